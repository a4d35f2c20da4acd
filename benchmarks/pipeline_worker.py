"""One stage of benchmarks/pipeline.py: runs jobs one after the other with the same neighbours, and times each.

A job is run by freerun's own worker, loop and executor, or by torch.distributed.pipelining on the same stage modules,
with the same optimizer and data. In a timed job the stage's compute is a wait, as a stand-in for an accelerator.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… pipeline_worker.py JOBS.json FOLDER
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import CACHE
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from freerun import assembly, config_files
from freerun.config import Config
from freerun.data import build
from freerun.mesh import Fabric, join, leave
from freerun.model.kinds import kind
from freerun.model.loss import token_loss
from freerun.model.stage import Stage
from freerun.optim.stepper import NamedParameter, StagePlace, Stepper
from freerun.saving import Saves
from freerun.steps import run
from freerun.trace import BUSY, Tracer
from freerun.train import train
from freerun.weights.flat import FlatParameters
from freerun.worker import prepare

CPU = torch.device("cpu")
PEERS = {"torch-1f1b": Schedule1F1B, "torch-gpipe": ScheduleGPipe}


@dataclass(frozen=True)
class Job:
    """What to run: config keys on top of the recipe `single`."""

    settings: dict[str, str]
    runtime: str = "freerun"
    """freerun, one of PEERS, bare, or matmul."""
    waits: list[float] | None = None
    """Per stage, the seconds of a forward and a backward together, when these are timed waits."""
    skip: int = 3
    """Updates at either end that are not counted: the pipeline fills and drains."""

    def config(self) -> Config:
        fixed = {
            "data.cache": str(CACHE),
            "training.threads": "1",
            "evaluation.microbatches": "0",
            "checkpoint.every": "0",
            "run.tensorboard": "false",
            "run.trace_updates": "0",
            "run.time_limit": "60",
        }
        return config_files.read("single", list({**fixed, **self.settings}.items()))


@dataclass
class Mark:
    """How far a stage was when it had made a version."""

    seconds: float
    cpu: float
    busy: float
    waited_on_compute: float


@dataclass
class Measured:
    """A stage's steady state, and what it kept."""

    seconds_per_microbatch: float
    busy_per_microbatch: float
    compute_per_microbatch: float
    """Of a timed stage: the waits themselves, as they really were."""
    cpu_per_microbatch: float
    loss: float = 0.0
    parameters: int = 0
    weight_bytes: int = 0
    """All parameters in memory when the last version was made."""
    summary_weight_bytes: int = 0


class TimedStage(Stage):
    """A stage that learns nothing: its forward takes a third of a fixed time, its backward the rest."""

    def __init__(self, width: int, vocabulary: int, context: int, *, first: bool, last: bool, seconds: float) -> None:
        super().__init__()
        self.input_width = 0 if first else width
        self.output_width = vocabulary if last else width
        self.context = context
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor, cache: Any = None) -> Tensor:
        hidden: Tensor = Waiting.apply(inputs, self.weight, self.output_width, self.seconds)
        return hidden


class Waiting(torch.autograd.Function):
    """Waits, and counts for how long."""

    total = 0.0

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, width: int, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape, ctx.floats = seconds, inputs.shape, inputs.is_floating_point()
        Waiting.wait(seconds / 3)
        return weight.new_zeros(*inputs.shape[:2], width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        Waiting.wait(ctx.seconds * 2 / 3)
        return gradients[0].new_zeros(ctx.shape) if ctx.floats else None, gradients[0].new_zeros(1), None, None

    @classmethod
    def wait(cls, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        cls.total += time.perf_counter() - start


class Clocked(Saves):
    """Saves that note the time at every version, and how much of it the stage was busy."""

    def __init__(self, config: Config, fabric: Fabric, tracer: Tracer) -> None:
        super().__init__(config, fabric.place, fabric.board)
        self.marks: list[Mark] = []
        self.weight_bytes = 0
        self._tracer = tracer

    def made(self, version: int, *more: Any) -> None:
        super().made(version, *more)
        self.marks.append(mark(self._tracer))
        if version == self.end:
            self.weight_bytes = weight_bytes()


def mark(tracer: Tracer | None = None) -> Mark:
    busy = sum(tracer.nanoseconds[name] for name in BUSY) / 1e9 if tracer else 0.0
    return Mark(time.perf_counter(), time.process_time(), busy, Waiting.total)


def by_freerun(job: Job, config: Config) -> Measured:
    """What freerun.worker does, with a timed stage if the job has one."""
    fabric = join(config, CPU)
    with tempfile.TemporaryDirectory() as folder:
        training = prepare(config, fabric, CPU, Path(folder))
        training.saves = saves = Clocked(config, fabric, training.tracer)
        with patch.object(assembly, "stage_module", module_maker(job)), redirect_stderr(StringIO()):
            summary = run(train(training))
    part = fabric.board.look(f"summary/{fabric.place.rank}")
    run(leave(fabric))
    measured = steady(saves.marks, job, config)
    measured.loss = summary["train_loss"] if summary else 0.0
    measured.weight_bytes = saves.weight_bytes
    measured.summary_weight_bytes = part["peak_weight_bytes"]
    measured.parameters = part["parameters"]
    return measured


def module_maker(job: Job) -> Any:
    """What makes the stage: the config's decoder, or a timed one."""
    if job.waits is None:
        return assembly.stage_module
    waits = job.waits

    def timed(config: Config, vocabulary: int, stage: int) -> Stage:
        last = stage == config.pipeline.stages - 1
        model = config.model
        return TimedStage(model.width, vocabulary, model.context, first=stage == 0, last=last, seconds=waits[stage])

    return timed


def weight_bytes() -> int:
    """Bytes of memory that the parameters of all modules in this process lie in."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is nn.Parameter]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def by_torch(job: Job, config: Config) -> Measured:
    """The same stages under torch.distributed.pipelining, by the loop of its documentation."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, stages, each = dist.get_rank(), dist.get_world_size(), config.pipeline.microbatches
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    module = module_maker(job)(config, data.tokenizer.vocabulary, rank)
    flat = FlatParameters(module)
    parameters = [NamedParameter(name, kind(name, p), p) for name, p in module.named_parameters()]
    stepper = Stepper(config.optimizer, config.training.updates, StagePlace(rank, stages, 0), parameters)
    tokens = config.training.sequences * config.model.context * each
    stage = PipelineStage(module, rank, stages, CPU)
    schedule = PEERS[job.runtime](
        stage, each, loss_fn=lambda logits, labels: token_loss(logits, labels) / tokens, scale_grads=False
    )
    marks, recent = [], []
    for update in range(config.training.updates):
        numbers = range(update * each, (update + 1) * each)
        if rank == 0:
            schedule.step(torch.cat([data.train.get(number).tokens for number in numbers]))
        elif rank == stages - 1:
            losses: list[Tensor] = []
            schedule.step(target=torch.cat([data.train.get(number).labels for number in numbers]), losses=losses)
            recent.append(float(sum(losses)))
        else:
            schedule.step()
        run(stepper.step(update, 0))
        flat.gradient.zero_()
        marks.append(mark())
    dist.barrier()
    dist.destroy_process_group()
    measured = steady(marks, job, config)
    measured.loss = sum(recent[-50:]) / max(len(recent[-50:]), 1)
    return measured


def by_bare_loop(job: Job, config: Config) -> Measured:
    """What anybody would write, in one process: no pipeline, torch's optimizer."""
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    module = module_maker(job)(config, data.tokenizer.vocabulary, 0)
    optimizer = torch.optim.AdamW(module.parameters(), config.optimizer.lr)
    marks = []
    for update in range(config.training.updates):
        batch = data.train.get(update)
        loss = token_loss(module(batch.tokens), batch.labels) / batch.labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark())
    return steady(marks, job, config)


def steady(marks: list[Mark], job: Job, config: Config) -> Measured:
    """Per microbatch, between the marks that count."""
    first, last = marks[job.skip - 1], marks[-1 - job.skip]
    microbatches = (len(marks) - 2 * job.skip) * config.pipeline.microbatches
    return Measured(
        (last.seconds - first.seconds) / microbatches,
        (last.busy - first.busy) / microbatches,
        (last.waited_on_compute - first.waited_on_compute) / microbatches,
        (last.cpu - first.cpu) / microbatches,
    )


def by_matmul(job: Job, config: Config) -> Measured:
    """Products of two 512 × 512 matrices, in all processes at once; one counts as a microbatch."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    left = torch.randn(512, 512)
    dist.barrier()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 2:
        left @ left
        count += 1
    seconds = (time.perf_counter() - start) / count
    dist.barrier()
    dist.destroy_process_group()
    return Measured(seconds, seconds, seconds, seconds)


def precise_sleep() -> None:
    """Ask Linux to end sleeps on time, rather than up to 50 µs later."""
    if sys.platform == "linux":
        pr_set_timerslack = 29
        ctypes.CDLL(None).prctl(pr_set_timerslack, 1)


def main() -> None:
    jobs = [Job(**job) for job in json.loads(Path(sys.argv[1]).read_text())]
    folder, port = Path(sys.argv[2]), int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    precise_sleep()
    results = []
    for number, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = str(port + number)
        measure = {"freerun": by_freerun, "bare": by_bare_loop, "matmul": by_matmul}.get(job.runtime, by_torch)
        results.append(asdict(measure(job, job.config())))
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    print("done", flush=True)


if __name__ == "__main__":
    main()
