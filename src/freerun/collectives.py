"""Sums and copies among the members of a group, by direct exchange.

Every sum is taken in fp32 (scalars: in fp64) in the order of ranks, whatever arrives first, so that results depend
neither on timing nor on whether the members are processes or live in one process.
"""

from __future__ import annotations

import torch

from freerun.groups import Group
from freerun.steps import Steps


def exchange_scalars(group: Group, values: list[float]) -> Steps[list[list[float]]]:
    """The same few numbers of every member, a row per rank, in fp64 on the wire."""
    own = torch.tensor(values, dtype=torch.float64)
    rows = [own if rank == group.rank else torch.empty_like(own) for rank in range(group.size)]
    others = [rank for rank in range(group.size) if rank != group.rank]
    waits = [group.receive(rows[rank], rank) for rank in others]
    waits += [group.send(own, rank) for rank in others]
    for wait in waits:
        yield wait
    return [[float(value) for value in row] for row in rows]
