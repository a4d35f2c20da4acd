"""What the page's scripts draw: curves thinned to what a screen can show, and the spans of the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from freerun.report.read import Json, Run

MAX_POINTS = 1200
MAX_SPANS = 60_000
TRAIN_KEYS = ("update", "seconds", "tokens", "loss", "smooth", "tokens_per_second", "lr", "grad_norm")
EVALUATION_KEYS = ("update", "seconds", "tokens", "eval_loss")
COMPUTE = "compute"

_Span = tuple[tuple[int, int], str, float, float, list[Any]]
"""Process and thread, name, start and length in milliseconds, and the microbatch, version and update it is about."""


def curves(run: Run) -> Json:
    """A run's curves, column by column."""
    smooth = smoothed([line["loss"] for line in run.train])
    train = [{**line, "smooth": value} for line, value in zip(run.train, smooth, strict=True)]
    return {
        "name": run.name,
        "train": {key: _thinned([line.get(key) for line in train]) for key in TRAIN_KEYS},
        "evaluations": {key: _rounded([line.get(key) for line in run.evaluations]) for key in EVALUATION_KEYS},
    }


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """The mean over a fiftieth of the curve around each value; over less at its steep start, so that it never lags."""
    known = np.array([value is not None for value in values], dtype=float)
    sums = np.concatenate([[0.0], np.cumsum([value or 0.0 for value in values])])
    counts = np.concatenate([[0.0], np.cumsum(known)])
    result: list[float | None] = []
    for n in range(len(values)):
        reach = min(len(values) // 100, n)
        low, high = n - reach, min(n + reach + 1, len(values))
        seen = counts[high] - counts[low]
        result.append(float((sums[high] - sums[low]) / seen) if seen else None)
    return result


def _thinned(values: Sequence[Any]) -> list[float | None]:
    """The values themselves or, when there are many, means of equal stretches of them."""
    step = -(-len(values) // MAX_POINTS)
    if step <= 1:
        return _rounded(values)
    stretches = [[v for v in values[i : i + step] if v is not None] for i in range(0, len(values), step)]
    return _rounded([float(np.mean(stretch)) if stretch else None for stretch in stretches])


def _rounded(values: Sequence[Any]) -> list[float | None]:
    return [None if value is None else float(f"{value:.7g}") for value in values]


def timeline(run: Run) -> Json | None:
    """The spans of every rank's lanes in milliseconds, the latest if there are too many; None without a trace."""
    ranks: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    spans: list[_Span] = []
    for event in run.events:
        with suppress(KeyError, TypeError, ValueError):
            _sort(event, ranks, lanes, spans)
    if not spans:
        return None
    spans.sort(key=lambda span: span[2])
    left_out = max(0, len(spans) - MAX_SPANS)
    spans = spans[left_out:]
    places = sorted({span[0] for span in spans})
    start, names = spans[0][2], sorted({span[1] for span in spans})
    return {
        "lanes": [
            {"label": ranks.get(pid, f"rank {pid}"), "name": lanes.get((pid, tid), COMPUTE), "rank": pid}
            for pid, tid in places
        ],
        "names": names,
        "spans": [
            [places.index(place), names.index(name), round(ts - start, 4), round(length, 4), *args]
            for place, name, ts, length, args in spans
        ],
        "leftOut": left_out,
    }


def _sort(event: Json, ranks: dict[int, str], lanes: dict[tuple[int, int], str], spans: list[_Span]) -> None:
    """Put one event of a Chrome trace where it belongs."""
    if event["ph"] == "M" and event["name"] == "process_name":
        ranks[event["pid"]] = str(event["args"]["name"])
    elif event["ph"] == "M" and event["name"] == "thread_name":
        lanes[event["pid"], event["tid"]] = str(event["args"]["name"])
    elif event["ph"] == "X":
        args = event.get("args", {})
        about = [args.get("microbatch"), args.get("version"), args.get("update")]
        place = (int(event["pid"]), int(event["tid"]))
        spans.append((place, str(event["name"]), float(event["ts"]) / 1000, float(event["dur"]) / 1000, about))
