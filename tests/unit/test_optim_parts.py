"""The parts of the optimizers, each against its formula."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from freerun.config import DelayConfig, OptimizerConfig
from freerun.errors import ConfigError
from freerun.optim import AdamW, BasisRotation, DelayCompensated, Muon, symmetric
from freerun.optim.adam_rule import adam_update
from freerun.optim.base import Slot
from freerun.optim.blocks import block_shape, chunks, join, split
from freerun.optim.error_feedback import ErrorFeedback
from freerun.optim.muon import orthogonalised
from freerun.optim.orthonormal import by_cholesky, orthonormal
from freerun.optim.products import product, take_product
from freerun.optim.rotation import singular_bases, temper, without_roundoff
from freerun.optim.stepper import NamedParameter, StagePlace, Stepper
from freerun.optim.velocity import MeanVelocity
from freerun.registry import OPTIMIZERS, load


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The first update


# In one-sided bases a gradient is not diagonal: a few true entries are small enough to pass for round-off.
@pytest.mark.parametrize(("geometry", "tolerance"), [("bilateral", 0.02), ("unilateral", 0.2)])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_first_update_makes_no_steps_of_round_off(geometry: Any, tolerance: float, scale: float) -> None:
    gradient = scale * random(24, 40) * torch.logspace(0, -3, 40, dtype=torch.float64)
    steps = {}
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(torch.zeros(24, 40, dtype=dtype))
        weight.grad = gradient.to(dtype)
        BasisRotation([weight], lr=1.0, eps=1e-8 * scale, weight_decay=0.0, geometry=geometry).step()
        steps[dtype] = weight.detach().double()
    assert (steps[torch.float32] - steps[torch.float64]).norm() < tolerance * steps[torch.float64].norm()


def test_the_first_bilateral_update_is_the_gradient_with_all_singular_values_one() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 12))
    weight.grad = random(8, 12, dtype=torch.float32)
    BasisRotation([weight], lr=0.1, weight_decay=0.0).step()
    assert torch.linalg.svdvals(weight.detach()) == pytest.approx(torch.full((8,), 0.1), rel=1e-4)


def test_round_off_is_judged_relative_to_the_matrix() -> None:
    matrix = torch.tensor([[[1e-8, 1.0]], [[1e-8, 1e-9]]])
    assert torch.equal(without_roundoff(matrix) == 0, torch.tensor([[[True, False]], [[False, False]]]))


# Linear algebra


@pytest.mark.parametrize("side", [6, 300])
@pytest.mark.parametrize("kind", ["near diagonal", "ill-conditioned", "singular", "zero"])
def test_orthonormal_spans_the_same_nested_spaces_as_qr(kind: str, side: int) -> None:
    eye = torch.eye(side, dtype=torch.float64)
    matrix = {
        "near diagonal": eye + 0.05 * random(side, side),
        "ill-conditioned": random(side, side) * torch.logspace(0, -12, side, dtype=torch.float64),
        "singular": random(side, 2) @ random(2, side, seed=1),
        "zero": 0 * eye,
    }[kind]
    basis = orthonormal(torch.stack([matrix, eye]))
    expected = torch.linalg.qr(matrix)[0]
    torch.testing.assert_close(basis.mT @ basis, eye.expand(2, side, side))
    known = {"singular": 2, "zero": 0}.get(kind, side)
    torch.testing.assert_close(basis[0, :, :known].abs(), expected[:, :known].abs())


def test_by_cholesky_only_columns_that_are_far_from_dependent() -> None:
    near_diagonal = torch.eye(6, dtype=torch.float64) + 0.05 * random(6, 6)
    basis = by_cholesky(near_diagonal[None])
    assert basis is not None
    torch.testing.assert_close(basis[0].abs(), torch.linalg.qr(near_diagonal)[0].abs())
    assert by_cholesky(torch.stack([near_diagonal, random(6, 2) @ random(2, 6, seed=1)])) is None


def test_singular_bases_make_a_matrix_diagonal() -> None:
    matrix = random(2, 5, 7)
    left, right = singular_bases(matrix)
    rotated = left.mT @ matrix @ right
    torch.testing.assert_close(rotated[..., :5], torch.diag_embed(torch.linalg.svdvals(matrix)))
    torch.testing.assert_close(rotated[..., 5:], torch.zeros(2, 5, 2, dtype=torch.float64))


def test_tempering_follows_its_formula_and_keeps_the_norm() -> None:
    ratio, denominator = random(4, 5), random(4, 5, seed=1).abs()
    expected = ratio * torch.clamp(denominator / denominator.square().mean().sqrt(), min=0.05) ** -0.5
    tempered = temper(ratio[None], denominator[None], 0.5)[0]
    torch.testing.assert_close(tempered, expected * ratio.norm() / expected.norm())


# Blocks


@pytest.mark.parametrize(
    ("shape", "longest", "blocks"),
    [
        ((512, 2048), 512, (512, 512)),
        ((512, 1376), 512, (512, 344)),
        ((512, 512), 0, (512, 512)),
        ((100, 60), 64, (50, 60)),
        ((509, 64), 64, (509, 64)),
    ],
)
def test_sides_are_cut_into_as_few_equal_parts_as_possible(shape: Any, longest: int, blocks: Any) -> None:
    assert block_shape(shape, longest) == blocks


@pytest.mark.parametrize("block", [(6, 8), (6, 4), (3, 8), (2, 4)])
def test_joined_blocks_are_the_matrix(block: tuple[int, int]) -> None:
    matrix = random(6, 8)
    blocks = split(matrix, *block)
    assert blocks.shape == (48 // (block[0] * block[1]), *block)
    assert torch.equal(blocks[0], matrix[: block[0], : block[1]])
    assert torch.equal(join(blocks, (6, 8)), matrix)


def test_chunks_cover_everything_within_the_limit_or_alone() -> None:
    sizes = [3, 3, 3, 9, 1, 1, 5]
    runs = [sizes[run] for run in chunks(sizes, 6)]
    assert runs == [[3, 3], [3], [9], [1, 1], [5]]


# Around the gradient


def adam_after(gradients: list[Tensor], **settings: Any) -> Tensor:
    weight = torch.nn.Parameter(random(4, 3, seed=9))
    optimizer = AdamW([weight], lr=0.1, **settings)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach()


def test_delay_compensation_carries_the_gradient_to_the_present_weights() -> None:
    weight = torch.nn.Parameter(random(4, 3, seed=9))
    gradient, used = random(4, 3), random(4, 3, seed=2)
    optimizer = DelayCompensated([weight], lr=0.1, compensation=0.3)
    optimizer.param_groups[0]["used"] = [used]
    weight.grad = gradient
    expected = gradient + 0.3 * gradient * gradient * (weight.detach() - used)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), adam_after([expected]), rtol=0, atol=0)


def test_weights_lent_to_the_optimizer_are_not_saved() -> None:
    weight = torch.nn.Parameter(random(4, 3))
    optimizer = DelayCompensated([weight])
    optimizer.param_groups[0]["used"] = [weight.detach()]
    assert "used" not in optimizer.state_dict()["param_groups"][0]


def test_error_feedback_adds_the_change_between_the_last_two_steps() -> None:
    gradients = [random(4, 3, seed=seed) for seed in range(3)]
    path = [random(4, 3, seed=9), *(adam_after(gradients[:n], weight_decay=0.0) for n in (1, 2, 3))]
    steps = [after - before for before, after in pairwise(path)]
    weight = torch.nn.Parameter(path[0].clone())
    optimizer = ErrorFeedback(AdamW([weight], lr=0.1, weight_decay=0.0), share=1.0)
    optimizer.param_groups[0]["delay"] = 1
    for n, gradient in enumerate(gradients):
        weight.grad = gradient
        optimizer.step()
        # Undelayed steps up to here, and the newest once more as a guess at the next.
        guess = steps[n] if n else torch.zeros_like(weight)
        first = 0.0 if n == 0 else -steps[0]
        torch.testing.assert_close(weight.detach(), path[n + 1] + guess + first)


def test_mean_velocity_sets_weights_back_along_a_straight_path() -> None:
    velocity = MeanVelocity(torch.zeros(3), decay=0.5)
    for t in range(40):
        velocity.update(torch.full((3,), float(t)), torch.full((3,), t + 1.0))
    torch.testing.assert_close(velocity.set_back(torch.full((3,), 40.0), 4), torch.full((3,), 36.0))


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in ((8, 8), (4, 16), (16, 4)):
        values = torch.linalg.svdvals(orthogonalised(random(*shape, dtype=torch.float32), 5))
        assert values.min() > 0.5 and values.max() < 1.5


# The combined rule on what is not rotated


def test_vectors_follow_the_combined_rule_without_rotation_and_tempering() -> None:
    beta1, beta2, eps, fresh, lr = 0.99, 0.999, 1e-8, 0.4, 0.1
    settings = {"betas": (beta1, beta2), "eps": eps, "fresh": fresh, "bias_correction": False, "tempering": 0.5}
    weight = torch.nn.Parameter(random(7))
    optimizer = BasisRotation([weight], lr=lr, weight_decay=0.01, **settings)
    expected, m, s = weight.detach().clone(), torch.zeros(7).double(), torch.zeros(7).double()
    for t in range(1, 30):
        g = weight.grad = random(7, seed=t)
        optimizer.step()
        m, s = beta1 * m + (1 - beta1) * g, beta2 * s + (1 - beta2) * g * g
        n = (1 - fresh) * m + fresh * g
        expected = expected - lr * (n / ((s / (1 - beta2**t)).sqrt() + eps) + 0.01 * expected)
        torch.testing.assert_close(weight.detach(), expected)


def test_fresh_alone_keeps_the_bias_correction() -> None:
    weight, gradient = random(3), random(3, seed=1)
    group = AdamW([torch.nn.Parameter(weight)], lr=0.1, weight_decay=0.0).param_groups[0] | {"fresh": 0.4}
    slot = Slot(0, weight.clone(), gradient, {}, None)
    adam_update(group, slot)
    torch.testing.assert_close(slot.weight, weight - 0.1 * gradient.sign(), rtol=0, atol=1e-6)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "third"}, "source is 'third'"),
        ({"geometry": "round"}, "geometry is 'round'"),
        ({"allocation": "none"}, "allocation is 'none'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"interval": 0}, "interval is 0"),
        ({"block": -1}, "block -1"),
        ({"tempering": -1.0}, "tempering -1.0"),
        ({"fresh": 1.5}, "fresh is 1.5"),
        ({"betas": (1.0, 0.9)}, "betas is"),
        ({"lr": -1.0}, "lr -1.0"),
        ({"nesterov": True, "fresh": 0.1}, "nesterov sets"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BasisRotation([torch.nn.Parameter(random(2, 2))], **settings)


def test_only_matrices_can_be_rotated_or_orthogonalised_by_demand() -> None:
    vector = torch.nn.Parameter(random(3))
    vector.grad = random(3)
    for optimizer in (
        BasisRotation([{"params": [vector], "rotate": True}]),
        Muon([{"params": [vector], "orthogonalise": True}]),
    ):
        with pytest.raises(ConfigError, match=r"shape \(3,\)"):
            optimizer.step()


# Products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_products_of_whole_transposed_and_partial_matrices_have_full_precision(count: int, dtype: torch.dtype) -> None:
    one, other = random(count, 160, 200), random(count, 200, 260, seed=1)
    forms = {
        "whole": (one.to(dtype), other.to(dtype)),
        "transposed": (one.mT.contiguous().to(dtype).mT, other.mT.contiguous().to(dtype).mT),
        "parts": (one.repeat(1, 1, 2).to(dtype)[..., :200], other.repeat(1, 2, 2).to(dtype)[:, :200, :260]),
    }
    scale = one.norm() * other.norm()
    for factors in forms.values():
        off = product(*factors).double() - one @ other
        assert off.norm() < 2 * torch.finfo(dtype).eps * scale
        total = torch.ones(count, 160, 260, dtype=dtype)
        take_product(total, *factors, decay=0.75)
        assert (total - 0.75 - 0.25 * (one @ other)).norm() < 2 * torch.finfo(dtype).eps * scale


# Symmetric matrices


@pytest.mark.parametrize("side", [5, 128, 300])
def test_packed_products_are_the_symmetric_matrix(side: int) -> None:
    first, then = random(2, side, 7), random(2, side, 7, seed=1)
    packed = symmetric.zeros(2, side, like=first)
    symmetric.take_product(packed, first, decay=0.0)
    symmetric.take_product(packed, then, decay=0.75)
    expected = 0.75 * first @ first.mT + 0.25 * then @ then.mT
    torch.testing.assert_close(symmetric.unpacked(packed, side), expected)
    torch.testing.assert_close(symmetric.lower_product(first).tril(), (first @ first.mT).tril())


def test_packed_matrices_of_many_strips_take_little_more_than_half() -> None:
    assert symmetric.zeros(1, 2048, like=random(1)).numel() < 0.54 * 2048**2


# From the config


def test_error_feedback_in_the_config_wraps_whatever_optimizer_is_chosen() -> None:
    tensor = torch.nn.Parameter(random(4, 3, dtype=torch.float32))
    config = OptimizerConfig(delay=DelayConfig(error_feedback=0.5))
    stepper = Stepper(config, 10, StagePlace(0, 2, 1), [NamedParameter("w", "matrix", tensor)])
    assert isinstance(stepper.optimizer, ErrorFeedback)
    assert (stepper.optimizer.share, type(stepper.optimizer.inner)) == (0.5, AdamW)


def test_momentum_by_delay_in_the_config_reaches_the_optimizer() -> None:
    config = OptimizerConfig(delay=DelayConfig(momentum=True))
    groups = [{"params": [torch.nn.Parameter(random(4, 3))], "names": ["w"], "kind": "matrix", "weight_decay": 0.0}]
    for name in ("adamw", "nesterov", "delay-compensated", "muon", "basis-rotation"):
        optimizer = load(OPTIMIZERS[name])([dict(group) for group in groups], config, 8, 4)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(0.945)
