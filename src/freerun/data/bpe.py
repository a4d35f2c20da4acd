"""A tokenizer of one's own: byte-level BPE, trained on the text that a data config names."""

from __future__ import annotations

import os
from pathlib import Path

from freerun.config import DataConfig
from freerun.data.extras import require
from freerun.data.records import documents
from freerun.data.tokenizer import END_OF_TEXT
from freerun.errors import ConfigError, DataError

_SMALLEST = 257  # every byte, and the end of text


def train_tokenizer(config: DataConfig, vocabulary: int, output: str | Path, progress: bool = False) -> Path:
    """Train on the documents of `config` and write a tokenizer.json of at most `vocabulary` ids.

    `output` is a file that ends in .json, or a folder to put tokenizer.json into. The path of the file is returned.
    """
    if vocabulary < _SMALLEST:
        raise ConfigError(f"A vocabulary of {vocabulary} can't hold every byte; give at least {_SMALLEST}.")
    library = require("tokenizers", "Training a tokenizer")
    pre_tokenizers = require("tokenizers.pre_tokenizers", "Training a tokenizer")
    decoders = require("tokenizers.decoders", "Training a tokenizer")
    trainers = require("tokenizers.trainers", "Training a tokenizer")
    models = require("tokenizers.models", "Training a tokenizer")

    path = Path(output).expanduser()
    path = path if path.suffix == ".json" else path / "tokenizer.json"
    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(documents(config), trainer=trainer)
    _write(path, tokenizer.to_str(pretty=True))
    return path


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise DataError(f"The tokenizer can't be written to {str(path)!r} ({error.strerror}).") from None
