"""Products of stacks of matrices (k, m, n), by whichever library is fastest at them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from freerun.optim.blocks import stacked

LARGE = 2**21
"""Multiplications from which one call per matrix pays."""


def product(one: Tensor, other: Tensor) -> Tensor:
    """one @ other.

    For large float32 matrices on a CPU by oneDNN, in full float32: it uses AVX-512 on every maker's processors. The
    library behind torch.matmul does so on Intel's alone, and takes twice the time elsewhere.
    """
    if not _by_onednn(one, other):
        return one @ other
    return stacked([_product(*pair)[None] for pair in zip(one, other, strict=True)])


def take_product(total: Tensor, one: Tensor, other: Tensor, decay: float) -> None:
    """total ← decay · total + (1 − decay) · one @ other, in place; computed in the factors' precision."""
    if total.dtype == one.dtype and not _by_onednn(one, other):
        total.baddbmm_(one, other, beta=decay, alpha=1 - decay)
    else:
        total.lerp_(product(one, other).to(total.dtype), 1 - decay)


def transposed(matrices: Tensor) -> Tensor:
    """The transposed matrices, contiguous. A single one as such: on a CPU torch is several times faster at that."""
    return matrices[0].mT.contiguous()[None] if len(matrices) == 1 else matrices.mT.contiguous()


def _by_onednn(one: Tensor, other: Tensor) -> bool:
    fits = one.dtype == other.dtype == torch.float32 and one.device.type == "cpu"
    return fits and one.shape[-2] * one.shape[-1] * other.shape[-1] >= LARGE and _onednn()


@cache
def _onednn() -> bool:
    built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    named = built_in and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch promises this name to nobody
    return named and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _product(one: Tensor, other: Tensor) -> Tensor:
    """By oneDNN, which is slow when `other` is a part of a larger matrix."""
    dense = other if other.is_contiguous() or other.mT.is_contiguous() else other.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(one, dense.mT, None, "none", [], "")
    return result
