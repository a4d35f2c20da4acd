"""All weights of a stage in one fp32 buffer, and all gradients in another, so that a stage is one tensor to move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slice:
    """Where a parameter lies in a flat buffer."""

    name: str
    shape: torch.Size
    start: int
    end: int

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat buffer, in its own shape."""
        return flat[self.start : self.end].view(self.shape)


def layout(module: nn.Module, without: Iterable[str] = ()) -> list[Slice]:
    """The parameters of a module one after the other, each counted once."""
    skipped = set(without)
    slices: list[Slice] = []
    start = 0
    for name, parameter in module.named_parameters():
        if name not in skipped:
            slices.append(Slice(name, parameter.shape, start, start + parameter.numel()))
            start += parameter.numel()
    return slices


def flatten(module: nn.Module, slices: Sequence[Slice]) -> Tensor:
    """Move parameters of a module into one fp32 buffer, of which they become views."""
    named = dict(module.named_parameters())
    device = next(module.parameters()).device
    weights = torch.empty(slices[-1].end if slices else 0, dtype=torch.float32, device=device)
    for part in slices:
        parameter, view = named[part.name], part.of(weights)
        view.copy_(parameter.detach())
        parameter.data = view
    return weights


class FlatParameters:
    """The master weights of a stage: its module's parameters become views of `weights`, their gradients of `gradient`.

    `without` names parameters that are borrowed from another stage and have no master here.
    """

    def __init__(self, module: nn.Module, without: Iterable[str] = ()) -> None:
        self.slices = layout(module, without)
        self.weights = flatten(module, self.slices)
        self.gradient = torch.zeros_like(self.weights)
        named = dict(module.named_parameters())
        self.parameters = {part.name: named[part.name] for part in self.slices}
        self.attach_gradients()

    def attach_gradients(self) -> None:
        """Let backwards add to `gradient`, together with what they have put elsewhere (after a zero_grad to None)."""
        for part in self.slices:
            parameter, view = self.parameters[part.name], part.of(self.gradient)
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.add_(parameter.grad)
            parameter.grad = view
