"""Propose and commit, state kept and restored, and gradients that are odd, for every optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from freerun.errors import NonFiniteError
from freerun.optim import AdamW, BasisRotation, DelayCompensated, ErrorFeedback, Muon, NesterovAdamW, adapt
from freerun.optim.base import ProposingOptimizer

SHAPES = [(4, 4), (4, 4), (3, 8), (5,), (1, 6), (6, 1)]
COMBINED = {"betas": (0.99, 0.999), "fresh": 0.4, "tempering": 0.5, "bias_correction": False}

MAKERS: dict[str, Callable[[Any], ProposingOptimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "nesterov": lambda p: NesterovAdamW(p, lr=0.01),
    "delay-compensated": lambda p: DelayCompensated(p, lr=0.01, compensation=0.5),
    "muon": lambda p: Muon(p, lr=0.01),
    "second-bilateral": lambda p: BasisRotation(p, lr=0.01, interval=3),
    "second-unilateral": lambda p: BasisRotation(p, lr=0.01, interval=3, geometry="unilateral"),
    "first-bilateral": lambda p: BasisRotation(p, lr=0.01, interval=3, source="first"),
    "first-unilateral": lambda p: BasisRotation(p, lr=0.01, interval=3, source="first", geometry="unilateral"),
    "combined": lambda p: BasisRotation(p, lr=0.01, interval=3, **COMBINED),
    "look-ahead-rotated": lambda p: BasisRotation(p, lr=0.01, interval=3, nesterov=True),
    "cheap": lambda p: BasisRotation(p, lr=0.01, interval=3, stagger=True, block=4, precision="bf16"),
    "adapted": lambda p: adapt(torch.optim.RMSprop(p, lr=0.01, momentum=0.9)),
    "error-feedback": lambda p: ErrorFeedback(BasisRotation(p, lr=0.01, interval=3), share=0.5),
    "error-feedback-adapted": lambda p: ErrorFeedback(adapt(torch.optim.NAdam(p, lr=0.01)), share=1.0),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
ours = pytest.mark.parametrize("make", [m for k, m in MAKERS.items() if "adapted" not in k])


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def feed(optimizer: ProposingOptimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        group["delay"] = 2
        group["used"] = [p.detach() + 0.1 for p in group["params"]]
        for p in group["params"]:
            p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def run(optimizer: ProposingOptimizer, seeds: range) -> None:
    for seed in seeds:
        feed(optimizer, seed)
        optimizer.step()


def values(optimizer: ProposingOptimizer) -> list[Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def same_state(optimizer: ProposingOptimizer, saved: dict[str, Any]) -> None:
    now = optimizer.state_dict()
    assert now["state"].keys() == saved["state"].keys()
    for name, state in now["state"].items():
        assert_same(state, saved["state"][name])


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_proposal_is_what_the_step_gives_bit_for_bit(make: Any, dtype: torch.dtype) -> None:
    optimizer = make(parameters(dtype))
    for seed in range(8):
        feed(optimizer, seed)
        proposed = optimizer.propose()
        optimizer.step()
        assert_same(proposed, values(optimizer))


@each
def test_proposing_touches_neither_parameters_nor_state(make: Any) -> None:
    optimizer = make(parameters())
    for seed in range(4):
        feed(optimizer, seed)
        before, saved, gradients = (
            values(optimizer),
            copy.deepcopy(optimizer.state_dict()),
            [p.grad for p in _all(optimizer)],
        )
        copies = copy.deepcopy(gradients)
        optimizer.propose()
        assert_same(values(optimizer), before)
        assert_same(gradients, copies)
        same_state(optimizer, saved)
        optimizer.step()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_restored_between_refreshes_goes_on_bit_equal(make: Any, dtype: torch.dtype) -> None:
    through = make(parameters(dtype))
    run(through, range(5))
    file = io.BytesIO()
    torch.save((through.state_dict(), [p.detach() for p in _all(through)]), file)
    file.seek(0)
    saved, weights = torch.load(file)
    resumed = make([torch.nn.Parameter(w) for w in weights])
    resumed.load_state_dict(saved)
    for optimizer in (through, resumed):
        run(optimizer, range(5, 12))
    assert_same(values(resumed), values(through))


@each
def test_a_loaded_state_is_a_copy(make: Any) -> None:
    first = make(parameters())
    run(first, range(3))
    saved = first.state_dict()
    kept = copy.deepcopy(saved)
    second = make(parameters())
    second.load_state_dict(saved)
    run(second, range(3, 7))
    same_state(first, kept)


@ours
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_raises_and_touches_nothing(make: Any, bad: float) -> None:
    optimizer = make(parameters())
    run(optimizer, range(4))
    before, saved = values(optimizer), copy.deepcopy(optimizer.state_dict())
    feed(optimizer, 4)
    _all(optimizer)[2].grad[1, 1] = bad
    for attempt in (optimizer.step, optimizer.propose):
        with pytest.raises(NonFiniteError, match=r"\(3, 8\)"):
            attempt()
    assert_same(values(optimizer), before)
    same_state(optimizer, saved)


@each
def test_zero_gradients_give_finite_steps(make: Any) -> None:
    optimizer = make(parameters())
    for seed in range(7):
        feed(optimizer, seed, scale=0.0)
        optimizer.step()
    run(optimizer, range(7))
    assert all(value.isfinite().all() for value in values(optimizer))


@ours
def test_rank_deficient_gradients_give_steps_of_bounded_size(make: Any) -> None:
    optimizer = make(parameters())
    for seed in range(12):
        before = values(optimizer)
        feed(optimizer, seed)
        for p in _all(optimizer):
            if p.ndim == 2:
                p.grad = p.grad[:, :1] @ p.grad[:1, :]
        optimizer.step()
        for old, new in zip(before, values(optimizer), strict=True):
            assert (new - old).norm() <= 0.2 * old.numel() ** 0.5


@each
def test_a_parameter_without_gradient_keeps_its_value_and_has_no_state(make: Any) -> None:
    optimizer = make(parameters())
    idle = _all(optimizer)[1]
    before = idle.detach().clone()
    for seed in range(5):
        feed(optimizer, seed)
        idle.grad = None
        assert_same(optimizer.propose()[1], before)
        optimizer.step()
    assert_same(idle.detach(), before)
    assert not optimizer.state.get(idle)


@each
def test_a_parameter_that_joins_late_counts_its_own_updates(make: Any) -> None:
    optimizer, alone = make(parameters()), make(parameters())
    for seed in range(6):
        for each_of in (optimizer, alone):
            feed(each_of, seed)
        if seed < 3:
            _all(optimizer)[0].grad = None
        else:
            alone.step()
        optimizer.step()
    assert_same(values(optimizer)[0], values(alone)[0])


def test_adapting_what_can_propose_returns_it() -> None:
    optimizer = AdamW(parameters())
    assert adapt(optimizer) is optimizer


def test_closures_run_with_gradients_on_and_return_their_loss() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight])

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert weight.grad is not None and weight[0] < 1


def _all(optimizer: ProposingOptimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
