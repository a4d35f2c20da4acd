"""Who talks to whom: members that exchange tensors in order, between processes or inside one.

Everything freerun sends goes through `Group.send` and `Group.receive`; messages between two members arrive in the order
in which they were sent. Collectives are built on top (collectives.py), so their sums have one fixed order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from freerun.errors import PeerError
from freerun.steps import Steps, Task, Together, Wait, run

if TYPE_CHECKING:
    from freerun.collectives import Ranges, Wire

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Numbers that a program looks at travel over gloo even where tensors are on GPUs."""


class NativeCollectives(Protocol):
    """Collectives of the engine itself (NCCL's), with the meaning that collectives.py gives to the same names."""

    bytes_sent: int

    def reduce_scatter(self, flat: Tensor, parts: Sequence[Ranges], into: Tensor, wire: Wire) -> Steps[None]:
        """Sum the members' flat buffers; `into` gets the coordinates that are this rank's part."""

    def all_gather(self, own: Tensor, parts: Sequence[Ranges], into: Tensor, wire: Wire) -> Steps[None]:
        """Put every member's part into `into`, all rounded to the wire's number format."""


class Group(Protocol):
    """Some members of a run, seen from one of them."""

    rank: int
    size: int

    @property
    def native(self) -> NativeCollectives | None:
        """The engine's own collectives, where they serve better than direct exchange."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other members so far, over all channels."""

    def channel(self, number: int) -> Group:
        """The same members with messages of their own, apart from those of other channels."""

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
    native: NativeCollectives | None = None
    bytes_sent = 0

    def channel(self, number: int) -> Solo:
        return self

    def send(self, tensor: Tensor, to: int) -> Wait:
        raise ValueError("a group of one has nobody to send to")

    def receive(self, into: Tensor, source: int) -> Wait:
        raise ValueError("a group of one has nobody to receive from")

    def background(self, steps: Steps[T]) -> Task[T]:
        task: Task[T] = Task()
        run(task.follow(steps))
        return task


Route = tuple[int, int, int]
"""Channel, sender, receiver."""


class Mailboxes:
    """The messages under way among the members of one local group.

    With `shared_memory` a message is not copied: what is received is the memory that was sent, which neither side may
    write any more.
    """

    def __init__(self, shared_memory: bool = False) -> None:
        self.shared_memory = shared_memory
        self.sent: dict[Route, deque[Tensor]] = defaultdict(deque)
        self.expected: dict[Route, deque[LocalReceive]] = defaultdict(deque)

    def send(self, route: Route, message: Tensor) -> None:
        """Put a message where it is expected, or else keep it."""
        if self.expected[route]:
            self._deliver(message, self.expected[route].popleft())
        else:
            self.sent[route].append(message if self.shared_memory else message.clone())

    def receive(self, route: Route, receive: LocalReceive) -> None:
        """Take the next message that was sent, or else expect it."""
        if self.sent[route]:
            self._deliver(self.sent[route].popleft(), receive)
        else:
            self.expected[route].append(receive)

    def _deliver(self, message: Tensor, receive: LocalReceive) -> None:
        if self.shared_memory:
            receive.into.data = message
        else:
            with torch.no_grad():
                receive.into.copy_(message)
        receive.arrived = True


class LocalReceive:
    """A message that a member of the same process will send."""

    def __init__(self, into: Tensor, label: str) -> None:
        self.into = into
        self.arrived = False
        self._label = label

    def ready(self) -> bool:
        return self.arrived

    def wait(self) -> None:
        if not self.arrived:
            raise RuntimeError(f"{self._label} is waited for before it was sent")

    def __str__(self) -> str:
        return self._label


class LocalGroup:
    """A member of a group that lives in one process (the replay)."""

    native: NativeCollectives | None = None

    def __init__(
        self, rank: int, size: int, name: str, mailboxes: Mailboxes, together: Together, number: int = 0
    ) -> None:
        self.rank = rank
        self.size = size
        self._sent = 0
        self._name = name
        self._mailboxes = mailboxes
        self._together = together
        self._number = number
        self._channels: list[LocalGroup] = []
        self._last: Wait = OVER

    @property
    def bytes_sent(self) -> int:
        return self._sent + sum(channel.bytes_sent for channel in self._channels)

    def channel(self, number: int) -> LocalGroup:
        other = LocalGroup(self.rank, self.size, self._name, self._mailboxes, self._together, number)
        self._channels.append(other)
        return other

    def send(self, tensor: Tensor, to: int) -> Wait:
        self._sent += tensor.nbytes
        self._mailboxes.send((self._number, self.rank, to), tensor.detach())
        return OVER

    def receive(self, into: Tensor, source: int) -> Wait:
        receive = LocalReceive(into, f"{self._name}: message from {source} to {self.rank}")
        self._mailboxes.receive((self._number, source, self.rank), receive)
        return receive

    def background(self, steps: Steps[T]) -> Task[T]:
        task = self._together.background(_after(self._last, steps))
        self._last = task
        return task


def _after(earlier: Wait, steps: Steps[T]) -> Steps[T]:
    if not earlier.ready():
        yield earlier
    return (yield from steps)


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
            raise PeerError(_reason(self._what, error, self._limit)) from error
        self._over = True
        self._keep = None


def _reason(what: str, error: RuntimeError, limit: float) -> str:
    """What a failed operation means."""
    text = str(error)
    if "timed out" in text.lower():
        return f"{what} took longer than run.time_limit, which is {limit:g} s"
    if "by peer" in text or "Broken pipe" in text:
        return f"{what} failed because that process is gone"
    return f"{what} failed: {text.splitlines()[0][:200]}"


class DistributedGroup:
    """A member of a group of processes, over torch.distributed point-to-point."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        ranks: list[int],
        labels: list[str],
        limit: float,
        number: int = 0,
        collectives: Callable[[dist.ProcessGroup, int, int, float], NativeCollectives] | None = None,
    ) -> None:
        self._process_group = process_group
        self._ranks = ranks
        self._labels = labels
        self._limit = limit
        self._worker: ThreadPoolExecutor | None = None
        self.rank = ranks.index(dist.get_rank())
        self.size = len(ranks)
        self._number = number
        self._sent = 0
        self._channels: list[DistributedGroup] = []
        self._collectives = collectives
        self.native = collectives(process_group, self.rank, self.size, limit) if collectives else None

    @property
    def bytes_sent(self) -> int:
        native = self.native.bytes_sent if self.native else 0
        return self._sent + native + sum(channel.bytes_sent for channel in self._channels)

    def channel(self, number: int) -> DistributedGroup:
        process_group = self._process_group
        if self._collectives:  # gloo keeps channels apart by a tag; NCCL has none, and needs a process group for each
            process_group = dist.new_group(self._ranks, backend=BACKENDS["cuda"], use_local_synchronization=True)
        other = DistributedGroup(process_group, self._ranks, self._labels, self._limit, number, self._collectives)
        self._channels.append(other)
        return other

    def send(self, tensor: Tensor, to: int) -> Wait:
        self._sent += tensor.nbytes
        tensor = tensor.detach()
        what = f"sending to {self._labels[to]}"
        try:
            work = dist.isend(tensor, dst=self._ranks[to], group=self._process_group, tag=self._number)
        except RuntimeError as error:
            raise PeerError(_reason(what, error, self._limit)) from error
        assert work is not None
        return DistributedWait(work, what, self._limit, tensor)

    def receive(self, into: Tensor, source: int) -> Wait:
        what = f"receiving from {self._labels[source]}"
        try:
            work = dist.irecv(into, src=self._ranks[source], group=self._process_group, tag=self._number)
        except RuntimeError as error:
            raise PeerError(_reason(what, error, self._limit)) from error
        assert work is not None
        return DistributedWait(work, what, self._limit, into)

    def background(self, steps: Steps[T]) -> Task[T]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(
                1, "freerun-background", torch.set_num_threads, (torch.get_num_threads(),)
            )
        task: Task[T] = Task()
        if self.native is not None:
            steps = _on_stream_of_its_own(steps)
        self._worker.submit(run, task.follow(steps))
        return task


def _on_stream_of_its_own(steps: Steps[T]) -> Steps[T]:
    """The same steps beside the caller's stream on a GPU: after what it has queued by now, and over when they are."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return _on_stream(steps, stream)


def _on_stream(steps: Steps[T], stream: torch.cuda.Stream) -> Steps[T]:
    with torch.cuda.stream(stream):
        result = yield from steps
        stream.synchronize()
        return result
