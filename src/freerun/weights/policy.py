"""What a treatment of delay asks of the weights that forwards and backwards see."""

from __future__ import annotations

from torch import Tensor

from freerun.config import Config
from freerun.optim.stepper import Stepper
from freerun.optim.velocity import MeanVelocity
from freerun.pipeline.schedule import Backward, Update
from freerun.weights.flat import FlatParameters
from freerun.weights.versions import WeightVersions


class WeightPolicy:
    """Forwards ahead of the weights (look-ahead), backwards set back (PipeMare T2), and the weights a gradient used."""

    def __init__(self, config: Config, flat: FlatParameters, delay: int) -> None:
        treatment = config.optimizer.delay
        self._flat = flat
        self._delay = delay
        self._ahead = treatment.lookahead * delay
        self._compensates = config.optimizer.name == "delay-compensated"
        self._velocity = MeanVelocity(flat.weights, treatment.velocity_decay) if treatment.velocity_decay else None
        self._previous = flat.weights.clone() if self._ahead or self._velocity else None

    def publish(self, versions: WeightVersions, version: int) -> None:
        """Write a new version for forwards to see."""
        weights = self._flat.weights
        if self._previous is None:
            versions.publish(version, weights)
            return
        seen = weights + self._ahead * (weights - self._previous) if self._ahead else weights
        if self._velocity is not None:
            self._velocity.update(self._previous, weights)
        self._previous.copy_(weights)
        versions.publish(version, seen)

    def before_backward(self, versions: WeightVersions, action: Backward) -> None:
        """Set the weights back to where the forward saw them, as far as their mean velocity tells."""
        versions.settle()
        if self._velocity is not None:
            age = versions.newest - action.version
            versions.write(versions.newest, self._velocity.set_back(self._flat.weights, age))

    def after_backward(self, versions: WeightVersions) -> None:
        """Let the next forward see the newest weights again."""
        if self._velocity is not None:
            versions.write(versions.newest, self._flat.weights)

    def before_update(self, versions: WeightVersions, stepper: Stepper, action: Update) -> None:
        """Show the optimizer the weights that the oldest gradient of this update was taken at."""
        if self._compensates:
            used = versions.read(action.update - action.delay)
            places = {part.name: part for part in self._flat.slices}
            stepper.show_used(lambda name: places[name].of(used))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        state = {} if self._previous is None else {"previous": self._previous}
        return state if self._velocity is None else {**state, "velocity": self._velocity.mean}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take up where a checkpoint left off."""
        if self._previous is not None:
            self._previous.copy_(state["previous"])
        if self._velocity is not None:
            self._velocity.mean.copy_(state["velocity"])
