"""Supervised fine-tuning: one conversation per row, loss on its responses."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from freerun.data.batches import IGNORED
from freerun.data.packing import held_out
from freerun.data.tokenizing import Tokenized

_log = logging.getLogger("freerun.data")


class Examples:
    """Rows of one conversation each, cut or padded to the context."""

    def __init__(
        self, data: Tokenized, chosen: NDArray[np.int64], counted: NDArray[np.int64], context: int, padding: int
    ) -> None:
        """`chosen` are numbers of examples, `counted` is how many labels count in each example of the data."""
        assert data.learn is not None
        self._tokens, self._learn = np.asarray(data.tokens), np.asarray(data.learn)
        self._start = np.asarray(data.documents[:-1])[chosen]
        self._stop = np.minimum(np.asarray(data.documents[1:])[chosen], self._start + context + 1)
        self._padding = padding
        self.context = context
        self.count = len(chosen)
        self.valid = counted[chosen]
        self.tokens = int((self._stop - self._start).sum())

    def gather(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of these rows."""
        tokens = np.full((len(rows), self.context + 1), self._padding, np.int64)
        labels = np.full((len(rows), self.context), IGNORED, np.int64)
        for row, (start, stop) in enumerate(zip(self._start[rows].tolist(), self._stop[rows].tolist(), strict=True)):
            ids = self._tokens[start:stop].astype(np.int64)  # unsigned ids would turn −100 into a large one
            tokens[row, : len(ids)] = ids
            labels[row, : len(ids) - 1] = np.where(self._learn[start + 1 : stop], ids[1:], IGNORED)
        return tokens[:, :-1].copy(), labels


def responses(data: Tokenized, context: int) -> NDArray[np.int64]:
    """How many labels count in each example when it is cut to the context."""
    assert data.learn is not None
    start = np.asarray(data.documents[:-1]) + 1
    stop = np.maximum(np.minimum(np.asarray(data.documents[1:]), start + context), start)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(data.learn, dtype=np.int64)])
    counted: NDArray[np.int64] = before[stop] - before[start]
    return counted


def split_examples(
    counted: NDArray[np.int64], fraction: float, context: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the examples for training and for evaluation, without those that have no room for a response.

    Examples are held out by a hash of their number, or from the end where that would leave one side without any.
    """
    count = len(counted)
    fits = counted > 0
    if not fits.all():
        _log.warning(
            "%d of %d examples are left out: within a context of %d they have no response to learn.",
            count - int(fits.sum()), count, context,
        )  # fmt: skip
    chosen = held_out(count, fraction)
    training, evaluation = np.flatnonzero(fits & ~chosen), np.flatnonzero(fits & chosen)
    if fraction == 0 or (len(training) and len(evaluation)):
        return training, evaluation
    fitting = np.flatnonzero(fits)
    border = len(fitting) - max(1, round(len(fitting) * fraction))
    return fitting[: max(border, 0)], fitting[max(border, 0) :]
