"""A run's folder into plain values; whatever is missing or cut off is named instead of failing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Json = dict[str, Any]


@dataclass
class Run:
    """Everything a report needs of one run; empty where the run left nothing."""

    name: str
    config: Json = field(default_factory=dict)
    summary: Json = field(default_factory=dict)
    train: list[Json] = field(default_factory=list)
    evaluations: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """One sentence for each thing that is not there."""

    def measure(self, key: str, *fallback: str) -> Any:
        """A number of summary.json or, for a run that did not finish, the last one of the metrics."""
        if self.summary.get(key) is not None:
            return self.summary[key]
        lines = sorted(self.train + self.evaluations, key=lambda line: int(line["update"]), reverse=True)
        return next((line[name] for line in lines for name in (key, *fallback) if line.get(name) is not None), None)


def read_run(folder: Path) -> Run:
    """Read what there is of a run."""
    run = Run(name=folder.resolve().name)
    run.config = _config(folder / "config.toml", run.missing)
    run.summary = _object(
        folder / "summary.json", run.missing, "the run has not finished; numbers are the last of the metrics"
    )
    run.train, run.evaluations = _metrics(folder / "metrics.jsonl", run.missing)
    trace = _object(folder / "trace.json", run.missing, "there is no timeline")
    run.events = [event for event in trace.get("traceEvents", ()) if isinstance(event, dict)]
    return run


def _config(path: Path, missing: list[str]) -> Json:
    try:
        config: Json = tomllib.loads(path.read_text(encoding="utf-8"))
        return config
    except FileNotFoundError:
        missing.append("config.toml is missing: the settings of this run are not known.")
    except (OSError, ValueError) as error:
        missing.append(f"config.toml can't be read ({error}): the settings of this run are not known.")
    return {}


def _object(path: Path, missing: list[str], consequence: str) -> Json:
    try:
        value = _loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing: {consequence}.")
        return {}
    except (OSError, ValueError):
        missing.append(f"{path.name} is cut off or damaged: {consequence}.")
        return {}
    return value if isinstance(value, dict) else {}


def _metrics(path: Path, missing: list[str]) -> tuple[list[Json], list[Json]]:
    """Training lines and evaluation lines, in order of updates, with seconds since the start in both."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        missing.append("metrics.jsonl is missing: there are no curves.")
        return [], []
    parsed = [_line(row) for row in text.splitlines()]
    lines = [line for line in parsed if line]
    damaged = len(parsed) - len(lines)
    if damaged:
        missing.append(f"metrics.jsonl has {damaged} line{'s' * (damaged > 1)} that can't be read, left out here.")
    train = _later_wins([line for line in lines if "loss" in line])
    evaluations = _later_wins([line for line in lines if "eval_loss" in line])
    if not train:
        missing.append("metrics.jsonl has no training lines: there are no curves.")
    _run_on_one_clock(train)
    for key in ("seconds", "tokens"):
        _interpolate(train, evaluations, key)
    return train, evaluations


def _line(row: str) -> Json | None:
    """One line of the metrics, or None if it is not one: the last line of a killed run may be cut off."""
    try:
        line = _loads(row)
        return {**line, "update": int(line["update"])}
    except (ValueError, KeyError, TypeError):
        return None


def _loads(text: str) -> Any:
    """JSON, with NaN and the infinities as None: nothing can be drawn of them."""
    return json.loads(text, parse_constant=lambda _: None)


def _later_wins(lines: list[Json]) -> list[Json]:
    """A resumed run writes some updates a second time: keep the last line of each."""
    return [line for _, line in sorted({line["update"]: line for line in lines}.items())]


def _run_on_one_clock(train: list[Json]) -> None:
    """A resumed run may count its seconds from zero again: let them go on from where they were."""
    offset = before = 0.0
    for line in train:
        seconds = float(line.get("seconds") or 0.0)
        if seconds + offset < before:
            offset = before
        before = line["seconds"] = seconds + offset


def _interpolate(train: list[Json], evaluations: list[Json], key: str) -> None:
    """Give evaluation lines the value that the training lines around them have."""
    known = [(line["update"], float(line[key])) for line in train if line.get(key) is not None]
    if known and evaluations:
        updates, values = zip(*known, strict=True)
        for line, value in zip(
            evaluations, np.interp([e["update"] for e in evaluations], updates, values), strict=True
        ):
            line[key] = float(value)
