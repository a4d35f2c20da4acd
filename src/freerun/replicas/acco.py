"""Accumulate while you communicate: sharded data parallelism that is entirely behind computation, without its delay."""

from __future__ import annotations

from torch import Tensor

from freerun.replicas.base import BESIDE, ReplicaStrategy, StageState, State
from freerun.replicas.sharded import ShardStepper, shard_of
from freerun.replicas.two_phases import TwoPhases
from freerun.steps import Steps


class Acco(ReplicaStrategy):
    """Two-phase rounds, each phase an update of the pipeline. The schedule advances by samples.

    Elastic: a gradient is the sum of its microbatches' mean gradients, however many; otherwise it is already divided
    by `pipeline.microbatches`.
    """

    def __init__(self, stage: StageState) -> None:
        super().__init__(stage)
        config = stage.config
        self._elastic = config.replicas.elastic
        self._microbatches = config.pipeline.microbatches
        channel = stage.group.channel(BESIDE)
        self.shard = shard_of(stage, channel)
        self.stepper = ShardStepper(stage, self.shard, channel)
        self.rounds = TwoPhases(
            stage.flat.weights,
            stage.flat.gradient,
            self.shard,
            self.stepper,
            channel,
            self.timing,
            batch=stage.group.size * self._microbatches,
            divided_by=1 if self._elastic else self._microbatches,
        )

    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        yield from self.rounds.end_phase(self._microbatches if microbatches is None else microbatches, delay)

    def finish(self) -> Steps[None]:
        yield from self.rounds.finish()

    def mean_weights(self) -> Steps[Tensor]:
        return (yield from self.rounds.committed())

    def wants_more(self) -> bool:
        return self._elastic and self.rounds.busy

    def ended(self, updates: int) -> bool:
        if self._elastic:
            return self.rounds.progress >= self.stage.updates
        return super().ended(updates)

    def state_dict(self) -> Steps[State]:
        rounds = yield from self.rounds.state_dict()
        return {"optimizer": self.stepper.optimizer.state_dict(), "rounds": rounds}

    def load_state_dict(self, state: State) -> None:
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        self.rounds.load_state_dict(state["rounds"])


def build(stage: StageState) -> Acco:
    """The strategy `acco`."""
    return Acco(stage)
