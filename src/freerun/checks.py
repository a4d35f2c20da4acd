"""Every check of a config, before anything is loaded: each refusal names the key, the value, and what would work."""

from __future__ import annotations

from collections.abc import Iterable

from freerun.config import Config, DataConfig, ModelConfig
from freerun.errors import ConfigError
from freerun.registry import OPTIMIZERS, STRATEGIES
from freerun.replicas.checks import check as check_replicas
from freerun.weights.delay import check as check_schedule


def weight_policy(config: Config) -> str:
    """The weight policy in force: what auto stands for with this schedule."""
    if config.pipeline.weights != "auto":
        return config.pipeline.weights
    return "two-version" if config.pipeline.schedule == "two-version" else "stash"


def clip_scope(config: Config) -> str:
    """The scope of clipping in force: the whole model where the schedule flushes, the stage where it does not."""
    if config.optimizer.clip_scope != "auto":
        return config.optimizer.clip_scope
    flushes = config.pipeline.schedule in ("gpipe", "1f1b") or config.pipeline.stages == 1
    return "global" if flushes else "stage"


def validate(config: Config) -> None:
    """Refuse what can't be, before anything is loaded; each refusal names the key, the value, and what would work."""
    _at_least(config)
    _check_model(config.model)
    _check_data(config.data)
    _check_pipeline(config)
    _check_replicas(config)
    _check_optimizer(config)


def validate_replay(config: Config) -> None:
    """Refuse what a replay can't do."""
    if config.replicas.elastic:
        raise ConfigError(
            "replicas.elastic lets the clock decide how much is accumulated, and a replay has none; "
            "use freerun train, or switch it off."
        )


def _at_least(config: Config) -> None:
    floors: list[tuple[str, float, float]] = [
        ("model.layers", config.model.layers, 1),
        ("model.width", config.model.width, 1),
        ("model.heads", config.model.heads, 1),
        ("model.context", config.model.context, 2),
        ("pipeline.stages", config.pipeline.stages, 1),
        ("pipeline.microbatches", config.pipeline.microbatches, 1),
        ("pipeline.slack", config.pipeline.slack, 0),
        ("replicas.count", config.replicas.count, 1),
        ("replicas.interval", config.replicas.interval, 1),
        ("training.updates", config.training.updates, 1),
        ("training.sequences", config.training.sequences, 1),
        ("optimizer.lr", config.optimizer.lr, 0),
        ("optimizer.warmup", config.optimizer.warmup, 0),
        ("optimizer.clip", config.optimizer.clip, 0),
        ("optimizer.weight_decay", config.optimizer.weight_decay, 0),
        ("optimizer.rotation.interval", config.optimizer.rotation.interval, 1),
        ("optimizer.rotation.fresh", config.optimizer.rotation.fresh, 0),
        ("optimizer.rotation.tempering", config.optimizer.rotation.tempering, 0),
        ("optimizer.rotation.grading", config.optimizer.rotation.grading, 0),
        ("optimizer.rotation.block", config.optimizer.rotation.block, 0),
        ("evaluation.every", config.evaluation.every, 0),
        ("evaluation.microbatches", config.evaluation.microbatches, 0),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("run.log_every", config.run.log_every, 1),
        ("run.time_limit", config.run.time_limit, 1),
    ]
    for key, value, floor in floors:
        if not value >= floor:
            raise ConfigError(f"{key} is {value:g}; it must be at least {floor:g}.")


def _check_model(model: ModelConfig) -> None:
    if model.width % model.heads:
        raise ConfigError(f"model.width is {model.width}, which {model.heads} heads (model.heads) do not divide.")
    if (model.width // model.heads) % 2:
        raise ConfigError(
            f"model.width {model.width} over model.heads {model.heads} gives heads of odd size "
            f"{model.width // model.heads}; rotary positions need an even one."
        )
    if model.kv_heads and model.heads % model.kv_heads:
        raise ConfigError(f"model.kv_heads is {model.kv_heads}; it must divide model.heads, which is {model.heads}.")
    if model.pretrained and model.architecture:
        raise ConfigError("model.pretrained and model.architecture are both set; keep the one to start from.")


def _check_data(data: DataConfig) -> None:
    if not 0 <= data.eval_fraction < 1:
        raise ConfigError(f"data.eval_fraction is {data.eval_fraction:g}; it must be at least 0 and below 1.")


def _check_pipeline(config: Config) -> None:
    pipeline = config.pipeline
    check_schedule(pipeline.schedule, 0, pipeline.stages, pipeline.microbatches, pipeline.slack)
    policy = weight_policy(config)
    if (policy == "two-version") != (pipeline.schedule == "two-version"):
        raise ConfigError(
            f"pipeline.weights is {policy} with pipeline.schedule {pipeline.schedule}; two-version goes only with "
            "two-version, and stash or latest with the others."
        )
    if policy == "latest" and config.optimizer.name == "delay-compensated":
        raise ConfigError(
            "optimizer.name delay-compensated needs the weights a forward saw; set pipeline.weights stash."
        )
    if config.optimizer.delay.velocity_decay and policy != "latest":
        raise ConfigError(f"optimizer.delay.velocity_decay needs pipeline.weights latest, but it is {policy}.")
    flushes = pipeline.schedule in ("gpipe", "1f1b") or pipeline.stages == 1
    if config.optimizer.clip_scope == "global" and not flushes:
        raise ConfigError(
            f"optimizer.clip_scope is global, but schedule {pipeline.schedule} never has all gradients at one time; "
            "choose stage or carried."
        )
    if not (config.model.pretrained or config.model.architecture):
        per_layer = 4 if pipeline.granularity == "quarter" else 1
        if pipeline.stages > config.model.layers * per_layer:
            raise ConfigError(
                f"pipeline.stages is {pipeline.stages}, more than the {config.model.layers * per_layer} pieces of "
                f"{config.model.layers} layers (model.layers); use at most {config.model.layers * per_layer} stages"
                + ("." if per_layer == 4 else ", or pipeline.granularity quarter with freerun simulate.")
            )


def _check_replicas(config: Config) -> None:
    if config.replicas.strategy not in STRATEGIES:
        raise ConfigError(f"replicas.strategy is {config.replicas.strategy!r}; choose {_either(STRATEGIES)}.")
    if config.replicas.strategy == "none" and config.replicas.count > 1:
        raise ConfigError(
            f"replicas.strategy none leaves {config.replicas.count} replicas unconnected; choose another."
        )
    check_replicas(config)


def _check_optimizer(config: Config) -> None:
    if config.optimizer.name not in OPTIMIZERS:
        raise ConfigError(f"optimizer.name is {config.optimizer.name!r}; choose {_either(OPTIMIZERS)}.")
    for index, beta in enumerate(config.optimizer.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"optimizer.betas[{index}] is {beta:g}; it must be at least 0 and below 1.")
    rotation = config.optimizer.rotation
    if rotation.fresh > 1:
        raise ConfigError(f"optimizer.rotation.fresh is {rotation.fresh:g}; it is a share, so at most 1.")
    if rotation.nesterov and (rotation.fresh or not rotation.bias_correction):
        raise ConfigError(
            "optimizer.rotation.nesterov sets the weights of momentum and gradient itself; it needs "
            "optimizer.rotation.fresh 0 and bias_correction true, which optimizer.name basis-rotation has."
        )


def _either(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
