"""Properties of the Hessian that need only its products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Vector = list[Tensor]
Product = Callable[[Vector], Vector]


def product(loss: Tensor, parameters: Sequence[Tensor]) -> Product:
    """Products with the Hessian of `loss` with respect to `parameters`; the graph is kept for any number of them."""
    gradients = torch.autograd.grad(loss, list(parameters), create_graph=True)

    def multiply(vector: Vector) -> Vector:
        return list(torch.autograd.grad(gradients, list(parameters), grad_outputs=vector, retain_graph=True))

    return multiply


def rotated(multiply: Product, bases: Sequence[tuple[Tensor, Tensor]]) -> Product:
    """Products with the same Hessian in the coordinates Uᵀ W V of every matrix."""

    def in_basis(vector: Vector) -> Vector:
        back = [left @ part @ right.T for part, (left, right) in zip(vector, bases, strict=True)]
        return [left.T @ part @ right for part, (left, right) in zip(multiply(back), bases, strict=True)]

    return in_basis


def misalignment(multiply: Product, like: Sequence[Tensor], probes: int, random: torch.Generator) -> float:
    """‖H‖₁,₁ as a share of the most that its Frobenius norm allows, n‖H‖_F: small when H is nearly diagonal.

    A row of H times a vector of independent Cauchy numbers is Cauchy with the row's absolute sum as its scale, and the
    median of its absolute value is that scale. The Frobenius norm comes from products with normal vectors.
    """
    rows = [[part.abs() for part in multiply(_cauchy(like, random))] for _ in range(probes)]
    absolute = sum(float(torch.stack(parts).median(0).values.sum()) for parts in zip(*rows, strict=True))
    squares = [sum(float(part.square().sum()) for part in multiply(_normal(like, random))) for _ in range(probes)]
    size = sum(part.numel() for part in like)
    frobenius = math.sqrt(sum(squares) / probes)
    return absolute / max(size * frobenius, 1e-30)


def leading_direction(multiply: Product, like: Sequence[Tensor], iterations: int, random: torch.Generator) -> Vector:
    """The unit eigenvector of the largest eigenvalue in absolute value, by power iteration."""
    vector = _unit(_normal(like, random))
    for _ in range(iterations):
        vector = _unit(multiply(vector))
    return vector


def _unit(vector: Vector) -> Vector:
    norm = float(torch.sqrt(torch.stack([part.square().sum() for part in vector]).sum()))
    return [part / max(norm, 1e-30) for part in vector]


def _normal(like: Sequence[Tensor], random: torch.Generator) -> Vector:
    return [torch.randn(part.shape, generator=random, dtype=part.dtype) for part in like]


def _cauchy(like: Sequence[Tensor], random: torch.Generator) -> Vector:
    return [torch.empty(part.shape, dtype=part.dtype).cauchy_(generator=random) for part in like]
