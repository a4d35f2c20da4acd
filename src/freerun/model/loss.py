"""The loss of next-token prediction."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Label of a position that doesn't count."""


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies over all labels that count, in fp32; the caller divides by their number."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
