"""Basis rotation: Adam in the eigenbasis of each weight matrix, where a late gradient does little harm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from freerun.config import OptimizerConfig
from freerun.errors import ConfigError
from freerun.optim.adam_rule import AdamRule, adam_defaults, adam_update, next_rule
from freerun.optim.base import Group, ProposingOptimizer, Slot
from freerun.optim.rates import momentum_by_delay
from freerun.optim.refresh import due, refresh_interval
from freerun.optim.rotation import (
    rotate,
    rotate_back,
    singular_bases,
    take_columns,
    take_rows,
    temper,
    turn_towards,
    turns_towards_singular,
    without_roundoff,
)


class BasisRotation(ProposingOptimizer):
    """AdamW whose second moment lives in a rotated basis for every 2-D parameter; plain AdamW for all others.

    source: the bases come from the gradient covariances ("second") or from the momentum ("first").
    geometry: rotate both sides of a matrix ("bilateral"), or only the smaller one ("unilateral").
    interval: updates between refreshes of the bases; allocation spreads this budget over the pipeline's stages.
    fresh, bias_correction, nesterov: the kind of momentum, see adam_rule.
    tempering: exponent by which steep directions are damped.

    A group may say `rotate`: False for plain AdamW (embeddings, head), True to insist.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        source: Literal["first", "second"] = "second",
        geometry: Literal["bilateral", "unilateral"] = "bilateral",
        interval: int = 10,
        allocation: Literal["uniform", "stage-aware", "reversed"] = "uniform",
        stages: int = 1,
        nominal_delay: int = 0,
        fresh: float = 0.0,
        tempering: float = 0.0,
        bias_correction: bool = True,
        nesterov: bool = False,
    ) -> None:
        if source not in ("first", "second"):
            raise ConfigError(f"source is {source!r}; the bases come from the 'first' or the 'second' moment.")
        if geometry not in ("bilateral", "unilateral"):
            raise ConfigError(f"geometry is {geometry!r}; choose 'bilateral' or 'unilateral'.")
        if interval < 1:
            raise ConfigError(
                f"interval is {interval}; bases can be refreshed at most once per update: give 1 or more."
            )
        defaults = adam_defaults(lr, betas, eps, weight_decay, fresh, bias_correction, nesterov)
        defaults |= {"source": source, "geometry": geometry, "interval": interval, "tempering": tempering}
        defaults |= {"allocation": allocation, "stages": stages, "nominal_delay": nominal_delay, "rotate": None}
        super().__init__(params, defaults)

    def update(self, group: Group, slots: list[Slot]) -> None:
        for slot in slots:
            if _is_rotated(group, slot.weight):
                _rotated_update(group, slot)
            else:
                adam_update(group, slot)


def _is_rotated(group: Group, weight: Tensor) -> bool:
    if group["rotate"] and weight.ndim != 2:
        raise ConfigError(
            f"rotate is set for a parameter of shape {tuple(weight.shape)}; only matrices can be rotated."
        )
    return weight.ndim == 2 and group["rotate"] is not False


def _rotated_update(group: Group, slot: Slot) -> None:
    state, gradient = slot.state, slot.gradient[None]
    if not state:
        _start(group, gradient, state)
    rule = next_rule(group, state)
    left, right = state.get("left_basis"), state.get("right_basis")
    rotated = rotate(gradient, left, right)
    _into_covariances(group, state, rotated)
    if rule.step == 1:
        rotated = without_roundoff(rotated, torch.linalg.matrix_norm(rotated))
    rule.into_momentum(state["momentum"], rotated)
    interval = refresh_interval(group["allocation"], group["interval"], group["nominal_delay"], group["stages"])
    if rule.step > 1 and due(rule.step, interval):
        rotated = _refresh(group, state, rotated)
    rule.into_second(state["second"], rotated)
    slot.weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(_step(group, state, rotated, rule)[0])


def _start(group: Group, gradient: Tensor, state: dict[str, Any]) -> None:
    """Zero moments, and bases from the first gradient."""
    rows, columns = gradient.shape[-2:]
    left, right = singular_bases(gradient)
    both = group["geometry"] == "bilateral"
    state["momentum"] = torch.zeros_like(gradient)
    state["second"] = torch.zeros_like(gradient)
    for side, basis, present in (("left", left, both or rows < columns), ("right", right, both or rows >= columns)):
        if present:
            state[f"{side}_basis"] = basis.contiguous()
            if group["source"] == "second":
                state[side] = torch.zeros_like(basis)


def _into_covariances(group: Group, state: dict[str, Any], rotated: Tensor) -> None:
    beta2 = group["betas"][1]
    if "left" in state:
        state["left"].mul_(beta2).baddbmm_(rotated, rotated.mT, alpha=1 - beta2)
    if "right" in state:
        state["right"].mul_(beta2).baddbmm_(rotated.mT, rotated, alpha=1 - beta2)


def _refresh(group: Group, state: dict[str, Any], rotated: Tensor) -> Tensor:
    """Turn the bases, and with them momentum, covariances and the rotated gradient, which is returned."""
    momentum = state["momentum"]
    if group["source"] == "second":
        turns = {side: turn_towards(state[side]) for side in ("left", "right") if side in state}
    elif group["geometry"] == "bilateral":
        turns = dict(zip(("left", "right"), turns_towards_singular(momentum), strict=True))
    elif "left_basis" in state:
        turns = {"left": turn_towards(momentum @ momentum.mT)}
    else:
        turns = {"right": turn_towards(momentum.mT @ momentum)}
    left, right = (turns[side].turn if side in turns else None for side in ("left", "right"))
    for side, (order, turn) in turns.items():
        state[f"{side}_basis"] = state[f"{side}_basis"] @ turn
        if side in state:
            state[side] = turn.mT @ state[side] @ turn
        state["second"] = take_rows(state["second"], order) if side == "left" else take_columns(state["second"], order)
    state["momentum"] = rotate(momentum, left, right)
    return rotate(rotated, left, right)


def _step(group: Group, state: dict[str, Any], rotated: Tensor, rule: AdamRule) -> Tensor:
    """What is added to the weights, weight decay aside."""
    numerator, factor = rule.numerator(state["momentum"], rotated)
    denominator = rule.denominator(state["second"])
    step = torch.mul(numerator, -factor).div_(denominator)
    if group["tempering"]:
        step = temper(step, denominator, group["tempering"])
    return rotate_back(step, state.get("left_basis"), state.get("right_basis"))


def build(groups: list[Group], config: OptimizerConfig, stages: int, nominal_delay: int) -> BasisRotation:
    """Basis rotation as the config describes it: matrices are rotated, everything else gets plain AdamW."""
    rotation = config.rotation
    return BasisRotation(
        [{**group, "rotate": group["kind"] == "matrix"} for group in groups],
        config.lr,
        momentum_by_delay(config, stages, nominal_delay),
        config.eps,
        config.weight_decay,
        source=rotation.source,
        geometry=rotation.geometry,
        interval=rotation.interval,
        allocation=rotation.allocation,
        stages=stages,
        nominal_delay=nominal_delay,
        fresh=rotation.fresh,
        tempering=rotation.tempering,
        bias_correction=rotation.bias_correction,
    )
