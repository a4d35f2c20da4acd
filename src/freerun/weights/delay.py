"""The arithmetic of delay: which version of the weights a microbatch's forward sees, and how old its gradient is.

A stage's version v is its weights after v updates. Update u (from 0) uses microbatches u·M … u·M + M − 1 and makes
version u + 1; a gradient used in update u whose forward saw version v has delay u − v. The schedule alone fixes all
of this, so everything here is a pure function.
"""

from __future__ import annotations

from collections import Counter

from freerun.errors import ConfigError

KINDS = ("gpipe", "1f1b", "two-version", "async")


def check(kind: str, stage: int, stages: int, microbatches: int, slack: int = 0) -> None:
    """Refuse a combination that no schedule can carry out."""
    if kind not in KINDS:
        raise ConfigError(f"pipeline.schedule is {kind!r}; choose one of {', '.join(KINDS)}.")
    if stages < 1:
        raise ConfigError(f"pipeline.stages is {stages}; it must be at least 1.")
    if not 0 <= stage < stages:
        raise ConfigError(
            f"stage {stage} does not exist: pipeline.stages is {stages}, so stages are 0 to {stages - 1}."
        )
    if microbatches < 1:
        raise ConfigError(f"pipeline.microbatches is {microbatches}; it must be at least 1.")
    if kind == "two-version" and microbatches < stages:
        raise ConfigError(
            f"pipeline.microbatches is {microbatches}, but schedule two-version with {stages} stages needs at least "
            f"{stages}, or a gradient would be more than one update old; raise it or use schedule async."
        )
    if slack < 0 or (slack and kind != "async"):
        raise ConfigError(f"pipeline.slack is {slack}, but schedule {kind} needs {_slack_range(kind)}.")


def _slack_range(kind: str) -> str:
    return "0 or more" if kind == "async" else "0; only async has room for more microbatches in flight"


def lag(stage: int, stages: int, slack: int = 0) -> int:
    """τ of a stage: how many forwards it is ahead of its backwards when it never flushes."""
    return (stages - 1 - stage) * (1 + slack)


def _settled_delay(kind: str, place: int, stage: int, stages: int, microbatches: int, slack: int) -> int:
    """Delay, once the pipeline is full, of the microbatch at this place (0 … M − 1) within its update."""
    if kind == "async":
        return -((place - lag(stage, stages, slack)) // microbatches)
    return 1 if kind == "two-version" else 0


def version_of(kind: str, microbatch: int, stage: int, stages: int, microbatches: int, slack: int = 0) -> int:
    """The version that the forward of this microbatch of the stream sees: its number of updates done."""
    update, place = divmod(microbatch, microbatches)
    return max(0, update - _settled_delay(kind, place, stage, stages, microbatches, slack))


def update_delay(kind: str, update: int, stage: int, stages: int, microbatches: int, slack: int = 0) -> int:
    """Delay of an update: that of the oldest of its gradients, which is the first microbatch's."""
    return update - version_of(kind, update * microbatches, stage, stages, microbatches, slack)


def steady_delay(kind: str, stage: int, stages: int, microbatches: int, slack: int = 0) -> int:
    """The delay that every update has once the pipeline is full."""
    return _settled_delay(kind, 0, stage, stages, microbatches, slack)


def delay_histogram(
    kind: str, stage: int, stages: int, microbatches: int, updates: int, slack: int = 0
) -> dict[int, int]:
    """How many gradients (one per microbatch) of a whole run have which delay."""
    histogram: Counter[int] = Counter()
    for place in range(microbatches):
        settled = _settled_delay(kind, place, stage, stages, microbatches, slack)
        filling = min(updates, settled)
        histogram.update(range(filling))
        histogram[settled] += updates - filling
    return {delay: count for delay, count in sorted(histogram.items()) if count}
