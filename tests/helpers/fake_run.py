"""A run's folder as a real run would leave it, made up: for everything that reads runs."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import tomli_w

from freerun.pipeline.schedule import Backward, Forward, max_versions
from freerun.simulate.events import Timeline, simulate
from freerun.trace import Tracer, write_trace
from freerun.weights.delay import delay_histogram

TRACED = 30
TOKENS_PER_MICROBATCH = 2048


def fake_run(
    folder: Path,
    *,
    kind: str = "async",
    stages: int = 4,
    microbatches: int = 1,
    replicas: int = 1,
    updates: int = 2000,
    optimizer: str = "basis-rotation",
    level: float = 1.6,
    seed: int = 0,
) -> Path:
    """Write config.toml, metrics.jsonl, summary.json and trace.json of a run that never happened."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    costs = [0.021 * chance.uniform(0.85, 1.1) for _ in range(stages)]
    timeline = simulate(kind, stages, microbatches, TRACED, costs, [2 * c for c in costs], 0.003, 0.004)
    pace = timeline.seconds_per_update
    config = _config(kind, stages, microbatches, replicas, updates, optimizer, seed)
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    tokens = TOKENS_PER_MICROBATCH * microbatches * replicas
    lines = _metrics(chance, updates, pace, tokens, level)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = _summary(lines, timeline, kind, stages, microbatches, replicas, updates, pace, tokens)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    write_trace(folder / "trace.json", _records(timeline, replicas, chance))
    return folder


def _config(
    kind: str, stages: int, microbatches: int, replicas: int, updates: int, optimizer: str, seed: int
) -> dict[str, Any]:
    return {
        "model": {"layers": 8, "width": 512, "heads": 8, "context": 256, "tied": False},
        "data": {"source": "python-stdlib", "tokenizer": "bytes", "eval_fraction": 0.02},
        "pipeline": {"stages": stages, "schedule": kind, "weights": "stash", "microbatches": microbatches, "slack": 0},
        "replicas": {"count": replicas, "strategy": "sparse", "fraction": 0.05, "interval": 20, "delay": "fixed:10"},
        "optimizer": {
            "name": optimizer,
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "rotation": {"source": "second", "geometry": "bilateral", "interval": 10},
        },
        "training": {"updates": updates, "sequences": 8, "seed": seed, "precision": "bf16"},
        "run": {"dir": "runs/demo", "trace_updates": TRACED},
    }


def _metrics(chance: random.Random, updates: int, pace: float, tokens: int, level: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for update in range(0, updates + 1, 10):
        curve = level + (5.5 - level) * (1 + update / 40) ** -0.75
        lr = 1e-3 * min(1, update / 100) * (0.55 + 0.45 * math.cos(math.pi * update / updates))
        line = {
            "update": update,
            "tokens": update * tokens,
            "loss": curve + chance.gauss(0, 0.07),
            "lr": lr,
            "grad_norm": 0.4 + 2 * math.exp(-update / 150) + abs(chance.gauss(0, 0.08)),
            "tokens_per_second": tokens / pace * chance.uniform(0.97, 1.01),
            "seconds": update * pace,
            "memory_mib": 812.0,
        }
        lines.append(line)
        if update and update % max(10, updates // 10) == 0:
            loss = curve + 0.06
            lines.append({"update": update, "eval_loss": loss, "perplexity": math.exp(loss)})
    return lines


def _summary(
    lines: list[dict[str, Any]],
    timeline: Timeline,
    kind: str,
    stages: int,
    microbatches: int,
    replicas: int,
    updates: int,
    pace: float,
    tokens: int,
) -> dict[str, Any]:
    last = [line for line in lines if "loss" in line][-1]
    evaluations = [line for line in lines if "eval_loss" in line]
    busy = timeline.busy_fractions
    histograms = [delay_histogram(kind, stage, stages, microbatches, updates) for stage in range(stages)]
    parts = [
        {
            "stage": stage,
            "replica": replica,
            "delay_histogram": {str(delay): count for delay, count in histograms[stage].items()},
            "busy_fraction": busy[stage] * 0.985,
            "waiting_fraction": (1 - busy[stage]) * 0.98,
            "versions_kept": (versions := max_versions(kind, "stash", stage, stages, microbatches)),
            "peak_weight_bytes": (26 << 20) + versions * (13 << 20) + (stage in (0, stages - 1)) * (9 << 20),
        }
        for replica in range(replicas)
        for stage in range(stages)
    ]
    return {
        "steps": updates,
        "tokens": updates * tokens,
        "wall_seconds": updates * pace,
        "tokens_per_second": tokens / pace,
        "train_loss": last["loss"],
        "eval_loss": evaluations[-1]["eval_loss"],
        "weights_sha256": hashlib.sha256(f"{kind} {stages} {updates}".encode()).hexdigest(),
        "stages": parts,
        "bytes_sent": {"pipeline": updates * tokens * 512 * 4, "replicas": (replicas - 1) * updates * 1_300_000},
        "hidden_communication_fraction": 0.973,
    }


def _records(timeline: Timeline, replicas: int, chance: random.Random) -> list[dict[str, Any]]:
    """What tracers of every rank would have recorded, with a little jitter and the waiting between actions."""
    records = []
    for replica in range(replicas):
        for stage, spans in enumerate(timeline.spans):
            rank = replica * len(timeline.spans) + stage
            tracer = Tracer(rank, f"stage {stage}" + (f" of replica {replica}" if replicas > 1 else ""))
            free = 0
            for span in spans:
                action = span.action
                start, end = round(span.start * 1e9), round(span.end * 1e9 - chance.uniform(1e5, 6e5))
                if start - free > 1_000_000:
                    tracer.add("wait", free, start, lane="compute")
                if isinstance(action, (Forward, Backward)):
                    name = type(action).__name__.lower()
                    tracer.add(name, start, end, "compute", microbatch=action.microbatch, version=action.version)
                    tracer.add("communicate", end, end + 4_000_000, f"send {name}", microbatch=action.microbatch)
                else:
                    tracer.add("update", start, end, "compute", update=action.update, delay=action.delay)
                free = end
            records.append(tracer.records())
    return records
