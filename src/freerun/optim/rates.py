"""Learning rate and momentum as pure functions of progress and delay."""

from __future__ import annotations

import math

from freerun.config import OptimizerConfig


def rate(config: OptimizerConfig, progress_updates: float, updates: int, delay: int) -> float:
    """The learning rate after `progress_updates` of `updates` are done, at a stage whose gradients are `delay` old.

    Progress may be fractional: what advances by samples counts them in updates.
    """
    return config.lr * _shape(config, progress_updates, updates) * _share_for(config, progress_updates, updates, delay)


def momentum_by_delay(config: OptimizerConfig, stages: int, nominal_delay: int) -> tuple[float, float]:
    """(β1, β2) of a stage; with delay.momentum, β1 grows with its delay towards 0.99."""
    beta1, beta2 = config.betas
    if config.delay.momentum:
        beta1 += nominal_delay * (0.99 - beta1) / stages
    return beta1, beta2


def _shape(config: OptimizerConfig, progress: float, updates: int) -> float:
    if progress + 1 < config.warmup:
        return (progress + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        start = updates * (1 - config.decay)
        return 1 - (1 - config.final) * _through(progress, start, updates)
    done = _through(progress, config.warmup, updates)
    return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done))


def _share_for(config: OptimizerConfig, progress: float, updates: int, delay: int) -> float:
    how = config.delay
    if how.lr == "anneal":
        still = 1 - _through(progress, 0, how.lr_anneal or updates / 4)
        return float(max(delay, 1) ** -still)
    if how.lr == "power":
        return float((1 + delay) ** -how.lr_power)
    return 1.0


def _through(progress: float, start: float, end: float) -> float:
    """How far progress is on its way from start to end, between 0 and 1."""
    if end <= start:
        return 1.0 if progress >= end else 0.0
    return min(max((progress - start) / (end - start), 0.0), 1.0)
