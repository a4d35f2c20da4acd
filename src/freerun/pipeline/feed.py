"""Which microbatch of the data a replica's stream means, and what its loss counts for."""

from __future__ import annotations

import torch
from torch import Tensor

from freerun.config import Config
from freerun.data import Batch, Microbatches
from freerun.mesh import Place
from freerun.pipeline.schedule import Backward
from freerun.weights.delay import version_of


class Feed:
    """The data as one replica sees it.

    Update u of replica r uses microbatches (u·R + r)·M … of the data, so that the replicas' microbatches of one update
    are consecutive and a run of R replicas with M each sees what one replica with R·M sees. With `interleaved` (elastic
    accumulation, where nobody knows M) replica r takes every R-th microbatch.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        train: Microbatches,
        evaluation: Microbatches,
        device: torch.device,
        *,
        one_batch: bool,
        interleaved: bool = False,
    ) -> None:
        self._pipeline = config.pipeline
        self._evaluations = config.evaluation.microbatches
        self._place = place
        self._train = train
        self._evaluation = evaluation
        self._device = device
        self._one_batch = one_batch
        self._interleaved = interleaved
        self._fetched: tuple[int, Batch] | None = None
        self._scale: tuple[int, float] | None = None

    def tokens(self, microbatch: int) -> Tensor:
        """The inputs of a microbatch of this replica's stream."""
        return self._batch(microbatch).tokens.to(self._device)

    def labels(self, microbatch: int) -> Tensor:
        """The labels of a microbatch of this replica's stream."""
        return self._batch(microbatch).labels.to(self._device)

    def valid(self, microbatch: int) -> int:
        """How many tokens of a microbatch the loss counts."""
        return self._train.valid(self._number(microbatch, self._place.replica))

    def scale(self, microbatch: int) -> float:
        """The factor on a microbatch's summed loss that makes the gradient that of a mean over tokens.

        Where the replicas act as one big batch, the mean over replicas of their gradients is the mean over all tokens
        of the update, however unevenly these are spread.
        """
        if self._interleaved:
            return 1.0 / max(self.valid(microbatch), 1)
        update = self.update_of(microbatch)
        if self._scale is None or self._scale[0] != update:
            replicas = range(self._place.replicas) if self._one_batch else [self._place.replica]
            first = update * self._pipeline.microbatches
            tokens = sum(
                self._train.valid(self._number(i, replica))
                for replica in replicas
                for i in range(first, first + self._pipeline.microbatches)
            )
            self._scale = (update, len(replicas) / max(tokens, 1))
        return self._scale[1]

    def update_of(self, microbatch: int) -> int:
        """The update that a microbatch belongs to."""
        return microbatch // self._pipeline.microbatches

    def completes(self, microbatch: int) -> bool:
        """Whether a microbatch is known to be the last of its update."""
        return not self._interleaved and (microbatch + 1) % self._pipeline.microbatches == 0

    def age(self, action: Backward) -> int:
        """Updates between the weights that a forward saw and the update that its gradient is for."""
        return 0 if self._interleaved else self.update_of(action.microbatch) - action.version

    def tied_version(self, microbatch: int) -> int:
        """The version of shared weights that the first stage's forward of a microbatch sees."""
        pipeline = self._pipeline
        return version_of(pipeline.schedule, microbatch, 0, pipeline.stages, pipeline.microbatches, pipeline.slack)

    def evaluation_microbatches(self) -> range:
        """The held-out microbatches that fall to this replica."""
        return range(self._place.replica, self._evaluations, self._place.replicas)

    def evaluation_tokens(self, number: int) -> Tensor:
        """The inputs of a held-out microbatch."""
        return self._evaluation.get(number).tokens.to(self._device)

    def evaluation_labels(self, number: int) -> Tensor:
        """The labels of a held-out microbatch."""
        return self._evaluation.get(number).labels.to(self._device)

    def _number(self, microbatch: int, replica: int) -> int:
        if self._interleaved:
            return microbatch * self._place.replicas + replica
        update, place = divmod(microbatch, self._pipeline.microbatches)
        return (update * self._place.replicas + replica) * self._pipeline.microbatches + place

    def _batch(self, microbatch: int) -> Batch:
        number = self._number(microbatch, self._place.replica)
        if self._fetched is None or self._fetched[0] != number:
            self._fetched = (number, self._train.get(number))
        return self._fetched[1]
