"""Asynchronous sparse averaging: a random share of the weights, averaged while training goes on.

    launch on the coordinates I:   a ← mean over replicas of w[I], on its way ; w[I] is remembered
    finish some updates later:     d = w[I] − remembered ;  e[I] ← μ e[I] + (1−μ) d ;  w[I] ← a + λ e[I]

What another round has brought to the same coordinates meanwhile (only possible where one partition follows another) was
not learnt, so it is left out of d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from freerun.collectives import Wire, all_reduce
from freerun.config import ReplicasConfig
from freerun.groups import Group
from freerun.payload import FP32, Bytes
from freerun.replicas.base import StageState, State, wire_of
from freerun.replicas.checks import delay_of
from freerun.replicas.coordinates import coordinates, parts_for
from freerun.replicas.local import LocalSteps
from freerun.replicas.rounds import Round, Rounds
from freerun.steps import Steps


@dataclass(frozen=True)
class Correction:
    """How what was learnt during a round is added back."""

    kind: Literal["none", "drift", "ema"] = "ema"
    strength: float = 1.0
    decay: tuple[float, float] = (0.5, 0.99)
    warmup: int = 1000

    def mean_decay(self, number: int) -> float:
        """μ of a round: the first value, then after the warm-up a cosine to the last, as long again."""
        start, end = self.decay
        done = min(max(number / self.warmup - 1, 0.0), 1.0) if self.warmup else 1.0
        return end + (start - end) * 0.5 * (1 + math.cos(math.pi * done))


class SparseRounds(Rounds):
    """Averages one part of a random partition after the other."""

    def __init__(
        self,
        weights: Tensor,
        group: Group,
        *,
        fraction: float,
        interval: int,
        delay: int | None,
        correction: Correction,
        wire: Wire,
        seed: int,
    ) -> None:
        super().__init__(weights, group, interval, delay)
        self._parts = parts_for(fraction)
        self._correction = correction
        self._wire = wire
        self._seed = seed
        # not a number: not visited yet
        self._mean_learnt = torch.full_like(weights, torch.nan) if correction.kind == "ema" else None
        self._lost = torch.zeros_like(weights) if wire.payload != FP32 else None
        self._agreed = weights.clone() if isinstance(wire.payload, Bytes) else None

    def take(self, number: int) -> Tensor:
        return self.weights[self._places(number)]

    def exchange(self, number: int, values: Tensor) -> Steps[Tensor]:
        places = self._places(number)
        if self._agreed is None:
            return (yield from self._mean(places, values))
        # bytes hold differences to the last average, which are small, where they would not hold weights
        base = self._agreed[places]
        self._agreed[places] = base + (yield from self._mean(places, values - base))
        return self._agreed[places]

    def put(self, done: Round, result: Tensor) -> None:
        places = self._places(done.number)
        before = [(other, self.weights[self._places(other.number)]) for other in self._overlapping(done)]
        learnt = self.weights[places] - done.remembered
        self.weights[places] = result + self._back(done.number, places, learnt)
        for other, old in before:
            other.remembered += self.weights[self._places(other.number)] - old

    def state_dict(self) -> Steps[State]:
        state = yield from super().state_dict()
        kept = {"mean_learnt": self._mean_learnt, "agreed": self._agreed, "lost": self._lost}
        return {**state, **{name: value for name, value in kept.items() if value is not None}}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        kept = {"mean_learnt": self._mean_learnt, "agreed": self._agreed, "lost": self._lost}
        for name, value in kept.items():
            if value is not None:
                value.copy_(state[name])

    def _places(self, number: int) -> Tensor:
        return coordinates(len(self.weights), self._parts, self._seed, number).to(self.weights.device)

    def _overlapping(self, done: Round) -> list[Round]:
        """Rounds under way that may share coordinates: those of another partition."""
        return [other for other in self.under_way if other.number // self._parts != done.number // self._parts]

    def _back(self, number: int, places: Tensor, learnt: Tensor) -> Tensor:
        """What is added to the average: λ times what was learnt, or its running mean, or nothing."""
        if self._correction.kind == "none":
            return torch.zeros_like(learnt)
        if self._mean_learnt is None:
            return self._correction.strength * learnt
        decay = self._correction.mean_decay(number)
        before = self._mean_learnt[places]
        mean = torch.where(before.isnan(), learnt, decay * before + (1 - decay) * learnt)
        self._mean_learnt[places] = mean
        return self._correction.strength * mean

    def _mean(self, places: Tensor, values: Tensor) -> Steps[Tensor]:
        """Average; what the number format loses of the values goes along the next time."""
        if self._lost is None:
            yield from all_reduce(self.channel, values, self._wire)
        else:
            values += self._lost[places]
            error = torch.zeros_like(values)
            yield from all_reduce(self.channel, values, self._wire, error)
            self._lost[places] = error
        return values.mul_(1 / self.group.size)


def correction_of(config: ReplicasConfig) -> Correction:
    """The correction that the config asks for."""
    return Correction(config.correction, config.correction_strength, config.mean_decay, config.mean_warmup)


def build(stage: StageState) -> LocalSteps:
    """The strategy `sparse`."""
    config = stage.config.replicas
    rounds = SparseRounds(
        stage.flat.weights,
        stage.group,
        fraction=config.fraction,
        interval=config.interval,
        delay=delay_of(config),
        correction=correction_of(config),
        wire=wire_of(config),
        seed=stage.config.training.seed,
    )
    return LocalSteps(stage, rounds)
