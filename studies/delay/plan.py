"""What the study runs: names, and what each changes about the workload.

A setting `lab.X` is one that only the laboratory has (rules.py); runs with such settings can't be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from studies.outcome import TARGET
from studies.runner import Run, Study

STUDY = Study(Path(__file__).parent)
Settings = dict[str, str]

METHODS: dict[str, Settings] = {
    "adamw": {"optimizer.name": "adamw"},
    "pipedream-lr": {"optimizer.name": "adamw", "optimizer.delay.lr": "anneal"},
    "nesterov": {"optimizer.name": "nesterov", "optimizer.betas": "0.99,0.999"},
    "delay-compensated": {"optimizer.name": "delay-compensated", "optimizer.delay.compensation": "0.5"},
    "muon": {"optimizer.name": "muon"},
    "rotation": {"optimizer.name": "basis-rotation"},
    "graded": {"optimizer.name": "graded-rotation"},
}
"""Methods by name; `rotation` is the paper's, `graded` is ours (docs/under-delay.md)."""

RATES: dict[str, dict[int, Sequence[str]]] = {
    "adamw": {
        1: ("1e-3", "3e-3", "6e-3", "1.2e-2"),
        2: ("1e-3", "3e-3"),
        4: ("1e-3", "3e-3"),
        8: ("5e-4", "1e-3", "2e-3", "3e-3"),
        16: ("5e-4", "1e-3"),
        32: ("3e-4", "5e-4", "1e-3", "3e-3"),
    },
    "pipedream-lr": {8: ("1e-3", "3e-3", "6e-3", "1.2e-2"), 32: ("1e-3", "3e-3", "6e-3", "1.2e-2")},
    "nesterov": {8: ("5e-4", "1e-3", "3e-3", "6e-3"), 32: ("5e-4", "1e-3", "3e-3", "6e-3")},
    "delay-compensated": {32: ("3e-4", "5e-4", "1e-3", "3e-3")},
    "rotation": {
        1: ("1e-3", "3e-3", "6e-3", "1.2e-2"),
        2: ("3e-3", "6e-3"),
        4: ("2e-3", "3e-3"),
        8: ("1e-3", "2e-3", "3e-3", "6e-3"),
        16: ("1e-3", "2e-3"),
        32: ("5e-4", "1e-3", "2e-3", "3e-3"),
    },
    "graded": {
        1: ("3e-3", "6e-3", "8e-3", "1.2e-2"),
        2: ("6e-3", "1.2e-2"),
        4: ("6e-3", "1.2e-2"),
        8: ("6e-3", "8e-3", "1.2e-2", "1.6e-2"),
        16: ("8e-3", "1.2e-2"),
        32: ("6e-3", "8e-3", "1.2e-2", "1.6e-2"),
    },
}
"""Learning rates tried for each method at each depth of pipeline: four at P = 1, 8 and 32, two between."""

BEST: dict[str, dict[int, str]] = {
    "adamw": {8: "5e-4", 32: "5e-4"},
    "pipedream-lr": {8: "1e-3", 32: "1e-3"},
    "nesterov": {8: "1e-3", 32: "5e-4"},
    "rotation": {8: "1e-3", 32: "5e-4"},
    "graded": {8: "8e-3", 32: "1.2e-2"},
}
"""The rates that the finals chose, for what is not searched again."""
SHORT = 1000
"""Updates of such a run, of 3,000 for which its learning rate is planned."""


def run(
    name: str,
    method: str,
    stages: int,
    settings: Settings | None = None,
    seed: int = 0,
    updates: int = 3000,
    until: float = 0.0,
    most: int = 0,
) -> Run:
    """A run of a method: what it changes about the workload, and what `settings` change about that."""
    all_settings = {
        **METHODS[method],
        "pipeline.stages": str(stages),
        "training.seed": str(seed),
        "training.updates": str(updates),
        **(settings or {}),
    }
    return Run(name, method, all_settings, until, most)


def finals() -> Iterator[Run]:
    """Every method at every rate, three seeds."""
    for method, depths in RATES.items():
        for stages, rates in depths.items():
            for lr in rates:
                for seed in range(3):
                    name = f"final/{method}-p{stages}-{lr}-s{seed}"
                    yield run(name, method, stages, {"optimizer.lr": lr}, seed)


def short(name: str, method: str, stages: int, settings: Settings, depth: int = 32, seed: int = 0) -> Run:
    """A run at the rate that is best for a depth, or at one of its own, for as long as it takes to see a difference."""
    all_settings = settings if "optimizer.lr" in settings else {"optimizer.lr": BEST[method][depth], **settings}
    return run(name, method, stages, all_settings, seed, until=TARGET, most=SHORT)


def rotation() -> Iterator[Run]:
    """The paper's own comparisons: variants, intervals, allocation of refreshes; and what else may help."""
    for source in ("first", "second"):
        for geometry in ("unilateral", "bilateral"):
            settings = {"optimizer.rotation.source": source, "optimizer.rotation.geometry": geometry}
            yield short(f"variants/{source}-{geometry}", "rotation", 32, settings)
    yield short("variants/look-ahead", "rotation", 32, {"optimizer.rotation.nesterov": "true"})
    for share in ("0.5", "1"):
        yield short(f"variants/graded-error-feedback-{share}", "graded", 32, {"optimizer.delay.error_feedback": share})
    for lr in ("1e-3", "3e-3", "1e-2"):
        settings = {"optimizer.lr": lr}
        yield short(f"variants/muon-{lr}", "muon", 32, settings)
    for method in ("rotation", "graded"):
        for seed in range(3):
            for interval in (1, 5, 10, 30, 100):
                settings = {"optimizer.rotation.interval": str(interval)}
                yield short(f"interval/{method}-{interval}-s{seed}", method, 32, settings, seed=seed)
            for allocation in ("uniform", "stage-aware", "reversed"):
                settings = {"optimizer.rotation.allocation": allocation, "optimizer.rotation.interval": "30"}
                yield short(f"allocation/{method}-{allocation}-s{seed}", method, 32, settings, seed=seed)


CHEAPEST = {
    "optimizer.rotation.block": "64",
    "optimizer.rotation.precision": "bf16",
    "optimizer.rotation.stagger": "true",
}


def cheapest() -> Iterator[Run]:
    """What the cheapest refreshes and rotations of benchmarks/optimizers.py cost in updates."""
    for method, stages in (("rotation", 8), ("graded", 32)):
        for seed in range(3):
            settings = {"optimizer.lr": BEST[method][stages], **CHEAPEST}
            name = f"cheapest/{method}-p{stages}-s{seed}"
            yield run(name, method, stages, settings, seed, until=TARGET, most=1300)


def latest() -> Iterator[Run]:
    """Without stashing: the newest weights in every backward."""
    for method in BEST:
        for stages in (8, 32):
            settings = {"pipeline.weights": "latest"}
            yield short(f"latest/{method}-p{stages}", method, stages, settings, depth=stages)


def ablation() -> Iterator[Run]:
    """Our method with one thing changed, or one thing tried; P = 32, P = 8 and without delay."""
    for change in ABLATIONS:
        yield from changed(32, change, {"optimizer.lr": "1.2e-2"})
    for stages, powers in ((8, ("0.5", "0.75", "1")), (1, ("1",))):
        for power in powers:
            for lr in ("4e-3", "8e-3", "1.2e-2"):
                change = {"optimizer.lr": lr, "optimizer.rotation.grading": power}
                yield from changed(stages, change)
    for beta in ("0.9", "0.95", "0.99"):
        yield from changed(1, {"optimizer.betas": f"{beta},0.999"}, {"optimizer.lr": "6e-3"})
    for fresh in ("0", "0.2"):
        yield from changed(1, {"optimizer.rotation.fresh": fresh}, {"optimizer.lr": "6e-3"})
    yield from changed(1, {"lab.others_rate": "4"}, {"optimizer.lr": "6e-3"})


def changed(stages: int, change: Settings, rest: Settings | None = None) -> Iterator[Run]:
    """Our method with a change, until the target."""
    label = ",".join(f"{key.rsplit('.', 1)[1]}={value.removesuffix(',0.999')}" for key, value in change.items())
    for seed in range(3):
        name = f"ablation/p{stages}-{label or 'whole'}-s{seed}"
        yield run(name, "graded", stages, {**(rest or {}), **change}, seed, until=TARGET, most=900)


def _choices(key: str, *values: str) -> list[Settings]:
    return [{key: value} for value in values]


ABLATIONS: list[Settings] = [
    {},
    *[
        {"optimizer.lr": lr, "optimizer.rotation.grading": power}
        for power in ("0.75", "1")
        for lr in ("4e-3", "6e-3", "8e-3", "1.6e-2", "2.4e-2")
    ],
    {"optimizer.rotation.grading": "0.75"},
    {"optimizer.rotation.grading": "0.5", "optimizer.lr": "4e-3"},
    *_choices("lab.others_power", "0.25", "0.5", "1"),
    *_choices("lab.others_rate", "0.5", "2", "4"),
    *[{"optimizer.rotation.grading": "0", "optimizer.lr": lr} for lr in ("1e-3", "2e-3", "4e-3")],
    *_choices("optimizer.betas", "0.9,0.999", "0.95,0.999", "0.97,0.999", "0.99,0.999", "0.98,0.99", "0.98,0.995"),
    *_choices("optimizer.rotation.fresh", "0", "0.1", "0.2", "0.3", "0.5", "0.6"),
    *_choices("optimizer.rotation.tempering", "0", "0.25", "0.75", "1"),
    *_choices("optimizer.rotation.bias_correction", "true"),
    *_choices("lab.covariance_beta", "0.9", "0.95", "0.98", "0.99", "0.995"),
    *_choices("lab.beta1_power", "0.2", "0.5"),
    *_choices("lab.fresh_power", "-0.25", "0.25"),
    *_choices("lab.ahead", "0.1", "0.3", "1"),
    *[
        {"lab.curvature": c, "lab.curvature_power": r, "optimizer.rotation.grading": p, "optimizer.lr": lr}
        for p, lr in (("0", "1e-3"), ("0", "3e-3"), ("0.5", "6e-3"), ("1", "1.2e-2"), ("1", "2.4e-2"))
        for c, r in (
            *((c, "2") for c in ("3", "10", "30", "100", "300", "1e3", "1e4", "1e5")),
            *((c, "1") for c in ("10", "100", "1e3", "1e4")),
        )
    ],
    *[
        {"lab.average": a, "lab.horizon": h, "optimizer.lr": lr}
        for a in ("0.5", "0.9")
        for h in ("10", "30", "100")
        for lr in ("1.2e-2", "2.4e-2")
    ],
    *[
        {"lab.average": a, "lab.horizon": h, "optimizer.lr": lr}
        for a, h in (("0.3", "100"), ("0.5", "100"), ("0.5", "300"), ("0.7", "100"), ("0.7", "300"))
        for lr in ("2.4e-2", "4.8e-2")
        if (a, h, lr) != ("0.5", "100", "2.4e-2")
    ],
    *_choices("lab.limit", "2", "5"),
    *_choices("lab.power_anneal", "1000", "3000"),
    *_choices("lab.rows", "1"),
    {"lab.rows": "1", "optimizer.rotation.tempering": "0"},
    {"lab.damping": "0.03", "lab.damping_power": "1", "optimizer.rotation.grading": "0.75"},
    {
        "lab.damping": "1",
        "lab.damping_power": "2",
        "optimizer.rotation.grading": "0",
        "optimizer.rotation.tempering": "0",
    },
    {
        "lab.damping": "0.3",
        "lab.damping_power": "1",
        "optimizer.rotation.grading": "0",
        "optimizer.rotation.tempering": "0",
    },
]
"""What is changed at P = 32, at the rate 1.2e-2 unless it says otherwise."""


def growth() -> Iterator[Run]:
    """The model and the pipeline grow together: bigger must stay better."""
    for method in ("adamw", "rotation", "graded"):
        for layers in (4, 8, 16):
            for seed in range(2):
                settings = {"model.layers": str(layers), "optimizer.lr": BEST[method][32]}
                yield run(f"growth/{method}-l{layers}-s{seed}", method, 4 * layers, settings, seed, most=SHORT)
    for layers in (4, 8, 16):
        settings = {"model.layers": str(layers), "optimizer.lr": BEST["graded"][32]}
        yield run(f"growth/graded-l{layers}-whole-s0", "graded", 4 * layers, settings)


def longer() -> Iterator[Run]:
    """What more updates change, at the best rates of 3,000; 20,000 with one seed."""
    for method, depths in BEST.items():
        for seed in range(3 if method in ("rotation", "graded") else 1):
            settings = {"optimizer.lr": depths[32]}
            yield run(f"longer/{method}-6000-s{seed}", method, 32, settings, seed, updates=6000)
    for method in ("nesterov", "rotation", "graded"):
        settings = {"optimizer.lr": BEST[method][32]}
        yield run(f"longer/{method}-20000-s0", method, 32, settings, updates=20000)


def clocked() -> Iterator[Run]:
    """What an update of a replay takes: to be done on a quiet machine, one at a time."""
    for method, depths in BEST.items():
        for stages in (8, 32):
            settings = {"optimizer.lr": depths[stages]}
            yield run(f"clocked/{method}-p{stages}", method, stages, settings, most=200)


TOKENIZER = "{studies}/delay/headers-1024.json"
PLACES: dict[str, tuple[int, Settings]] = {
    "width128": (32, {"model.width": "128"}),
    "headers-bpe": (32, {"data.source": "{torch}/include/torch/csrc/**/*.h", "data.tokenizer": TOKENIZER}),
    "l16-p64": (64, {"model.layers": "16"}),
    "width256": (32, {"model.width": "256"}),
    "l32-p128": (128, {"model.layers": "32"}),
}
"""Where nothing was tuned: deeper, wider, C++ headers in a byte-pair encoding of 1,024."""


def elsewhere() -> Iterator[Run]:
    """Rates as at home, with and without delay."""
    rates = {
        "rotation": {1: ("1e-3", "3e-3"), 32: ("1e-3", "2e-3")},
        "graded": {1: ("3e-3", "6e-3"), 32: ("8e-3", "1.2e-2")},
    }
    for place, (stages, settings) in PLACES.items():
        for method, of_depth in rates.items():
            for depth in (1, stages):
                for lr in of_depth[min(depth, 32)]:
                    for seed in range(2):
                        name = f"elsewhere/{place}-{method}-p{depth}-{lr}-s{seed}"
                        yield run(name, method, depth, {"optimizer.lr": lr, **settings}, seed, most=800)


def quick() -> Iterator[Run]:
    """The two-minute form: P = 8, three methods, 600 updates."""
    for method in ("adamw", "rotation", "graded"):
        settings = {
            "optimizer.lr": BEST[method][8],
            "pipeline.granularity": "layer",
            "data.max_documents": "100",
        }
        yield run(f"quick/{method}", method, 8, settings, updates=600)


SECTIONS = {
    "finals": finals,
    "ablation": ablation,
    "rotation": rotation,
    "cheapest": cheapest,
    "latest": latest,
    "growth": growth,
    "longer": longer,
    "clocked": clocked,
    "elsewhere": elsewhere,
}
