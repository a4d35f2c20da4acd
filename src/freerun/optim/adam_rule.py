"""Adam's arithmetic, written once: for every optimizer here, in the parameter's own coordinates or in rotated ones.

    m ← β1 m + (1−β1) g        s ← β2 s + (1−β2) g²        D = √(s/(1−β2ᵗ)) + ε
    w ← w − η λ w − (a m + b g) / D

The kind of momentum is only a choice of a and b. Plain: a = η/(1−β1ᵗ), b = 0. A fresh share γ: a = η(1−γ)/(1−β1ᵗ),
b = ηγ. Look-ahead (NAdam): with μ_t = β1 (1 − ½·0.96^{t·0.004}), a = η μ_{t+1}/(1−Π_{≤t+1} μ) and
b = η (1−μ_t)/(1−Π_{≤t} μ). Without bias correction, 1−β1ᵗ is left out of a, which acts as a warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freerun.errors import ConfigError
from freerun.optim.base import Group, Slot

MOMENTUM_DECAY = 0.004


@dataclass(frozen=True)
class AdamRule:
    """One update's numbers, the same for every parameter of a group that has made as many updates."""

    step: int
    beta1: float
    beta2: float
    eps: float
    from_momentum: float
    """a: learning rate times the weight of the momentum."""
    from_gradient: float
    """b: learning rate times the weight of the newest gradient."""

    def into_momentum(self, momentum: Tensor, gradient: Tensor) -> None:
        """Let the first moment take the new gradient, in place."""
        momentum.lerp_(gradient, 1 - self.beta1)

    def into_second(self, second: Tensor, gradient: Tensor) -> None:
        """Let the second moment take the new gradient, in place."""
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)

    def denominator(self, second: Tensor) -> Tensor:
        """D."""
        correction: float = (1 - self.beta2**self.step) ** 0.5
        return second.sqrt().div_(correction).add_(self.eps)

    def numerator(self, momentum: Tensor, gradient: Tensor) -> tuple[Tensor, float]:
        """(N, c) with c·N = a m + b g. N is the momentum itself when b is 0: don't write to it."""
        if self.from_gradient == 0:
            return momentum, self.from_momentum
        return torch.mul(momentum, self.from_momentum).add_(gradient, alpha=self.from_gradient), 1.0


def adam_defaults(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fresh: float = 0.0,
    bias_correction: bool = True,
    nesterov: bool = False,
) -> dict[str, Any]:
    """The settings of a group that updates by this rule, checked."""
    if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
        raise ConfigError(f"lr {lr}, eps {eps} and weight_decay {weight_decay} must each be 0 or more.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas is {betas}; each must be at least 0 and below 1.")
    if not 0 <= fresh <= 1:
        raise ConfigError(f"fresh is {fresh}; the newest gradient's share must lie between 0 and 1.")
    if nesterov and (fresh or not bias_correction):
        raise ConfigError(
            "nesterov sets the newest gradient's share by itself: leave fresh at 0 and bias_correction on."
        )
    return {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "fresh": fresh,
        "bias_correction": bias_correction,
        "nesterov": nesterov,
    }


def next_rule(group: Group, state: dict[str, Any]) -> AdamRule:
    """Count one more update in `state`, and say by which numbers it is made."""
    step = state["step"] = state.get("step", 0) + 1
    lr, (beta1, beta2), fresh = group["lr"], group["betas"], group["fresh"]
    if group["nesterov"]:
        now, ahead = _lookahead(beta1, step), _lookahead(beta1, step + 1)
        product = state["product"] = state.get("product", 1.0) * now
        from_momentum, from_gradient = lr * ahead / (1 - product * ahead), lr * (1 - now) / (1 - product)
    else:
        correction = 1 - beta1**step if group["bias_correction"] else 1.0
        from_momentum, from_gradient = lr * (1 - fresh) / correction, lr * fresh
    return AdamRule(step, beta1, beta2, group["eps"], from_momentum, from_gradient)


def adam_update(group: Group, slot: Slot) -> None:
    """One update of one parameter in its own coordinates."""
    state = slot.state
    if not state:
        state["momentum"] = torch.zeros_like(slot.weight)
        state["second"] = torch.zeros_like(slot.weight)
    rule = next_rule(group, state)
    rule.into_momentum(state["momentum"], slot.gradient)
    rule.into_second(state["second"], slot.gradient)
    numerator, factor = rule.numerator(state["momentum"], slot.gradient)
    slot.weight.mul_(1 - group["lr"] * group["weight_decay"])
    slot.weight.addcdiv_(numerator, rule.denominator(state["second"]), value=-factor)


def _lookahead(beta1: float, step: int) -> float:
    return float(beta1 * (1 - 0.5 * 0.96 ** (step * MOMENTUM_DECAY)))
