"""What each pipeline stage does, in which order: pure functions from (stage, stages, microbatches) to actions.

Four schedules. `gpipe` and `1f1b` flush: every forward of an update sees the weights that the update changes.
`two-version` and `async` flow: stage k runs τ_k forwards to fill the pipeline, then a forward and a backward in
turn, an update after every M backwards, and never empties before the end.

Nothing is looked up and nothing is kept: the actions of a run of 10⁹ updates are made one at a time, from any update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from freerun.errors import ConfigError
from freerun.weights.delay import check, lag, steady_delay, update_delay, version_of


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the microbatch forward on the given version of the weights (the number of updates they have had)."""

    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the microbatch backward; version is the one its forward saw, whatever the backward itself reads."""

    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class Update:
    """Make version update + 1 out of version update; delay is that of the oldest gradient in it."""

    update: int
    delay: int


Action = Forward | Backward | Update


def _flush(warmup: int, microbatches: int, updates: range) -> Iterator[Action]:
    """Each update on its own: warm-up forwards, then forward and backward in turn, then the remaining backwards."""
    for update in updates:
        first = update * microbatches
        end = first + microbatches
        for i in range(first, first + warmup):
            yield Forward(i, update)
        for i in range(first, end):
            if i + warmup < end:
                yield Forward(i + warmup, update)
            yield Backward(i, update)
        yield Update(update, 0)


def gpipe(stage: int, stages: int, microbatches: int, updates: range, slack: int = 0) -> Iterator[Action]:
    """All forwards of an update, all its backwards, the update."""
    return _flush(microbatches, microbatches, updates)


def one_forward_one_backward(
    stage: int, stages: int, microbatches: int, updates: range, slack: int = 0
) -> Iterator[Action]:
    """Like gpipe, but a backward runs as soon as it can, so that fewer microbatches are in flight."""
    return _flush(min(lag(stage, stages), microbatches), microbatches, updates)


def _flow(kind: str, stage: int, stages: int, microbatches: int, updates: range, slack: int = 0) -> Iterator[Action]:
    """Warm-up forwards once, then forward and backward in turn until the stream ends, an update after every M."""
    ahead = lag(stage, stages, slack)
    start, end = updates.start * microbatches, updates.stop * microbatches

    def version(microbatch: int) -> int:
        return version_of(kind, microbatch, stage, stages, microbatches, slack)

    for i in range(start, min(start + ahead, end)):
        yield Forward(i, version(i))
    for i in range(start, end):
        if i + ahead < end:
            yield Forward(i + ahead, version(i + ahead))
        yield Backward(i, version(i))
        if (i + 1) % microbatches == 0:
            update = i // microbatches
            yield Update(update, update_delay(kind, update, stage, stages, microbatches, slack))


def two_version(stage: int, stages: int, microbatches: int, updates: range, slack: int = 0) -> Iterator[Action]:
    """PipeDream-2BW: flows, and every microbatch of an update sees the version before the last: delay 1 everywhere."""
    return _flow("two-version", stage, stages, microbatches, updates)


def asynchronous(stage: int, stages: int, microbatches: int, updates: range, slack: int = 0) -> Iterator[Action]:
    """Asynchronous 1F1B: flows, and each forward sees the newest weights that its stage has."""
    return _flow("async", stage, stages, microbatches, updates, slack)


SCHEDULES: dict[str, Callable[[int, int, int, range, int], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "two-version": two_version,
    "async": asynchronous,
}


def actions(kind: str, stage: int, stages: int, microbatches: int, updates: int, slack: int = 0) -> Iterator[Action]:
    """All that a stage does in a run, lazily."""
    return resumed(kind, stage, stages, microbatches, updates, slack, from_update=0)


def resumed(
    kind: str, stage: int, stages: int, microbatches: int, updates: int, slack: int = 0, *, from_update: int
) -> Iterator[Action]:
    """What is left to do when the stage has done `from_update` updates.

    The forwards that were in flight come first, on the versions they saw the first time; what follows is the rest of
    `actions`, to the letter. All stages resume from the same update, so neighbours' messages match again.
    """
    check(kind, stage, stages, microbatches, slack)
    if not 0 <= from_update <= updates:
        raise ConfigError(f"can't resume from update {from_update} of {updates}; choose 0 to {updates}.")
    return SCHEDULES[kind](stage, stages, microbatches, range(from_update, updates), slack)


def in_flight(
    kind: str, stage: int, stages: int, microbatches: int, updates: int, slack: int = 0, *, after_update: int
) -> list[Forward]:
    """The forwards that still await their backward when the stage has just done `after_update` updates."""
    check(kind, stage, stages, microbatches, slack)
    if kind in ("gpipe", "1f1b") or after_update == 0:
        return []
    first = after_update * microbatches
    end = min(first + lag(stage, stages, slack), updates * microbatches)
    return [Forward(i, version_of(kind, i, stage, stages, microbatches, slack)) for i in range(first, end)]


def versions_needed(
    kind: str, stage: int, stages: int, microbatches: int, updates: int, slack: int = 0, *, after_update: int
) -> range:
    """The versions that a checkpoint after `after_update` updates must hold for `resumed` to go on exactly."""
    check(kind, stage, stages, microbatches, slack)
    if after_update >= updates:
        return range(updates, updates + 1)
    oldest = version_of(kind, after_update * microbatches, stage, stages, microbatches, slack)
    return range(oldest, after_update + 1)


def forward_order(actions: Iterable[Action]) -> Iterator[int]:
    """The order in which a stage with these actions sends activations, and its successor receives them."""
    return (action.microbatch for action in actions if isinstance(action, Forward))


def backward_order(actions: Iterable[Action]) -> Iterator[int]:
    """The order in which a stage with these actions sends gradients, and its predecessor receives them."""
    return (action.microbatch for action in actions if isinstance(action, Backward))


def delays(actions: Iterable[Action]) -> dict[int, int]:
    """How many gradients (one per microbatch) have which delay, counted from the actions themselves."""
    counts: Counter[int] = Counter()
    versions: list[int] = []
    for action in actions:
        if isinstance(action, Backward):
            versions.append(action.version)
        elif isinstance(action, Update):
            counts.update(action.update - version for version in versions)
            versions.clear()
    return dict(sorted(counts.items()))


def max_in_flight(kind: str, stage: int, stages: int, microbatches: int, slack: int = 0) -> int:
    """The most microbatches that have been forward but not yet backward at this stage."""
    check(kind, stage, stages, microbatches, slack)
    if kind == "gpipe":
        return microbatches
    if kind == "1f1b":
        return min(stages - stage, microbatches)
    return lag(stage, stages, slack) + 1


def max_versions(kind: str, policy: str, stage: int, stages: int, microbatches: int, slack: int = 0) -> int:
    """The most versions, the newest included, that the stage must keep at one time under a weight policy."""
    check(kind, stage, stages, microbatches, slack)
    if policy not in ("stash", "two-version", "latest"):
        raise ConfigError(f"pipeline.weights is {policy!r}; choose stash, two-version or latest.")
    if kind in ("gpipe", "1f1b"):
        return 1
    if policy == "two-version" and kind != "two-version":
        raise ConfigError(
            f"pipeline.weights is two-version, but schedule {kind} may need more; choose stash or latest."
        )
    if policy == "latest" and kind == "two-version":
        raise ConfigError("pipeline.weights is latest, but schedule two-version reads an older version; choose stash.")
    return 1 if policy == "latest" else steady_delay(kind, stage, stages, microbatches, slack) + 1
