"""What delay does to a run, per stage: misalignment of the Hessian, oscillation of updates, their staleness."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from freerun import checkpoint, config_files
from freerun.assembly import delay_of, stage_module
from freerun.config import Config
from freerun.data import Batch, Data, build
from freerun.errors import ConfigError
from freerun.files import write_text
from freerun.groups import Solo
from freerun.hessian import leading_direction, misalignment, product, rotated
from freerun.mesh import Place, places
from freerun.model.kinds import kind
from freerun.model.loss import token_loss
from freerun.model.stage import Stage
from freerun.optim.stepper import StagePlace
from freerun.replicas.base import StageState, whole_stepper
from freerun.simulate.replay import simulate
from freerun.steps import run
from freerun.summary import everyone
from freerun.weights.delay import version_of
from freerun.weights.flat import FlatParameters

SHARDED = ("zero1", "dpu", "acco")


@dataclasses.dataclass
class Effort:
    """How much is measured."""

    probes: int = 24
    batches: int = 8
    updates: int = 30
    power_iterations: int = 20


@dataclasses.dataclass
class Diagnosis:
    """What was measured of a stage."""

    stage: int
    delay: int
    misalignment: float
    """‖H‖₁,₁ of the stage's matrices over n‖H‖_F."""
    misalignment_rotated: float
    """The same in the eigenbasis of the gradient covariances."""
    oscillation: float
    """Share of updates whose step along the Hessian's leading direction turns back on the one before."""
    gradient_cosine: float
    """Between the gradient that is as late as this stage's and a fresh one."""
    update_cosine: float
    """Between the updates that these two gradients give."""


class Stages:
    """The whole model as its stages, with the optimizers of a checkpoint."""

    def __init__(self, folder: Path, config: Config, update: int, data: Data) -> None:
        self.config = config
        self.update = update
        self.data = data
        mesh = places(config.pipeline.stages, config.replicas.count)[: config.pipeline.stages]
        self.states = [checkpoint.load(folder / "checkpoints", update, place) for place in mesh]
        self.modules = [stage_module(config, data.tokenizer.vocabulary, place.stage) for place in mesh]
        self.flats = [FlatParameters(module, module.borrowed) for module in self.modules]
        _tie(self.modules)
        self.steppers = [self._stepper(place) for place in mesh]

    def place_versions(self, late: bool) -> None:
        """Have the weights that the oldest gradient of the next update saw, or the newest ones."""
        for stage, (flat, state) in enumerate(zip(self.flats, self.states, strict=True)):
            version = self._oldest(stage) if late else self.update
            with torch.no_grad():
                flat.weights.copy_(state["versions"][version])

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, through all stages."""
        hidden = batch.tokens
        for module in self.modules:
            hidden = module(hidden)
        return token_loss(hidden, batch.labels) / (batch.labels != -100).sum()

    def gradients(self, batch: Batch, late: bool) -> list[Tensor]:
        """Each stage's flat gradient of a batch."""
        self.place_versions(late)
        for flat in self.flats:
            flat.gradient.zero_()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        return [flat.gradient.clone() for flat in self.flats]

    def step_of(self, stage: int, gradient: Tensor) -> Tensor:
        """The update that a stage's optimizer makes of a gradient, at the newest weights."""
        flat, stepper = self.flats[stage], self.steppers[stage]
        flat.gradient.copy_(gradient)
        proposed = run(stepper.propose(self.update, delay_of(self.config, stage)))
        assert proposed is not None
        parameters = [p for group in stepper.optimizer.param_groups for p in group["params"]]
        return torch.cat([(new - old).detach().flatten() for new, old in zip(proposed, parameters, strict=True)])

    def matrices(self, stage: int) -> dict[str, nn.Parameter]:
        """A stage's matrices by name."""
        return {n: p for n, p in self.flats[stage].parameters.items() if kind(n, p) == "matrix"}

    def _oldest(self, stage: int) -> int:
        pipeline = self.config.pipeline
        first = self.update * pipeline.microbatches
        return version_of(pipeline.schedule, first, stage, pipeline.stages, pipeline.microbatches, pipeline.slack)

    def _stepper(self, place: Place) -> Any:
        flat, module = self.flats[place.stage], self.modules[place.stage]
        kinds: dict[str, str] = {name: kind(name, parameter) for name, parameter in module.named_parameters()}
        where = StagePlace(place.stage, place.stages, delay_of(self.config, place.stage))
        stepper = whole_stepper(StageState(flat, kinds, where, Solo(), None, self.config, self.config.training.updates))
        stepper.optimizer.load_state_dict(self.states[place.stage]["strategy"]["optimizer"])
        return stepper


def diagnose(folder: Path, update: int | None, effort: Effort) -> list[Diagnosis]:
    """Measure every stage of a run at one of its checkpoints, which must be from before its end."""
    config = config_files.read(str(folder / "config.toml"))
    update = choose_checkpoint(folder, config, update)
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    stages = Stages(folder, config, update, data)
    first = update * config.pipeline.microbatches * config.replicas.count
    batches = [data.train.get(first + index) for index in range(effort.batches)]
    cosines = staleness(stages, batches)
    steps = updates_after(folder, config, update, effort.updates)
    found = []
    for stage in range(config.pipeline.stages):
        before, after, turns = curvature(stages, stage, batches, steps[stage], effort)
        found.append(Diagnosis(stage, delay_of(config, stage), before, after, turns, *cosines[stage]))
    return found


def choose_checkpoint(folder: Path, config: Config, update: int | None) -> int:
    """The newest checkpoint with microbatches in flight, or the one asked for."""
    if config.replicas.count > 1 and config.replicas.strategy in SHARDED:
        raise ConfigError(
            f"replicas.strategy is {config.replicas.strategy}, whose optimizer state is in shards; diagnose a run with "
            "none, allreduce, sparse or diloco."
        )
    have = [at for at in checkpoint.complete(folder / "checkpoints", everyone(config)) if at < config.training.updates]
    if not have or (update is not None and update not in have):
        raise ConfigError(
            f"{folder} has no checkpoint {'from before its end' if update is None else update}; train with "
            f"checkpoint.every and checkpoint.keep so that it does{f' (it has {have})' if have else ''}."
        )
    return have[-1] if update is None else update


def staleness(stages: Stages, batches: list[Batch]) -> list[tuple[float, float]]:
    """Per stage, the mean cosine between late and fresh gradients, and between the updates that they give."""
    sums = [[0.0, 0.0] for _ in stages.modules]
    for batch in batches:
        late, fresh = stages.gradients(batch, late=True), stages.gradients(batch, late=False)
        for stage, total in enumerate(sums):
            total[0] += _cosine(late[stage], fresh[stage])
            total[1] += _cosine(stages.step_of(stage, late[stage]), stages.step_of(stage, fresh[stage]))
    return [(total[0] / len(batches), total[1] / len(batches)) for total in sums]


def updates_after(folder: Path, config: Config, update: int, count: int) -> list[list[Tensor]]:
    """Per stage, the changes of its weights in the updates that follow, by replaying the run from its checkpoint."""
    count = min(count, config.training.updates - update)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        here = f"update-{update:08d}"
        shutil.copytree(folder / "checkpoints" / here, scratch / "checkpoints" / here)
        again = dataclasses.replace(
            config,
            checkpoint=dataclasses.replace(config.checkpoint, every=1, keep=count + 2),
            evaluation=dataclasses.replace(config.evaluation, microbatches=0),
            run=dataclasses.replace(config.run, dir=name, resume=True, tensorboard=False, wandb="", trackio=""),
        )
        simulate(again, scratch, end=update + count)
        steps = []
        for place in everyone(config)[: config.pipeline.stages]:
            saved = [checkpoint.load(scratch / "checkpoints", at, place) for at in range(update, update + count + 1)]
            steps.append([new["weights"] - old["weights"] for old, new in itertools.pairwise(saved)])
    return steps


def curvature(
    stages: Stages, stage: int, batches: list[Batch], steps: list[Tensor], effort: Effort
) -> tuple[float, float, float]:
    """A stage's misalignment before and after rotation, and how its updates turn back along the leading direction."""
    random = torch.Generator().manual_seed(0)
    matrices = stages.matrices(stage)
    bases = covariance_bases(stages, list(matrices), stage, batches)
    stages.place_versions(late=False)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        multiply = product(stages.loss(batches[0]), list(matrices.values()))
    like = [parameter.detach() for parameter in matrices.values()]
    before = misalignment(multiply, like, effort.probes, random)
    after = misalignment(rotated(multiply, bases), like, effort.probes, random)
    leading = leading_direction(multiply, like, effort.power_iterations, random)
    parts = {part.name: part for part in stages.flats[stage].slices}
    along = [
        sum(float((parts[n].of(step) * v).sum()) for n, v in zip(matrices, leading, strict=True)) for step in steps
    ]
    turns = [a * b < 0 for a, b in itertools.pairwise(along)]
    return before, after, sum(turns) / max(len(turns), 1)


def covariance_bases(stages: Stages, names: list[str], stage: int, batches: list[Batch]) -> list[tuple[Tensor, Tensor]]:
    """The eigenvectors of Σ G Gᵀ and Σ Gᵀ G of each matrix over some batches."""
    parts = {part.name: part for part in stages.flats[stage].slices}
    gradients = [stages.gradients(batch, late=False)[stage] for batch in batches]
    bases = []
    for name in names:
        each = torch.stack([parts[name].of(gradient) for gradient in gradients])
        left = torch.linalg.eigh((each @ each.mT).sum(0)).eigenvectors
        right = torch.linalg.eigh((each.mT @ each).sum(0)).eigenvectors
        bases.append((left, right))
    return bases


def write(found: list[Diagnosis], path: Path) -> None:
    """Write the numbers as JSON."""
    write_text(path, json.dumps([dataclasses.asdict(one) for one in found], indent=1))


def _tie(modules: list[Stage]) -> None:
    """Let the last stage use the first one's own embedding, so that its gradient is the sum of both uses."""
    for name in modules[-1].borrowed:
        owner, _, attribute = name.rpartition(".")
        modules[-1].get_submodule(owner).register_parameter(attribute, modules[0].get_parameter(name))


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
