"""Replica strategies between real hosts with shaped links: who waits for the network, and how long.

Compute is a timed wait; messages, buffers and optimizers are real (see replica_worker.py). Needs root and iproute2.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import RESULTS, Claim, arguments, machine, quiet, report, table
from netlab import Hosts, hosts
from replica_memory import memory_table
from replica_worker import Job, Timed

WORKER = Path(__file__).parent / "replica_worker.py"
BUCKET = {"bucket_mib": 1.0}
SPARSE = {"fraction": 0.05, "interval": 20, "delay": "free"}


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    weights: int = 2_500_000
    updates: int = 12
    repetitions: int = 3
    sparse_updates: int = 210
    """Ends between two rounds, so that none is half counted."""
    scaling_weights: int = 1_000_000


QUICK = Size(500_000, 4, 1, 70, 200_000)


def measure(lab: Hosts, job: Job) -> list[Timed]:
    """Run a job on as many hosts as it has replicas."""
    command = [sys.executable, str(WORKER), json.dumps(asdict(job))]
    return [Timed(**json.loads(line)) for line in lab.run([command] * len(job.compute), limit=600)]


def in_turns(lab: Hosts, jobs: Mapping[str, Job], repetitions: int, patience: float) -> dict[str, list[list[Timed]]]:
    """Every job, one round of all after the other."""
    results: dict[str, list[list[Timed]]] = {name: [] for name in jobs}
    for _ in range(repetitions):
        for name, job in jobs.items():
            quiet(patience)
            results[name].append(measure(lab, job))
            print(f"  {name}: {per_microbatch(results[name][-1]):.3f} s per microbatch of a replica", flush=True)
    return results


def per_microbatch(timed: list[Timed]) -> float:
    """Seconds for which one replica's microbatch stands, all replicas together."""
    return statistics.mean(one.seconds for one in timed) * len(timed) / sum(one.microbatches for one in timed)


def typical(results: list[list[Timed]]) -> float:
    return statistics.median(map(per_microbatch, results))


def hidden(results: list[list[Timed]]) -> float:
    return statistics.median(one.hidden for timed in results for one in timed)


def balanced(size: Size, patience: float) -> tuple[list[Claim], dict[str, Any]]:
    """Two equal workers; the link is such that ZeRO-1's communication takes as long as its compute."""
    print("two workers, communication as long as compute")
    with hosts(2) as lab:
        lab.shape_all("100mbit")
        probe = Job("zero1", size.weights, [0.0, 0.0], size.updates, settings=BUCKET)
        took = max(timed.communication for timed in measure(lab, probe))
        job = replace(probe, compute=[took, took])
        methods = ("zero1", "acco", "dpu", "allreduce", "ddp-zero")
        jobs = {method: replace(job, method=method) for method in methods}
        jobs["ddp-zero, default buckets"] = replace(job, method="ddp-zero", settings={})
        jobs["acco, compute 1.5 ×"] = replace(job, method="acco", compute=[1.5 * took] * 2)
        results = in_turns(lab, jobs, size.repetitions, patience)
    times = {name: typical(timed) for name, timed in results.items()}
    shares = {name: hidden(timed) for name, timed in results.items() if not name.startswith("ddp")}
    rows = [(name, time, time / took, shares.get(name, float("nan"))) for name, time in times.items()]
    table(("method", "s per microbatch", "of compute", "hidden"), rows)
    claims = [
        Claim(
            "acco over DDP + ZeroRedundancyOptimizer", times["acco"] / times["ddp-zero, default buckets"], 0.55, True
        ),
        Claim("acco over the same with 1 MiB buckets", times["acco"] / times["ddp-zero"], 0.55, True),
        Claim("acco over our zero1", times["acco"] / times["zero1"], 0.60, True),
        Claim("hidden communication, as long as compute", shares["acco"], 0.95),
        Claim("hidden communication, 2/3 of compute", shares["acco, compute 1.5 ×"], 0.95),
    ]
    return claims, {"communication_seconds": took, "seconds": times, "hidden": shares}


def uneven(size: Size, patience: float) -> tuple[list[Claim], dict[str, Any]]:
    """One worker half as fast as the other, no limit on the link."""
    print("two workers, one half as fast")
    with hosts(2) as lab:
        job = Job("zero1", size.weights, [0.3, 0.6], 2 * size.updates, settings=BUCKET)
        jobs = {
            "zero1": job,
            "acco": replace(job, method="acco"),
            "acco, elastic": replace(job, method="acco", settings={**BUCKET, "elastic": True}),
        }
        results = in_turns(lab, jobs, size.repetitions, patience)
    times = {name: typical(timed) for name, timed in results.items()}
    table(("method", "s per microbatch", "speed-up"), [(name, t, times["zero1"] / t) for name, t in times.items()])
    return [Claim("elastic acco against zero1 (bound 1.5)", times["zero1"] / times["acco, elastic"], 1.4)], {
        "seconds": times
    }


def slow_link(size: Size, patience: float) -> tuple[list[Claim], dict[str, Any]]:
    """A link on which one all-reduce takes 50 updates."""
    print("two workers, a link 50 times too slow for an all-reduce per update")
    compute = 0.1
    bytes_a_second = size.weights * 4 / (50 * compute)
    job = Job("none", size.weights, [compute, compute], size.sparse_updates, warmup=1)
    with hosts(2) as lab:
        lab.shape_all(f"{8 * bytes_a_second / 1e6:.2f}mbit")
        sparse = replace(job, method="sparse", settings=SPARSE)
        bf16 = replace(sparse, settings={**SPARSE, "payload": "bf16"})
        jobs = {"no network": job, "sparse": sparse, "sparse, bf16": bf16}
        results = in_turns(lab, jobs, size.repetitions, patience)
    times = {name: typical(timed) for name, timed in results.items()}
    table(("method", "s per update", "speed"), [(name, t, times["no network"] / t) for name, t in times.items()])
    rounds = (size.sparse_updates + 1) // SPARSE["interval"] - 1 // SPARSE["interval"]
    expected = rounds * 2 * (1 / 2) * SPARSE["fraction"] * size.weights * 4
    ratios = {
        "fp32": statistics.median(one.bytes_sent for timed in results["sparse"] for one in timed) / expected,
        "bf16": statistics.median(one.bytes_sent for timed in results["sparse, bf16"] for one in timed) / expected * 2,
    }
    claims = [Claim("sparse against no network at all", times["no network"] / times["sparse"], 0.97)]
    for payload, ratio in ratios.items():
        claims += [
            Claim(f"bytes sent over bytes expected, {payload}", ratio, 0.98),
            Claim(f"bytes sent over bytes expected, {payload} (upper)", ratio, 1.02, True),
        ]
    return claims, {"seconds": times, "bytes_over_expected": ratios, "link_bytes_a_second": bytes_a_second}


def scaling(size: Size, patience: float) -> tuple[list[Claim], dict[str, Any]]:
    """2, 4 and 8 workers."""
    print("more workers")
    strategies: dict[str, dict[str, Any]] = {
        "allreduce": BUCKET,
        "zero1": BUCKET,
        "dpu": BUCKET,
        "acco": BUCKET,
        "diloco": {**BUCKET, "interval": 10},
        "sparse": {**SPARSE, "interval": 5},
    }
    counts = (2, 4, 8)
    seconds: dict[str, dict[int, float]] = {name: {} for name in strategies}
    with hosts(max(counts)) as lab:
        lab.shape_all("100mbit")
        for count in counts:
            job = Job("", size.scaling_weights, [0.4] * count, size.updates)
            jobs = {name: replace(job, method=name, settings=settings) for name, settings in strategies.items()}
            for name, timed in in_turns(lab, jobs, 1, patience).items():
                seconds[name][count] = typical(timed)
    rows = [(name, *(times[count] for count in counts)) for name, times in seconds.items()]
    table(("s per update", *(f"{count} workers" for count in counts)), rows)
    draw(seconds)
    return [], {"compute_seconds": 0.4, "seconds_per_update": seconds}


def draw(seconds: dict[str, dict[int, float]]) -> None:
    """Time per update against the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, times in seconds.items():
        axes.plot(list(times), list(times.values()), marker="o", label=name)
    axes.axhline(0.4, color="grey", linestyle=":", label="compute")
    axes.set(xlabel="workers", ylabel="seconds per update", ylim=(0, None), xscale="log", xticks=list(seconds["acco"]))
    axes.minorticks_off()
    axes.set_xticklabels([str(count) for count in seconds["acco"]])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "replicas.svg", bbox_inches="tight")


PARTS: dict[str, Callable[[Size, float], tuple[list[Claim], dict[str, Any]]]] = {
    "balanced": balanced,
    "uneven": uneven,
    "slow-link": slow_link,
    "scaling": scaling,
}


def main() -> None:
    options = arguments(__doc__, ("--only", {"choices": list(PARTS), "help": "measure only this part again"}))
    size, about = QUICK if options.quick else Size(), machine()
    patience = 0 if options.quick else options.patience
    claims: list[Claim] = []
    measured: dict[str, Any] = {}
    if options.only is None:
        measured["memory"] = memory_table()
    for name, part in PARTS.items():
        if options.only in (None, name):
            more, measured[name] = part(size, patience)
            claims += more
    report("replicas", options.quick, about, claims, measured, options.only)


if __name__ == "__main__":
    main()
