"""What the study runs: names, and what each changes about the workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

Settings = dict[str, str]

METHODS: dict[str, Settings] = {
    "adamw": {"optimizer.name": "adamw"},
    "pipedream-lr": {"optimizer.name": "adamw", "optimizer.delay.lr": "anneal"},
    "nesterov": {"optimizer.name": "nesterov", "optimizer.betas": "0.99,0.999"},
    "delay-compensated": {"optimizer.name": "delay-compensated", "optimizer.delay.compensation": "0.5"},
    "muon": {"optimizer.name": "muon"},
    "rotation": {"optimizer.name": "basis-rotation"},
    "graded": {
        "optimizer.name": "basis-rotation",
        "optimizer.betas": "0.99,0.999",
        "optimizer.rotation.bias_correction": "false",
        "optimizer.rotation.fresh": "0.4",
        "optimizer.rotation.tempering": "0.5",
        "optimizer.delay.lr": "power",
        "optimizer.delay.lr_power": "0.75",
    },
}
"""Methods by name; `rotation` is the paper's, `graded` is ours (docs/under-delay.md)."""

RATES: dict[str, dict[int, tuple[str, ...]]] = {
    "adamw": {1: ("1e-3", "3e-3", "6e-3"), 8: ("1e-3", "3e-3", "6e-3"), 32: ("3e-4", "1e-3", "3e-3")},
    "pipedream-lr": {8: ("1e-3", "3e-3", "6e-3"), 32: ("1e-3", "3e-3", "6e-3")},
    "nesterov": {8: ("1e-3", "3e-3", "6e-3"), 32: ("1e-3", "3e-3", "6e-3")},
    "delay-compensated": {32: ("3e-4", "1e-3", "3e-3")},
    "muon": {32: ("1e-3", "3e-3", "1e-2")},
    "rotation": {1: ("1e-3", "3e-3", "6e-3"), 8: ("1e-3", "3e-3", "6e-3"), 32: ("5e-4", "1e-3", "3e-3")},
    "graded": {1: ("2e-3", "4e-3", "8e-3"), 8: ("2e-3", "4e-3", "8e-3"), 32: ("4e-3", "8e-3", "1.6e-2")},
}
"""Learning rates searched for each method at each depth of pipeline: as many for every method."""

BEST: dict[str, dict[int, str]] = {
    "adamw": {1: "3e-3", 2: "3e-3", 4: "3e-3", 8: "1e-3", 16: "1e-3", 32: "1e-3"},
    "pipedream-lr": {8: "3e-3", 32: "3e-3"},
    "nesterov": {8: "3e-3", 32: "3e-3"},
    "delay-compensated": {32: "1e-3"},
    "muon": {32: "3e-3"},
    "rotation": {1: "3e-3", 2: "3e-3", 4: "3e-3", 8: "1e-3", 16: "1e-3", 32: "1e-3"},
    "graded": {1: "4e-3", 2: "4e-3", 4: "4e-3", 8: "4e-3", 16: "8e-3", 32: "8e-3"},
}
"""The rates that the search chose (those not searched yet: the nearest depth's)."""


@dataclass(frozen=True)
class Run:
    """One run: `freerun simulate` on the workload with these settings."""

    name: str
    method: str
    stages: int
    settings: Settings = field(default_factory=dict)
    seed: int = 0
    updates: int = 3000
    until: float = 0.0
    """Stop when the smoothed loss is this low; 0 runs to the end."""

    def overrides(self) -> Settings:
        """Everything that differs from the workload."""
        return {
            **METHODS[self.method],
            "pipeline.stages": str(self.stages),
            "training.seed": str(self.seed),
            "training.updates": str(self.updates),
            **self.settings,
        }


def _best(method: str, stages: int) -> Settings:
    return {"optimizer.lr": BEST[method][stages]}


def search() -> Iterator[Run]:
    """Learning rates, one seed."""
    for method, depths in RATES.items():
        for stages, rates in depths.items():
            for lr in rates:
                yield Run(f"search/{method}-p{stages}-{lr}", method, stages, {"optimizer.lr": lr})


def finals() -> Iterator[Run]:
    """Every method at its best rate, three seeds, P = 1, 8, 32."""
    for seed in range(3):
        for method, depths in RATES.items():
            for stages in depths:
                updates = 6000 if stages == 32 else 3000
                name = f"final/{method}-p{stages}-s{seed}"
                yield Run(name, method, stages, _best(method, stages), seed, updates)


def slowdown() -> Iterator[Run]:
    """Updates to the target as the pipeline deepens."""
    for method in ("adamw", "rotation", "graded"):
        for stages in (1, 2, 4, 8, 16, 32):
            yield Run(f"slowdown/{method}-p{stages}", method, stages, _best(method, stages), updates=6000, until=1.8)


def rotation() -> Iterator[Run]:
    """The paper's own comparisons: variants, intervals, allocation of refreshes."""
    for source in ("first", "second"):
        for geometry in ("unilateral", "bilateral"):
            settings = {"optimizer.rotation.source": source, "optimizer.rotation.geometry": geometry}
            yield Run(f"variants/{source}-{geometry}", "rotation", 32, {**_best("rotation", 32), **settings})
    for method in ("rotation", "graded"):
        for interval in (1, 5, 10, 30, 100):
            settings = {**_best(method, 32), "optimizer.rotation.interval": str(interval)}
            yield Run(f"interval/{method}-{interval}", method, 32, settings)
        for allocation in ("uniform", "stage-aware", "reversed"):
            extra = {"optimizer.rotation.allocation": allocation, "optimizer.rotation.interval": "30"}
            yield Run(f"allocation/{method}-{allocation}", method, 32, {**_best(method, 32), **extra})


def latest() -> Iterator[Run]:
    """Without stashing: the newest weights in every backward."""
    for method in ("adamw", "pipedream-lr", "nesterov", "rotation", "graded"):
        for stages in (8, 32):
            settings = {**_best(method, stages), "pipeline.weights": "latest"}
            yield Run(f"latest/{method}-p{stages}", method, stages, settings)


def ablation() -> Iterator[Run]:
    """Our method with one part taken away, or changed."""
    changes: dict[str, Settings] = {
        "whole": {},
        "no-fresh": {"optimizer.rotation.fresh": "0"},
        "no-tempering": {"optimizer.rotation.tempering": "0"},
        "bias-corrected": {"optimizer.rotation.bias_correction": "true"},
        "beta-0.9": {"optimizer.betas": "0.9,0.999"},
        "uniform-rate-2e-3": {"optimizer.delay.lr": "none", "optimizer.lr": "2e-3"},
        "uniform-rate-1e-3": {"optimizer.delay.lr": "none", "optimizer.lr": "1e-3"},
        "power-0.5": {"optimizer.delay.lr_power": "0.5", "optimizer.lr": "4e-3"},
        "power-1": {"optimizer.delay.lr_power": "1", "optimizer.lr": "1.6e-2"},
        "unilateral": {"optimizer.rotation.geometry": "unilateral"},
    }
    for name, settings in changes.items():
        yield Run(f"ablation/{name}", "graded", 32, {**_best("graded", 32), **settings})


def growth() -> Iterator[Run]:
    """The model and the pipeline grow together: bigger must stay better."""
    for method in ("adamw", "rotation", "graded"):
        for layers in (4, 8, 16):
            settings = {**_best(method, 32), "model.layers": str(layers)}
            yield Run(f"growth/{method}-l{layers}", method, 4 * layers, settings)


def elsewhere() -> Iterator[Run]:
    """Where nothing was tuned: deeper, wider, longer."""
    places: dict[str, tuple[int, Settings, int]] = {
        "l16-p64": (64, {"model.layers": "16"}, 3000),
        "l32-p128": (128, {"model.layers": "32"}, 3000),
        "width128": (32, {"model.width": "128"}, 3000),
        "width256": (32, {"model.width": "256"}, 3000),
        "long": (32, {}, 20000),
    }
    for place, (stages, settings, updates) in places.items():
        for method in ("adamw", "rotation", "graded"):
            for alone in (False, True):
                depth = 1 if alone else stages
                rate = BEST[method][1 if alone else 32]
                name = f"elsewhere/{place}-{method}-p{depth}"
                yield Run(name, method, depth, {"optimizer.lr": rate, **settings}, updates=updates)


def quick() -> Iterator[Run]:
    """The two-minute form: P = 8, three methods, 600 updates."""
    for method in ("adamw", "rotation", "graded"):
        settings = {**_best(method, 8), "pipeline.granularity": "layer", "data.max_documents": "100"}
        yield Run(f"quick/{method}", method, 8, settings, updates=600)


SECTIONS = {
    "finals": finals,
    "search": search,
    "slowdown": slowdown,
    "ablation": ablation,
    "rotation": rotation,
    "latest": latest,
    "growth": growth,
    "elsewhere": elsewhere,
}
