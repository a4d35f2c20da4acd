"""What a run was, in numbers: each process gives its part, and the one that speaks for the run puts them together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from freerun.config import Config
from freerun.evaluation import Evaluation
from freerun.files import write_text
from freerun.mesh import Place, places
from freerun.metrics import Reporter, memory_mib, tokens_per_microbatch
from freerun.pipeline.executor import Executor
from freerun.trace import Tracer
from freerun.weights.flat import FlatParameters

Summary = dict[str, Any]


def hashes(flat: FlatParameters, weights: Tensor) -> dict[str, str]:
    """SHA-256 of every parameter's final weights, by name."""
    cpu = weights.detach().cpu()
    return {part.name: hashlib.sha256(part.of(cpu).contiguous().numpy().tobytes()).hexdigest() for part in flat.slices}


def part_of(
    executor: Executor, weights: Tensor, tracer: Tracer, reporter: Reporter, sent: dict[str, int], disagreement: float
) -> Summary:
    """One process's part of the summary."""
    fractions = tracer.fractions()
    return {
        "stage": executor.place.stage,
        "replica": executor.place.replica,
        "delay_histogram": {str(delay): count for delay, count in sorted(executor.delays.items())},
        "busy_fraction": fractions["busy"],
        "waiting_fraction": fractions["waiting"],
        "seconds": tracer.seconds(),
        "versions_kept": executor.versions.most_kept,
        "peak_weight_bytes": executor.versions.bytes,
        "parameters": executor.flat.weights.numel(),
        "memory_mib": memory_mib(),
        "skipped": executor.losses.skipped + executor.strategy.stepper.skipped,
        "microbatches": executor.microbatches_done,
        "from_microbatch": reporter.from_microbatch,
        "losses": reporter.recent,
        "training_seconds": reporter.training_seconds,
        "hidden_communication": executor.strategy.timing.hidden if executor.strategy.stage.group.size > 1 else None,
        "bytes_sent": sent,
        "disagreement": disagreement,
        "hashes": hashes(executor.flat, weights),
        "trace": tracer.records(),
    }


def summarise(config: Config, end: int, parts: list[Summary], evaluations: list[Evaluation]) -> Summary:
    """The parts of all processes as one summary."""
    names: dict[str, str] = {}
    for part in parts:
        if part["replica"] == 0:
            names |= part["hashes"]
    digest = hashlib.sha256(json.dumps(sorted(names.items())).encode()).hexdigest()
    first_stages = [part for part in parts if part["stage"] == 0]
    each = tokens_per_microbatch(config)
    tokens = each * sum(part["microbatches"] for part in first_stages)
    tokens_now = tokens - each * sum(part["from_microbatch"] for part in first_stages)
    seconds = max(part["training_seconds"] for part in parts)
    last_losses = [part["losses"] for part in parts if part["losses"]]
    return {
        "steps": end,
        "tokens": tokens,
        "wall_seconds": seconds,
        "tokens_per_second": tokens_now / max(seconds, 1e-9),
        "train_loss": _mean([_mean(losses) for losses in last_losses]),
        "eval_loss": evaluations[-1].loss if evaluations else None,
        "weights_sha256": digest,
        "stages": [
            {key: value for key, value in part.items() if key not in ("hashes", "trace", "losses")} for part in parts
        ],
        "bytes_sent": {kind: sum(part["bytes_sent"][kind] for part in parts) for kind in ("pipeline", "replicas")},
        "hidden_communication_fraction": _mean([part["hidden_communication"] for part in parts]),
        "skipped": sum(part["skipped"] for part in parts),
    }


def everyone(config: Config) -> list[Place]:
    """Every place of the run's mesh."""
    return places(config.pipeline.stages, config.replicas.count)


def write(path: Path, summary: Summary) -> None:
    """Write a summary, beside and renamed."""
    write_text(path, json.dumps(summary, indent=1))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
