"""Pipelines that never wait: against torch.distributed.pipelining, against what their schedule allows, on slow links.

Five parts: `cores` (does the machine give two?), `transformer` (two stages of 25M parameters, real compute), `timed`
(eight stages whose compute is a wait), `link` (two hosts 50 Mbit/s apart; needs root and iproute2) and `memory`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import Claim, arguments, machine, quiet, report, table
from netlab import Hosts, hosts
from pipeline_worker import Job, Measured

from freerun.simulate.events import simulate
from freerun.weights.delay import steady_delay

WORKER = Path(__file__).parent / "pipeline_worker.py"
LARGE = {
    "model.layers": "8",
    "model.width": "512",
    "model.heads": "8",
    "model.context": "128",
    "training.sequences": "4",
    "optimizer.clip_scope": "stage",
    "pipeline.stages": "2",
}
Results = list[list[Measured]]
"""For each job, what each stage measured."""
Part = tuple[list[Claim], dict[str, Any]]


def measure(jobs: Sequence[Job], stages: int, limit: float, lab: Hosts | None = None) -> Results:
    """Run jobs one after the other, in a process per stage: on this machine, or on a host of the lab each."""
    port = random.randrange(20_000, 30_000)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "jobs.json"
        listed.write_text(json.dumps([asdict(job) for job in jobs]))
        command = [sys.executable, str(WORKER), str(listed), folder]
        if lab:
            lab.run([command] * stages, limit, port)
        else:
            on_this_machine(command, stages, limit, port)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(stages)]
    return [[Measured(**rank[job]) for rank in ranks] for job in range(len(jobs))]


def on_this_machine(command: Sequence[str], processes: int, limit: float, port: int) -> None:
    """The same command in several processes, with the variables that torchrun would set."""
    shared = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile() as said:
        children = [
            subprocess.Popen(
                command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=said
            )
            for rank in range(processes)
        ]
        deadline = time.monotonic() + limit
        try:
            while any(child.poll() is None for child in children) and not any(child.returncode for child in children):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no end after {limit:g} s")
                time.sleep(0.05)
            if any(child.returncode for child in children):
                said.seek(0)
                raise RuntimeError(said.read().decode()[-3000:])
        finally:
            for child in children:
                child.kill()
                child.wait()


def cores(quick: bool, patience: float) -> Part:
    """One process multiplying matrices, then two at once."""
    product = Job({"pipeline.stages": "2"}, runtime="matmul")
    quiet(patience)
    alone = measure([product], 1, 60)[0][0].seconds_per_microbatch
    both = [rank.seconds_per_microbatch for rank in measure([product], 2, 60)[0]]
    together = sum(alone / seconds for seconds in both)
    table(
        ("512 × 512 products", "ms"), [("alone", alone * 1e3), *((f"both, {r}", s * 1e3) for r, s in enumerate(both))]
    )
    return [Claim("two processes do the work of", together, 1.9)], {"alone": alone, "both": both}


def transformer(quick: bool, patience: float) -> Part:
    """Two stages on two cores: freerun against torch.distributed.pipelining, in turns."""
    updates, repetitions, skip = (4, 1, 1) if quick else (12, 5, 2)
    sizes = {"model.context": "32"} if quick else {}

    def job(runtime: str, schedule: str, microbatches: int = 4, **more: str) -> Job:
        count = updates * 4 // microbatches
        settings = {"pipeline.schedule": schedule, "pipeline.microbatches": str(microbatches), **more}
        return Job(
            {**LARGE, **sizes, "training.updates": str(count), **settings}, runtime, skip=skip * 4 // microbatches
        )

    jobs = {
        "async": job("freerun", "async"),
        "torch 1F1B": job("torch-1f1b", "1f1b"),
        "torch GPipe": job("torch-gpipe", "gpipe"),
        "async, slack 1": job("freerun", "async", **{"pipeline.slack": "1"}),
        "async, updates of 1": job("freerun", "async", microbatches=1),
        "freerun 1f1b": job("freerun", "1f1b"),
    }
    runs: dict[str, list[list[Measured]]] = {name: [] for name in jobs}
    for _ in range(repetitions):
        quiet(patience)
        for name, stages in zip(jobs, measure(list(jobs.values()), 2, 900), strict=True):
            runs[name].append(stages)
    tokens = 4 * int(sizes.get("model.context", LARGE["model.context"]))
    seconds = {name: [stages[-1].seconds_per_microbatch for stages in taken] for name, taken in runs.items()}
    busy = {name: [max(s.busy_per_microbatch for s in stages) for stages in taken] for name, taken in runs.items()}
    of_bound = {name: _median_ratio(busy[name], seconds[name]) for name in jobs}
    faster = {name: _median_ratio(seconds[name], seconds["async"]) for name in jobs}
    rows = [(name, tokens / statistics.median(seconds[name]), of_bound[name], faster[name]) for name in jobs]
    table(("two stages, 25M", "tokens/s", "of the bubble-free bound", "async is faster by"), rows)
    claims = [
        Claim("async over the bubble-free bound", of_bound["async"], 0.95),
        Claim("async over torch Schedule1F1B, 4 microbatches", faster["torch 1F1B"], 1.15),
        Claim("async over torch ScheduleGPipe, 4 microbatches", faster["torch GPipe"], 1.25),
    ]
    losses = {name: taken[-1][-1].loss for name, taken in runs.items()}
    return claims, {"seconds_per_microbatch": seconds, "busy_per_microbatch": busy, "losses": losses}


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def timed(quick: bool, patience: float) -> Part:
    """Eight stages whose compute is a wait: what the runtime itself costs.

    Beside them torch's schedules on the same stages, and the same stand-in in a bare loop: one process, no pipeline.
    """
    kinds = {
        "gpipe": ("gpipe", 8, 0),
        "1f1b": ("1f1b", 8, 0),
        "two-version": ("two-version", 8, 0),
        "async": ("async", 1, 0),
        "async, slack 1": ("async", 1, 1),
    }
    claims, measured, rows = [], {}, []
    for pair in (0.02,) if quick else (0.005, 0.02):
        shape = {name: timed_job(*kind, [pair] * 8, 1.0 if quick else 5.0) for name, kind in kinds.items()}
        slow = [pair] * 3 + [2 * pair] + [pair] * 4
        shape["async, a stage at 2 ×"] = timed_job("async", 1, 0, slow, 1.0 if quick else 5.0)
        shape["torch 1F1B"] = replace(shape["1f1b"], runtime="torch-1f1b")
        shape["torch GPipe"] = replace(shape["gpipe"], runtime="torch-gpipe")
        bare = replace(timed_job("async", 1, 0, [pair], 1.0 if quick else 5.0), runtime="bare")
        quiet(patience)
        results = dict(zip(shape, measure(list(shape.values()), 8, 600), strict=True))
        shape["bare loop, one process"], results["bare loop, one process"] = bare, measure([bare], 1, 60)[0]
        for name, stages in results.items():
            result = against_schedule(shape[name], stages)
            label = f"{pair * 1e3:g} ms: {name}"
            measured[label] = result
            rows.append((label, *result.values()))
            if shape[name].runtime != "freerun":
                continue
            if name == "async, slack 1":
                of_bare = results["bare loop, one process"][0].seconds_per_microbatch * 1e3 / result["ms"]
                claims.append(Claim(f"{label}, over a bare loop in one process", of_bare, 0.98))
            claims.append(Claim(f"{label}, of what the schedule allows", result["of_schedule"], 0.97))
            if name in ("two-version", "async", "async, slack 1"):
                claims.append(Claim(f"{label}, utilisation", result["utilisation"], 0.98))
    table(("eight timed stages", *next(iter(measured.values()))), rows)
    return claims, measured


def timed_job(kind: str, microbatches: int, slack: int, waits: list[float], seconds: float) -> Job:
    """A job on timed stages that takes about so many seconds."""
    counted = max(4, round(seconds / max(waits) / microbatches))
    skip = -(-3 * len(waits) * (1 + slack) // microbatches)
    settings = {
        "model.width": "8",
        "model.heads": "2",
        "model.context": "16",
        "training.sequences": "1",
        "pipeline.stages": str(len(waits)),
        "model.layers": str(len(waits)),
        "pipeline.schedule": kind,
        "pipeline.microbatches": str(microbatches),
        "pipeline.slack": str(slack),
        "training.updates": str(counted + 2 * skip),
        "run.log_every": "100",
    }
    return Job(settings, waits=waits, skip=skip)


def against_schedule(job: Job, stages: Sequence[Measured], link: float = 0.0) -> dict[str, float]:
    """What was reached, next to what the schedule gives on a virtual clock with the waits as they really were."""
    pipeline = job.config().pipeline
    waits = [stage.compute_per_microbatch for stage in stages]
    allowed = simulate(
        pipeline.schedule,
        pipeline.stages,
        pipeline.microbatches,
        max(60, 12 * pipeline.stages // pipeline.microbatches),
        [wait / 3 for wait in waits],
        [wait * 2 / 3 for wait in waits],
        link_seconds=link,
        slack=pipeline.slack,
    )
    seconds = stages[-1].seconds_per_microbatch
    slowest = max(waits)
    return {
        "ms": seconds * 1e3,
        "of_schedule": allowed.seconds_per_update / pipeline.microbatches / seconds,
        "utilisation": slowest / seconds,
        "allowed": slowest / (allowed.seconds_per_update / pipeline.microbatches),
        "nominal": max(job.waits or [0]) / seconds,
        "cpu_ms": statistics.mean(stage.cpu_per_microbatch for stage in stages) * 1e3,
    }


def link(quick: bool, patience: float) -> Part:
    """Two hosts; an activation takes 0.8 of a stage's compute time to get across."""
    pair, bandwidth = 0.05, 50e6
    context = round(0.8 * pair * bandwidth / 8 / (8 * 128 * 4))
    big = {"model.width": "128", "model.heads": "4", "model.context": str(context), "training.sequences": "8"}
    jobs = {}
    for slack in (0, 1, 2):
        job = timed_job("async", 1, slack, [pair] * 2, 1.5 if quick else 10.0)
        jobs[f"slack {slack}"] = replace(job, settings={**job.settings, **big})
    taken: dict[str, list[list[Measured]]] = {f"{name}, {rate}": [] for name in jobs for rate in ("none", "50mbit")}
    with hosts(2) as lab:
        for _ in range(1 if quick else 3):
            for rate in ("none", "50mbit"):
                lab.shape_all(rate)
                quiet(patience)
                for name, stages in zip(jobs, measure(list(jobs.values()), 2, 300, lab), strict=True):
                    taken[f"{name}, {rate}"].append(stages)
    seconds = {name: [stages[-1].seconds_per_microbatch for stages in runs] for name, runs in taken.items()}
    rows, measured = [], {}
    for name, job in jobs.items():
        own = _median_ratio(seconds[f"{name}, none"], seconds[f"{name}, 50mbit"])
        best = _median_ratio(seconds["slack 0, none"], seconds[f"{name}, 50mbit"])
        model = against_schedule(job, taken[f"{name}, 50mbit"][0], link=0.8 * pair)["allowed"]
        rows.append((name, own, best, model))
        measured[name] = {"of_unshaped": own, "of_unshaped_slack_0": best, "schedule_allows": model}
    table(("50 Mbit/s, 0.8 of compute", "of unshaped", "of unshaped, slack 0", "schedule allows"), rows)
    claims = [Claim("shaped over unshaped, slack 2", measured["slack 2"]["of_unshaped_slack_0"], 0.95)]
    return claims, {**measured, "seconds_per_microbatch": seconds}


def memory(quick: bool, patience: float) -> Part:
    """Bytes of weights per stage against the formula: (τ + 1) compute copies and the master."""
    jobs = {}
    for schedule, weights, precision in (
        ("async", "stash", "fp32"),
        ("async", "stash", "bf16"),
        ("async", "latest", "bf16"),
        ("two-version", "two-version", "bf16"),
    ):
        settings = {
            "pipeline.stages": "4",
            "pipeline.schedule": schedule,
            "pipeline.weights": weights,
            "pipeline.microbatches": "4" if schedule == "two-version" else "1",
            "training.precision": precision,
            "training.updates": "8",
            "training.sequences": "1",
        }
        jobs[f"{weights} {precision}"] = Job(settings, skip=1)
    rows, worst, measured = [], 0.0, {}
    for (name, job), stages in zip(jobs.items(), measure(list(jobs.values()), 4, 300), strict=True):
        for number, stage in enumerate(stages):
            formula = stage.parameters * bytes_per_weight(job, number)
            off = max(abs(size / formula - 1) for size in (stage.weight_bytes, stage.summary_weight_bytes))
            worst = max(worst, off)
            rows.append((f"{name}, stage {number}", formula, stage.weight_bytes, stage.summary_weight_bytes))
        measured[name] = [asdict(stage) for stage in stages]
    table(("weights", "formula", "in memory", "in summary.json"), rows)
    return [Claim("weight bytes, largest deviation from the formula", worst, 0.001, at_most=True)], measured


def bytes_per_weight(job: Job, stage: int) -> int:
    """4 for the master, and the compute copies; the one fp32 copy of a stage without delay is the master itself."""
    config = job.config()
    pipeline = config.pipeline
    delay = steady_delay(pipeline.schedule, stage, pipeline.stages, pipeline.microbatches)
    copies = 1 if pipeline.weights == "latest" else delay + 1
    if config.training.precision == "fp32":
        return 4 if copies == 1 else 4 + 4 * copies
    return 4 + 2 * copies


PARTS: dict[str, Callable[[bool, float], Part]] = {
    "cores": cores,
    "transformer": transformer,
    "timed": timed,
    "link": link,
    "memory": memory,
}


def main() -> None:
    options = arguments(__doc__, ("--only", {"choices": list(PARTS), "help": "measure only this part again"}))
    patience = 0 if options.quick else options.patience
    quiet(patience)
    about = machine()
    claims: list[Claim] = []
    measured: dict[str, Any] = {}
    for name, part in PARTS.items():
        if options.only in (None, name):
            more, measured[name] = part(options.quick, patience)
            claims += more
    report("pipeline", options.quick, about, claims, measured, options.only)


if __name__ == "__main__":
    main()
