"""Fresh weights as a pure function of (seed, parameter name), so that every cut starts alike."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def seed_of(seed: int, name: str) -> int:
    """A seed for random numbers that depends on nothing but the run's seed and the name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def fill_normal(parameter: Tensor, seed: int, name: str, std: float) -> None:
    """Draws a parameter's values on the CPU in fp32, wherever it lives."""
    values = torch.empty(parameter.shape, dtype=torch.float32)
    parameter.copy_(values.normal_(std=std, generator=torch.Generator().manual_seed(seed_of(seed, name))))
