"""The order of the data: a keyed permutation that is computed, not stored.

The numbers 0 … count−1 are laid out on a grid of rows × columns just large enough to hold them. A few rounds move
each number along its row by a hash of the row, then along its column by a hash of the column (a Feistel network over
unequal halves); every round can be undone, so the whole is a bijection of the grid. A number that lands on one of the
few surplus cells is sent through again until it does not.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 3
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash of each value (the finalizer of splitmix64); `values` is overwritten."""
    values ^= values >> np.uint64(30)
    values *= _FACTORS[0]
    values ^= values >> np.uint64(27)
    values *= _FACTORS[1]
    values ^= values >> np.uint64(31)
    return values


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Two keys per round, each a hash of (seed, epoch, position)."""
    base = mix(np.array([seed & _MASK], dtype=np.uint64) + np.uint64(_GOLDEN))
    base = mix(base + np.uint64(epoch & _MASK) * np.ones(1, np.uint64))
    steps = np.arange(1, 2 * _ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    keys = mix(steps + base)
    keys.setflags(write=False)
    return keys


def _scramble(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """A keyed 32-bit hash: half the work of `mix`, enough within a round."""
    hashed = values ^ key
    hashed *= _FACTORS[0]
    hashed ^= hashed >> np.uint64(29)
    hashed *= _FACTORS[1]
    hashed >>= np.uint64(32)
    return hashed


def _shuffle_grid(
    values: NDArray[np.uint64], rows: np.uint64, columns: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """All rounds, once, for numbers on the grid."""
    row, column = np.divmod(values, columns)
    for key in range(0, len(keys), 2):
        row = (row + _scramble(column, keys[key])) % rows
        column = (column + _scramble(row, keys[key + 1])) % columns
    shuffled: NDArray[np.uint64] = row * columns + column
    return shuffled


def permute(numbers: NDArray[np.int64], count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the permutation of 0 … count−1 keyed by (seed, epoch) sends each of `numbers`."""
    side = isqrt(count - 1) + 1 if count > 1 else 1
    rows, columns = np.uint64(side), np.uint64(-(-count // side))
    keys = _round_keys(seed, epoch)
    places = _shuffle_grid(numbers.astype(np.uint64), rows, columns, keys)
    surplus = places >= np.uint64(count)
    while surplus.any():
        places[surplus] = _shuffle_grid(places[surplus], rows, columns, keys)
        surplus = places >= np.uint64(count)
    return places.astype(np.int64)


def shares(count: int, salt: int) -> NDArray[np.float64]:
    """A fixed number in [0, 1) for each of 0 … count−1, the same whatever `count` is."""
    hashed = mix(mix(np.arange(count, dtype=np.uint64) + np.uint64(_GOLDEN)) + np.uint64(salt))
    fractions: NDArray[np.float64] = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions
