"""Local training with an outer optimizer (DiLoCo), whole or, as its streaming form, a fragment of layers at a time.

    Δ = θ − mean over replicas of w ;  b ← m b + Δ ;  θ ← θ − η (Δ + m b) ;  w ← θ

θ are the outer weights, equal on all replicas. Streaming, the fragments take turns, each result arrives some updates
after its launch, and w ← α w + (1−α) θ keeps a share of what the replica has learnt meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from freerun.collectives import Range, Wire, all_reduce
from freerun.errors import ConfigError
from freerun.groups import Group
from freerun.payload import Bytes
from freerun.replicas.base import StageState, State, wire_of
from freerun.replicas.checks import delay_of
from freerun.replicas.local import LocalSteps
from freerun.replicas.rounds import Round, Rounds
from freerun.steps import Steps
from freerun.weights.flat import Slice


def fragments_of(slices: Sequence[Slice], count: int) -> list[list[Range]]:
    """Layers dealt out in turn; what lies before them goes with the first fragment, what lies after, with the last."""
    numbers = [re.search(r"\.(\d+)\.", f".{part.name}") for part in slices]
    layers = sorted({int(found[1]) for found in numbers if found})
    most = max(len(layers), 1)
    if count > most:
        raise ConfigError(
            f"replicas.fragments is {count}, but this stage has {len(layers)} layers; use at most {most}."
        )
    fragments: list[list[Range]] = [[] for _ in range(count)]
    seen_layer = False
    for part, found in zip(slices, numbers, strict=True):
        seen_layer = seen_layer or found is not None
        index = layers.index(int(found[1])) % count if found else (count - 1 if seen_layer else 0)
        fragments[index].append((part.start, part.end))
    return fragments


class OuterRounds(Rounds):
    """Outer steps of one fragment after the other."""

    def __init__(
        self,
        weights: Tensor,
        group: Group,
        fragments: list[list[Range]],
        *,
        interval: int,
        delay: int | None,
        rate: float,
        momentum: float,
        kept: float,
        wire: Wire,
    ) -> None:
        super().__init__(weights, group, interval, delay)
        self._fragments = fragments
        self._rate = rate
        self._momentum = momentum
        self._kept = kept
        self._wire = wire
        self._outer = weights.clone()
        self._velocity = torch.zeros_like(weights)
        self._lost = torch.zeros_like(weights) if isinstance(wire.payload, Bytes) else None

    def take(self, number: int) -> Tensor:
        return self._gather(self.weights, number)

    def exchange(self, number: int, values: Tensor) -> Steps[Tensor]:
        """The fragment's new outer weights."""
        outer, velocity = self._gather(self._outer, number), self._gather(self._velocity, number)
        step = outer - values
        error = torch.zeros_like(step) if self._lost is not None else None
        if self._lost is not None:
            step += self._gather(self._lost, number)
        yield from all_reduce(self.channel, step, self._wire, error)
        if self._lost is not None and error is not None:
            self._scatter(self._lost, number, error)
        step.mul_(1 / self.group.size)
        velocity.mul_(self._momentum).add_(step)
        outer.sub_(step.add_(velocity, alpha=self._momentum), alpha=self._rate)
        self._scatter(self._outer, number, outer)
        self._scatter(self._velocity, number, velocity)
        return outer

    def put(self, done: Round, result: Tensor) -> None:
        own = self._gather(self.weights, done.number)
        self._scatter(self.weights, done.number, torch.lerp(result, own, self._kept))

    def state_dict(self) -> Steps[State]:
        state = yield from super().state_dict()
        lost = {} if self._lost is None else {"lost": self._lost}
        return {**state, "outer": self._outer, "velocity": self._velocity, **lost}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._outer.copy_(state["outer"])
        self._velocity.copy_(state["velocity"])
        if self._lost is not None:
            self._lost.copy_(state["lost"])

    def _gather(self, flat: Tensor, number: int) -> Tensor:
        return torch.cat([flat[start:end] for start, end in self._fragment(number)])

    def _scatter(self, flat: Tensor, number: int, values: Tensor) -> None:
        ranges = self._fragment(number)
        pieces = torch.split(values, [end - start for start, end in ranges])
        for (start, end), piece in zip(ranges, pieces, strict=True):
            flat[start:end] = piece

    def _fragment(self, number: int) -> list[Range]:
        return self._fragments[number % len(self._fragments)]


def build(stage: StageState) -> LocalSteps:
    """The strategy `diloco`."""
    config = stage.config.replicas
    streaming = config.fragments > 1
    rounds = OuterRounds(
        stage.flat.weights,
        stage.group,
        fragments_of(stage.flat.slices, config.fragments),
        interval=config.interval // config.fragments,
        delay=delay_of(config) if streaming else 0,
        rate=config.outer_lr,
        momentum=config.outer_momentum,
        kept=config.outer_kept if streaming else 0.0,
        wire=wire_of(config),
    )
    return LocalSteps(stage, rounds)
