"""When bases are refreshed: over the stages, and over the matrices of a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.optim import BasisRotation
from freerun.optim.refresh import due, refresh_interval, turns

few = settings(max_examples=30, deadline=None)
stages_and_interval = given(st.integers(2, 40), st.integers(1, 150))


def per_update(allocation: Any, interval: int, stages: int) -> list[float]:
    return [1 / refresh_interval(allocation, interval, delay, stages) for delay in range(stages)]


@few
@stages_and_interval
def test_every_allocation_spends_the_same_budget(stages: int, interval: int) -> None:
    for allocation in ("uniform", "stage-aware", "reversed"):
        assert sum(per_update(allocation, interval, stages)) / stages == pytest.approx(1 / interval)


@few
@stages_and_interval
def test_each_stage_refreshes_at_most_once_per_update_and_at_least_every_200(stages: int, interval: int) -> None:
    for allocation in ("stage-aware", "reversed"):
        assert all(1 / 200 <= refreshes <= 1 for refreshes in per_update(allocation, interval, stages))


@few
@stages_and_interval
def test_reversed_is_stage_aware_seen_from_the_other_end(stages: int, interval: int) -> None:
    assert per_update("reversed", interval, stages) == per_update("stage-aware", interval, stages)[::-1]


def test_stage_aware_refreshes_are_proportional_to_delay_plus_one() -> None:
    refreshes = per_update("stage-aware", 10, 8)
    assert [r / refreshes[0] for r in refreshes] == pytest.approx(range(1, 9))


def test_one_stage_refreshes_as_asked() -> None:
    assert refresh_interval("stage-aware", 10, 0, 1) == 10


def test_without_phase_the_first_update_and_each_multiple_of_the_interval_refresh() -> None:
    assert [step for step in range(1, 41) if due(step, 10.0)] == [1, 10, 20, 30, 40]


@few
@given(st.floats(1, 200), st.integers(0, 9))
def test_fractional_intervals_keep_their_mean(interval: float, phase: int) -> None:
    refreshes = sum(due(step, interval, phase) for step in range(2, 4002))
    assert refreshes == pytest.approx((4001 - phase) / interval, abs=1.01)


@few
@given(st.floats(1, 200), st.integers(0, 9))
def test_no_phase_makes_a_refresh_come_early(interval: float, phase: int) -> None:
    assert not any(due(step, interval, phase) for step in range(2, int(interval)))


def test_turns_share_the_cost_evenly() -> None:
    costs = [8.0, 8.0, 1.0, 1.0, 1.0, 1.0, 8.0, 4.0]
    loads = [0.0] * 4
    for phase, cost in zip(turns(costs, 4), costs, strict=True):
        loads[phase] += cost
    assert sorted(loads) == [8, 8, 8, 8]


def test_staggered_matrices_refresh_in_turn_and_as_often() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(5)]
    optimizer = BasisRotation(weights, interval=5, stagger=True)
    refreshes: list[set[int]] = []
    for _ in range(30):
        before = [optimizer.state[w].get("left_basis", torch.zeros(1)).clone() for w in weights]
        for w in weights:
            w.grad = torch.randn(4, 4)
        optimizer.step()
        changed = {i for i, w in enumerate(weights) if not torch.equal(optimizer.state[w]["left_basis"], before[i])}
        refreshes.append(changed)
    assert refreshes[0] == {0, 1, 2, 3, 4}
    assert all(not changed for changed in refreshes[1:4])
    assert all(len(changed) == 1 for changed in refreshes[4:])
    assert set.union(*refreshes[4:9]) == {0, 1, 2, 3, 4}
