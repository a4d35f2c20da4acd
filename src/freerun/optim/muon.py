"""Muon: the momentum of each matrix, made orthogonal; plain AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freerun.config import OptimizerConfig
from freerun.errors import ConfigError
from freerun.optim.adam_rule import adam_defaults, adam_update
from freerun.optim.base import Group, ProposingOptimizer, Slot, treats
from freerun.optim.rates import momentum_by_delay

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic that drives singular values towards 1."""


class Muon(ProposingOptimizer):
    """Momentum, orthogonalised by Newton-Schulz iterations, for 2-D parameters; AdamW for all others.

    A step is scaled by 0.2 √max(m, n), which gives it the size of an AdamW step, so that both parts share one
    learning rate. As torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), in the parameter's own precision instead of
    bf16. A group may say `orthogonalise`: False for plain AdamW (embeddings, head), True to insist.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum is {momentum}; it must be at least 0 and below 1.")
        defaults = adam_defaults(lr, betas, eps, weight_decay)
        defaults |= {"muon_momentum": momentum, "muon_nesterov": nesterov, "iterations": iterations}
        super().__init__(params, {**defaults, "orthogonalise": None})

    def update(self, group: Group, slots: list[Slot]) -> None:
        for slot in slots:
            if treats(group, "orthogonalise", slot.weight):
                _orthogonal_update(group, slot)
            else:
                adam_update(group, slot)


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """Roughly U Vᵀ of the matrix's SVD: its singular values brought near 1."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _orthogonal_update(group: Group, slot: Slot) -> None:
    if not slot.state:
        slot.state["momentum"] = torch.zeros_like(slot.weight)
    momentum = slot.state["momentum"].lerp_(slot.gradient, 1 - group["muon_momentum"])
    direction = slot.gradient.lerp(momentum, group["muon_momentum"]) if group["muon_nesterov"] else momentum
    size = group["lr"] * 0.2 * max(slot.weight.shape) ** 0.5
    slot.weight.mul_(1 - group["lr"] * group["weight_decay"])
    slot.weight.add_(orthogonalised(direction, group["iterations"]), alpha=-size)


def build(groups: list[Group], config: OptimizerConfig, stages: int, nominal_delay: int) -> Muon:
    """Muon as the config describes it: matrices are orthogonalised, everything else gets plain AdamW."""
    return Muon(
        [{**group, "orthogonalise": group["kind"] == "matrix"} for group in groups],
        config.lr,
        momentum_by_delay(config, stages, nominal_delay),
        config.eps,
        config.weight_decay,
    )
