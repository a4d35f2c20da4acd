"""One-step error feedback: the error that a late gradient caused in the last step is made good in this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from freerun.errors import ConfigError
from freerun.optim.base import Wrapping, adapt


class ErrorFeedback(Wrapping):
    """Any optimizer, with each step corrected by what the last one got wrong.

    Let Δ_t be the step that the wrapped optimizer makes of the gradient that arrives at update t. This gradient was
    taken one update earlier, so Δ_t is the step that should have been made then; Δ_{t−1} was made in its place. The
    error of that update is therefore Δ_t − Δ_{t−1}, and now that it is known it is added:

        w ← w + Δ_t + share · (Δ_t − Δ_{t−1})

    With share 1 and a delay of one update, the weights are always those of undelayed steps plus the newest step as a
    guess at the next. The paper (arXiv 2606.30634) names the idea; taking the error in steps instead of gradients, so
    that the wrapped optimizer's moments see true gradients only, is our choice, and so is the same one-step rule for
    longer delays. A group whose gradients have no delay steps as the wrapped optimizer does.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, share: float = 1.0) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"The share of error feedback is {share}; it must lie between 0 and 1.")
        self.inner = adapt(optimizer)
        super().__init__(self.inner)
        self.share = share

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step, corrected."""
        before = [p.detach().clone() for p in self._parameters()]
        loss = self.inner.step(closure)
        corrected, steps = self._corrected(before, [p.detach() for p in self._parameters()])
        for parameter, value, step in zip(self._parameters(), corrected, steps, strict=True):
            if parameter.grad is not None:
                parameter.copy_(value)
                self.state[parameter]["last_step"] = step
        return loss

    @torch.no_grad()
    def propose(self) -> list[Tensor]:
        """The values that `step` would give, in the order of param_groups."""
        return self._corrected([p.detach() for p in self._parameters()], self.inner.propose())[0]

    def _corrected(self, before: list[Tensor], after: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The weights with the last step's error made good, and the steps Δ_t."""
        steps = [new - old for old, new in zip(before, after, strict=True)]
        delays = [group["delay"] for group in self.param_groups for _ in group["params"]]
        corrected = []
        for parameter, value, step, delay in zip(self._parameters(), after, steps, delays, strict=True):
            last = self.state.get(parameter, {}).get("last_step")
            error = 0.0 if last is None or delay == 0 or parameter.grad is None else self.share * (step - last)
            corrected.append(value + error)
        return corrected, steps
