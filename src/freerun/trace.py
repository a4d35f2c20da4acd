"""Spans of what a rank does when, for Perfetto and for the busy and waiting fractions of the summary.

Every span counts towards the totals; only those of a window of updates are kept one by one. Times are
nanoseconds of `time.perf_counter_ns` plus an offset that puts all ranks on one clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from time import perf_counter_ns
from types import TracebackType
from typing import Any, TypeVar

from freerun.files import write_text
from freerun.steps import Steps

T = TypeVar("T")

BUSY = ("forward", "backward", "update")
WAITING = ("wait",)
ASIDE = ("evaluate", "checkpoint")
"""Neither training nor waiting for it: left out of the time that fractions are shares of."""
SHORT_PAUSE_NS = 20_000
"""What was there already takes a few microseconds to be fetched."""


class _Running:
    """A span of the rank's own thread while it is open."""

    __slots__ = ("args", "name", "start", "tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self.tracer = tracer
        self.name = name
        self.args = args

    def __enter__(self) -> None:
        self.start = perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        end = perf_counter_ns()
        tracer = self.tracer
        tracer.nanoseconds[self.name] += end - self.start
        tracer.last = end
        if tracer.keeping:
            tracer.spans.append(("compute", self.name, self.start, end, self.args))


class Tracer:
    """What one rank does when.

    Spans of one lane do not overlap. `span` is for the rank's own thread (lane "compute"); `add` is for what is
    measured elsewhere, from any thread, by default in the lane "network". The updates from `first_update` up to,
    not including, `last_update` are kept span by span (None: to the end of the run).
    """

    def __init__(
        self, rank: int, label: str, first_update: int = 0, last_update: int | None = None, offset_ns: int = 0
    ) -> None:
        self.rank = rank
        self.label = label
        self.offset_ns = offset_ns
        self.spans: list[tuple[str, str, int, int, dict[str, Any]]] = []
        self.nanoseconds: defaultdict[str, int] = defaultdict(int)
        self.first = self.last = perf_counter_ns()
        self._window = (first_update, last_update)
        self._lock = Lock()
        self.at_update(0)

    def at_update(self, update: int) -> None:
        """Say which update comes next; it decides whether spans are kept from here on."""
        first, last = self._window
        self.keeping = update >= first and (last is None or update < last)

    def span(self, name: str, **args: Any) -> _Running:
        """Time the block: `with tracer.span("forward", microbatch=3, version=1): ...`."""
        return _Running(self, name, args)

    def add(self, name: str, start_ns: int, end_ns: int, lane: str = "network", **args: Any) -> None:
        """Count a span that has been measured already, in nanoseconds of `time.perf_counter_ns`."""
        with self._lock:
            self.nanoseconds[name] += end_ns - start_ns
        if self.keeping:
            self.spans.append((lane, name, start_ns, end_ns, args))

    def now(self) -> int:
        """The time, which is also the end of the training time so far."""
        self.last = perf_counter_ns()
        return self.last

    def seconds(self) -> dict[str, float]:
        """Seconds spent so far, by span name, over all updates."""
        return {name: ns / 1e9 for name, ns in sorted(self.nanoseconds.items())}

    def fractions(self) -> dict[str, float]:
        """Shares of the training time so far that were busy and waiting; the rest is overhead between the spans."""
        aside = sum(self.nanoseconds[name] for name in ASIDE)
        elapsed = max(1, self.last - self.first - aside)
        return {
            "busy": sum(self.nanoseconds[name] for name in BUSY) / elapsed,
            "waiting": sum(self.nanoseconds[name] for name in WAITING) / elapsed,
        }

    def restart(self) -> None:
        """Let totals and fractions count from now: training starts here, what came before was preparation."""
        self.nanoseconds.clear()
        self.first = self.last = perf_counter_ns()

    def records(self) -> dict[str, Any]:
        """Everything that `write_trace` needs from this rank, as plain JSON values."""
        offset = self.offset_ns
        spans = [[lane, name, start + offset, end + offset, args] for lane, name, start, end, args in self.spans]
        return {"rank": self.rank, "label": self.label, "spans": spans}


def write_trace(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write the ranks' records as one Chrome/Perfetto trace: a process per rank, a thread per lane, microseconds."""
    ranks = sorted(records, key=lambda record: int(record["rank"]))
    origin = min((span[2] for record in ranks for span in record["spans"]), default=0)
    events: list[dict[str, Any]] = []
    for record in ranks:
        lanes = sorted({span[0] for span in record["spans"]}, key=lambda lane: (lane != "compute", lane))
        events += _names(record, lanes)
        events += [
            {
                "ph": "X",
                "pid": record["rank"],
                "tid": lanes.index(lane),
                "name": name,
                "ts": (start - origin) / 1000,
                "dur": (end - start) / 1000,
                "args": args,
            }
            for lane, name, start, end, args in record["spans"]
        ]
    write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))


def _names(record: dict[str, Any], lanes: list[str]) -> list[dict[str, Any]]:
    """The metadata events that name a rank's process and threads, in the order of ranks."""
    rank = record["rank"]

    def metadata(about: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": rank, "tid": tid, "name": about, "args": args}

    return [
        metadata("process_name", 0, name=record["label"]),
        metadata("process_sort_index", 0, sort_index=rank),
        *(metadata("thread_name", tid, name=lane) for tid, lane in enumerate(lanes)),
    ]


def traced(steps: Steps[T], tracer: Tracer, name: str, **args: Any) -> Steps[T]:
    """The same steps, with the time they compute counted as `name` and the time they wait as "wait".

    What is no training is counted as a whole, waiting included. A pause too short to be a wait does not split a span.
    """
    pausing = name if name in ASIDE else "wait"
    start = perf_counter_ns()
    while True:
        try:
            wait = next(steps)
        except StopIteration as stop:
            tracer.add(name, start, tracer.now(), lane="compute", **args)
            result: T = stop.value
            return result
        pause = perf_counter_ns()
        yield wait
        end = tracer.now()
        if end - pause > SHORT_PAUSE_NS:
            tracer.add(name, start, pause, lane="compute", **args)
            tracer.add(pausing, pause, end, lane="compute", action=name, **args)
            start = end
