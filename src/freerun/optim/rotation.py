"""The linear algebra of basis rotation, on stacks of matrices (k, m, n): pure functions.

Covariances and momentum are kept in rotated coordinates: for the covariance L with basis U, L̃ = Uᵀ L U. Then a
gradient is rotated once, and a refresh is U ← U Q, L̃ ← Qᵀ L̃ Q, M̃ ← Q_Uᵀ M̃ Q_V with Q = qr(L̃), because
qr(L U) = U qr(L̃). Signs of Q's columns are free: every update comes out the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def rotate(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Uᵀ X V; a basis that is None is the identity."""
    if right is not None:
        matrix = matrix @ right
    return matrix if left is None else left.mT @ matrix


def rotate_back(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """U X Vᵀ."""
    if right is not None:
        matrix = matrix @ right.mT
    return matrix if left is None else left @ matrix


def singular_bases(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """All left and right singular vectors, by descending singular value.

    The first update's covariances are G Gᵀ and Gᵀ G, so that these are their eigenvectors, with twice the digits
    that an eigendecomposition of the products would leave.
    """
    left, _, right = torch.linalg.svd(matrix, full_matrices=True)
    return left, right.mT


def without_roundoff(matrix: Tensor, scale: Tensor) -> Tensor:
    """The matrix with entries that are zero but for round-off set to zero, as matrix_rank would judge them.

    In its own bases the first gradient is diagonal. Off the diagonal float arithmetic leaves noise, and divided by
    the root of its own square, noise would become steps of full size.
    """
    tolerance = max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps * scale
    return matrix.where(matrix.abs() > tolerance[..., None, None], 0.0)


class Turn(NamedTuple):
    """How one side's basis moves in a refresh: U ← U · turn, after its columns were reordered by `order`."""

    order: Tensor
    turn: Tensor


def turn_towards(covariance: Tensor) -> Turn:
    """One power iteration on a covariance given in its basis's coordinates, columns sorted by its diagonal."""
    order = _descending(covariance.diagonal(dim1=-2, dim2=-1))
    return Turn(order, orthonormal(take_columns(covariance, order)))


def turns_towards_singular(matrix: Tensor) -> tuple[Turn, Turn]:
    """One power iteration on each side of a matrix given in its bases' coordinates: U ← qr(M V), V ← qr(Mᵀ U).

    Both sides are sorted by the estimated singular values |uᵢᵀ M vᵢ|. The longer side has columns without a partner:
    they stay last, and are made orthogonal to the others.
    """
    rows, columns = matrix.shape[-2:]
    order = _descending(matrix.diagonal(dim1=-2, dim2=-1).abs())
    left, right = (_with_unpaired(order, size) for size in (rows, columns))
    left_turn = orthonormal(_completed(take_columns(matrix, right)))
    right_turn = orthonormal(_completed(matrix.mT @ left_turn))
    return Turn(left, left_turn), Turn(right, right_turn)


def orthonormal(matrix: Tensor) -> Tensor:
    """Q of the QR decomposition of square matrices."""
    q: Tensor = torch.linalg.qr(matrix)[0]
    return q


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


def _completed(matrix: Tensor) -> Tensor:
    """A square matrix: columns beyond the rows are dropped, missing ones are unit vectors."""
    rows, columns = matrix.shape[-2:]
    unit = torch.eye(rows, dtype=matrix.dtype, device=matrix.device)[:, columns:]
    return torch.cat([matrix[..., :rows], unit.expand(*matrix.shape[:-2], -1, -1)], dim=-1)


def temper(ratio: Tensor, denominator: Tensor, exponent: float, floor: float = 0.05) -> Tensor:
    """Damp the steep directions of N/D, keeping its Frobenius norm: N/D · max(D/rms(D), floor)^(−q)."""
    relative = denominator / denominator.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    damped = ratio * relative.clamp_(min=floor).pow_(-exponent)
    norms = torch.linalg.matrix_norm(ratio, keepdim=True), torch.linalg.matrix_norm(damped, keepdim=True)
    return damped.mul_(norms[0] / norms[1].clamp(min=torch.finfo(ratio.dtype).tiny))
