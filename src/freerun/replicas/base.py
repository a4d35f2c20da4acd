"""What the replicas of a stage do together: the interface of every strategy, and what strategies share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from freerun.collectives import Wire, all_reduce, exchange_scalars
from freerun.config import Config, ReplicasConfig
from freerun.errors import PeerError
from freerun.groups import Group
from freerun.optim.stepper import NamedParameter, StagePlace, Stepper
from freerun.payload import PAYLOADS
from freerun.steps import Steps
from freerun.weights.flat import FlatParameters

T = TypeVar("T")

State = dict[str, Any]
"""Nested dicts and lists of tensors, numbers and strings: what a checkpoint can hold."""

BESIDE = 1
"""The channel on which a strategy exchanges things beside the training loop."""


@dataclass
class StageState:
    """What a strategy works on.

    `flat.weights` is what the next forwards read. `flat.gradient` is this replica's own sum for the update, scaled so
    that the mean over replicas is the gradient of the global batch.
    """

    flat: FlatParameters
    kinds: dict[str, str]
    place: StagePlace
    group: Group
    """The replicas of this stage."""
    stage_group: Group | None
    """The stages of this replica when the clipping norm is the whole model's, else None."""
    config: Config
    updates: int


@dataclass
class Timing:
    """How long communication took, and how long the main steps stood still for it."""

    took: float = 0.0
    waited: float = 0.0

    def communicate(self, steps: Steps[T]) -> Steps[T]:
        """Count the time of these steps as communication."""
        start = perf_counter()
        result = yield from steps
        self.took += perf_counter() - start
        return result

    def stand_still(self, steps: Steps[T]) -> Steps[T]:
        """Count the time of these steps as waiting of the main steps."""
        start = perf_counter()
        result = yield from steps
        self.waited += perf_counter() - start
        return result

    @property
    def hidden(self) -> float:
        """The share of communication behind which computation went on."""
        return max(0.0, 1 - self.waited / self.took) if self.took else 1.0


class ReplicaStrategy(ABC):
    """What one replica of a stage does at each update, and what it exchanges with the others.

    Communication is launched in one place and finished in another; what happens between the two happens on
    `group.channel(BESIDE).background`, in the order of launches, and on no other thread. Nothing but this may use that
    channel.
    """

    one_batch = True
    """Whether the replicas' batches of an update act as one; otherwise each replica steps on its own."""

    stepper: Stepper

    def __init__(self, stage: StageState) -> None:
        self.stage = stage
        self.timing = Timing()

    @abstractmethod
    def update(self, update: int, delay: int, microbatches: int | None = None) -> Steps[None]:
        """The gradient of this update is complete: make `flat.weights` what the next forwards read.

        The caller then sets `flat.gradient` to zero. `microbatches` says how many are in the gradient when that is not
        `pipeline.microbatches`.
        """

    @abstractmethod
    def finish(self) -> Steps[None]:
        """The run is over: complete what is under way and leave the final weights."""

    @abstractmethod
    def state_dict(self) -> Steps[State]:
        """All that, with the weights, makes a resumed run go on bit for bit; waits for what is under way."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Go on from there; `flat.weights` is loaded by the caller."""

    def mean_weights(self) -> Steps[Tensor]:
        """The weights to evaluate and export; every replica of the stage must ask at the same update."""
        yield from ()
        return self.stage.flat.weights

    def disagreement(self, mean: Tensor) -> Steps[float]:
        """Mean squared distance of a weight to its mean over replicas, which `mean_weights` has just given."""
        yield from ()
        return 0.0

    def gradient_ready(self, names: list[str]) -> None:  # noqa: B027
        """The last backward of the update has completed these parameters' gradients; may be told, need not be."""

    def wants_more(self) -> bool:
        """Whether to add another microbatch to the gradient before the update, rather than wait."""
        return False

    def ended(self, updates: int) -> bool:
        """Whether the run is over after this many updates; the same answer on every replica."""
        return updates >= self.stage.updates

    def metrics(self) -> dict[str, float]:
        """Numbers about the last update and the run so far."""
        return {
            "grad_norm": self.stepper.last_norm,
            "lr": self.stepper.last_rate,
            "updates_skipped": self.stepper.skipped,
            "replica_bytes_sent": self.stage.group.bytes_sent,
            "hidden_communication_fraction": self.timing.hidden,
        }


def whole_stepper(stage: StageState) -> Stepper:
    """The stage's optimizer over whole parameters, the same on every replica."""
    parameters = [
        NamedParameter(name, stage.kinds[name], parameter) for name, parameter in stage.flat.parameters.items()
    ]
    return Stepper(
        stage.config.optimizer,
        stage.updates,
        stage.place,
        parameters,
        norm_groups=[stage.stage_group] if stage.stage_group else [],
        skip_nonfinite=stage.config.training.nonfinite == "skip",
    )


def wire_of(config: ReplicasConfig) -> Wire:
    """How the config wants flat buffers to travel."""
    return Wire(PAYLOADS[config.payload], max(1, int(config.bucket_mib * 2**20 / 4)))


def mean_over(group: Group, weights: Tensor) -> Steps[Tensor]:
    """The members' mean, exact to fp32, the same bits for every member."""
    mean = weights.clone()
    yield from all_reduce(group, mean, Wire())
    return mean.mul_(1 / group.size)


def spread_around(group: Group, weights: Tensor, mean: Tensor) -> Steps[float]:
    """Mean squared distance of a member's weight to the members' mean."""
    own = float((weights - mean).double().square().sum()) / max(weights.numel(), 1)
    rows = yield from exchange_scalars(group, [own])
    return sum(value for (value,) in rows) / group.size


def refuse_unequal_start(group: Group, weights: Tensor) -> Steps[None]:
    """Raise an error that names the replicas whose weights are not the first one's."""
    digest = hashlib.sha256(weights.detach().cpu().numpy().tobytes()).digest()
    # six bytes at a time are exact in a float64
    rows = yield from exchange_scalars(
        group, [float(int.from_bytes(digest[start : start + 6], "big")) for start in range(0, 32, 6)]
    )
    others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise PeerError(
            f"replica {', '.join(others)} of {group.size} starts from other weights than replica 0; give all the same "
            "training.seed, or the same model or checkpoint to start from."
        )
