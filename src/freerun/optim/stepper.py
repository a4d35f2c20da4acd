"""One optimizer step as the training loop sees it: clip by the right norm, set the rate for this delay, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freerun.collectives import exchange_scalars
from freerun.config import OptimizerConfig
from freerun.errors import NonFiniteError
from freerun.groups import Group
from freerun.optim.base import ProposingOptimizer, adapt
from freerun.optim.error_feedback import ErrorFeedback
from freerun.optim.param_groups import param_groups
from freerun.optim.rates import rate
from freerun.registry import OPTIMIZERS, load
from freerun.steps import Steps


@dataclass(frozen=True)
class NamedParameter:
    """A trainable tensor (a whole parameter or a slice of one), with what decides how it is optimised."""

    name: str
    kind: str
    tensor: Tensor


@dataclass(frozen=True)
class StagePlace:
    """Where a stage stands: what an optimizer may know about the pipeline around it."""

    stage: int
    stages: int
    delay: int


class Stepper:
    """An optimizer over some parameters, with its learning-rate schedule and clipping.

    `norm_groups` are the groups over which the squared gradient norm is summed before clipping: the replicas when each
    holds a shard, the stages when the norm is the whole model's.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        updates: int,
        place: StagePlace,
        parameters: Sequence[NamedParameter],
        norm_groups: Sequence[Group] = (),
        skip_nonfinite: bool = False,
    ) -> None:
        kinds = {parameter.name: parameter.kind for parameter in parameters}
        named = [(parameter.name, parameter.tensor) for parameter in parameters]
        groups = param_groups(named, lambda name, _: kinds[name], config)
        build: Callable[..., torch.optim.Optimizer] = load(OPTIMIZERS[config.name])
        self.optimizer: ProposingOptimizer = adapt(build(groups, config, place.stages, place.delay))
        self.optimizer.looks_for_nonfinite = False  # _prepare does, by the norm that it needs anyway
        if config.delay.error_feedback:
            self.optimizer = ErrorFeedback(self.optimizer, config.delay.error_feedback)
        self.others_norm2 = 0.0
        self.last_norm = 0.0
        self.last_rate = 0.0
        self.skipped = 0
        self._config = config
        self._updates = updates
        self._place = place
        self._tensors = [parameter.tensor for parameter in parameters]
        self._norm_groups = list(norm_groups)
        self._skip_nonfinite = skip_nonfinite

    def step(self, progress: float, delay: int) -> Steps[bool]:
        """Keep one step; false when the gradient is not finite and such updates are skipped."""
        if not (yield from self._prepare(progress, delay)):
            return False
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["used"] = None
        return True

    def propose(self, progress: float, delay: int) -> Steps[list[Tensor] | None]:
        """The new values of the parameters, in the optimizer's order, touching neither them nor any state."""
        if not (yield from self._prepare(progress, delay)):
            return None
        return self.optimizer.propose()

    def rate(self, progress: float, delay: int) -> float:
        """The learning rate of an update."""
        return rate(self._config, progress, self._updates, delay)

    def show_used(self, weights_of: Callable[[str], Tensor]) -> None:
        """Show the optimizer, for its next step only, the weights that the gradients were taken at."""
        for group in self.optimizer.param_groups:
            group["used"] = [weights_of(name) for name in group["names"]]

    def _prepare(self, progress: float, delay: int) -> Steps[bool]:
        norm2 = yield from squared_norm(self._tensors, self._norm_groups)
        self.last_norm = math.sqrt(norm2)
        if not math.isfinite(norm2):
            if not self._skip_nonfinite:
                where = f"stage {self._place.stage}, update {int(progress)}"
                raise NonFiniteError(f"the gradient is not finite at {where}; lower optimizer.lr or look at the data")
            self.skipped += 1
            return False
        norm = math.sqrt(norm2 + self.others_norm2)
        clip(self._tensors, norm, self._config.clip)
        self.last_rate = self.rate(progress, delay)
        for group in self.optimizer.param_groups:
            group["lr"] = self.last_rate * group.get("lr_scale", 1.0)
            group["delay"] = delay
        return True


def squared_norm(tensors: Sequence[Tensor], groups: Sequence[Group]) -> Steps[float]:
    """The squared norm of the tensors' gradients, summed over the members of each group."""
    norms = torch._foreach_norm([_gradient(tensor) for tensor in tensors])
    norm2 = float(torch.stack(norms).double().square().sum()) if norms else 0.0
    for group in groups:
        shares = yield from exchange_scalars(group, [norm2])
        norm2 = math.fsum(share for (share,) in shares)
    return norm2


def clip(tensors: Sequence[Tensor], norm: float, largest: float) -> None:
    """Scale the tensors' gradients, whose norm (with others') is `norm`, to the largest allowed; 0 allows any."""
    if largest and norm > largest:
        torch._foreach_mul_([_gradient(tensor) for tensor in tensors], largest / norm)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
