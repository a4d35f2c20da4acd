"""Synchronous data parallelism with a sharded optimizer: each replica steps its share and hands the result round."""

from __future__ import annotations

from freerun.replicas.base import ReplicaStrategy, StageState, State
from freerun.replicas.sharded import ShardStepper, shard_of
from freerun.steps import Steps


class Zero1(ReplicaStrategy):
    """Reduce-scatter the gradient, step the shard, all-gather the weights."""

    def __init__(self, stage: StageState) -> None:
        super().__init__(stage)
        self.shard = shard_of(stage, stage.group)
        self.stepper = ShardStepper(stage, self.shard, stage.group)

    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        flat, timing = self.stage.flat, self.timing
        yield from timing.stand_still(timing.communicate(self.shard.collect(flat.gradient)))
        self.shard.gradient.mul_(1 / self.stage.group.size)
        yield from self.stepper.step(update, delay)
        yield from timing.stand_still(timing.communicate(self.shard.spread(self.shard.master, flat.weights)))

    def finish(self) -> Steps[None]:
        yield from ()

    def state_dict(self) -> Steps[State]:
        yield from ()
        return {"optimizer": self.stepper.optimizer.state_dict(), "master": self.shard.master}

    def load_state_dict(self, state: State) -> None:
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        self.shard.master.copy_(state["master"])


def build(stage: StageState) -> Zero1:
    """The strategy `zero1`."""
    return Zero1(stage)
