"""NCCL's own collectives, behind the functions of collectives.py. Written for GPUs, not yet run on one.

NCCL would serialise a direct exchange between two members (its point-to-point operations have one stream per pair), and
its reduce-scatter and all-gather put no more on the wire than ours. Their sums are taken in the wire's number format,
in an order that NCCL chooses: a run on GPUs repeats itself, but its replay on a CPU differs in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from freerun.collectives import Ranges, Wire, gather_ranges, scatter_ranges, size_of
from freerun.errors import ConfigError
from freerun.groups import DistributedWait
from freerun.payload import Floats
from freerun.steps import Steps


class NcclCollectives:
    """Reduce-scatter and all-gather of one process group; unequal parts are padded to the longest."""

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int, limit: float) -> None:
        self.bytes_sent = 0
        self._process_group = process_group
        self._rank = rank
        self._size = size
        self._limit = limit

    def reduce_scatter(self, flat: Tensor, parts: Sequence[Ranges], into: Tensor, wire: Wire) -> Steps[None]:
        """Sum the members' flat buffers; `into` gets the coordinates that are this rank's part."""
        width = max(map(size_of, parts))
        outgoing = flat.new_zeros(self._size, width, dtype=_dtype(wire))
        for row, part in zip(outgoing, parts, strict=True):
            row[: size_of(part)] = gather_ranges(flat, part)
        mine = outgoing.new_empty(width)
        work = dist.reduce_scatter_tensor(mine, outgoing.view(-1), group=self._process_group, async_op=True)
        yield self._wait(work, "reduce-scatter", outgoing)
        into.copy_(mine[: size_of(parts[self._rank])])

    def all_gather(self, own: Tensor, parts: Sequence[Ranges], into: Tensor, wire: Wire) -> Steps[None]:
        """Put every member's part into `into`."""
        width = max(map(size_of, parts))
        mine = own.new_zeros(width, dtype=_dtype(wire))
        mine[: own.numel()] = own
        everyone = mine.new_empty(self._size, width)
        work = dist.all_gather_into_tensor(everyone.view(-1), mine, group=self._process_group, async_op=True)
        yield self._wait(work, "all-gather", mine)
        for row, part in zip(everyone, parts, strict=True):
            scatter_ranges(into, part, row[: size_of(part)].float())

    def _wait(self, work: dist.Work, what: str, keep: Tensor) -> DistributedWait:
        self.bytes_sent += keep.nbytes * (self._size - 1) // (self._size if keep.ndim > 1 else 1)
        return DistributedWait(work, f"{what} among {self._size} members", self._limit, keep)


def _dtype(wire: Wire) -> torch.dtype:
    if not isinstance(wire.payload, Floats):
        raise ConfigError("replicas.payload is int8, which NCCL can't sum; use bf16 or fp32 on GPUs.")
    return wire.payload.dtype
