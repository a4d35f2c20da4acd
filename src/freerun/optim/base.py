"""What every optimizer here has in common: one update, run on the weights (step) or on copies of them (propose)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from freerun.errors import ConfigError, NonFiniteError

Group = dict[str, Any]


@dataclass
class Slot:
    """One parameter on its way through an update.

    `weight` and `state` are written in place, `gradient` and `used` are only read. All tensors have the working
    precision: float32 for a bf16 or fp16 parameter, otherwise the parameter's own.
    """

    index: int
    """Its place in the group's parameters."""
    weight: Tensor
    gradient: Tensor
    state: dict[str, Any]
    used: Tensor | None


class ProposingOptimizer(torch.optim.Optimizer):
    """An optimizer that can say what it would do.

    `propose` returns the new value of every parameter, in the order of param_groups, and touches nothing. `step`
    commits. Both run the same `update`, so that a proposal and the step after it agree bit for bit.

    The caller may set on every group, before either: `delay`, the updates that passed since the forward of this
    gradient, and `used`, the weights that this forward saw (a list aligned with `params`, or None).

    A parameter without gradient keeps its value and its state. A gradient that is not finite raises NonFiniteError
    before anything is touched; a caller that has seen to it already sets `looks_for_nonfinite` to false.
    """

    looks_for_nonfinite = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {"delay": 0, "used": None, **defaults})

    @abstractmethod
    def update(self, group: Group, slots: list[Slot]) -> None:
        """Advance the weights and states of one group's slots in place; the group itself is only read."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, parameters, slots in self._gathered(commit=True):
            self.update(group, slots)
            for parameter, slot in zip(parameters, slots, strict=True):
                if parameter.dtype != slot.weight.dtype:
                    parameter.copy_(slot.weight)
        return loss

    @torch.no_grad()
    def propose(self) -> list[Tensor]:
        """The values that `step` would give, in the order of param_groups."""
        proposed: dict[Tensor, Tensor] = {}
        for group, parameters, slots in self._gathered(commit=False):
            self.update(group, slots)
            for parameter, slot in zip(parameters, slots, strict=True):
                proposed[parameter] = slot.weight.to(parameter.dtype)
        return [proposed[p] if p in proposed else p.detach().clone() for p in self._parameters()]

    def state_dict(self) -> dict[str, Any]:
        """As in torch, without the weights lent through `used`."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.pop("used", None)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but state keeps its own precision (torch casts it to the parameter's)."""
        super().load_state_dict(state_dict)
        self._restore(state_dict)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for name, parameter in zip(names, self._parameters(), strict=True):
            if name in state_dict["state"]:
                self.state[parameter] = _copied(state_dict["state"][name], parameter.device)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gathered(self, commit: bool) -> list[tuple[Group, list[Tensor], list[Slot]]]:
        """Each group with its parameters that have a gradient and their slots: real ones to commit, else copies."""
        gathered = []
        for group in self.param_groups:
            used = group.get("used") or [None] * len(group["params"])
            pairs = zip(group["params"], used, strict=True)
            present = [(i, p, u) for i, (p, u) in enumerate(pairs) if p.grad is not None]
            slots = [self._slot(i, p, u, commit) for i, p, u in present]
            if self.looks_for_nonfinite:
                _refuse_nonfinite(slots)
            gathered.append((group, [p for _, p, _ in present], slots))
        return gathered

    def _slot(self, index: int, parameter: Tensor, used: Tensor | None, commit: bool) -> Slot:
        working = torch.promote_types(parameter.dtype, torch.float32)
        assert parameter.grad is not None
        weight, state = parameter.detach(), self.state[parameter] if commit else {}
        if not commit:
            weight = weight.clone()
            state = _copied(self.state.get(parameter, {}), parameter.device)
        return Slot(
            index=index,
            weight=weight.to(working),
            gradient=parameter.grad.detach().to(working),
            state=state,
            used=None if used is None else used.detach().to(working),
        )


def treats(group: Group, wish: str, parameter: Tensor) -> bool:
    """Whether a parameter gets what is meant for matrices: 2-D ones do, unless group[wish] is False."""
    if group[wish] and parameter.ndim != 2:
        raise ConfigError(f"{wish} is set for a parameter of shape {tuple(parameter.shape)}; it is for matrices only.")
    return parameter.ndim == 2 and group[wish] is not False


def _copied(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {k: v.detach().to(device, copy=True) if isinstance(v, Tensor) else deepcopy(v) for k, v in state.items()}


def _refuse_nonfinite(slots: list[Slot]) -> None:
    if not slots or torch.isfinite(get_total_norm([s.gradient for s in slots])):
        return
    shapes = [tuple(s.gradient.shape) for s in slots if not torch.isfinite(s.gradient.norm())]
    raise NonFiniteError(
        f"The gradients of {len(shapes)} parameters (the first of shape {shapes[0] if shapes else 'any'}) are not "
        "finite, or too large to square; nothing was updated. Skip this update, or lower optimizer.lr."
    )


class Wrapping(ProposingOptimizer):
    """A proposing optimizer around another one, with which it shares parameters, groups and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self._share()

    def update(self, group: Group, slots: list[Slot]) -> None:
        raise NotImplementedError("The wrapped optimizer updates all groups at once, in step.")

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the wrapped optimizer."""
        if hasattr(self, "optimizer"):
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the wrapped optimizer, but state keeps its own precision."""
        self.optimizer.load_state_dict(state_dict)
        self._share()
        self._restore(state_dict)

    def _share(self) -> None:
        self.state = self.optimizer.state
        self.param_groups = self.optimizer.param_groups


class Adapted(Wrapping):
    """Any torch.optim optimizer, made to propose: it steps on copies, which are then taken back.

    While `propose` runs, the parameters point to the copies; their own memory is never written. What a step does with
    a gradient that is not finite is the adapted optimizer's affair.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The adapted optimizer's own step."""
        return self.optimizer.step(closure)

    @torch.no_grad()
    def propose(self) -> list[Tensor]:
        """The values that `step` would give, in the order of param_groups."""
        parameters = self._parameters()
        own_data, own_state = [p.data for p in parameters], dict(self.state)
        settings = [{k: deepcopy(v) for k, v in g.items() if k not in ("params", "used")} for g in self.param_groups]
        try:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
                if parameter in own_state:
                    self.state[parameter] = _copied(own_state[parameter], parameter.device)
            self.step()
            return [p.data for p in parameters]
        finally:
            for parameter, data in zip(parameters, own_data, strict=True):
                parameter.data = data
            self.state.clear()
            self.state.update(own_state)
            for group, kept in zip(self.param_groups, settings, strict=True):
                group.update(kept)


def adapt(optimizer: torch.optim.Optimizer) -> ProposingOptimizer:
    """The optimizer itself when it can propose, otherwise an Adapted one."""
    return optimizer if isinstance(optimizer, ProposingOptimizer) else Adapted(optimizer)
