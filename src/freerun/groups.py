"""Who talks to whom: members that exchange tensors in order, between processes or inside one.

Everything freerun sends goes through `Group.send` and `Group.receive`; messages between two members arrive in the order
in which they were sent. Collectives are built on top (collectives.py), so their sums have one fixed order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from freerun.errors import PeerError
from freerun.steps import Steps, Task, Together, Wait, run

T = TypeVar("T")


class Group(Protocol):
    """Some members of a run, seen from one of them."""

    rank: int
    size: int
    bytes_sent: int

    def send(self, tensor: Tensor, to: int) -> Wait:
        """Send; the tensor must stay unchanged until the returned wait is over."""

    def receive(self, into: Tensor, source: int) -> Wait:
        """Fill `into` with the next message from `source`; post receives in the order in which it sends."""

    def background(self, steps: Steps[T]) -> Task[T]:
        """Run steps beside the caller, after those given before."""


class Over:
    """A wait that is already over."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        return


OVER = Over()


class Solo:
    """The group of one."""

    rank = 0
    size = 1
    bytes_sent = 0

    def send(self, tensor: Tensor, to: int) -> Wait:
        raise ValueError("a group of one has nobody to send to")

    def receive(self, into: Tensor, source: int) -> Wait:
        raise ValueError("a group of one has nobody to receive from")

    def background(self, steps: Steps[T]) -> Task[T]:
        task: Task[T] = Task()
        run(task.follow(steps))
        return task


class Mailboxes:
    """The messages under way among the members of one local group."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.expected: dict[tuple[int, int], deque[LocalReceive]] = defaultdict(deque)

    def deliver(self, pair: tuple[int, int]) -> None:
        """Copy what has been sent into what is expected, in order."""
        sent, expected = self.sent[pair], self.expected[pair]
        while sent and expected:
            expected.popleft().accept(sent.popleft())


class LocalReceive:
    """A message that a member of the same process will send."""

    def __init__(self, into: Tensor, label: str) -> None:
        self._into = into
        self._label = label
        self._arrived = False

    def accept(self, message: Tensor) -> None:
        with torch.no_grad():
            self._into.copy_(message)
        self._arrived = True

    def ready(self) -> bool:
        return self._arrived

    def wait(self) -> None:
        if not self._arrived:
            raise RuntimeError(f"{self._label} is waited for before it was sent")

    def __str__(self) -> str:
        return self._label


class LocalGroup:
    """A member of a group that lives in one process (the replay)."""

    def __init__(self, rank: int, size: int, name: str, mailboxes: Mailboxes, together: Together) -> None:
        self.rank = rank
        self.size = size
        self.bytes_sent = 0
        self._name = name
        self._mailboxes = mailboxes
        self._together = together

    def send(self, tensor: Tensor, to: int) -> Wait:
        self.bytes_sent += tensor.nbytes
        pair = (self.rank, to)
        self._mailboxes.sent[pair].append(tensor.detach().clone())
        self._mailboxes.deliver(pair)
        return OVER

    def receive(self, into: Tensor, source: int) -> Wait:
        pair = (source, self.rank)
        receive = LocalReceive(into, f"{self._name}: message from {source} to {self.rank}")
        self._mailboxes.expected[pair].append(receive)
        self._mailboxes.deliver(pair)
        return receive

    def background(self, steps: Steps[T]) -> Task[T]:
        return self._together.background(steps)


class DistributedWait:
    """A torch.distributed operation under way."""

    def __init__(self, work: dist.Work, what: str, limit: float, keep: Tensor) -> None:
        self._work = work
        self._what = what
        self._limit = limit
        self._keep: Tensor | None = keep  # gloo reads or writes this memory until the work is done
        self._over = False

    def ready(self) -> bool:
        # gloo reports completion only after wait, so a wait is the one way to learn of it
        return self._over

    def wait(self) -> None:
        if self._over:
            return
        try:
            self._work.wait(timedelta(seconds=self._limit))
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise PeerError(f"{self._what} failed within {self._limit:g} s: {reason}") from error
        self._over = True
        self._keep = None


class DistributedGroup:
    """A member of a group of processes, over torch.distributed point-to-point."""

    def __init__(self, process_group: dist.ProcessGroup, ranks: list[int], labels: list[str], limit: float) -> None:
        self._process_group = process_group
        self._ranks = ranks
        self._labels = labels
        self._limit = limit
        self._worker: ThreadPoolExecutor | None = None
        self.rank = ranks.index(dist.get_rank())
        self.size = len(ranks)
        self.bytes_sent = 0

    def send(self, tensor: Tensor, to: int) -> Wait:
        self.bytes_sent += tensor.nbytes
        tensor = tensor.detach()
        what = f"sending to {self._labels[to]}"
        try:
            work = dist.isend(tensor, dst=self._ranks[to], group=self._process_group)
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {str(error).splitlines()[0][:200]}") from error
        assert work is not None
        return DistributedWait(work, what, self._limit, tensor)

    def receive(self, into: Tensor, source: int) -> Wait:
        what = f"receiving from {self._labels[source]}"
        try:
            work = dist.irecv(into, src=self._ranks[source], group=self._process_group)
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {str(error).splitlines()[0][:200]}") from error
        assert work is not None
        return DistributedWait(work, what, self._limit, into)

    def background(self, steps: Steps[T]) -> Task[T]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "freerun-background", torch.set_num_threads, (torch.get_num_threads(),))
        task: Task[T] = Task()
        self._worker.submit(run, task.follow(steps))
        return task
