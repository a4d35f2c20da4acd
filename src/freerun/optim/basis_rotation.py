"""Basis rotation: Adam in the eigenbasis of each weight matrix, where a late gradient does little harm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from freerun.config import OptimizerConfig
from freerun.errors import ConfigError
from freerun.optim.adam_rule import AdamRule, adam_defaults, adam_update, next_rule
from freerun.optim.base import Group, ProposingOptimizer, Slot, treats
from freerun.optim.blocks import block_shape, chunks, join, split, stacked
from freerun.optim.rates import momentum_by_delay
from freerun.optim.refresh import due, refresh_interval, turns
from freerun.optim.rotated_update import TENSORS, start, update_blocks

STACK = {"cpu": 2**18}
"""Numbers in a stack of blocks that are updated together; elsewhere than on a CPU 2**24."""


class BasisRotation(ProposingOptimizer):
    """AdamW whose second moment lives in a rotated basis for every 2-D parameter; plain AdamW for all others.

    source: the bases come from the gradient covariances ("second") or from the momentum ("first").
    geometry: rotate both sides of a matrix ("bilateral"), or only the smaller one ("unilateral").
    interval: updates between refreshes of the bases.
    allocation: spread the refreshes of a pipeline of `stages` evenly, or by `nominal_delay`; see refresh.py.
    fresh, bias_correction, nesterov: the kind of momentum; see adam_rule.py.
    tempering: exponent by which steep directions are damped; 0 is off.
    grading: exponent by which the rate of a rotated matrix falls with the gradient's delay; 0 is off.
    stagger: matrices refresh in turn, so that no update is a spike, instead of all when t is a multiple of interval.
    block: cut matrices into blocks with sides no longer than this, each rotated on its own; 0 is off. Cheaper.
    precision: "bf16" rotates in bf16, and keeps bases and momentum in it. Cheaper.

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
        grading: float = 0.0,
        bias_correction: bool = True,
        nesterov: bool = False,
        stagger: bool = False,
        block: int = 0,
        precision: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        _one_of("source", source, ("first", "second"))
        _one_of("geometry", geometry, ("bilateral", "unilateral"))
        _one_of("allocation", allocation, ("uniform", "stage-aware", "reversed"))
        _one_of("precision", precision, ("fp32", "bf16"))
        if interval < 1 or min(block, tempering, grading) < 0:
            raise ConfigError(
                f"interval is {interval}, block {block}, tempering {tempering} and grading {grading}; "
                "interval must be 1 or more, the others 0 (off) or more."
            )
        defaults = adam_defaults(lr, betas, eps, weight_decay, fresh, bias_correction, nesterov)
        defaults |= {"source": source, "geometry": geometry, "interval": interval, "tempering": tempering}
        defaults |= {"grading": grading}
        defaults |= {"allocation": allocation, "stages": stages, "nominal_delay": nominal_delay, "rotate": None}
        defaults |= {"stagger": stagger, "block": block, "precision": precision}
        super().__init__(params, defaults)

    def update(self, group: Group, slots: list[Slot]) -> None:
        interval = refresh_interval(group["allocation"], group["interval"], group["nominal_delay"], group["stages"])
        graded = {**group, "lr": group["lr"] * (1 + group["delay"]) ** -group["grading"]}
        alike: dict[tuple[Any, ...], list[Slot]] = {}
        for slot in slots:
            if not treats(group, "rotate", slot.weight):
                adam_update(group, slot)
                continue
            if not slot.state:
                phase = _phase(group, slot.index, interval)
                slot.state.update(start(group, _blocks(group, slot.gradient)), phase=phase)
            rule = next_rule(graded, slot.state)
            refresh = rule.step > 1 and due(rule.step, interval, slot.state["phase"])
            key = (block_shape(slot.weight.shape, group["block"]), slot.weight.device, slot.weight.dtype, rule, refresh)
            alike.setdefault(key, []).append(slot)
        for (_, device, _, rule, refresh), members in alike.items():
            for run in chunks([slot.weight.numel() for slot in members], STACK.get(device.type, 2**24)):
                _update_together(graded, members[run], rule, refresh)


def _update_together(group: Group, slots: list[Slot], rule: AdamRule, refresh: bool) -> None:
    """Update slots whose blocks are of one size, as one stack."""
    names = [name for name in TENSORS if name in slots[0].state]
    state = {name: stacked([slot.state[name] for slot in slots]) for name in names}
    steps = update_blocks(group, rule, refresh, stacked([_blocks(group, slot.gradient) for slot in slots]), state)
    counts = [len(slot.state["second"]) for slot in slots]
    for name in names:
        parts = torch.split(state[name], counts) if len(slots) > 1 else [state[name]]
        for slot, part in zip(slots, parts, strict=True):
            if part is not slot.state[name]:
                slot.state[name].copy_(part)
    for slot, step in zip(slots, torch.split(steps, counts), strict=True):
        slot.weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(join(step, slot.weight.shape))


def _blocks(group: Group, matrix: Tensor) -> Tensor:
    return split(matrix, *block_shape(matrix.shape, group["block"]))


def _phase(group: Group, index: int, interval: float) -> int:
    """The turn of the group's parameter number `index`."""
    if not group["stagger"]:
        return 0
    return turns([_refresh_cost(group, parameter) for parameter in group["params"]], interval)[index]


def _refresh_cost(group: Group, parameter: Tensor) -> int:
    """Roughly how a matrix compares with others."""
    if not treats(group, "rotate", parameter):
        return 0
    return parameter.numel() * sum(block_shape(parameter.shape, group["block"]))


def _one_of(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError(f"{name} is {given!r}; choose one of {', '.join(choices)}.")


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
        grading=rotation.grading,
        bias_correction=rotation.bias_correction,
        nesterov=rotation.nesterov,
        stagger=rotation.stagger,
        block=rotation.block,
        precision=rotation.precision,
    )
