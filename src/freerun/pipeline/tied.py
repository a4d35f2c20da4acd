"""Weights that the first and the last stage share: the embedding, used again as the head.

The first stage owns them. The last one receives every version of them, runs microbatch i on the version that the first
stage's forward of i saw, and sends its gradient of update u in time for the first stage's update u. So the sum of both
gradients is exact in every schedule, and the delay of the shared weights is the first stage's, P − 1 in steady state.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn

from freerun.groups import Group
from freerun.steps import Steps, Wait
from freerun.weights.flat import FlatParameters, Slice
from freerun.weights.versions import WeightVersions, accumulate_into


class TiedOwner:
    """The first stage's side: sends versions, takes in gradients."""

    def __init__(self, weights: Group, gradients: Group, flat: FlatParameters, part: Slice, depth: int) -> None:
        self._weights = weights
        self._gradients = gradients
        self._last = weights.size - 1
        self._gradient = part.of(flat.gradient)
        self._part = part
        self._depth = depth
        self._under_way: deque[tuple[Wait, Tensor]] = deque()

    def send(self, weights: Tensor) -> Steps[None]:
        """Send a version of the shared weights, out of the stage's flat ones."""
        while len(self._under_way) >= self._depth:
            wait, _ = self._under_way.popleft()
            if not wait.ready():
                yield wait
        mine = self._part.of(weights).float().clone()
        self._under_way.append((self._weights.send(mine, self._last), mine))

    def collect(self) -> Steps[None]:
        """Add the last stage's gradient of this update to our own."""
        theirs = torch.empty_like(self._gradient)
        yield self._gradients.receive(theirs, self._last)
        self._gradient.add_(theirs)

    def close(self) -> Steps[None]:
        """See every version off."""
        while self._under_way:
            wait, _ = self._under_way.popleft()
            if not wait.ready():
                yield wait


class TiedBorrower:
    """The last stage's side: takes in versions, sends gradients."""

    def __init__(
        self, weights: Group, gradients: Group, stage: nn.Module, name: str, versions: WeightVersions, version: int
    ) -> None:
        self._weights = weights
        self._gradients = gradients
        self._parameters = [dict(module.named_parameters())[name] for module in versions.modules()]
        own = dict(stage.named_parameters())[name]
        self._gradient = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for parameter in self._parameters:
            accumulate_into(parameter, self._gradient)
        self._next = version
        self._loaded = -1
        self._kept: dict[int, Tensor] = {}
        self._sent: tuple[Wait, Tensor] | None = None

    def load(self, version: int, *, again: bool = False) -> Steps[None]:
        """Have this version in place, and drop older ones unless training needs one `again` (after an evaluation).

        Nothing is in flight in the last stage between a backward and the next forward, so copying disturbs nothing.
        """
        while self._next <= version:
            incoming = torch.empty_like(self._gradient)
            yield self._weights.receive(incoming, 0)
            self._kept[self._next] = incoming
            self._next += 1
        if version != self._loaded:
            for parameter in self._parameters:
                parameter.data.copy_(self._kept[version])
            self._loaded = version
        if not again:
            self._kept = {kept: weights for kept, weights in self._kept.items() if kept >= version}

    def send_gradient(self) -> Steps[None]:
        """Send the gradient of this update, and start the next from zero."""
        if self._sent is not None and not self._sent[0].ready():
            yield self._sent[0]
        mine = self._gradient.clone()
        self._sent = (self._gradients.send(mine, 0), mine)
        self._gradient.zero_()

    def drain(self, newest: int) -> Steps[None]:
        """Take in the versions up to the newest that the owner sent, and see the last gradient off."""
        yield from self.load(newest)
        if self._sent is not None and not self._sent[0].ready():
            yield self._sent[0]


def slice_of(flat: FlatParameters, name: str) -> Slice:
    """Where a parameter lies."""
    return next(part for part in flat.slices if part.name == name)
