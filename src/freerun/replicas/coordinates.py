"""Which weights a round of sparse averaging takes, from (seed, round) alone.

A partition cuts the coordinates into blocks of as many neighbours as there are parts, and gives each block a random
shift: part k takes from each block the neighbour at (k + shift) mod parts. So a part is a random coordinate of every
block, in order of place, found in time and memory of the part alone, and every coordinate is in exactly one part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def parts_for(fraction: float) -> int:
    """How many parts a partition has when each round takes at most this fraction."""
    # what 1/fraction has beyond a whole number by rounding alone must not make another part
    return math.ceil(1 / fraction - 1e-9)


def coordinates(size: int, parts: int, seed: int, number: int) -> Tensor:
    """The coordinates of round `number`, ascending; a fresh partition every `parts` rounds."""
    partition, part = divmod(number, parts)
    random = torch.Generator().manual_seed(_mixed(seed, partition))
    starts = torch.arange(0, size, parts)
    shifts = torch.randint(parts, starts.shape, generator=random)
    chosen = starts + (shifts + part) % parts
    # only the last block can be short
    return chosen if len(chosen) == 0 or chosen[-1] < size else chosen[:-1]


def _mixed(seed: int, partition: int) -> int:
    """A seed for each pair; neighbouring pairs give unrelated ones."""
    return (seed * 0x9E3779B97F4A7C15 + (partition + 1) * 0xD1B54A32D192ED03) % 2**63
