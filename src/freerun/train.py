"""The training loop of one process: what the schedule decides, carried out in order, as steps that can pause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from freerun import checkpoint, summary
from freerun.assembly import assemble, oldest_version
from freerun.config import Config
from freerun.data import Data
from freerun.errors import ConfigError
from freerun.evaluation import Evaluations
from freerun.mesh import Fabric, collect
from freerun.metrics import Reporter, sinks
from freerun.pipeline.executor import Executor
from freerun.pipeline.program import Discard, Evaluate, Mark, Step, elastic, program
from freerun.pipeline.schedule import Backward, Forward, Update, in_flight, resumed, versions_needed
from freerun.replicas.base import refuse_unequal_start
from freerun.saving import Saves
from freerun.state import load_state, state_of
from freerun.steps import Steps
from freerun.trace import Tracer, traced, write_trace
from freerun.weights.delay import lag


@dataclass
class Run:
    """What one process trains with."""

    config: Config
    fabric: Fabric
    data: Data
    device: torch.device
    folder: Path
    saves: Saves
    tracer: Tracer
    doing: Step | None = None
    """The action under way, for the error when it fails."""


def train(run: Run) -> Steps[summary.Summary | None]:
    """Train one stage of one replica; the process that speaks for the run returns the summary."""
    if run.config.evaluation.microbatches:
        run.data.evaluation.numbers(0)  # a lack of held-out data shows here, not when it is needed
    start = yield from starting_update(run)
    executor = assemble(run.config, run.fabric, run.data, run.device, run.saves, start)
    evaluations = Evaluations(run.config, run.fabric, executor)
    if start:
        resume(run, executor, start)
    else:
        yield from refuse_unequal_start(run.fabric.side, executor.flat.weights)
    evaluates = evaluations.due(start, run.saves.end)
    if evaluates:
        yield from evaluations.keep(start)
    rows_to = sinks(run.config, run.folder, start, run.fabric.place, evaluates)
    with closing(Reporter(run.config, rows_to, start, executor.microbatches_done)) as reporter:
        run.tracer.restart()
        yield from executor.start(oldest_version(run.config, 0, start))
        for step in steps(run, start, executor, evaluations):
            run.doing = step
            yield from carry_out(run, step, executor, evaluations, reporter)
        for evaluation in (yield from evaluations.arrived(all_of_them=True)):
            reporter.evaluated(evaluation)
        yield from executor.close(run.saves.end)
    return (yield from finished(run, executor, evaluations, reporter))


def carry_out(run: Run, step: Step, executor: Executor, evaluations: Evaluations, reporter: Reporter) -> Steps[None]:
    """Do what a step says."""
    tracer = run.tracer
    match step:
        case Forward():
            work = executor.forward(step)
            yield from traced(work, tracer, "forward", microbatch=step.microbatch, version=step.version)
        case Backward():
            work = executor.backward(step)
            yield from traced(work, tracer, "backward", microbatch=step.microbatch, version=step.version)
        case Update():
            yield from traced(executor.update(step), tracer, "update", update=step.update, delay=step.delay)
        case Evaluate():
            with reporter.aside():
                yield from traced(evaluations.run(step.version), tracer, "evaluate", version=step.version)
        case Discard():
            yield from executor.discard()
        case Mark():
            yield from marked(run, step.version, executor, evaluations, reporter)


def resume(run: Run, executor: Executor, start: int) -> None:
    """Take up the checkpoint of an update."""
    state = checkpoint.load(run.folder / "checkpoints", start, run.fabric.place)
    if state["ended"] and oldest_version(run.config, 0, start) < start:
        raise ConfigError(
            f"training.updates is {run.config.training.updates}, but the run ended after {start} and its pipeline "
            "has run empty; start anew, or stop runs that are to go on with Ctrl-C or SIGTERM."
        )
    load_state(executor, state, run.data.fingerprint)


def steps(run: Run, start: int, executor: Executor, evaluations: Evaluations) -> Iterator[Step]:
    """The schedule of this stage from `start` on, with evaluations and marks."""
    pipeline, place = run.config.pipeline, run.fabric.place

    def due(version: int) -> bool:
        return evaluations.due(version, run.saves.end)

    def stop(version: int) -> bool:
        return version >= run.saves.end

    def surplus(version: int) -> range:
        own, before = (forwards_done(run.config, stage, version) for stage in (place.stage, max(place.stage - 1, 0)))
        return range(own, before)

    if run.config.replicas.elastic:
        return elastic(
            start=start,
            first_microbatch=executor.microbatches_done,
            wants_more=executor.strategy.wants_more,
            ended=executor.strategy.ended,
            due=due,
            stop=stop,
        )
    flushes = pipeline.schedule in ("gpipe", "1f1b")
    return program(
        resumed(
            pipeline.schedule,
            place.stage,
            place.stages,
            pipeline.microbatches,
            run.config.training.updates,
            pipeline.slack,
            from_update=start,
        ),
        first_lag=0 if flushes else lag(0, place.stages, pipeline.slack),
        microbatches=pipeline.microbatches,
        start=start,
        due=due,
        stop=stop,
        surplus=surplus,
    )


def forwards_done(config: Config, stage: int, version: int) -> int:
    """How many forwards a stage has done when it has just made a version."""
    pipeline, updates = config.pipeline, config.training.updates
    mesh = (pipeline.schedule, stage, pipeline.stages, pipeline.microbatches, updates, pipeline.slack)
    return version * pipeline.microbatches + len(in_flight(*mesh, after_update=version))


def marked(run: Run, version: int, executor: Executor, evaluations: Evaluations, reporter: Reporter) -> Steps[None]:
    """A version has been made: report, keep what its evaluation needs, save."""
    run.saves.made(version, executor.strategy.ended(version))
    run.tracer.at_update(version)
    reporter.updated(version, executor.microbatches_done, executor.take_loss(), executor.strategy.metrics())
    if evaluations.due(version, run.saves.end):
        yield from evaluations.keep(version)
    for evaluation in (yield from evaluations.arrived()):
        reporter.evaluated(evaluation)
    if run.saves.due(version):
        with reporter.aside():
            yield from traced(save(run, version, executor), run.tracer, "checkpoint", version=version)


def save(run: Run, version: int, executor: Executor) -> Steps[None]:
    """Save this process's part of a checkpoint, and drop those that are no longer needed."""
    pipeline, place = run.config.pipeline, run.fabric.place
    needed = versions_needed(
        pipeline.schedule,
        place.stage,
        place.stages,
        pipeline.microbatches,
        run.config.training.updates,
        pipeline.slack,
        after_update=version,
    )
    folder = run.folder / "checkpoints"
    state = yield from state_of(executor, needed, run.data.fingerprint)
    checkpoint.save(folder, version, place, state)
    checkpoint.prune(folder, place, summary.everyone(run.config), run.config.checkpoint.keep)


def starting_update(run: Run) -> Steps[int]:
    """Zero, or the newest checkpoint of which every process has its part; all processes come to the same answer."""
    if not run.config.run.resume:
        return 0
    place, board = run.fabric.place, run.fabric.board
    everyone = summary.everyone(run.config)
    board.put(f"parts/{place.rank}", checkpoint.parts(run.folder / "checkpoints", place))
    have = yield from collect(board, "parts", everyone)
    start = checkpoint.newest(run.folder / "checkpoints", have)
    checkpoint.drop_after(run.folder / "checkpoints", place, start)
    return start


def finished(
    run: Run, executor: Executor, evaluations: Evaluations, reporter: Reporter
) -> Steps[summary.Summary | None]:
    """Put the parts of all processes together."""
    place, board, fabric = run.fabric.place, run.fabric.board, run.fabric
    weights = yield from executor.strategy.mean_weights()
    sent = {
        "pipeline": sum(
            group.bytes_sent
            for group in (fabric.activations, fabric.gradients, fabric.tied_weights, fabric.tied_gradients)
        ),
        "replicas": fabric.replicas.bytes_sent,
    }
    disagreement = yield from executor.strategy.disagreement(weights)
    board.put(f"summary/{place.rank}", summary.part_of(executor, weights, run.tracer, reporter, sent, disagreement))
    if not place.reports:
        return None
    parts = yield from collect(board, "summary", summary.everyone(run.config))
    whole = summary.summarise(run.config, run.saves.end, parts, evaluations.results)
    summary.write(run.folder / "summary.json", whole)
    write_trace(run.folder / "trace.json", [part["trace"] for part in parts])
    return whole
