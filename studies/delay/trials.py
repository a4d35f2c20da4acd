"""Trials: one seed, stopped at the target, run by screening.py; kept whatever came of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freerun import config_files
from freerun.files import write_text
from freerun.optim.rotation import temper
from studies.delay.screening import Screening, Trial

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "trials"
TARGET = 1.8
Direction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

PAPER = "optimizer.name=basis-rotation"
OURS = (
    f"{PAPER} optimizer.betas=0.99,0.999 optimizer.rotation.bias_correction=false optimizer.rotation.fresh=0.4 "
    "optimizer.rotation.tempering=0.5 optimizer.delay.lr=power optimizer.delay.lr_power=0.75 optimizer.lr=8e-3"
)
ALONE = "pipeline.stages=1"

P1 = f"{OURS} optimizer.delay.lr_power=1 optimizer.lr=1.6e-2"
FLAT = f"{OURS} optimizer.delay.lr=none"


def damped(c: float, r: float, floor: float = 0.0, fresh: float = 0.4) -> Direction:
    """Each direction slowed by the delay as its steepness demands: N/D over 1 + c·τ·(D/rms)^r, never rescaled."""

    def direction(momentum: Tensor, gradient: Tensor, denominator: Tensor, delays: Tensor) -> Tensor:
        relative = denominator / denominator.square().mean(dim=(-2, -1), keepdim=True).sqrt()
        slowed = 1 + c * delays[:, None, None] * relative.clamp(min=floor) ** r
        return momentum.lerp(gradient, fresh) / denominator / slowed

    return direction


def steep_by_delay(slope: float, most: float, fresh: float = 0.4) -> Direction:
    """Tempering whose exponent grows with the delay: q = most · (1 − (1+τ)^−slope)."""

    def direction(momentum: Tensor, gradient: Tensor, denominator: Tensor, delays: Tensor) -> Tensor:
        relative = denominator / denominator.square().mean(dim=(-2, -1), keepdim=True).sqrt()
        exponent = most * (1 - (1.0 + delays) ** -slope)
        ratio = momentum.lerp(gradient, fresh) / denominator
        bent = ratio * relative.clamp(min=0.05) ** -exponent[:, None, None]
        return bent * (ratio.norm(dim=(-2, -1), keepdim=True) / bent.norm(dim=(-2, -1), keepdim=True))

    return direction


def cautious(momentum: Tensor, gradient: Tensor, denominator: Tensor, delays: Tensor) -> Tensor:
    """Tempered, and only where momentum and newest gradient agree in sign."""
    ratio = momentum.lerp(gradient, 0.4) / denominator
    agree = (momentum * gradient > 0).to(ratio.dtype)
    return temper(ratio * agree / agree.mean(dim=(-2, -1), keepdim=True).clamp(min=0.1), denominator, 0.5)


TRIALS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync-ours-4e-3": (f"{OURS} {ALONE} optimizer.lr=4e-3", {}),
    "ours": (OURS, {}),
    "ours-p1-16e-3": (P1, {}),
    "damped-1-2-8e-3": (FLAT, {"direction": damped(1, 2)}),
    "damped-0.3-1-4e-3": (f"{FLAT} optimizer.lr=4e-3", {"direction": damped(0.3, 1)}),
    "damped-0.05-1-4e-3": (f"{FLAT} optimizer.lr=4e-3", {"direction": damped(0.05, 1)}),
    "damped-1-2-others0.75-8e-3": (FLAT, {"direction": damped(1, 2), "others_power": 0.75}),
    "others-p0": (OURS, {"others_power": 0.0}),
    "p1-16e-3-others-p0": (P1, {"others_power": 0.0}),
    "damped-0.3-2-8e-3": (FLAT, {"direction": damped(0.3, 2)}),
    "damped-1-1-8e-3": (FLAT, {"direction": damped(1, 1)}),
    "damped-1-2-16e-3": (f"{FLAT} optimizer.lr=1.6e-2", {"direction": damped(1, 2)}),
    "damped-1-2-everywhere-8e-3": (FLAT, {"direction": damped(1, 2), "others_damping": (1, 2)}),
    "q1": (f"{OURS} optimizer.rotation.tempering=1", {}),
    "paper-1e-3": (f"{PAPER} optimizer.lr=1e-3", {"stop_at": 1000}),
    "paper-3e-3": (f"{PAPER} optimizer.lr=3e-3", {"stop_at": 700}),
    "fresh-0.6": (f"{OURS} optimizer.rotation.fresh=0.6", {}),
    "fresh-0.2-ahead-1": (f"{OURS} optimizer.rotation.fresh=0.2", {"ahead": 1.0}),
    "covariances-0.99": (OURS, {"covariance_decay": 0.99}),
    "sync-adamw-3e-3": (f"{ALONE} optimizer.lr=3e-3", {}),
    "adamw-1e-3": ("optimizer.lr=1e-3", {"stop_at": 1000}),
    "cautious": (OURS, {"direction": cautious}),
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
