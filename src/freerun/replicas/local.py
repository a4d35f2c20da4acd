"""Each replica steps its own optimizer on its own batches; now and then the replicas average, in rounds."""

from __future__ import annotations

from torch import Tensor

from freerun.replicas.base import ReplicaStrategy, StageState, State, mean_over, spread_around, whole_stepper
from freerun.replicas.rounds import Rounds
from freerun.steps import Steps


class LocalSteps(ReplicaStrategy):
    """A step of one's own at every update, and rounds beside it."""

    one_batch = False

    def __init__(self, stage: StageState, rounds: Rounds) -> None:
        super().__init__(stage)
        self.stepper = whole_stepper(stage)
        self.rounds = rounds
        self.timing = rounds.timing

    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        yield from self.stepper.step(update, delay)
        yield from self.rounds.advance(update + 1)

    def finish(self) -> Steps[None]:
        yield from self.rounds.finish()

    def mean_weights(self) -> Steps[Tensor]:
        return (yield from mean_over(self.stage.group, self.stage.flat.weights))

    def disagreement(self, mean: Tensor) -> Steps[float]:
        return (yield from spread_around(self.stage.group, self.stage.flat.weights, mean))

    def state_dict(self) -> Steps[State]:
        rounds = yield from self.rounds.state_dict()
        return {"optimizer": self.stepper.optimizer.state_dict(), "rounds": rounds}

    def load_state_dict(self, state: State) -> None:
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        self.rounds.load_state_dict(state["rounds"])
