"""One replica, alone: the optimizer and nothing else."""

from __future__ import annotations

from freerun.replicas.base import ReplicaStrategy, StageState, State, whole_stepper
from freerun.steps import Steps


class Alone(ReplicaStrategy):
    """Steps the stage's optimizer."""

    def __init__(self, stage: StageState) -> None:
        super().__init__(stage)
        self.stepper = whole_stepper(stage)

    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        yield from self.stepper.step(update, delay)

    def finish(self) -> Steps[None]:
        yield from ()

    def state_dict(self) -> Steps[State]:
        yield from ()
        return {"optimizer": self.stepper.optimizer.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.stepper.optimizer.load_state_dict(state["optimizer"])


def build(stage: StageState) -> Alone:
    """The strategy `none`."""
    return Alone(stage)
