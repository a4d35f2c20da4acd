"""One replica of benchmarks/replicas.py: trains a stand-in model whose compute is a timed wait, and times its updates.

The forward and backward of a layer sleep as long as an accelerator would compute; gradients, optimizer, buffers and
messages are real. So cores are not the limit, and torch's DistributedDataParallel can overlap as it is made to.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from freerun.config import Config, OptimizerConfig, ReplicasConfig, TrainingConfig
from freerun.groups import DistributedGroup, Group, Solo
from freerun.optim.stepper import StagePlace
from freerun.registry import STRATEGIES, load
from freerun.replicas.base import ReplicaStrategy, StageState
from freerun.steps import run
from freerun.weights.flat import FlatParameters


@dataclass(frozen=True)
class Job:
    """What to train; method is a strategy of freerun's, or ddp-zero for torch's own."""

    method: str
    weights: int
    compute: list[float]
    """Seconds of forward and backward of a microbatch, by replica."""
    updates: int
    warmup: int = 2
    layers: int = 16
    settings: dict[str, Any] = field(default_factory=dict)
    """Of ReplicasConfig; of ddp-zero, bucket_mib."""


@dataclass
class Timed:
    """What came out."""

    seconds: float
    microbatches: int
    bytes_sent: int = 0
    communication: float = 0.0
    """Seconds that communication took, per update."""
    hidden: float = 0.0


class TimedLayer(torch.autograd.Function):
    """Waits in forward and, twice as long, in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds / 3)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return gradient, torch.full(ctx.shape, 1e-3), None


class TimedModel(nn.Module):
    """Layers of equal size that cost nothing but time."""

    def __init__(self, job: Job, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(job.weights // job.layers)) for _ in range(job.layers)])
        self.seconds = seconds / job.layers

    def forward(self, inputs: Tensor) -> Tensor:
        for weight in self.layers:
            inputs = TimedLayer.apply(inputs, weight, self.seconds)
        return inputs


def train_freerun(job: Job, model: TimedModel, group: Group) -> Timed:
    """Any of freerun's strategies."""
    config = Config(
        replicas=ReplicasConfig(strategy=job.method, count=group.size, **job.settings),
        optimizer=OptimizerConfig(warmup=0, schedule="constant"),
        training=TrainingConfig(updates=10**6),
    )
    flat = FlatParameters(model)
    state = StageState(flat, dict.fromkeys(flat.parameters, "vector"), StagePlace(0, 1, 0), group, None, config, 10**6)
    strategy: ReplicaStrategy = load(STRATEGIES[job.method])(state)
    for name, parameter in flat.parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: strategy.gradient_ready([name]))
    timed = Timed(0.0, 0)
    start = time.perf_counter()
    before = (0, 0.0, 0.0)
    for update in range(job.warmup + job.updates):
        if update == job.warmup:
            start, timed.microbatches = time.perf_counter(), 0
            before = (group.bytes_sent, strategy.timing.took, strategy.timing.waited)
        count = 1
        backward(model)
        while strategy.wants_more():
            backward(model)
            count += 1
        run(strategy.update(update, 0, count))
        flat.gradient.zero_()
        timed.microbatches += count
    timed.seconds = time.perf_counter() - start
    took, waited = strategy.timing.took - before[1], strategy.timing.waited - before[2]
    timed.bytes_sent = group.bytes_sent - before[0]
    timed.communication = took / job.updates
    timed.hidden = 1 - waited / took if took else 1.0
    run(strategy.finish())
    return timed


def train_torch(job: Job, model: TimedModel) -> Timed:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model, bucket_cap_mb=job.settings.get("bucket_mib"))
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=1e-3)
    start = time.perf_counter()
    for update in range(job.warmup + job.updates):
        if update == job.warmup:
            start = time.perf_counter()
        optimizer.zero_grad()
        backward(parallel)
        optimizer.step()
    return Timed(time.perf_counter() - start, job.updates)


def backward(model: nn.Module) -> None:
    """A microbatch forward and backward."""
    model(torch.ones(1, requires_grad=True)).sum().backward()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = TimedModel(job, job.compute[rank])
    group: Group = Solo()
    if size > 1 and job.method != "none":
        assert dist.group.WORLD is not None
        group = DistributedGroup(dist.group.WORLD, list(range(size)), [f"replica {r}" for r in range(size)], 120)
    dist.barrier()
    timed = train_torch(job, model) if job.method == "ddp-zero" else train_freerun(job, model, group)
    dist.barrier()
    print(json.dumps(asdict(timed)), flush=True)


if __name__ == "__main__":
    main()
