"""A pipeline on a virtual clock: what a schedule takes, given the cost of each action and of each link.

It executes the very actions that the processes execute, in their order, with links that carry one message at a time
and buffers that are bounded. So it says which utilisation a schedule allows, and proves that it can't deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from freerun.errors import ConfigError, FreerunError
from freerun.pipeline.schedule import Action, Backward, Forward, Update, actions, max_in_flight

Seconds = float | Sequence[float]


class Deadlock(FreerunError):
    """Every stage waits for another."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action, from its start to its end on the virtual clock."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every stage did when; a stage's spans are in order and do not overlap."""

    spans: list[list[Span]]

    @property
    def makespan(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max((stage[-1].end for stage in self.spans if stage), default=0.0)

    @property
    def busy_fractions(self) -> list[float]:
        """Per stage, the share of the steady state that it spends on its actions."""
        return [self._busy_fraction(stage) for stage in range(len(self.spans))]

    @property
    def utilisation(self) -> float:
        """Mean of the stages' busy fractions in steady state."""
        return sum(self.busy_fractions) / len(self.spans)

    @property
    def seconds_per_update(self) -> float:
        """Seconds between updates in steady state, at the slowest stage."""
        windows = [self._steady_window(stage) for stage in range(len(self.spans))]
        return max((end - start) / updates for start, end, updates in windows)

    def _steady_window(self, stage: int) -> tuple[float, float, int]:
        """The middle third of a stage's updates: from one update's end to another's, and how many lie between."""
        ends = [span.end for span in self.spans[stage] if isinstance(span.action, Update)]
        first, last = len(ends) // 3, 2 * len(ends) // 3
        if first == last:
            return 0.0, self.makespan, max(1, len(ends))
        return ends[first], ends[last], last - first

    def _busy_fraction(self, stage: int) -> float:
        start, end, _ = self._steady_window(stage)
        inside = (min(s.end, end) - max(s.start, start) for s in self.spans[stage] if s.end > start and s.start < end)
        return sum(inside) / (end - start) if end > start else 0.0


class _Channel:
    """One direction of a link: messages are carried one at a time, in order, into a bounded number of buffers.

    A buffer is taken when the sender starts the action that fills it, and given back when the receiver starts the
    action that needs it.
    """

    def __init__(self, transfer: float, latency: float, buffers: int) -> None:
        self.transfer = transfer
        self.latency = latency
        self.buffers_free_at = deque([0.0] * buffers)
        self.arrivals: deque[tuple[int, float]] = deque()
        self.link_free_at = 0.0

    def send(self, microbatch: int, produced: float) -> None:
        self.buffers_free_at.popleft()
        self.link_free_at = max(self.link_free_at, produced) + self.transfer
        self.arrivals.append((microbatch, self.link_free_at + self.latency))

    def take(self, microbatch: int, start: float) -> None:
        carried, _ = self.arrivals.popleft()
        if carried != microbatch:
            raise FreerunError(f"the schedule asks for microbatch {microbatch}, but {carried} is next on the link.")
        self.buffers_free_at.append(start)


@dataclass
class _Stage:
    """A stage in the middle of its actions."""

    todo: deque[Action]
    seconds: dict[type, float]
    takes: dict[type, _Channel]
    sends: dict[type, _Channel]
    spans: list[Span] = field(default_factory=list)

    def advance(self) -> bool:
        """Do all that can be done with what has been sent so far; whether that was anything."""
        before = len(self.spans)
        while self.todo and (start := self._start(self.todo[0])) is not None:
            self._run(self.todo.popleft(), start)
        return len(self.spans) > before

    def _start(self, action: Action) -> float | None:
        """When the action can start, or None while that depends on what other stages have yet to do."""
        start = self.spans[-1].end if self.spans else 0.0
        source, target = self.takes.get(type(action)), self.sends.get(type(action))
        if source:
            if not source.arrivals:
                return None
            start = max(start, source.arrivals[0][1])
        if target:
            if not target.buffers_free_at:
                return None
            start = max(start, target.buffers_free_at[0])
        return start

    def _run(self, action: Action, start: float) -> None:
        span = Span(action, start, start + self.seconds[type(action)])
        self.spans.append(span)
        if isinstance(action, Update):
            return
        if source := self.takes.get(type(action)):
            source.take(action.microbatch, span.start)
        if target := self.sends.get(type(action)):
            target.send(action.microbatch, span.end)


def simulate(
    kind: str,
    stages: int,
    microbatches: int,
    updates: int,
    forward_seconds: Seconds,
    backward_seconds: Seconds,
    update_seconds: Seconds = 0.0,
    link_seconds: Seconds = 0.0,
    slack: int = 0,
    *,
    latency_seconds: Seconds = 0.0,
    buffers: int | None = None,
) -> Timeline:
    """Run a schedule on a virtual clock.

    Costs are one number, or one per stage (per link for links). `link_seconds` is what a message occupies its link
    for, each direction on its own; `latency_seconds` comes on top and delays messages without queueing them.
    `buffers` bounds the messages under way per direction of a link; by default as many as the schedule can use.
    """
    links = stages - 1
    costs = {
        Forward: _per("forward_seconds", forward_seconds, stages),
        Backward: _per("backward_seconds", backward_seconds, stages),
        Update: _per("update_seconds", update_seconds, stages),
    }
    transfer, latency = _per("link_seconds", link_seconds, links), _per("latency_seconds", latency_seconds, links)
    room = max_in_flight(kind, 0, stages, microbatches, slack) if buffers is None else buffers
    down = [_Channel(transfer[k], latency[k], room) for k in range(links)]
    up = [_Channel(transfer[k], latency[k], room) for k in range(links)]
    line = [
        _Stage(
            todo=deque(actions(kind, k, stages, microbatches, updates, slack)),
            seconds={kind_of_action: cost[k] for kind_of_action, cost in costs.items()},
            takes={Forward: down[k - 1]} if k else {},
            sends={Backward: up[k - 1]} if k else {},
        )
        for k in range(stages)
    ]
    for k in range(links):
        line[k].sends[Forward] = down[k]
        line[k].takes[Backward] = up[k]
    while sum(stage.advance() for stage in line):
        pass
    stuck = [f"stage {k} before {stage.todo[0]}" for k, stage in enumerate(line) if stage.todo]
    if stuck:
        raise Deadlock(f"with {room} buffers per channel the schedule {kind} is stuck: {', '.join(stuck)}.")
    return Timeline([stage.spans for stage in line])


def _per(name: str, value: Seconds, count: int) -> list[float]:
    """One number for each stage or link."""
    if isinstance(value, (int, float)):
        return [float(value)] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries; give one number or {count}.")
    return [float(v) for v in value]
