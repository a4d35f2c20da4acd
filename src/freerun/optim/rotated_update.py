"""One update of a stack of equally large blocks in rotated coordinates.

The momentum is kept in rotated coordinates, M̃ = Uᵀ M V, so that only the gradient is rotated in an ordinary update;
a refresh takes M̃ back and forth once. Covariances are kept in the original coordinates, where they are defined.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freerun.optim.adam_rule import AdamRule
from freerun.optim.base import Group
from freerun.optim.products import product, transposed
from freerun.optim.rotation import (
    Refreshed,
    refreshed,
    refreshed_pair,
    rotate,
    rotate_back,
    singular_bases,
    take_columns,
    take_rows,
    temper,
    without_roundoff,
)
from freerun.optim.symmetric import take_product, unpacked, zeros

State = dict[str, Tensor]
TENSORS = ("momentum", "second", "left", "right", "left_basis", "right_basis")
"""M̃, S, L, R, U and V, as far as the variant has them; L and R packed, see symmetric.py."""
SIDES = {"left": "left_basis", "right": "right_basis"}


def start(group: Group, gradient: Tensor) -> State:
    """Zero moments, and bases from the first gradient."""
    stored = torch.bfloat16 if group["precision"] == "bf16" else gradient.dtype
    rows, columns = gradient.shape[-2:]
    both = group["geometry"] == "bilateral"
    state = {"momentum": torch.zeros_like(gradient, dtype=stored), "second": torch.zeros_like(gradient)}
    wanted = {"left": both or rows < columns, "right": both or rows >= columns}
    for side, basis in zip(SIDES, singular_bases(gradient), strict=True):
        if wanted[side]:
            state[SIDES[side]] = basis.to(stored).contiguous()
            if group["source"] == "second":
                state[side] = zeros(len(basis), basis.shape[-1], like=gradient)
    return state


def update_blocks(group: Group, rule: AdamRule, refresh: bool, gradient: Tensor, state: State) -> Tensor:
    """Advance the state, in place or by new tensors in it; return what is added to the weights, decay aside."""
    momentum = state["momentum"] = state["momentum"].to(gradient.dtype)
    _into_covariances(group, gradient, state)
    if refresh:
        momentum = rotate_back(momentum, *_bases(state))
        rule.into_momentum(momentum, gradient)
        _refresh(group, momentum, state)
        momentum = state["momentum"] = rotate(momentum, *_bases(state))
    rotated = rotate(gradient, *_bases(state))
    if rule.step == 1:
        rotated = without_roundoff(rotated)
    if not refresh:
        rule.into_momentum(momentum, rotated)
    rule.into_second(state["second"], rotated)
    numerator, factor = rule.numerator(momentum, rotated)
    denominator = rule.denominator(state["second"])
    step = torch.mul(numerator, -factor).div_(denominator)
    if group["tempering"]:
        step = temper(step, denominator, group["tempering"])
    return rotate_back(step, *_bases(state))


def _bases(state: State) -> tuple[Tensor | None, Tensor | None]:
    return state.get("left_basis"), state.get("right_basis")


def _into_covariances(group: Group, gradient: Tensor, state: State) -> None:
    beta2 = group["betas"][1]
    rounded = gradient.bfloat16() if group["precision"] == "bf16" else gradient
    for side, rows in (("left", rounded), ("right", transposed(rounded))):
        if side in state:
            take_product(state[side], rows, beta2)


def _refresh(group: Group, moment: Tensor, state: State) -> None:
    """New bases; the second moment's rows and columns move along with the basis vectors that they belong to."""
    for side, (order, basis) in _new_bases(group, moment, state).items():
        state[SIDES[side]] = basis.to(state[SIDES[side]].dtype)
        state["second"] = take_rows(state["second"], order) if side == "left" else take_columns(state["second"], order)


def _new_bases(group: Group, moment: Tensor, state: State) -> dict[str, Refreshed]:
    bases = {side: state[name].to(moment.dtype) for side, name in SIDES.items() if name in state}
    if group["source"] == "second":
        return {side: refreshed(unpacked(state[side], len(basis[0])), basis) for side, basis in bases.items()}
    if len(bases) == 2:
        return dict(zip(SIDES, refreshed_pair(moment, bases["left"], bases["right"]), strict=True))
    return {
        side: refreshed(product(moment, moment.mT) if side == "left" else product(moment.mT, moment), basis)
        for side, basis in bases.items()
    }
