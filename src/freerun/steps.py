"""Work that can pause: generators that yield what they wait for.

The training loop, the pipeline executor and the replica strategies are written once, as generators. A process of a real
run drives its own with `run`, which blocks at each wait. The one-process replay drives all stages and replicas with
`Together`, which goes on with one that can. Both execute the same code, hence the same arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from threading import Event
from typing import Generic, Protocol, TypeVar

from freerun.errors import FreerunError

T = TypeVar("T")


class Wait(Protocol):
    """Something not there yet."""

    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    def wait(self) -> None:
        """Block until it is there; raise a PeerError naming the peer when the time limit is over."""


Steps = Generator[Wait, None, T]


class Task(Generic[T]):
    """The result of steps that run in the background. The steps are driven elsewhere: by a thread or by the replay."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @classmethod
    def over(cls, result: T) -> Task[T]:
        """A task that is done already."""
        task = cls()
        task._result = result
        task._done.set()
        return task

    def follow(self, steps: Steps[T]) -> Steps[None]:
        """Run `steps` and keep their result or their error."""
        try:
            self._result = yield from steps
        except Exception as error:
            self._error = error
        self._done.set()

    def ready(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        # every wait inside the steps has a time limit of its own, so this one ends
        self._done.wait()

    def result(self) -> T:
        """What the steps returned; raises what they raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def finish(task: Task[T]) -> Steps[T]:
    """Wait for a background task and give its result."""
    if not task.ready():
        yield task
    return task.result()


def run(steps: Steps[T]) -> T:
    """Drive steps in this thread, blocking at every wait."""
    try:
        wait = next(steps)
        while True:
            wait = _after(wait, steps)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _after(wait: Wait, steps: Steps[T]) -> Wait:
    """Block until the wait is over; what it raises is raised where the steps wait, so that a task can keep it."""
    try:
        wait.wait()
    except Exception as error:
        return steps.throw(error)
    return next(steps)


class _Driven:
    """Steps on their way, and what they wait for."""

    __slots__ = ("steps", "wait")

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.wait: Wait | None = None

    def ready(self) -> bool:
        return self.wait is None or self.wait.ready()


class Together:
    """Drives many steps in one thread until all are done.

    What runs in the background goes first, then the lines in turn; of a line always the first steps that can go on. A
    line is a replica's stages in order, so a gradient travels to the first stage before another microbatch begins its
    way back, and no replica leaves the others behind.
    """

    def __init__(self) -> None:
        self._background: list[_Driven] = []
        self._lines: dict[int, list[_Driven]] = {}
        self._turns: deque[int] = deque()

    def add(self, steps: Steps[None], line: int) -> None:
        """Drive these steps too, as the last of a line."""
        if line not in self._lines:
            self._lines[line] = []
            self._turns.append(line)
        self._lines[line].append(_Driven(steps))

    def background(self, steps: Steps[T]) -> Task[T]:
        """Drive these steps too, and give their result to whoever waits for it."""
        task: Task[T] = Task()
        self._background.append(_Driven(task.follow(steps)))
        return task

    def run(self) -> None:
        """Go on until every step is done; a circle of waits is an error."""
        while self._advance():
            pass
        waiting = [driven.wait for line in (self._background, *self._lines.values()) for driven in line]
        if waiting:
            waits = ", ".join(str(wait) for wait in waiting[:8])
            raise FreerunError(f"the replay is stuck: everything waits for something else ({waits})")

    def _advance(self) -> bool:
        """Let one of the steps go on; false if none can."""
        if _advance_first(self._background):
            return True
        for _ in range(len(self._turns)):
            line = self._turns[0]
            self._turns.rotate(-1)
            if _advance_first(self._lines[line]):
                return True
        return False


def _advance_first(line: list[_Driven]) -> bool:
    """Let the first steps of a line that can go on do so; false if none can."""
    for driven in line:
        if driven.ready():
            try:
                driven.wait = next(driven.steps)
            except StopIteration:
                line.remove(driven)
            return True
    return False
