"""Every variant of basis rotation against the plain reference, in float64, refreshes included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freerun.optim import BasisRotation, GradedRotation
from freerun.optim.blocks import join, split
from freerun.optim.reference import PlainRotation

UPDATES = 200
COMBINED = {"fresh": 0.4, "tempering": 0.5, "bias_correction": False}


def gradients(shape: tuple[int, int], updates: int = UPDATES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random gradients whose covariances have distinct eigenvalues, as a network's have."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, dtype=dtype) for side in shape)
    return [left @ torch.randn(shape, generator=generator, dtype=dtype) @ right for _ in range(updates)]


def parameter(shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype))


@pytest.mark.parametrize("settings", [{}, COMBINED], ids=["adam", "combined"])
@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (12, 7)], ids=str)
@pytest.mark.parametrize("geometry", ["bilateral", "unilateral"])
@pytest.mark.parametrize("source", ["second", "first"])
def test_every_variant_follows_the_reference(
    source: str, geometry: str, shape: tuple[int, int], settings: dict[str, Any]
) -> None:
    weight = parameter(shape)
    plain = PlainRotation(weight.detach().clone(), lr=0.02, source=source, geometry=geometry, **settings)
    ours = BasisRotation([weight], lr=0.02, source=source, geometry=geometry, **settings)
    for gradient in gradients(shape):
        weight.grad = gradient
        ours.step()
        plain.update(gradient)
        torch.testing.assert_close(weight.detach(), plain.weight, rtol=0, atol=1e-10)


def test_graded_rotation_follows_the_reference_whatever_the_delay() -> None:
    weight = parameter((5, 9))
    plain = PlainRotation(
        weight.detach().clone(), lr=0.02, betas=(0.98, 0.999), grading=1.0, weight_decay=0.3, **COMBINED
    )
    ours = GradedRotation([weight], lr=0.02, weight_decay=0.3)
    for update, gradient in enumerate(gradients((5, 9))):
        weight.grad = gradient
        ours.param_groups[0]["delay"] = update % 8
        ours.step()
        plain.update(gradient, update % 8)
        torch.testing.assert_close(weight.detach(), plain.weight, rtol=0, atol=1e-10)


def test_a_delay_slows_matrices_and_nothing_else() -> None:
    steps = []
    for delay in (0, 7):
        matrix, vector = parameter((4, 4)), torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = GradedRotation([matrix, vector], lr=0.02, weight_decay=0.0)
        optimizer.param_groups[0]["delay"] = delay
        before = [matrix.detach().clone(), vector.detach().clone()]
        matrix.grad, vector.grad = gradients((4, 4), 1)[0], torch.arange(1.0, 5.0, dtype=torch.float64)
        optimizer.step()
        steps.append([p.detach() - b for p, b in zip((matrix, vector), before, strict=True)])
    torch.testing.assert_close(steps[0][0], 8 * steps[1][0])
    torch.testing.assert_close(steps[0][1], steps[1][1])


def test_matrices_of_one_shape_are_updated_together_as_if_alone() -> None:
    weights = [parameter((6, 4)), parameter((6, 4)), parameter((4, 6))]
    plain = [PlainRotation(w.detach().clone()) for w in weights]
    ours = BasisRotation(weights)
    streams = [gradients((6, 4)), gradients((6, 4))[::-1], gradients((4, 6))]
    for together in zip(*streams, strict=True):
        for weight, reference, gradient in zip(weights, plain, together, strict=True):
            weight.grad = gradient
            reference.update(gradient)
        ours.step()
    for weight, reference in zip(weights, plain, strict=True):
        torch.testing.assert_close(weight.detach(), reference.weight, rtol=0, atol=1e-10)


def test_a_matrix_in_blocks_is_its_blocks_each_rotated_alone() -> None:
    weight = parameter((5, 12))
    plain = [PlainRotation(block.clone()) for block in split(weight.detach(), 5, 6)]
    ours = BasisRotation([weight], block=8)
    for gradient in gradients((5, 12)):
        weight.grad = gradient
        ours.step()
        for reference, block in zip(plain, split(gradient, 5, 6), strict=True):
            reference.update(block)
    expected = join(torch.stack([reference.weight for reference in plain]), (5, 12))
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-10)


def test_float32_follows_float64_within_its_precision() -> None:
    exact, rounded = parameter((8, 12)), parameter((8, 12), torch.float64)
    rounded = torch.nn.Parameter(rounded.detach().float())
    optimizers = BasisRotation([exact]), BasisRotation([rounded])
    for gradient in gradients((8, 12)):
        exact.grad, rounded.grad = gradient, gradient.float()
        for optimizer in optimizers:
            optimizer.step()
    moved = (exact - parameter((8, 12))).norm()
    assert (exact - rounded).norm() < 1e-3 * moved


def test_large_float32_matrices_follow_the_reference_within_its_precision() -> None:
    weight = parameter((160, 300), torch.float32)
    plain = PlainRotation(weight.detach().clone())
    ours = BasisRotation([weight])
    for gradient in gradients((160, 300), 20, torch.float32):
        weight.grad = gradient
        ours.step()
        plain.update(gradient)
    moved = (plain.weight - parameter((160, 300), torch.float32)).norm()
    assert (weight - plain.weight).norm() < 1e-3 * moved


def test_bf16_rotation_stays_close_to_float32() -> None:
    exact, rounded = parameter((16, 24), torch.float32), parameter((16, 24), torch.float32)
    optimizers = BasisRotation([exact]), BasisRotation([rounded], precision="bf16")
    for gradient in gradients((16, 24), dtype=torch.float32):
        exact.grad = rounded.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    moved = (exact - parameter((16, 24), torch.float32)).norm()
    assert (exact - rounded).norm() < 0.2 * moved
