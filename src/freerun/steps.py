"""Work that can pause: generators that yield what they wait for.

The training loop, the pipeline executor and the replica strategies are written once, as generators. A process of a real
run drives its own with `run`, which blocks at each wait. The one-process replay drives all stages and replicas with
`run_together`, which goes on with whichever can. Both execute the same code, hence the same arithmetic.
"""

from __future__ import annotations

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
    """Drives many steps in one thread until all are done: always the first of them, in the order added, that can go on.

    So in a pipeline a gradient travels to the first stage before another microbatch begins its way back.
    """

    def __init__(self) -> None:
        self._driven: list[_Driven] = []

    def add(self, steps: Steps[None]) -> None:
        """Drive these steps too."""
        self._driven.append(_Driven(steps))

    def background(self, steps: Steps[T]) -> Task[T]:
        """Drive these steps too, and give their result to whoever waits for it."""
        task: Task[T] = Task()
        self.add(task.follow(steps))
        return task

    def run(self) -> None:
        """Go on until every step is done; a circle of waits is an error."""
        while self._driven:
            first = next((driven for driven in self._driven if driven.ready()), None)
            if first is None:
                waits = ", ".join(str(driven.wait) for driven in self._driven[:8])
                raise FreerunError(f"the replay is stuck: everything waits for something else ({waits})")
            self._advance(first)

    def _advance(self, driven: _Driven) -> None:
        try:
            driven.wait = next(driven.steps)
        except StopIteration:
            self._driven.remove(driven)
