"""AdamW: under delay, the plain baseline (PipeDream)."""

from __future__ import annotations

from typing import Any

from freerun.config import OptimizerConfig
from freerun.optim.adam_rule import adam_defaults, adam_update
from freerun.optim.base import Group, ProposingOptimizer, Slot
from freerun.optim.rates import momentum_by_delay


class AdamW(ProposingOptimizer):
    """Adam with decoupled weight decay, bit-equal to torch.optim.AdamW on float32 and float64 parameters."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay))

    def update(self, group: Group, slots: list[Slot]) -> None:
        for slot in slots:
            adam_update(group, slot)


def build(groups: list[Group], config: OptimizerConfig, stages: int, nominal_delay: int) -> AdamW:
    """AdamW as the config describes it."""
    betas = momentum_by_delay(config, stages, nominal_delay)
    return AdamW(groups, config.lr, betas, config.eps, config.weight_decay)
