"""Sums and copies among the members of a group, by direct exchange.

Every sum is taken in fp32 (scalars: in fp64) in the order of ranks, whatever arrives first, so that results depend
neither on timing nor on whether the members are processes or live in one process. A reduce-scatter and an all-gather
each put (R−1)/R of the buffer on the wire per member, an all-reduce twice that, which is the least possible.

A group whose engine has collectives of its own (NCCL) offers them as `Group.native`; they are used behind the same
functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from freerun.groups import Group
from freerun.payload import FP32, Payload
from freerun.steps import Steps, Wait

Range = tuple[int, int]
"""Start and end of some coordinates of a flat buffer."""

Ranges = Sequence[Range]

BUCKETS_UNDER_WAY = 2


@dataclass(frozen=True)
class Wire:
    """How a flat buffer travels: in which number format, and how many of its coordinates at a time."""

    payload: Payload = FP32
    bucket: int = 6_553_600


def exchange_scalars(group: Group, values: list[float]) -> Steps[list[list[float]]]:
    """The same few numbers of every member, a row per rank, in fp64 on the wire."""
    own = torch.tensor(values, dtype=torch.float64)
    rows = [own if rank == group.rank else torch.empty_like(own) for rank in range(group.size)]
    waits = [group.receive(rows[rank], rank) for rank in _others(group)]
    waits += [group.send(own, rank) for rank in _others(group)]
    yield from waits
    return [[float(value) for value in row] for row in rows]


def reduce_scatter(
    group: Group, flat: Tensor, parts: Sequence[Ranges], into: Tensor, wire: Wire, error: Tensor | None = None
) -> Steps[None]:
    """Sum the members' flat buffers; `into` gets the coordinates that are this rank's part, `flat` stays as it is.

    `error`, as long as `flat`, gets what the number format on the wire lost of this member's contribution.
    """
    if group.native is not None:
        yield from group.native.reduce_scatter(flat, parts, into, wire)
        return
    pieces = [_pieces(part, wire.bucket // group.size) for part in parts]
    own = pieces[group.rank]
    ends = _ends(own)

    def launch(bucket: int) -> tuple[list[Wait], dict[int, Tensor]]:
        arriving: dict[int, Tensor] = {}
        if bucket < len(own):
            count = size_of(own[bucket])
            arriving = {rank: wire.payload.empty(count, flat.device) for rank in _others(group)}
        waits = [group.receive(encoded, rank) for rank, encoded in arriving.items()]
        for rank in _others(group):
            if bucket < len(pieces[rank]):
                values = gather_ranges(flat, pieces[rank][bucket])
                encoded = wire.payload.encode(values)
                waits.append(group.send(encoded, rank))
                if error is not None:
                    scatter_ranges(error, pieces[rank][bucket], values - wire.payload.decode(encoded, values.numel()))
        return waits, arriving

    def complete(bucket: int, arrived: dict[int, Tensor]) -> None:
        if bucket >= len(own):
            return
        count = size_of(own[bucket])
        total = into[ends[bucket] - count : ends[bucket]]
        mine = gather_ranges(flat, own[bucket])
        for rank in range(group.size):
            share = mine if rank == group.rank else wire.payload.decode(arrived[rank], count)
            total.copy_(share) if rank == 0 else total.add_(share)

    yield from _in_buckets(max(map(len, pieces)), launch, complete)


def all_gather(
    group: Group, own: Tensor, parts: Sequence[Ranges], into: Tensor, wire: Wire, error: Tensor | None = None
) -> Steps[None]:
    """Put every member's part into `into`, this rank's too, all as the wire's number format gives them.

    `error`, as long as `into`, has added to it, in this rank's part, what that number format lost.
    """
    if group.native is not None:
        yield from group.native.all_gather(own, parts, into, wire)
        return
    pieces = [_pieces(part, wire.bucket // group.size) for part in parts]
    ends = _ends(pieces[group.rank])

    def launch(bucket: int) -> tuple[list[Wait], dict[int, Tensor]]:
        arriving = {
            rank: wire.payload.empty(size_of(pieces[rank][bucket]), into.device)
            for rank in _others(group)
            if bucket < len(pieces[rank])
        }
        waits = [group.receive(encoded, rank) for rank, encoded in arriving.items()]
        if bucket < len(ends):
            ranges = pieces[group.rank][bucket]
            count = size_of(ranges)
            values = own[ends[bucket] - count : ends[bucket]]
            encoded = wire.payload.encode(values)
            waits += [group.send(encoded, rank) for rank in _others(group)]
            decoded = wire.payload.decode(encoded, count)
            scatter_ranges(into, ranges, decoded)
            if error is not None:
                scatter_ranges(error, ranges, gather_ranges(error, ranges) + values - decoded)
        return waits, arriving

    def complete(bucket: int, arrived: dict[int, Tensor]) -> None:
        for rank, encoded in arrived.items():
            ranges = pieces[rank][bucket]
            scatter_ranges(into, ranges, wire.payload.decode(encoded, size_of(ranges)))

    yield from _in_buckets(max(map(len, pieces)), launch, complete)


def all_reduce(group: Group, flat: Tensor, wire: Wire, error: Tensor | None = None) -> Steps[None]:
    """Replace the members' flat buffers by their sum, the same bits for every member."""
    if group.size == 1:
        return
    parts = equal_parts(flat.numel(), group.size)
    own = flat.new_empty(size_of(parts[group.rank]))
    yield from reduce_scatter(group, flat, parts, own, wire, error)
    yield from all_gather(group, own, parts, flat, wire, error)


def equal_parts(size: int, count: int) -> list[list[Range]]:
    """Cut a flat buffer into consecutive parts whose sizes differ by at most one."""
    bounds = [size * part // count for part in range(count + 1)]
    return [[(start, end)] for start, end in pairwise(bounds)]


def size_of(ranges: Ranges) -> int:
    """How many coordinates some ranges have."""
    return sum(end - start for start, end in ranges)


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _pieces(ranges: Ranges, size: int) -> list[list[Range]]:
    """Cut a part into consecutive pieces of `size` coordinates, the last one smaller."""
    size = max(size, 1)
    pieces: list[list[Range]] = []
    room = 0
    for start, end in ranges:
        while start < end:
            if room == 0:
                pieces.append([])
                room = size
            taken = min(room, end - start)
            pieces[-1].append((start, start + taken))
            start += taken
            room -= taken
    return pieces


def _ends(pieces: Sequence[Ranges]) -> list[int]:
    """Where each piece ends when they lie one after the other."""
    ends: list[int] = []
    for piece in pieces:
        ends.append((ends[-1] if ends else 0) + size_of(piece))
    return ends


def gather_ranges(flat: Tensor, ranges: Ranges) -> Tensor:
    """The coordinates of a flat buffer that some ranges name."""
    if len(ranges) == 1:
        return flat[ranges[0][0] : ranges[0][1]]
    return torch.cat([flat[start:end] for start, end in ranges])


def scatter_ranges(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """Put values into the coordinates that some ranges name."""
    taken = 0
    for start, end in ranges:
        flat[start:end].copy_(values[taken : taken + end - start])
        taken += end - start


def _in_buckets(
    count: int,
    launch: Callable[[int], tuple[list[Wait], dict[int, Tensor]]],
    complete: Callable[[int, dict[int, Tensor]], None],
) -> Steps[None]:
    """Keep a few buckets under way, so that the link is busy while an earlier bucket is summed."""
    under_way: deque[tuple[int, list[Wait], dict[int, Tensor]]] = deque()
    for bucket in range(count + BUCKETS_UNDER_WAY):
        if bucket >= BUCKETS_UNDER_WAY and under_way:
            first, waits, arrived = under_way.popleft()
            yield from waits
            complete(first, arrived)
        if bucket < count:
            under_way.append((bucket, *launch(bucket)))
