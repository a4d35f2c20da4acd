"""All weights of a stage in one fp32 buffer, and all gradients in another, so that a stage is one tensor to move."""

from __future__ import annotations

from collections.abc import Iterable
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


class FlatParameters:
    """The master weights of a stage: its module's parameters become views of `weights`, their gradients of `gradient`.

    `without` names parameters that are borrowed from another stage and have no master here.
    """

    def __init__(self, module: nn.Module, without: Iterable[str] = ()) -> None:
        self.slices = layout(module, without)
        size = self.slices[-1].end if self.slices else 0
        device = next(module.parameters()).device
        self.weights = torch.empty(size, dtype=torch.float32, device=device)
        self.gradient = torch.zeros(size, dtype=torch.float32, device=device)
        self.parameters: dict[str, nn.Parameter] = {}
        named = dict(module.named_parameters())
        for part in self.slices:
            parameter = named[part.name]
            view = part.of(self.weights)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = part.of(self.gradient)
            self.parameters[part.name] = parameter
