"""Held-out loss in the middle of training, through the same stages, on the weights of one version."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass

from torch import Tensor, nn

from freerun.collectives import exchange_scalars
from freerun.config import Config
from freerun.mesh import Fabric
from freerun.pipeline.executor import Executor
from freerun.steps import Steps, Task


@dataclass(frozen=True)
class Evaluation:
    """The loss of a version of the weights on held-out tokens."""

    version: int
    loss: float
    disagreement: float | None
    """Mean squared distance of the last stage's weights to their mean over replicas, where replicas differ."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


class Evaluations:
    """Keeps the weights of versions that are to be evaluated until the schedule comes to it, and adds up the losses.

    A stage behind the first one has gone on by then, so it keeps a copy of those weights; with several replicas it
    keeps their mean.
    """

    def __init__(self, config: Config, fabric: Fabric, executor: Executor) -> None:
        self.results: list[Evaluation] = []
        self._every = config.evaluation.every
        self._microbatches = config.evaluation.microbatches
        self._fabric = fabric
        self._executor = executor
        self._copy: nn.Module | None = None
        self._kept: dict[int, Tensor] = {}
        self._disagreements: dict[int, float] = {}
        self._under_way: deque[tuple[int, Task[list[list[float]]]]] = deque()

    def due(self, version: int, end: int) -> bool:
        """Whether a version is evaluated."""
        if self._microbatches == 0 or version == 0:
            return False
        return version == end or (self._every > 0 and version % self._every == 0)

    def keep(self, version: int) -> Steps[None]:
        """A version that is due has just been made."""
        place = self._fabric.place
        if place.stages * place.replicas > 1:
            mean = yield from self._executor.strategy.mean_weights()
            self._kept[version] = mean.clone()
            if not self._executor.strategy.one_batch:
                self._disagreements[version] = yield from self._executor.strategy.disagreement(mean)

    def run(self, version: int) -> Steps[None]:
        """Evaluate a version that was kept."""
        yield from self._executor.load_tied(version)
        totals = yield from self._executor.evaluate(self._module(version))
        if self._fabric.place.last:
            task = self._fabric.side.background(exchange_scalars(self._fabric.side, totals))
            self._under_way.append((version, task))

    def arrived(self, *, all_of_them: bool = False) -> Steps[list[Evaluation]]:
        """The evaluations to which every replica has contributed by now."""
        new = []
        while self._under_way and (all_of_them or self._under_way[0][1].ready()):
            version, task = self._under_way.popleft()
            if not task.ready():
                yield task
            rows = task.result()
            loss = sum(row[0] for row in rows) / max(sum(row[1] for row in rows), 1)
            new.append(Evaluation(version, loss, self._disagreements.pop(version, None)))
        self.results += new
        return new

    def _module(self, version: int) -> nn.Module:
        if version not in self._kept:
            return self._executor.versions.module(version)
        if self._copy is None:
            self._copy = copy.deepcopy(self._executor.stage)
        weights = self._kept.pop(version)
        dtype = self._executor.dtype
        places = {part.name: part for part in self._executor.flat.slices}
        borrowed = dict(self._executor.versions.module(self._executor.versions.newest).named_parameters())
        for name, parameter in self._copy.named_parameters():
            source = places[name].of(weights) if name in places else borrowed[name].detach()
            parameter.data = source.to(dtype)
        return self._copy
