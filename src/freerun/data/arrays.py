"""Tokens that somebody else has made: .bin as nanoGPT, llm.c and Megatron write it, and .npy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.config import DataConfig
from freerun.data.cache import cached
from freerun.data.sources import Source, names_tokens
from freerun.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, IdTokenizer, Tokenizer, load_tokenizer
from freerun.data.tokenizing import VERSION, stamps
from freerun.errors import DataError

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_SHARD_MAGIC, _SHARD_HEADER = 20240520, 1024  # llm.c and its descendants: 256 int32 before the tokens
_SCAN = 1 << 24


@dataclass(frozen=True)
class Arrays:
    """Tokens of several files, memory-mapped as they are, and where documents begin in their concatenation."""

    tokens: tuple[NDArray[Any], ...]
    documents: NDArray[np.int64]
    content: str


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The tokenizer of a run, with the vocabulary that its model has; the data itself need not be there.

    For tokens that exist already it is the one that made them, with data.vocabulary if that is set, or without
    data.tokenizer one that knows only numbers.
    """
    if not names_tokens(config):
        return load_tokenizer(config.tokenizer)
    if config.tokenizer != "bytes":
        tokenizer = load_tokenizer(config.tokenizer)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        return replace(tokenizer, vocabulary=config.vocabulary or tokenizer.vocabulary)
    if config.vocabulary <= 0:
        raise DataError(
            f"data.source is {config.source!r}, which holds tokens; set data.vocabulary to the number of ids "
            "(50257 for GPT-2's), or data.tokenizer to the tokenizer that made them."
        )
    return BytesTokenizer() if config.vocabulary == BytesTokenizer.vocabulary else IdTokenizer(config.vocabulary)


def open_arrays(source: Source, config: DataConfig, tokenizer: Tokenizer) -> Arrays:
    """Map the files. They are read once, to find where documents begin, and this is kept in the cache."""
    tokens = tuple(_open(path, config) for path in source.files)
    description = {
        "version": VERSION,
        "files": stamps(source),
        "indices": [path.stat().st_mtime_ns for path in map(_index, source.files) if path.is_file()],
        "format": "tokens",
        "end_of_text": tokenizer.end_of_text,
        "vocabulary": tokenizer.vocabulary,
    }
    folder = cached(Path(config.cache).expanduser(), description, lambda path: _scan(path, source, tokens, tokenizer))
    documents: NDArray[np.int64] = np.load(folder / "documents.npy", mmap_mode="r", allow_pickle=False)
    content = json.loads((folder / "content.json").read_text(encoding="utf-8"))["sha256"]
    if config.max_documents and config.max_documents < len(documents) - 1:
        documents = documents[: config.max_documents + 1]
        content = f"{content}-{config.max_documents}"
    return Arrays(tokens, documents, content)


def _index(path: Path) -> Path:
    return path.with_suffix(".idx")


def _open(path: Path, config: DataConfig) -> NDArray[Any]:
    if path.stat().st_size == 0:
        raise DataError(f"data.source names {str(path)!r}, which is empty.")
    if path.suffix.lower() == ".npy":
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise DataError(f"data.source names {str(path)!r}, which is no NumPy array ({error}).") from None
    elif _index(path).is_file():
        array = np.memmap(path, _read_index(_index(path))[0], "r")
    else:
        header = np.fromfile(path, np.int32, 1)
        sharded = header.size == 1 and header[0] == _SHARD_MAGIC
        array = np.memmap(path, np.uint16, "r", offset=_SHARD_HEADER if sharded else 0)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise DataError(
            f"data.source names {str(path)!r}, an array of {array.dtype} with shape {array.shape}; "
            "tokens are one row of integers."
        )
    return array


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """The type of the tokens and where documents begin, from Megatron's .idx."""
    content = path.read_bytes()
    if not content.startswith(_MEGATRON_MAGIC) or content[17] not in _MEGATRON_TYPES:
        raise DataError(
            f"data.source: {str(path)!r} is no index of Megatron tokens; move it away if it is another thing."
        )
    dtype = np.dtype(_MEGATRON_TYPES[content[17]])
    sequences, documents = (int(count) for count in np.frombuffer(content, np.int64, 2, offset=18))
    pointers = np.frombuffer(content, np.int64, sequences, offset=34 + 4 * sequences)
    first_sequences = np.frombuffer(content, np.int64, documents, offset=34 + 12 * sequences)
    begins = pointers[first_sequences[first_sequences < sequences]] // dtype.itemsize
    return dtype, begins.astype(np.int64)


def _scan(folder: Path, source: Source, tokens: tuple[NDArray[Any], ...], tokenizer: Tokenizer) -> None:
    """Read everything once: where documents begin, whether all ids are known, and the hash of the content."""
    digest = hashlib.sha256()
    starts: list[NDArray[np.int64]] = []
    length = 0
    for path, array in zip(source.files, tokens, strict=True):
        ends = [np.zeros(1, np.int64)]
        for offset, part in _parts(array):
            _check_ids(path, part, tokenizer)
            digest.update(part.data)
            ends.append(np.flatnonzero(part == tokenizer.end_of_text) + offset + 1)
        begins = (
            _read_index(_index(path))[1] if path.suffix == ".bin" and _index(path).is_file() else np.concatenate(ends)
        )
        starts.append(begins[begins < len(array)] + length)
        length += len(array)
    documents = np.concatenate([*starts, np.array([length], np.int64)])
    digest.update(documents.data)
    np.save(folder / "documents.npy", documents, allow_pickle=False)
    (folder / "content.json").write_text(json.dumps({"sha256": digest.hexdigest()}), encoding="utf-8")


def _parts(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for offset in range(0, len(array), _SCAN):
        yield offset, np.ascontiguousarray(array[offset : offset + _SCAN])


def _check_ids(path: Path, part: NDArray[Any], tokenizer: Tokenizer) -> None:
    smallest, largest = int(part.min()), int(part.max())
    if smallest < 0 or largest >= tokenizer.vocabulary:
        wrong = smallest if smallest < 0 else largest
        raise DataError(
            f"data.vocabulary is {tokenizer.vocabulary}, but {str(path)!r} holds the id {wrong}; "
            f"set data.vocabulary to at least {largest + 1}."
            if wrong >= 0
            else f"data.source names {str(path)!r}, which holds the id {wrong}; ids are not negative."
        )
