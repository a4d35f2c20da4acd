"""What the replicas' settings can't be, with the reason; nothing here imports torch."""

from __future__ import annotations

from freerun.config import Config, ReplicasConfig
from freerun.errors import ConfigError

SHARDED_BEHIND = ("acco", "dpu")


def delay_of(config: ReplicasConfig) -> int | None:
    """Updates from a round's launch to its finish; None when it finishes as it arrives."""
    if config.delay == "free":
        return None
    kind, _, number = config.delay.partition(":")
    if kind != "fixed" or not number.isdecimal():
        raise ConfigError(
            f"replicas.delay is {config.delay!r}; write fixed:N for N updates, such as fixed:10, or free."
        )
    return int(number)


def check(config: Config) -> None:
    """Refuse a combination that can't be."""
    check_settings(config.replicas)
    if config.replicas.elastic:
        _check_elastic(config)
    if config.replicas.strategy in SHARDED_BEHIND:
        _check_behind(config)


def check_settings(replicas: ReplicasConfig) -> None:
    """Refuse replica settings that can't be, whatever the rest of the run."""
    delay_of(replicas)
    _check_ranges(replicas)
    _check_payload(replicas)
    if replicas.strategy == "diloco":
        _check_diloco(replicas)


def _check_ranges(replicas: ReplicasConfig) -> None:
    if not 0 < replicas.fraction <= 1:
        raise ConfigError(
            f"replicas.fraction is {replicas.fraction:g}; it is a share of the weights, above 0 and at most 1."
        )
    if replicas.interval < 1:
        raise ConfigError(f"replicas.interval is {replicas.interval}; rounds are at least 1 update apart.")
    if replicas.fragments < 1:
        raise ConfigError(f"replicas.fragments is {replicas.fragments}; it must be at least 1.")
    if not replicas.bucket_mib > 0:
        raise ConfigError(f"replicas.bucket_mib is {replicas.bucket_mib:g}; it must be above 0.")
    if replicas.mean_warmup < 0:
        raise ConfigError(f"replicas.mean_warmup is {replicas.mean_warmup}; it must be at least 0.")
    shares = [
        ("mean_decay[0]", replicas.mean_decay[0]),
        ("mean_decay[1]", replicas.mean_decay[1]),
        ("outer_momentum", replicas.outer_momentum),
        ("outer_kept", replicas.outer_kept),
    ]
    for key, value in shares:
        if not 0 <= value < 1:
            raise ConfigError(f"replicas.{key} is {value:g}; it must be at least 0 and below 1.")


def _check_payload(replicas: ReplicasConfig) -> None:
    if replicas.payload != "int8":
        return
    if replicas.strategy not in ("sparse", "diloco"):
        raise ConfigError(
            f"replicas.payload is int8, but {replicas.strategy} sends whole weights or gradients, which bytes are too "
            "coarse for; use fp32 or bf16, or strategy sparse or diloco, which send differences."
        )
    if replicas.strategy == "sparse" and delay_of(replicas) is None:
        raise ConfigError(
            "replicas.payload int8 sends differences to the last average, which replicas with replicas.delay free do "
            "not have at the same time; use a fixed delay, or payload bf16."
        )


def _check_diloco(replicas: ReplicasConfig) -> None:
    if replicas.fragments == 1:
        return
    delay = delay_of(replicas)
    if delay is None:
        raise ConfigError(
            "replicas.delay is free, but diloco's outer weights must be the same on all replicas at every update; use "
            "fixed:N."
        )
    if replicas.interval % replicas.fragments:
        raise ConfigError(
            f"replicas.interval is {replicas.interval}, which replicas.fragments {replicas.fragments} does not divide; "
            "fragments take turns at equal distances."
        )
    if delay >= replicas.interval:
        raise ConfigError(
            f"replicas.delay is fixed:{delay}, but a fragment leaves again after replicas.interval "
            f"{replicas.interval} updates and must have arrived by then; choose a smaller delay."
        )


def _check_elastic(config: Config) -> None:
    if config.replicas.strategy != "acco":
        raise ConfigError(
            f"replicas.elastic is on, but strategy {config.replicas.strategy} needs the same number of microbatches of "
            "every replica; only acco counts what each has done."
        )
    if config.pipeline.stages > 1:
        raise ConfigError(
            f"replicas.elastic is on with pipeline.stages {config.pipeline.stages}; the stages of a replica have to "
            "know beforehand how many microbatches an update has, so use 1 stage, or leave elastic off."
        )


def _check_behind(config: Config) -> None:
    """What does not go with steps that run while the next gradient is computed."""
    name, delay = config.replicas.strategy, config.optimizer.delay
    if config.optimizer.name == "delay-compensated":
        raise ConfigError(
            f"optimizer.name delay-compensated needs the weights that a whole gradient was taken at, and with strategy "
            f"{name} the step runs when these are gone; use zero1 or allreduce."
        )
    if config.optimizer.clip_scope == "carried":
        raise ConfigError(
            f"optimizer.clip_scope is carried, but with strategy {name} a step runs while newer norms come in; use "
            "stage."
        )
    if name == "acco" and (delay.lookahead or delay.velocity_decay):
        raise ConfigError(
            "optimizer.delay.lookahead and velocity_decay follow the last change of the weights, and acco's alternates "
            "between a prediction and its correction; set both to 0, or use another strategy."
        )
