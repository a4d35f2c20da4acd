"""AdamW with Nesterov look-ahead: the gradient is taken where the momentum will have carried the weights."""

from __future__ import annotations

from typing import Any

from freerun.config import OptimizerConfig
from freerun.optim.adam_rule import adam_defaults, adam_update
from freerun.optim.base import Group, ProposingOptimizer, Slot
from freerun.optim.rates import momentum_by_delay


class NesterovAdamW(ProposingOptimizer):
    """NAdam with decoupled weight decay, as torch.optim.NAdam(decoupled_weight_decay=True).

    The method wants a large β1, by default 0.99.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay, nesterov=True))

    def update(self, group: Group, slots: list[Slot]) -> None:
        for slot in slots:
            adam_update(group, slot)


def build(groups: list[Group], config: OptimizerConfig, stages: int, nominal_delay: int) -> NesterovAdamW:
    """NesterovAdamW as the config describes it."""
    betas = momentum_by_delay(config, stages, nominal_delay)
    return NesterovAdamW(groups, config.lr, betas, config.eps, config.weight_decay)
