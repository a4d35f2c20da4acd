"""Documents one behind the other, cut into blocks of context + 1 tokens, split into training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.data.order import shares

_SALT = 0x66726565  # not the seed: what is held out must stay the same when the seed changes


def held_out(documents: int, fraction: float) -> NDArray[np.bool_]:
    """Which documents are for evaluation. Document i is or is not, however many there are after it."""
    return shares(documents, _SALT) < fraction


class Blocks:
    """Rows of `context` tokens from stretches of memory-mapped tokens, read as one stream.

    Row k holds the stream's tokens k·context … (k+1)·context − 1, its labels are the same one further on.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], stretches: NDArray[np.int64], context: int) -> None:
        """`stretches` is [n, 2]: first and behind the last token, counted over all arrays."""
        self._arrays = [np.asarray(array) for array in arrays]  # plain views: slicing np.memmap is slow
        bounds = np.cumsum([0, *map(len, arrays)])
        stretches = _cut_at(stretches, bounds)
        self._array = np.searchsorted(bounds, stretches[:, 0], side="right") - 1
        self._start = stretches[:, 0] - bounds[self._array]
        lengths = stretches[:, 1] - stretches[:, 0]
        self._stream = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self.context = context
        self.tokens = int(self._stream[-1])
        self.count = max(0, self.tokens - 1) // context
        self.valid = context

    def gather(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of these rows."""
        blocks = np.empty((len(rows), self.context + 1), np.int64)
        starts = rows * self.context
        stretches = np.searchsorted(self._stream, starts, side="right") - 1
        for block, start, stretch in zip(blocks, starts.tolist(), stretches.tolist(), strict=True):
            self._fill(block, start, stretch)
        return blocks[:, :-1].copy(), blocks[:, 1:].copy()

    def _fill(self, block: NDArray[np.int64], start: int, stretch: int) -> None:
        filled = 0
        while filled < len(block):
            offset = start + filled - int(self._stream[stretch])
            first = int(self._start[stretch]) + offset
            take = min(len(block) - filled, int(self._stream[stretch + 1]) - start - filled)
            block[filled : filled + take] = self._arrays[self._array[stretch]][first : first + take]
            filled += take
            stretch += 1


def _cut_at(stretches: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same stretches, none of which crosses a bound."""
    if not len(stretches):
        return stretches
    cuts = np.unique(np.concatenate([stretches.ravel(), bounds]))
    starts, stops = cuts[:-1], cuts[1:]
    inside = np.searchsorted(stretches[:, 0], starts, side="right") - 1
    kept = (inside >= 0) & (starts < stretches[inside, 1])
    return np.stack([starts[kept], stops[kept]], axis=1)


def split(documents: NDArray[np.int64], fraction: float, context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Stretches of training and of evaluation, as [n, 2] arrays.

    Whole documents are held out by a hash of their number. Where there are too few documents for that (none expected,
    or one side without a block), the end of the tokens is held out instead.
    """
    count = len(documents) - 1
    chosen = held_out(count, fraction)
    training, evaluation = _stretches(documents, ~chosen), _stretches(documents, chosen)
    if fraction == 0 or (count * fraction >= 1 and min(_tokens(training), _tokens(evaluation)) > context):
        return training, evaluation
    first, last = int(documents[0]), int(documents[-1])
    tail = max(round((last - first) * fraction), context + 1)
    border = max(first, last - tail)
    return np.array([[first, border]], np.int64), np.array([[border, last]], np.int64)


def _tokens(stretches: NDArray[np.int64]) -> int:
    return int((stretches[:, 1] - stretches[:, 0]).sum())


def _stretches(documents: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Runs of neighbouring chosen documents."""
    padded = np.concatenate([[False], chosen, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return np.asarray(documents, np.int64)[edges].reshape(-1, 2)
