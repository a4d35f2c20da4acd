"""What the study runs: strategies by name, and what each changes about the workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from studies.runner import Run, Study

STUDY = Study(Path(__file__).parent)
BATCH = 32
"""Sequences of all replicas in one update; `acco` halves it, for a committed step takes two phases."""
UPDATES = 1200
WARMUP = 100
HELD_OUT = 1024
"""Sequences of an evaluation, the same for all."""
SEEDS = range(3)

METHODS: dict[str, dict[str, str]] = {
    "allreduce": {"replicas.strategy": "allreduce"},
    "dpu": {"replicas.strategy": "dpu"},
    "acco": {"replicas.strategy": "acco"},
    "sparse-ema": {"replicas.strategy": "sparse", "replicas.correction": "ema"},
    "sparse-drift": {"replicas.strategy": "sparse", "replicas.correction": "drift"},
    "sparse-none": {"replicas.strategy": "sparse", "replicas.correction": "none"},
    "diloco": {"replicas.strategy": "diloco"},
    "diloco-streaming": {"replicas.strategy": "diloco", "replicas.fragments": "4", "replicas.delay": "fixed:2"},
}
SPARSE = {"replicas.fraction": "0.05", "replicas.interval": "1", "replicas.delay": "fixed:10"}

RATES = ("7.5e-4", "1.5e-3", "3e-3", "6e-3", "1.2e-2")
BEST = {
    "allreduce": "1.5e-3",
    "dpu": "7.5e-4",
    "acco": "1.5e-3",
    "sparse-ema": "6e-3",
    "sparse-drift": "1.5e-3",
    "sparse-none": "6e-3",
    "diloco": "3e-3",
    "diloco-streaming": "6e-3",
}
"""The rates that the search chose, by held-out loss."""


def run(method: str, replicas: int, lr: str, seed: int) -> Run:
    """A run of a method: as many tokens as any other, and as large a batch."""
    share = 2 if method == "acco" else 1
    sequences = BATCH // replicas // share
    settings = {
        **(SPARSE if method.startswith("sparse") else {}),
        **METHODS[method],
        "replicas.count": str(replicas),
        "optimizer.lr": lr,
        "optimizer.warmup": str(WARMUP * share),
        "training.sequences": str(sequences),
        "training.updates": str(UPDATES * share),
        "training.seed": str(seed),
        "run.log_every": str(10 * share),
        "evaluation.microbatches": str(HELD_OUT // sequences),
    }
    return Run(f"runs/{method}-r{replicas}-{lr}-s{seed}", method, settings)


def search() -> Iterator[Run]:
    """Learning rates, one seed, four replicas: as many for every method."""
    for method in METHODS:
        for lr in RATES:
            yield run(method, 4, lr, 0)


def finals() -> Iterator[Run]:
    """Every method at its best rate, four replicas, three seeds."""
    for seed in SEEDS:
        for method in METHODS:
            yield run(method, 4, BEST[method], seed)


def workers() -> Iterator[Run]:
    """Two and eight replicas, with the same batch."""
    for method in ("acco", "sparse-ema"):
        for replicas in (2, 8):
            for seed in SEEDS:
                yield run(method, replicas, BEST[method], seed)


def limits() -> Iterator[Run]:
    """What `sparse` loses to its delay, to its fraction, and to steps from a replica's own small batch."""
    for fraction, delay in (("1", "0"), ("0.05", "0"), ("0.3", "10")):
        of_round = {"replicas.fraction": fraction, "replicas.delay": f"fixed:{delay}"}
        like = run("sparse-ema", 4, BEST["sparse-ema"], 0)
        label = f"sparse, p = {fraction}, delay {delay}"
        yield Run(f"limits/sparse-p{fraction}-delay{delay}", label, {**like.settings, **of_round})


SECTIONS = {"search": search, "finals": finals, "workers": workers, "limits": limits}
