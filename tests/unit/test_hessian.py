"""Estimates from Hessian products agree with the Hessian written out."""

from __future__ import annotations

import torch

from freerun.hessian import leading_direction, misalignment, product, rotated


def quadratic(hessian: torch.Tensor) -> tuple[torch.nn.Parameter, torch.Tensor]:
    weights = torch.nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    flat = weights.flatten()
    return weights, 0.5 * flat @ hessian @ flat


def symmetric(size: int) -> torch.Tensor:
    half = torch.randn(size, size, generator=torch.Generator().manual_seed(2))
    return half + half.T


def test_the_product_is_the_hessian_times_the_vector() -> None:
    hessian = symmetric(12)
    weights, loss = quadratic(hessian)
    vector = torch.randn(3, 4)
    (given,) = product(loss, [weights])([vector])
    torch.testing.assert_close(given.flatten(), hessian @ vector.flatten())


def test_misalignment_estimates_the_share_of_the_absolute_sum() -> None:
    hessian = symmetric(12)
    weights, loss = quadratic(hessian)
    random = torch.Generator().manual_seed(0)
    estimate = misalignment(product(loss, [weights]), [weights.detach()], 3000, random)
    exact = float(hessian.abs().sum() / (12 * hessian.norm()))
    assert abs(estimate / exact - 1) < 0.1


def test_the_eigenbasis_of_a_kronecker_hessian_is_aligned() -> None:
    left, right = symmetric(3), symmetric(4)
    weights, loss = quadratic(torch.kron(left, right))
    bases = [(torch.linalg.eigh(left).eigenvectors, torch.linalg.eigh(right).eigenvectors)]
    random = torch.Generator().manual_seed(0)
    multiply = product(loss, [weights])
    before = misalignment(multiply, [weights.detach()], 300, random)
    after = misalignment(rotated(multiply, bases), [weights.detach()], 300, random)
    eigenvalues = torch.linalg.eigvalsh(torch.kron(left, right))
    aligned = float(eigenvalues.abs().sum() / (12 * eigenvalues.norm()))
    assert after < before
    assert abs(after / aligned - 1) < 0.3


def test_the_leading_direction_is_the_largest_eigenvector() -> None:
    hessian = torch.diag(torch.tensor([0.1 * i for i in range(11)] + [9.0]))
    weights, loss = quadratic(hessian)
    (found,) = leading_direction(product(loss, [weights]), [weights.detach()], 40, torch.Generator().manual_seed(0))
    assert float(found.flatten()[-1].abs()) > 0.999
