"""What a run came to, from its metrics: a small JSON that is kept, whether it ended well or not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOPELESS = 6.0
"""A smoothed loss above this, after 300 updates, is a diverged run."""
WINDOW = 5
"""Rows of metrics (each the mean over 10 updates) in a smoothed loss: 50 updates."""
TARGET = 1.8
"""Training loss at which runs are compared."""

Curve = list[tuple[int, float]]
Outcome = dict[str, Any]


def losses(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics that have a training loss."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the line is being written
            continue
        if "loss" in row:
            rows.append(row)
    return rows


def smoothed(rows: list[dict[str, float]]) -> Curve:
    """(update, mean loss of the 50 updates before it), every 10 updates."""
    means = []
    for end in range(WINDOW, len(rows) + 1):
        window = rows[end - WINDOW : end]
        means.append((int(window[-1]["update"]), sum(row["loss"] for row in window) / WINDOW))
    return means


def crossing(curve: Curve, target: float = TARGET) -> int | None:
    """The first update whose smoothed loss is below the target."""
    return next((update for update, loss in curve if loss < target), None)


def diverged(curve: Curve) -> bool:
    """Whether there is no hope left."""
    return bool(curve) and (not math.isfinite(curve[-1][1]) or (curve[-1][0] > 300 and curve[-1][1] > HOPELESS))


def outcome(folder: Path, status: str) -> Outcome:
    """The numbers of a run."""
    rows = losses(folder)
    curve = smoothed(rows)
    summary = folder / "summary.json"
    whole = json.loads(summary.read_text()) if summary.exists() else {}
    reached = crossing(curve)
    seconds = {int(row["update"]): row["seconds"] for row in rows}
    return {
        "status": status,
        "updates": int(rows[-1]["update"]) if rows else 0,
        "loss": round(curve[-1][1], 4) if curve else None,
        "eval_loss": whole.get("eval_loss"),
        "crossing": reached,
        "seconds": round(rows[-1]["seconds"], 1) if rows else None,
        "seconds_to_target": round(seconds[reached], 1) if reached else None,
        "disagreement": max((s["disagreement"] for s in whole.get("stages", ()) if "disagreement" in s), default=None),
        "weights_sha256": whole.get("weights_sha256"),
        "curve": [(update, round(loss, 3)) for update, loss in curve],
    }
