"""Learning rate and momentum as functions of progress and delay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freerun.config import DelayConfig, OptimizerConfig
from freerun.optim.rates import momentum_by_delay, rate

UPDATES = 1000


def config(delay: DelayConfig | None = None, **settings: Any) -> OptimizerConfig:
    return replace(OptimizerConfig(lr=1.0, warmup=100), delay=delay or DelayConfig(), **settings)


def test_warmup_rises_linearly_from_above_zero_to_the_peak() -> None:
    rates = [rate(config(), progress, UPDATES, 0) for progress in range(100)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == 1.0
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("cosine", 0.55, 0.1), ("wsd", 1.0, 0.1), ("constant", 1.0, 1.0)],
)
def test_schedules_reach_their_known_points(schedule: Any, middle: float, end: float) -> None:
    assert rate(config(schedule=schedule), 550, UPDATES, 0) == pytest.approx(middle)
    assert rate(config(schedule=schedule), UPDATES, UPDATES, 0) == pytest.approx(end)
    assert rate(config(schedule=schedule), 2 * UPDATES, UPDATES, 0) == pytest.approx(end)


def test_wsd_decays_over_its_last_share() -> None:
    assert rate(config(schedule="wsd", decay=0.2), 800, UPDATES, 0) == 1.0
    assert rate(config(schedule="wsd", decay=0.2), 900, UPDATES, 0) == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_fractional_progress_lies_between_whole_updates(schedule: Any) -> None:
    for progress in (20, 850):
        before, between, after = (rate(config(schedule=schedule), progress + x, UPDATES, 3) for x in (0, 0.5, 1))
        assert min(before, after) < between < max(before, after)


def test_a_run_shorter_than_its_warmup_has_a_rate() -> None:
    assert 0 < rate(config(), 5, 10, 0) <= 1


def test_anneal_divides_by_the_delay_at_first_and_not_at_all_later() -> None:
    annealed = config(DelayConfig(lr="anneal", lr_anneal=400), schedule="constant", warmup=0)
    assert rate(annealed, 0, UPDATES, 8) == pytest.approx(1 / 8)
    assert rate(annealed, 200, UPDATES, 8) == pytest.approx(8**-0.5)
    assert rate(annealed, 400, UPDATES, 8) == 1.0
    assert rate(annealed, 0, UPDATES, 0) == 1.0


def test_anneal_takes_a_quarter_of_the_run_by_default() -> None:
    annealed = config(DelayConfig(lr="anneal"), schedule="constant", warmup=0)
    assert rate(annealed, 249, UPDATES, 8) < 1.0
    assert rate(annealed, 250, UPDATES, 8) == 1.0


def test_power_lowers_the_rate_by_a_power_of_the_delay() -> None:
    by_power = config(DelayConfig(lr="power", lr_power=0.75), schedule="constant", warmup=0)
    assert rate(by_power, 0, UPDATES, 31) == pytest.approx(32**-0.75)
    assert rate(by_power, 0, UPDATES, 0) == 1.0


def test_momentum_grows_with_delay_only_when_asked() -> None:
    grows = config(DelayConfig(momentum=True))
    assert momentum_by_delay(config(), 8, 7) == (0.9, 0.999)
    assert momentum_by_delay(grows, 8, 0) == (0.9, 0.999)
    assert momentum_by_delay(grows, 8, 4)[0] == pytest.approx(0.9 + 4 * 0.09 / 8)
