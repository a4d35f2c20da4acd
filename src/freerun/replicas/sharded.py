"""A replica's shard: the master weights and the optimizer state that it alone keeps, and the way in and out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from freerun.collectives import Wire, all_gather, reduce_scatter
from freerun.groups import Group
from freerun.optim.base import ProposingOptimizer
from freerun.optim.sharding import Piece, ranges, shares
from freerun.optim.stepper import NamedParameter, Stepper
from freerun.registry import MATRIX_OPTIMIZERS
from freerun.replicas.base import StageState, wire_of
from freerun.steps import Steps


class Stepping(Protocol):
    """Steps an optimizer over the tensors of a shard; `Stepper` is one."""

    optimizer: ProposingOptimizer

    def step(self, progress: float, delay: int) -> Steps[bool]:
        """Keep one step; false when it was skipped."""

    def propose(self, progress: float, delay: int) -> Steps[list[Tensor] | None]:
        """The new values in the optimizer's order; None when the step would be skipped."""


class Shard:
    """This replica's pieces of the master weights and of the gradient, each kind in one buffer."""

    def __init__(self, weights: Tensor, pieces: list[list[Piece]], group: Group, wire: Wire) -> None:
        self.pieces = pieces[group.rank]
        self.parts = [ranges(owned) for owned in pieces]
        self._group = group
        self._wire = wire
        own = self.parts[group.rank]
        self.master = torch.cat([weights[start:end] for start, end in own])
        self.gradient = torch.zeros_like(self.master)
        self.tensors: list[Tensor] = []
        place = 0
        for piece in self.pieces:
            after = place + piece.end - piece.start
            tensor = self.master[place:after].view(piece.shape).requires_grad_()
            tensor.grad = self.gradient[place:after].view(piece.shape)
            self.tensors.append(tensor)
            place = after

    def collect(self, gradient: Tensor) -> Steps[None]:
        """Fill the shard's gradient with the sum of everyone's, and leave everyone's as it is."""
        yield from reduce_scatter(self._group, gradient, self.parts, self.gradient, self._wire)

    def spread(self, own: Tensor, into: Tensor) -> Steps[None]:
        """Gather everyone's new weights."""
        yield from all_gather(self._group, own, self.parts, into, self._wire)

    def arranged(self, optimizer: ProposingOptimizer, proposed: list[Tensor]) -> Tensor:
        """Proposed values in the order of the master weights."""
        values = self.master.clone()
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for tensor, value in zip(tensors, proposed, strict=True):
            start = tensor.storage_offset()
            values[start : start + tensor.numel()].copy_(value.reshape(-1))
        return values

    def reload(self, weights: Tensor) -> None:
        """Take the master weights over from a checkpoint."""
        with torch.no_grad():
            self.master.copy_(weights)


def shard_of(stage: StageState, group: Group) -> Shard:
    """A replica's shard of a stage, sliced as the config's optimizer allows; `group` is the channel to use."""
    matrices = set()
    if stage.config.optimizer.name in MATRIX_OPTIMIZERS:
        matrices = {name for name, kind in stage.kinds.items() if kind == "matrix"}
    pieces = shares(stage.flat.slices, matrices, group.size)
    return Shard(stage.flat.weights, pieces, group, wire_of(stage.config.replicas))


class ShardStepper(Stepper):
    """The stage's optimizer over a shard."""

    def __init__(self, stage: StageState, shard: Shard, group: Group) -> None:
        """Clips by the norm of all shards; `group` is the channel to use."""
        self._pieces = {piece.name: piece for piece in shard.pieces}
        parameters = [
            NamedParameter(piece.name, stage.kinds[piece.name], tensor)
            for piece, tensor in zip(shard.pieces, shard.tensors, strict=True)
        ]
        super().__init__(
            stage.config.optimizer,
            stage.updates,
            stage.place,
            parameters,
            norm_groups=[group, *([stage.stage_group] if stage.stage_group else [])],
            skip_nonfinite=stage.config.training.nonfinite == "skip",
        )

    def show_used(self, weights_of: Callable[[str], Tensor]) -> None:
        super().show_used(lambda name: self._pieces[name].of(weights_of(name)))
