"""What the benchmarks share: a quiet machine, turns, a table of claims, results as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CACHE = Path(__file__).parent / ".freerun-cache"
QUIET = 1.5
"""A one-minute load below which the cores are ours."""


@dataclass(frozen=True)
class Claim:
    """A number that was promised, and what was measured."""

    what: str
    measured: float
    target: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.measured <= self.target if self.at_most else self.measured >= self.target


def arguments(about: str | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The options that every benchmark has, and some of its own."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="a smoke run of half a minute; its numbers mean little")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for a quiet machine")
    for name, settings in more:
        parser.add_argument(name, **settings)
    return parser.parse_args()


def quiet(patience: float) -> float:
    """Wait until nothing else keeps the cores busy, as long as patience lasts; the load at the end of the wait."""
    deadline = time.monotonic() + patience
    while os.getloadavg()[0] >= QUIET and time.monotonic() < deadline:
        time.sleep(2)
    return os.getloadavg()[0]


@dataclass
class Turn:
    """What one contender's turn took."""

    seconds: float
    cpu_seconds: float


class Turns:
    """Contenders that run in turns, each in a thread of its own, never two at a time.

    A contender is a function that takes `switch` and calls it after each piece of work; the others then do theirs.
    So all of them meet the same disturbances, and the ratio of neighbouring turns says more than either number.
    """

    def __init__(self, contenders: Mapping[str, Callable[[Callable[[], None]], None]]) -> None:
        self.taken: dict[str, list[Turn]] = {name: [] for name in contenders}
        self._contenders = contenders
        self._batons = {name: threading.Semaphore(0) for name in contenders}
        self._running = list(contenders)
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self, skip: int = 1) -> dict[str, list[Turn]]:
        """All turns, by contender, until the first contender is through, without the first `skip` turns of each."""
        for name in self._contenders:
            threading.Thread(target=self._contend, args=(name,), daemon=True).start()
        self._batons[self._running[0]].release()
        self._finished.wait()
        if self._error is not None:
            raise self._error
        rounds = min(map(len, self.taken.values()))
        return {name: turns[skip:rounds] for name, turns in self.taken.items()}

    def _contend(self, name: str) -> None:
        following = self._running[(self._running.index(name) + 1) % len(self._running)]
        self._batons[name].acquire()
        started = (time.perf_counter(), time.process_time())

        def switch() -> None:
            nonlocal started
            now = (time.perf_counter(), time.process_time())
            self.taken[name].append(Turn(now[0] - started[0], now[1] - started[1]))
            self._batons[following].release()
            self._batons[name].acquire()
            started = (time.perf_counter(), time.process_time())

        try:
            self._contenders[name](switch)
        except BaseException as error:
            self._error = error
        self._finished.set()


def ratio(over: Sequence[Turn], under: Sequence[Turn], cpu: bool = False) -> float:
    """The median of the ratios of neighbouring turns, in seconds or in CPU seconds."""
    pairs = zip(over, under, strict=True)
    if cpu:
        return statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs)
    return statistics.median(a.seconds / b.seconds for a, b in pairs)


def interleaved(
    functions: Mapping[str, Callable[[], Any]], repetitions: int, patience: float = 0
) -> dict[str, list[Any]]:
    """Each function's results, one round of all of them after the other."""
    results: dict[str, list[Any]] = {name: [] for name in functions}
    for round_number in range(repetitions):
        order = list(functions) if round_number % 2 == 0 else list(functions)[::-1]
        for name in order:
            quiet(patience)
            results[name].append(functions[name]())
    return results


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print columns, numbers to the right."""
    cells = [list(head), *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        first = row[0].ljust(widths[0])
        print("  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]))
    print(flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return str(value)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "load_before": os.getloadavg()[0],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def report(
    name: str,
    quick: bool,
    about: dict[str, Any],
    claims: Sequence[Claim],
    measured: dict[str, Any],
    only: str | None = None,
) -> None:
    """Print the claims with what came out, and write everything as JSON; a quick run's numbers replace nobody's.

    When `only` one part was measured, its numbers replace those that the part had in the last whole run's file.
    """
    rows = [
        (c.what, c.measured, f"{'≤' if c.at_most else '≥'} {_shown(c.target)}", "yes" if c.holds else "NO")
        for c in claims
    ]
    table(("claim", "measured", "target", "holds"), rows)
    about = {**about, "load_after": os.getloadavg()[0], "quick": quick}
    whole = {
        "benchmark": name,
        "machine": about,
        "claims": [{**vars(claim), "holds": claim.holds} for claim in claims],
        "measured": measured,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / (f"{name}.quick.json" if quick else f"{name}.json")
    if only and path.exists():
        whole = _renewed(json.loads(path.read_text()), whole, only)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(whole, indent=1) + "\n")
    beside.replace(path)
    if about["load_before"] >= QUIET:
        print(f"the machine was busy (load {about['load_before']:.1f}); take these numbers with care", file=sys.stderr)
    print(f"results: {path.name}")


def _renewed(whole: dict[str, Any], part: dict[str, Any], only: str) -> dict[str, Any]:
    """A whole run's results with one part's claims and numbers from a later run."""
    later = {claim["what"]: claim for claim in part["claims"]}
    claims = [later.pop(claim["what"], claim) for claim in whole["claims"]]
    return {
        **whole,
        "machine": {**whole["machine"], f"{only}, measured again": part["machine"]},
        "claims": [*claims, *later.values()],
        "measured": {**whole["measured"], only: part["measured"][only]},
    }
