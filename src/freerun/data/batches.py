"""Microbatch number n, computed from (seed, n) and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from freerun.data.order import permute
from freerun.errors import DataError

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""The label where no loss is taken."""


class Batch(NamedTuple):
    """Token ids and the labels to predict at each of them, both LongTensor [sequences, context]."""

    tokens: torch.Tensor
    labels: torch.Tensor


class Rows(Protocol):
    """Sequences by number, in the order in which the data lies on disk."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def valid(self) -> int | NDArray[np.int64]:
        """Labels that count in a row: one number for all, or one per row."""

    def gather(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of these rows, each [len(rows), context]."""


@dataclass(frozen=True)
class Microbatches:
    """An endless sequence of microbatches; number n holds the samples n·sequences … (n+1)·sequences − 1.

    Sample s is visited in epoch s // epoch_length, at the place that the permutation keyed by (seed, epoch) gives to
    s % epoch_length: each epoch visits every row once. With `reshuffle` off, every epoch has the same order.
    """

    rows: Rows
    sequences: int
    seed: int
    reshuffle: bool = True
    if_empty: str = "There is no data."

    @property
    def epoch_length(self) -> int:
        """Sequences in one epoch."""
        return self.rows.count

    def numbers(self, n: int) -> NDArray[np.int64]:
        """The rows that microbatch n holds."""
        if n < 0:
            raise IndexError(f"microbatches are numbered from 0, not {n}")
        count = self.rows.count
        if count == 0:
            raise DataError(self.if_empty)
        first = n * self.sequences
        epoch, start = divmod(first, count)
        places = np.arange(start, start + self.sequences, dtype=np.int64)
        if start + self.sequences <= count:
            return self._permuted(places, epoch)
        later, places = np.divmod(places, count)
        parts = [self._permuted(places[later == step], epoch + step) for step in range(int(later[-1]) + 1)]
        return np.concatenate(parts)

    def _permuted(self, places: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return permute(places, self.rows.count, self.seed, epoch if self.reshuffle else 0)

    def get(self, n: int) -> Batch:
        """Microbatch n."""
        import torch  # here, because the processes that tokenize import this package and need no torch

        tokens, labels = self.rows.gather(self.numbers(n))
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))

    __getitem__ = get

    def valid(self, n: int) -> int:
        """How many labels of microbatch n count."""
        per_row = self.rows.valid
        if isinstance(per_row, int):
            return self.sequences * per_row
        return int(per_row[self.numbers(n)].sum())
