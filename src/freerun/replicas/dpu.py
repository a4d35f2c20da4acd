"""Delayed parameter update: the step of one update's gradient runs beside the computation of the next one.

Every gradient is one update older when it is applied, and nothing makes up for that: the baseline that shows what
ACCO's second phase is for.
"""

from __future__ import annotations

from torch import Tensor

from freerun.replicas.base import BESIDE, ReplicaStrategy, StageState, State
from freerun.replicas.behind import Behind
from freerun.replicas.sharded import ShardStepper, shard_of
from freerun.steps import Steps


class DelayedUpdate(ReplicaStrategy):
    """Finishes the previous update's step, then launches this one's."""

    def __init__(self, stage: StageState) -> None:
        super().__init__(stage)
        channel = stage.group.channel(BESIDE)
        self.shard = shard_of(stage, channel)
        self.stepper = ShardStepper(stage, self.shard, channel)
        self._behind = Behind(stage.flat.weights, stage.flat.gradient, self.shard, channel, self.timing)

    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        yield from self._behind.complete()
        self._behind.launch(lambda: self._step(update, delay + (update > 0)))

    def finish(self) -> Steps[None]:
        yield from self._behind.complete()

    def state_dict(self) -> Steps[State]:
        behind = yield from self._behind.state_dict()
        return {"optimizer": self.stepper.optimizer.state_dict(), "master": self.shard.master, "behind": behind}

    def load_state_dict(self, state: State) -> None:
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        self.shard.master.copy_(state["master"])
        self._behind.load_state_dict(state["behind"])

    def _step(self, update: int, delay: int) -> Steps[Tensor]:
        self.shard.gradient.mul_(1 / self.stage.group.size)
        yield from self.stepper.step(update, delay)
        return self.shard.master


def build(stage: StageState) -> DelayedUpdate:
    """The strategy `dpu`."""
    return DelayedUpdate(stage)
