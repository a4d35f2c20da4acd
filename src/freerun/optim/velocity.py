"""The mean velocity of weights, by which PipeMare (T2) sets the weights of a backward back to those of its forward."""

from __future__ import annotations

import torch
from torch import Tensor


class MeanVelocity:
    """A running mean of how far an update moves the weights."""

    def __init__(self, like: Tensor, decay: float) -> None:
        self.mean = torch.zeros_like(like)
        self._decay = decay

    def update(self, old: Tensor, new: Tensor) -> None:
        """Take one update into the mean."""
        self.mean.mul_(self._decay).add_(new - old, alpha=1 - self._decay)

    def set_back(self, weights: Tensor, delay: int) -> Tensor:
        """Where the weights were `delay` updates ago, as far as the mean tells."""
        return weights - delay * self.mean
