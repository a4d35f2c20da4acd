"""Matrices cut into equal blocks, and blocks of equal size stacked, so that one call works on many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def block_shape(shape: Sequence[int], longest: int) -> tuple[int, int]:
    """The size of the blocks that a matrix is cut into, so that no side is longer than `longest` (0: no limit).

    A side is cut into as few equal parts as possible; one that has no equal parts of at least half that length stays
    whole.
    """
    rows, columns = (_part(side, longest) for side in shape)
    return rows, columns


def split(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The blocks of a matrix, stacked: (k, rows, columns). Whole matrices are not copied."""
    if matrix.shape == (rows, columns):
        return matrix[None]
    down, across = matrix.shape[0] // rows, matrix.shape[1] // columns
    return matrix.reshape(down, rows, across, columns).transpose(1, 2).reshape(-1, rows, columns)


def join(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The matrix whose blocks these are."""
    if len(blocks) == 1:
        return blocks[0]
    rows, columns = blocks.shape[1:]
    return blocks.reshape(shape[0] // rows, -1, rows, columns).transpose(1, 2).reshape(*shape)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stacks of blocks in one; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def chunks(sizes: Sequence[int], limit: int) -> list[slice]:
    """Consecutive runs of items whose sizes add up to at most `limit`, or that are alone."""
    runs, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            runs.append(slice(start, index))
            start, total = index, 0
        total += size
    return [*runs, slice(start, len(sizes))]


def _part(side: int, longest: int) -> int:
    if not longest or side <= longest:
        return side
    fewest = -(-side // longest)
    count = next((c for c in range(fewest, 2 * fewest + 1) if side % c == 0), 1)
    return side // count
