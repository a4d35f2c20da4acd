"""A process's part of a run, put together from the config: data, stage, versions, strategy, links."""

from __future__ import annotations

import torch

from freerun.checks import clip_scope, weight_policy
from freerun.config import Config
from freerun.data import Data
from freerun.mesh import Fabric
from freerun.model.cut import cut, pieces
from freerun.model.kinds import kind
from freerun.model.stage import Stage, build_stage
from freerun.optim.stepper import StagePlace
from freerun.pipeline.executor import Executor, Links
from freerun.pipeline.feed import Feed
from freerun.pipeline.schedule import max_in_flight, max_versions, versions_needed
from freerun.pipeline.tied import TiedBorrower, TiedOwner, slice_of
from freerun.pipeline.transport import Format, Incoming, Outgoing
from freerun.registry import STRATEGIES, load
from freerun.replicas.base import ReplicaStrategy, StageState
from freerun.saving import Saves
from freerun.weights.delay import steady_delay
from freerun.weights.flat import FlatParameters
from freerun.weights.policy import WeightPolicy
from freerun.weights.versions import WeightVersions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def device_of(config: Config, local_rank: int) -> torch.device:
    """Where this process computes."""
    wants = config.training.device
    if wants == "cuda" or (wants == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
    return torch.device("cpu")


def delay_of(config: Config, stage: int) -> int:
    """The delay of a stage's gradients once the pipeline is full."""
    pipeline = config.pipeline
    return steady_delay(pipeline.schedule, stage, pipeline.stages, pipeline.microbatches, pipeline.slack)


def stage_module(config: Config, vocabulary: int, stage: int) -> Stage:
    """A stage of the model, on the CPU, with the weights that the run starts from."""
    parts = pieces(config.model, vocabulary, config.pipeline.granularity)
    own = cut(parts, config.pipeline.stages, config.pipeline.cut)[stage]
    return build_stage(
        config.model,
        vocabulary,
        [parts[index] for index in own],
        seed=config.training.seed,
        first=stage == 0,
        last=stage == config.pipeline.stages - 1,
    )


def assemble(config: Config, fabric: Fabric, data: Data, device: torch.device, saves: Saves, start: int) -> Executor:
    """Everything one stage needs to carry out its actions."""
    place, pipeline = fabric.place, config.pipeline
    shape = (pipeline.schedule, place.stage, place.stages, pipeline.microbatches)
    dtype = DTYPES[config.training.precision]
    module = stage_module(config, data.tokenizer.vocabulary, place.stage).to(device)
    flat = FlatParameters(module, module.borrowed)
    delay = delay_of(config, place.stage)
    overwrite = weight_policy(config) == "latest"
    depth = max_in_flight(*shape, pipeline.slack)
    versions = WeightVersions(
        module,
        flat,
        dtype,
        max_versions(pipeline.schedule, weight_policy(config), *shape[1:], pipeline.slack),
        in_flight=depth,
        overwrite=overwrite,
        delay=delay,
        remember=lambda version: saves.within(version, delay),
    )
    strategy = build_strategy(config, fabric, flat, module)
    feed = Feed(
        config,
        place,
        data.train,
        data.evaluation,
        device,
        one_batch=strategy.one_batch,
        interleaved=config.replicas.elastic,
    )
    carried = config.optimizer.clip_scope == "carried"
    executor = Executor(
        place,
        module,
        dtype,
        flat,
        versions,
        WeightPolicy(config, flat, delay),
        strategy,
        links(config, fabric, module, flat, versions, device, depth, start),
        feed,
        skip_nonfinite=config.training.nonfinite == "skip",
        deferred=None if overwrite else fabric.deferred,  # overwritten weights are gone later
        norms=torch.zeros(place.stages if carried else 0, dtype=torch.float64),
    )
    if place.replicas > 1:
        versions.on_gradient(executor.gradient_done)
    return executor


def build_strategy(config: Config, fabric: Fabric, flat: FlatParameters, module: Stage) -> ReplicaStrategy:
    """What the replicas of this stage do together."""
    place = fabric.place
    name = config.replicas.strategy if place.replicas > 1 else "none"
    state = StageState(
        flat=flat,
        kinds={name: kind(name, parameter) for name, parameter in module.named_parameters()},
        place=StagePlace(place.stage, place.stages, delay_of(config, place.stage)),
        group=fabric.replicas,
        stage_group=fabric.norms if place.stages > 1 and clip_scope(config) == "global" else None,
        config=config,
        updates=config.training.updates,
    )
    strategy: ReplicaStrategy = load(STRATEGIES[name])(state)
    return strategy


def links(
    config: Config,
    fabric: Fabric,
    module: Stage,
    flat: FlatParameters,
    versions: WeightVersions,
    device: torch.device,
    depth: int,
    start: int,
) -> Links:
    """The ends of links that this stage has."""
    place = fabric.place
    norms = place.stages if config.optimizer.clip_scope == "carried" else 0
    dtype = DTYPES[config.training.precision]

    def form(width: int) -> Format:
        return Format((config.training.sequences, config.model.context, width), dtype, device, norms)

    ends = Links()
    # every evaluation sends its microbatches at once, so let as many be under way as a training step never reaches
    depth += config.evaluation.microbatches + 2
    if not place.last:
        ends.activations_out = Outgoing(fabric.activations, place.stage + 1, form(module.output_width), depth)
        ends.gradients_in = Incoming(fabric.gradients, place.stage + 1, form(module.output_width))
    if not place.first:
        ends.activations_in = Incoming(fabric.activations, place.stage - 1, form(module.input_width))
        ends.gradients_out = Outgoing(fabric.gradients, place.stage - 1, form(module.input_width), depth)
    if module.lent:
        ends.tied_owner = TiedOwner(
            fabric.tied_weights, fabric.tied_gradients, flat, slice_of(flat, module.lent[0]), depth + 2
        )
    if module.borrowed:
        oldest = oldest_version(config, 0, start)
        ends.tied_borrower = TiedBorrower(
            fabric.tied_weights, fabric.tied_gradients, module, module.borrowed[0], versions, oldest
        )
    return ends


def oldest_version(config: Config, stage: int, after_update: int) -> int:
    """The oldest version that a stage's forwards still see after an update."""
    pipeline = config.pipeline
    mesh = (pipeline.schedule, stage, pipeline.stages, pipeline.microbatches)
    return versions_needed(*mesh, config.training.updates, pipeline.slack, after_update=after_update).start
