"""The schedule's actions, with evaluations and checkpoints put where they disturb no message order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from freerun.pipeline.schedule import Action, Backward, Forward, Update


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run the held-out microbatches through the weights of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Version `version` has just been made: keep what its evaluation or its checkpoint needs."""

    version: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Take in a microbatch that the stage before has sent, though the run ends before it is needed here."""

    microbatch: int


Step = Action | Evaluate | Mark | Discard


def elastic(
    *,
    start: int,
    first_microbatch: int,
    wants_more: Callable[[], bool],
    ended: Callable[[int], bool],
    due: Callable[[int], bool],
    stop: Callable[[int], bool],
) -> Iterator[Step]:
    """One stage whose updates have as many microbatches as the strategy asks for while it goes on.

    Unlike every other stream of actions this one depends on the clock.
    """
    update, microbatch = start, first_microbatch
    if due(start):
        yield Evaluate(start)
    while not ended(update):
        yield Forward(microbatch, update)
        yield Backward(microbatch, update)
        microbatch += 1
        if wants_more():
            continue
        yield Update(update, 0)
        update += 1
        yield Mark(update)
        if due(update):
            yield Evaluate(update)
        if stop(update):
            break


def program(
    actions: Iterable[Action],
    *,
    first_lag: int,
    microbatches: int,
    due: Callable[[int], bool],
    start: int,
    stop: Callable[[int], bool],
    surplus: Callable[[int], range],
) -> Iterator[Step]:
    """The actions, a Mark after every update, and an Evaluate for each version that is `due`.

    The first stage evaluates version v before forward v·M + first_lag, the first one that it runs on v. Every stage
    does it before the same forward, so activations of training and of evaluation keep one order on every link, and no
    stage stops for it. `stop` is asked after every update; when it says so the stream ends there, but for the
    `surplus` of that version: microbatches that the stage before has sent by then.
    """
    waiting: deque[int] = deque([start] if due(start) else [])

    def evaluations_before(microbatch: int) -> Iterator[Step]:
        while waiting and waiting[0] * microbatches + first_lag <= microbatch:
            yield Evaluate(waiting.popleft())

    for action in actions:
        if isinstance(action, Forward):
            yield from evaluations_before(action.microbatch)
        yield action
        if isinstance(action, Update):
            version = action.update + 1
            yield Mark(version)
            if due(version):
                waiting.append(version)
            if stop(version):
                for microbatch in surplus(version):
                    yield from evaluations_before(microbatch)
                    yield Discard(microbatch)
                break
    for version in waiting:
        yield Evaluate(version)
