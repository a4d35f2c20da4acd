"""The same steps for every member of a group: inside one process, or in a process each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from freerun.groups import DistributedGroup, Group, LocalGroup, Mailboxes
from freerun.steps import Steps, Together, run
from helpers.processes import spawn

T = TypeVar("T")


def in_one_process(count: int, steps: Callable[..., Steps[T]], *args: Any) -> list[T]:
    """Drive `steps(group, *args)` of every member together; their results by rank."""
    together, mailboxes = Together(), Mailboxes()
    groups = [LocalGroup(rank, count, "replicas", mailboxes, together) for rank in range(count)]
    tasks = [together.background(steps(group, *args)) for group in groups]
    together.run()
    return [task.result() for task in tasks]


def in_processes(count: int, steps: Callable[..., Steps[T]], *args: Any, limit: float = 60) -> list[T]:
    """Drive `steps(group, *args)` of every member in a process of its own; their results by rank."""
    return spawn(count, _member, steps, args, limit, limit=limit)


def gloo_group(limit: float = 30) -> DistributedGroup:
    """All processes of this test, as a group."""
    ranks = list(range(dist.get_world_size()))
    assert dist.group.WORLD is not None
    return DistributedGroup(dist.group.WORLD, ranks, [f"replica {rank}" for rank in ranks], limit)


def _member(rank: int, count: int, steps: Callable[[Group], Steps[T]], args: tuple[Any, ...], limit: float) -> T:
    return run(steps(gloo_group(limit), *args))
