"""Q of the QR decomposition of stacks of square matrices (k, n, n), up to the signs of its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from freerun.optim.blocks import stacked
from freerun.optim.products import product, transposed
from freerun.optim.symmetric import lower_product

PANEL = 128
"""Columns that are reflected together."""


def orthonormal(matrices: Tensor) -> Tensor:
    """Q: by reflections on a CPU; elsewhere by Cholesky where the columns allow it, which is far faster on a GPU."""
    if matrices.device.type == "cpu":
        return by_reflections(matrices)
    basis = by_cholesky(matrices)
    return _at_once(matrices) if basis is None else basis


def by_cholesky(matrices: Tensor) -> Tensor | None:
    """Q where columns are far from dependent, as those of L U are once U is near L's eigenvectors; otherwise None."""
    columns = matrices / matrices.abs().amax(dim=-2, keepdim=True).clamp_(min=torch.finfo(matrices.dtype).tiny)
    products = lower_product(columns.mT)
    factor, failures = torch.linalg.cholesky_ex(products)
    # The factor's diagonal has the part of each column that lies outside the span of those before it.
    outside = factor.diagonal(dim1=-2, dim2=-1) / products.diagonal(dim1=-2, dim2=-1).sqrt()
    if failures.any() or not outside.min() > 0.5:
        return None
    basis: Tensor = torch.linalg.solve_triangular(factor.mT, columns, upper=True, left=False)
    return basis


def by_reflections(matrices: Tensor) -> Tensor:
    """Q whatever the columns: Householder reflections, a panel of columns at a time, I − V T Vᵀ.

    With one or two panels there is too little left to multiply for them to pay.
    """
    if matrices.shape[-1] > 2 * PANEL:
        return stacked([_reflected(rows)[None] for rows in transposed(matrices)])
    return _at_once(matrices)


def _at_once(matrices: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(matrices)[0]
    return basis


def _reflected(rows: Tensor) -> Tensor:
    """Q of one matrix, given transposed."""
    panels = []
    while len(rows):
        reflectors, factor, rows = _panel(rows)
        panels.append((reflectors, factor))
    basis = rows
    for reflectors, factor in reversed(panels):
        width = reflectors.shape[1]
        seen = torch.cat([reflectors[:width].mT, _product(reflectors[width:].mT, basis)], dim=1)
        turned = _product(reflectors, _product(factor.neg(), seen))
        turned.diagonal()[:width].add_(1)
        turned[width:, width:].add_(basis)
        basis = turned
    return basis


def _panel(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V and T of the first columns' reflections, and the other columns reflected, without the rows that are done."""
    panel, scales = torch.geqrf(rows[:PANEL].mT)
    reflectors = panel.tril_(-1).contiguous()
    reflectors.diagonal().fill_(1)
    width = reflectors.shape[1]
    overlaps = _product(reflectors.mT, reflectors).triu_(1).mul_(scales[:, None])
    factor = torch.linalg.solve_triangular(overlaps, scales.diag(), upper=True, unitriangular=True)
    shares = _product(_product(rows[width:], reflectors), factor)
    return reflectors, factor, rows[width:, width:] - _product(shares, reflectors[width:].mT)


def _product(one: Tensor, other: Tensor) -> Tensor:
    return product(one[None], other[None])[0]
