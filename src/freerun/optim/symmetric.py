"""Symmetric matrices, of which only the half on and below the diagonal is computed and kept, in strips of columns.

A strip begins with the whole square on the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freerun.optim import products

STRIP = 128
"""Columns of a strip: narrower ones save more of the other half, wider ones multiply faster."""


def zeros(count: int, side: int, like: Tensor) -> Tensor:
    """`count` packed symmetric matrices of zeros: (count, numbers kept)."""
    kept = sum((side - start) * min(STRIP, side - start) for start in range(0, side, STRIP))
    return torch.zeros(count, kept, dtype=like.dtype, device=like.device)


def unpacked(packed: Tensor, side: int) -> Tensor:
    """The whole matrices (k, side, side)."""
    matrices = packed.new_empty(len(packed), side, side)
    for start, strip in zip(range(0, side, STRIP), _packed_strips(packed, side), strict=True):
        end = min(start + STRIP, side)
        matrices[:, start:, start:end] = strip
        matrices[:, start:end, end:] = products.transposed(strip[:, end - start :])
    return matrices


def take_product(packed: Tensor, rows: Tensor, decay: float) -> None:
    """packed ← decay · packed + (1 − decay) · X Xᵀ, in place; the product is computed in the precision of X."""
    _take(_packed_strips(packed, rows.shape[-2]), rows, decay)


def lower_product(rows: Tensor) -> Tensor:
    """X Xᵀ on and below the diagonal; above it are zeros and parts of the product."""
    whole = rows.new_zeros(len(rows), rows.shape[-2], rows.shape[-2])
    _take(_strips(whole), rows, decay=0.0)
    return whole


def _take(strips: Sequence[Tensor], rows: Tensor, decay: float) -> None:
    for strip, start in zip(strips, range(0, rows.shape[-2], STRIP), strict=True):
        products.take_product(strip, rows[:, start:], rows[:, start : start + STRIP].mT, decay)


def _strips(matrices: Tensor) -> list[Tensor]:
    return [matrices[:, start:, start : start + STRIP] for start in range(0, matrices.shape[-1], STRIP)]


def _packed_strips(packed: Tensor, side: int) -> list[Tensor]:
    strips, taken = [], 0
    for start in range(0, side, STRIP):
        height, width = side - start, min(STRIP, side - start)
        strips.append(packed[:, taken : taken + height * width].view(len(packed), height, width))
        taken += height * width
    return strips
