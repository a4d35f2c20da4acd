"""Who owns what: which part of a stage's weights, and of the optimizer's state, each replica holds.

An optimizer that treats each element alone is cut into equal slices of the flat buffer, in the midst of parameters. One
whose step mixes the elements of a matrix is shared out by whole matrices, balanced by what a step costs, and only the
rest of the parameters by equal slices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freerun.collectives import Range
from freerun.errors import ConfigError
from freerun.weights.flat import Slice


@dataclass(frozen=True)
class Piece:
    """A parameter, or a run of its elements, that one replica owns; start and end are places in the flat buffer."""

    name: str
    start: int
    end: int
    shape: tuple[int, ...]
    """The shape in which the optimizer sees it: the parameter's own if it is whole."""
    skipped: int = 0
    """Elements of the parameter before the piece."""

    def of(self, parameter: Tensor) -> Tensor:
        """The piece of a whole parameter."""
        return parameter.reshape(-1)[self.skipped : self.skipped + self.end - self.start].view(self.shape)


def shares(slices: Sequence[Slice], matrices: Collection[str], count: int) -> list[list[Piece]]:
    """What each of `count` replicas owns; the parameters named in `matrices` stay whole."""
    whole = [part for part in slices if part.name in matrices]
    if whole and len(whole) < count:
        raise ConfigError(
            f"replicas.count is {count}, but this stage has only {len(whole)} matrices to share out, and the "
            f"optimizer needs each in one piece; use at most {len(whole)} replicas, fewer pipeline.stages, or "
            "replicas.strategy allreduce."
        )
    owned = _by_cost(whole, count)
    for rank, pieces in enumerate(_by_slices([part for part in slices if part.name not in matrices], count)):
        owned[rank] += pieces
    if any(not pieces for pieces in owned):
        raise ConfigError(f"replicas.count is {count}, more than this stage has weights to share out; use fewer.")
    return [sorted(pieces, key=lambda piece: piece.start) for pieces in owned]


def ranges(pieces: Sequence[Piece]) -> list[Range]:
    """The places of some pieces in the flat buffer, neighbours joined."""
    joined: list[Range] = []
    for piece in pieces:
        if joined and joined[-1][1] == piece.start:
            joined[-1] = (joined[-1][0], piece.end)
        else:
            joined.append((piece.start, piece.end))
    return joined


def step_cost(shape: Sequence[int]) -> int:
    """What a step of a matrix optimizer costs, relatively: products of the matrix with its sides' square ones."""
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * columns * (rows + columns)


def _by_cost(matrices: Sequence[Slice], count: int) -> list[list[Piece]]:
    """Dearest first, each to whoever has the least to do so far."""
    owned: list[list[Piece]] = [[] for _ in range(count)]
    load = [0] * count
    for part in sorted(matrices, key=lambda part: (-step_cost(part.shape), part.start)):
        rank = load.index(min(load))
        load[rank] += step_cost(part.shape)
        owned[rank].append(Piece(part.name, part.start, part.end, tuple(part.shape)))
    return owned


def _by_slices(parts: Sequence[Slice], count: int) -> list[list[Piece]]:
    """Equal runs of elements, as if the parameters lay one after the other."""
    total = sum(part.end - part.start for part in parts)
    bounds = [total * rank // count for rank in range(count + 1)]
    owned: list[list[Piece]] = [[] for _ in range(count)]
    passed = 0
    for part in parts:
        size = part.end - part.start
        for rank in range(count):
            start, end = max(bounds[rank], passed), min(bounds[rank + 1], passed + size)
            if start < end:
                place, shape = part.start - passed, _shape(part, end - start)
                owned[rank].append(Piece(part.name, start + place, end + place, shape, start - passed))
        passed += size
    return owned


def _shape(part: Slice, size: int) -> tuple[int, ...]:
    if size == part.end - part.start:
        return tuple(part.shape)
    # a run of a matrix's elements is still a matrix's, which matters for weight decay
    return (size,) if len(part.shape) < 2 else (1, size)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that an optimizer keeps."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in kept if isinstance(value, Tensor))
