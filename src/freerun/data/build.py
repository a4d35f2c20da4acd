"""From a data config to microbatches."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from freerun.config import DataConfig
from freerun.data.arrays import open_arrays, tokenizer_of
from freerun.data.batches import Microbatches
from freerun.data.examples import Examples, responses, split_examples
from freerun.data.packing import Blocks, split
from freerun.data.sources import Source, find
from freerun.data.tokenizer import Tokenizer
from freerun.data.tokenizing import tokenized
from freerun.errors import DataError


@dataclass(frozen=True)
class Data:
    """Everything that training reads."""

    train: Microbatches
    evaluation: Microbatches
    tokenizer: Tokenizer
    fingerprint: str
    """Equal on two machines, or in two runs, if and only if they train and evaluate on the same tokens."""
    tokens: int
    """Tokens there are to train on."""


def build(config: DataConfig, context: int, sequences: int, seed: int, progress: bool = False) -> Data:
    """Find, tokenize (once; later runs use the cache) and split the data that `config` names.

    A row has `context` tokens, a microbatch `sequences` rows; `seed` orders the rows. Evaluation has one fixed order.
    """
    source = find(config)
    training: Blocks | Examples
    evaluation: Blocks | Examples
    tokenizer = tokenizer_of(config)
    if config.task == "sft":
        training, evaluation, content = _examples(source, config, tokenizer, context, progress)
    else:
        training, evaluation, content = _blocks(source, config, tokenizer, context, progress)
    if training.count == 0:
        raise DataError(_too_little(config, context, training.tokens))
    if_empty = f"data.eval_fraction is {config.eval_fraction}, which holds nothing out; set it above 0 to evaluate."
    parts = (content, tokenizer.fingerprint, config.task, f"{config.eval_fraction!r}")
    return Data(
        train=Microbatches(training, sequences, seed),
        evaluation=Microbatches(evaluation, sequences, seed=0, reshuffle=False, if_empty=if_empty),
        tokenizer=tokenizer,
        fingerprint=hashlib.sha256("\n".join(parts).encode()).hexdigest(),
        tokens=training.tokens,
    )


def _blocks(
    source: Source, config: DataConfig, tokenizer: Tokenizer, context: int, progress: bool
) -> tuple[Blocks, Blocks, str]:
    if source.format == "tokens":
        arrays = open_arrays(source, config, tokenizer)
        tokens, documents, content = arrays.tokens, arrays.documents, arrays.content
    else:
        data = tokenized(source, config, tokenizer, progress)
        tokens, documents, content = (data.tokens,), data.documents, data.content
    training, evaluation = split(documents, config.eval_fraction, context)
    return Blocks(tokens, training, context), Blocks(tokens, evaluation, context), content


def _examples(
    source: Source, config: DataConfig, tokenizer: Tokenizer, context: int, progress: bool
) -> tuple[Examples, Examples, str]:
    data = tokenized(source, config, tokenizer, progress)
    counted = responses(data, context)
    sides = split_examples(counted, config.eval_fraction, context)
    training, evaluation = (Examples(data, side, counted, context, tokenizer.end_of_text) for side in sides)
    return training, evaluation, data.content


def _too_little(config: DataConfig, context: int, tokens: int) -> str:
    if config.task == "sft":
        return (
            f"data.source is {config.source!r}, which leaves no example to train on with model.context {context} "
            f"and data.eval_fraction {config.eval_fraction}; give more examples or a longer context."
        )
    return (
        f"data.source is {config.source!r}, which leaves {tokens} tokens to train on with data.eval_fraction "
        f"{config.eval_fraction}, too few for one sequence of model.context {context}; "
        "give more text or a shorter context."
    )
