"""AdamW on a gradient that is carried to the weights it meets (DC-ASGD)."""

from __future__ import annotations

from typing import Any

from freerun.config import OptimizerConfig
from freerun.errors import ConfigError
from freerun.optim.adam_rule import adam_defaults, adam_update
from freerun.optim.base import Group, ProposingOptimizer, Slot
from freerun.optim.rates import momentum_by_delay


class DelayCompensated(ProposingOptimizer):
    """AdamW fed with g + c · g ⊙ g ⊙ (w_now − w_used), where g ⊙ g stands in for the Hessian's diagonal.

    w_used comes through group["used"], set by the caller before each step; where it is None, nothing is added.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        compensation: float = 0.04,
    ) -> None:
        if compensation < 0:
            raise ConfigError(f"compensation is {compensation}; it must be 0 (off) or more.")
        super().__init__(params, {**adam_defaults(lr, betas, eps, weight_decay), "compensation": compensation})

    def update(self, group: Group, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.used is not None:
                drift = (slot.weight - slot.used).mul_(slot.gradient).mul_(slot.gradient)
                slot.gradient = slot.gradient + group["compensation"] * drift
            adam_update(group, slot)


def build(groups: list[Group], config: OptimizerConfig, stages: int, nominal_delay: int) -> DelayCompensated:
    """DelayCompensated as the config describes it."""
    betas = momentum_by_delay(config, stages, nominal_delay)
    return DelayCompensated(
        groups, config.lr, betas, config.eps, config.weight_decay, compensation=config.delay.compensation
    )
