from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.replicas.coordinates import coordinates, parts_for


@settings(deadline=None)
@given(st.integers(1, 400), st.floats(0.01, 1.0), st.integers(0, 2**40), st.integers(0, 30))
def test_every_coordinate_is_taken_exactly_once_in_a_partition(
    size: int, fraction: float, seed: int, which: int
) -> None:
    parts = parts_for(fraction)
    rounds = [coordinates(size, parts, seed, which * parts + part) for part in range(parts)]
    assert torch.equal(torch.cat(rounds).sort().values, torch.arange(size))


def test_a_round_takes_its_share_and_no_more_than_one_coordinate_extra() -> None:
    for part in range(20):
        assert abs(len(coordinates(100_001, 20, 3, part)) - 100_001 / 20) <= 1


def test_fractions_that_are_not_exact_in_binary_make_no_extra_part() -> None:
    assert [parts_for(fraction) for fraction in (1.0, 0.5, 0.3, 0.1, 0.05, 0.01, 0.07)] == [1, 2, 4, 10, 20, 100, 15]


def test_coordinates_follow_from_seed_and_round_and_differ_between_partitions_and_seeds() -> None:
    assert torch.equal(coordinates(1000, 10, 7, 4), coordinates(1000, 10, 7, 4))
    assert not torch.equal(coordinates(1000, 10, 7, 4), coordinates(1000, 10, 7, 14))
    assert not torch.equal(coordinates(1000, 10, 7, 4), coordinates(1000, 10, 8, 4))


@pytest.mark.parametrize("part", [0, 3])
def test_each_coordinate_is_as_likely_as_any_other(part: int) -> None:
    counts = torch.zeros(40)
    for partition in range(4000):
        counts[coordinates(40, 8, 1, partition * 8 + part)] += 1
    assert (counts - 500).abs().max() < 110  # five standard deviations


def test_neighbouring_blocks_are_independent() -> None:
    first = torch.stack([coordinates(16, 8, 0, 8 * partition) for partition in range(4000)]) % 8
    together = torch.zeros(8, 8)
    for one, other in first.tolist():
        together[one, other] += 1
    assert (together - 62.5).abs().max() < 45
