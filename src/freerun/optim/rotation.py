"""The linear algebra of basis rotation, on stacks of matrices (k, m, n): pure functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freerun.optim.orthonormal import orthonormal
from freerun.optim.products import product


class Refreshed(NamedTuple):
    """One side's new basis, and the order in which the old one's columns were taken for it."""

    order: Tensor
    basis: Tensor


def rotate(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Uᵀ X V, computed in the bases' precision; a basis that is None is the identity."""
    turned = matrix
    if right is not None:
        turned = product(turned.to(right.dtype), right)
    if left is not None:
        turned = product(left.mT, turned.to(left.dtype))
    return turned.to(matrix.dtype)


def rotate_back(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """U X Vᵀ, computed in the bases' precision."""
    return rotate(matrix, None if left is None else left.mT, None if right is None else right.mT)


def singular_bases(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """All left and right singular vectors, by descending singular value.

    The first update's covariances are G Gᵀ and Gᵀ G up to a factor, so that these are their eigenvectors, with twice
    the digits that an eigendecomposition of the products would leave.
    """
    left, _, right = torch.linalg.svd(matrix, full_matrices=True)
    return left, right.mT


def without_roundoff(matrix: Tensor) -> Tensor:
    """The matrix with entries that are zero but for round-off set to zero, as matrix_rank would judge them.

    In its own bases the first gradient is diagonal. Off the diagonal float arithmetic leaves noise, and divided by
    the root of its own square, noise would become steps of full size.
    """
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    tolerance = max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps * norm
    return matrix.where(matrix.abs() > tolerance, 0.0)


def refreshed(covariance: Tensor, basis: Tensor) -> Refreshed:
    """One power iteration, U ← qr(L U), after U's columns were sorted by diag(Uᵀ L U)."""
    iterated = product(covariance, basis)
    order = _descending((basis * iterated).sum(dim=-2))
    return Refreshed(order, orthonormal(take_columns(iterated, order)))


def refreshed_pair(moment: Tensor, left: Tensor, right: Tensor) -> tuple[Refreshed, Refreshed]:
    """One power iteration on each side: U ← qr(M V), V ← qr(Mᵀ U), both sorted by the estimates |uᵢᵀ M vᵢ|.

    The longer side has columns without a partner: they stay last, and keep their directions as far as orthogonality
    to the others allows.
    """
    rows, columns = moment.shape[-2:]
    estimates = (left[..., :columns] * product(moment, right)[..., :rows]).sum(dim=-2).abs()
    order = _descending(estimates)
    orders = [_with_unpaired(order, size) for size in (rows, columns)]
    left, right = (take_columns(basis, o) for basis, o in zip((left, right), orders, strict=True))
    left = orthonormal(torch.cat([product(moment, right)[..., :rows], left[..., columns:]], dim=-1))
    right = orthonormal(torch.cat([product(moment.mT, left)[..., :columns], right[..., rows:]], dim=-1))
    return Refreshed(orders[0], left), Refreshed(orders[1], right)


def temper(ratio: Tensor, denominator: Tensor, exponent: float, floor: float = 0.05) -> Tensor:
    """Damp the steep directions of N/D, keeping its Frobenius norm: N/D · max(D/rms(D), floor)^(−q)."""
    relative = denominator / denominator.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    damped = ratio * relative.clamp_(min=floor).pow_(-exponent)
    before, after = (torch.linalg.matrix_norm(x, keepdim=True) for x in (ratio, damped))
    return damped.mul_(before / after.clamp(min=torch.finfo(ratio.dtype).tiny))


def take_rows(matrix: Tensor, order: Tensor) -> Tensor:
    """The rows in this order."""
    return matrix.gather(-2, order[..., :, None].expand(matrix.shape))


def take_columns(matrix: Tensor, order: Tensor) -> Tensor:
    """The columns in this order."""
    return matrix.gather(-1, order[..., None, :].expand(matrix.shape))


def _descending(values: Tensor) -> Tensor:
    """Indices that sort each row of values from large to small, ties in their old order."""
    return values.argsort(dim=-1, descending=True, stable=True)


def _with_unpaired(order: Tensor, size: int) -> Tensor:
    rest = torch.arange(order.shape[-1], size, device=order.device)
    return torch.cat([order, rest.expand(*order.shape[:-1], -1)], dim=-1)
