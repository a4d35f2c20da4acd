"""Whether an optimizer treats each element alone, so that its weights may be cut anywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freerun.errors import ConfigError

UPDATES = 3


def is_elementwise(factory: Callable[[list[Tensor]], torch.optim.Optimizer]) -> bool:
    """Try the optimizer on a small matrix in one piece and in two, and see whether the steps agree."""
    random = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=random)
    gradients = [torch.randn(6, 4, generator=random) for _ in range(UPDATES)]
    whole = [start.clone()]
    halves = [start.view(1, 24)[:, :10].clone(), start.view(1, 24)[:, 10:].clone()]
    _train(factory, whole, [[gradient] for gradient in gradients])
    _train(factory, halves, [list(gradient.view(1, 24).tensor_split([10], dim=1)) for gradient in gradients])
    return torch.allclose(torch.cat(halves, dim=1).view(6, 4), whole[0], rtol=1e-5, atol=1e-7)


def _train(
    factory: Callable[[list[Tensor]], torch.optim.Optimizer], weights: list[Tensor], gradients: list[list[Tensor]]
) -> None:
    optimizer = factory([weight.requires_grad_() for weight in weights])
    for parts in gradients:
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part
        try:
            optimizer.step()
        except TypeError as error:
            raise ConfigError(
                f"{type(optimizer).__name__} can't be sharded: its step needs more than the gradient ({error})."
            ) from error
