"""When bases are refreshed: the budget over stages, and the turns of the matrices within a stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

SLOWEST = 200.0
"""No stage waits longer than this many updates for a refresh."""


@cache
def refresh_interval(
    allocation: Literal["uniform", "stage-aware", "reversed"], interval: float, stage_delay: int, stages: int
) -> float:
    """Updates between refreshes at a stage, not always whole.

    stage-aware gives refreshes in proportion to delay + 1, reversed to the delay counted from the other end. Over the
    stages, whose delays are 0 … stages−1, the mean of refreshes per update stays 1/interval, with each at least
    1/200 and at most 1.
    """
    if allocation == "uniform" or stages == 1:
        return float(interval)
    budget = min(max(1 / interval, 1 / SLOWEST), 1.0)
    low, high = 0.0, 1.0
    for _ in range(60):
        unit = (low + high) / 2
        mean = sum(_clamped(unit * (delay + 1)) for delay in range(stages)) / stages
        low, high = (unit, high) if mean < budget else (low, unit)
    counted = stage_delay if allocation == "stage-aware" else max(stages - 1 - stage_delay, 0)
    return 1 / _clamped(high * (counted + 1))


def due(step: int, interval: float, phase: int = 0) -> bool:
    """Whether update number `step` (from 1) refreshes: the first, and phase + each multiple of the interval.

    No phase makes a refresh come earlier than the interval says. A second moment that has seen only two or three
    gradients has coordinates that are zero by chance, and momentum turned into one of them would be a huge step.
    """
    counted = step - phase
    return step == 1 or (counted >= interval and math.floor(counted / interval) > math.floor((counted - 1) / interval))


def turns(costs: Sequence[float], interval: float) -> list[int]:
    """A phase for each matrix, from 0 to interval−1, so that the updates share the cost of refreshing evenly.

    The costliest come first, each to the update that has least to do so far.
    """
    loads = [0.0] * max(int(interval), 1)
    phases = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        phases[index] = loads.index(min(loads))
        loads[phases[index]] += costs[index]
    return phases


def _clamped(refreshes_per_update: float) -> float:
    return min(max(refreshes_per_update, 1 / SLOWEST), 1.0)
