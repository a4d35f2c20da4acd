"""Trials: one seed, stopped at the target, run by screening.py; kept whatever came of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from freerun import config_files
from freerun.files import write_text
from studies.delay.screening import Screening, Trial

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "trials"
TARGET = 1.8

PAPER = "optimizer.name=basis-rotation"
OURS = (
    f"{PAPER} optimizer.betas=0.99,0.999 optimizer.rotation.bias_correction=false optimizer.rotation.fresh=0.4 "
    "optimizer.rotation.tempering=0.5 optimizer.delay.lr=power optimizer.delay.lr_power=0.75 optimizer.lr=8e-3"
)
ALONE = "pipeline.stages=1"

TRIALS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync-ours-4e-3": (f"{OURS} {ALONE} optimizer.lr=4e-3", {}),
    "ours": (OURS, {}),
    "sync-paper-3e-3": (f"{PAPER} {ALONE} optimizer.lr=3e-3", {}),
    "sync-adamw-3e-3": (f"{ALONE} optimizer.lr=3e-3", {}),
    "paper-1e-3": (f"{PAPER} optimizer.lr=1e-3", {"stop_at": 2000}),
    "ours-p1-16e-3": (f"{OURS} optimizer.delay.lr_power=1 optimizer.lr=1.6e-2", {}),
}


def run(name: str) -> None:
    """Run one trial, and keep what came of it."""
    overrides, trial = TRIALS[name]
    pairs: list[tuple[str, str]] = []
    for word in overrides.split():
        key, _, value = word.partition("=")
        pairs.append((key, value))
    config = config_files.read(str(HERE / "workload.toml"), pairs)
    screening = Screening(config, Trial(**{"until": TARGET - 0.03, "stop_at": 1200, **trial}))
    losses = screening.run()
    means = [sum(losses[max(0, i - 50) : i]) / len(losses[max(0, i - 50) : i]) for i in range(1, len(losses) + 1)]
    crossing = next((i for i in range(50, len(means) + 1) if means[i - 1] < TARGET), None)
    result = {
        "name": name,
        "overrides": overrides,
        "trial": {key: value for key, value in trial.items() if not callable(value)},
        "crossing": crossing,
        "updates": len(losses),
        "loss": means[-1],
        "every_50": [round(mean, 4) for mean in means[49::50]],
        "cpu_ms_per_update": {key: round(1e3 * value / len(losses), 2) for key, value in screening.seconds.items()},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_text(RESULTS / f"{name}.json", json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)


def main() -> None:
    """Run the named trials, or all that have no result yet."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TRIALS:
        if not (RESULTS / f"{name}.json").exists():
            run(name)


if __name__ == "__main__":
    main()
