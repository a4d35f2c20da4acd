"""Plain synchronous data parallelism: every gradient is the mean over replicas before the optimizer sees it.

The gradient travels in buckets, last parameters first, each as soon as the last backward has completed it (if the
executor tells), so that most of it is on its way while the backward still computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freerun.collectives import all_reduce
from freerun.replicas.base import BESIDE, ReplicaStrategy, StageState, State, whole_stepper, wire_of
from freerun.steps import Steps, Task, finish
from freerun.weights.flat import Slice


@dataclass(frozen=True)
class Bucket:
    """Neighbouring parameters whose gradients travel together."""

    names: frozenset[str]
    start: int
    end: int


def buckets(slices: Sequence[Slice], size: int) -> list[Bucket]:
    """Cut the parameters, last ones first, into buckets of at least `size` numbers."""
    made: list[Bucket] = []
    names: list[str] = []
    for part in reversed(slices):
        names.append(part.name)
        end = made[-1].start if made else slices[-1].end
        if end - part.start >= size or part is slices[0]:
            made.append(Bucket(frozenset(names), part.start, end))
            names = []
    return made


class AllReduce(ReplicaStrategy):
    """Sums buckets of the gradient beside the backward, then steps the same optimizer on every replica."""

    def __init__(self, stage: StageState) -> None:
        super().__init__(stage)
        self.stepper = whole_stepper(stage)
        self._beside = stage.group.channel(BESIDE)
        self._wire = wire_of(stage.config.replicas)
        self._buckets = buckets(stage.flat.slices, self._wire.bucket)
        self._ready: set[str] = set()
        self._under_way: list[Task[None]] = []

    def gradient_ready(self, names: list[str]) -> None:
        self._ready.update(names)
        # buckets leave in one order, so that those of all replicas meet
        while len(self._under_way) < len(self._buckets):
            if not self._buckets[len(self._under_way)].names <= self._ready:
                break
            self._launch()

    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        while len(self._under_way) < len(self._buckets):
            self._launch()
        for task in self._under_way:
            yield from self.timing.stand_still(finish(task))
        self._under_way.clear()
        self._ready.clear()
        self.stage.flat.gradient.mul_(1 / self.stage.group.size)
        yield from self.stepper.step(update, delay)

    def finish(self) -> Steps[None]:
        yield from ()

    def state_dict(self) -> Steps[State]:
        yield from ()
        return {"optimizer": self.stepper.optimizer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.stepper.optimizer.load_state_dict(state["optimizer"])

    def _launch(self) -> None:
        bucket = self._buckets[len(self._under_way)]
        gradient = self.stage.flat.gradient[bucket.start : bucket.end]
        steps = self.timing.communicate(all_reduce(self._beside, gradient, self._wire))
        self._under_way.append(self._beside.background(steps))


def build(stage: StageState) -> AllReduce:
    """The strategy `allreduce`."""
    return AllReduce(stage)
