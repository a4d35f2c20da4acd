"""The order of the data: a bijection per epoch, computed from (seed, n) alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.data.batches import Microbatches
from freerun.data.order import permute, shares
from freerun.errors import DataError


class NumberedRows:
    """Row k is its own number, so that a batch shows which rows it holds."""

    valid = 1

    def __init__(self, count):
        self.count = count

    def gather(self, rows):
        return rows[:, None].copy(), rows[:, None].copy()


def microbatches(count, sequences, seed=0, **options):
    return Microbatches(NumberedRows(count), sequences, seed, **options)


def held(batches, n):
    return batches.get(n).tokens[:, 0].tolist()


seeds = st.integers(-(2**63), 2**64)


@settings(deadline=None)
@given(count=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_bijection(count, seed, epoch):
    assert sorted(permute(np.arange(count), count, seed, epoch)) == list(range(count))


@settings(deadline=None)
@given(count=st.integers(1, 2**45), seed=seeds, data=st.data())
def test_distinct_samples_of_huge_data_stay_distinct_and_inside(count, seed, data):
    numbers = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20, unique=True))
    places = permute(np.array(numbers), count, seed, 3)
    assert len(set(places.tolist())) == len(numbers)
    assert places.min() >= 0 and places.max() < count


@settings(deadline=None)
@given(count=st.integers(1, 100), sequences=st.integers(1, 9), seed=seeds)
def test_every_sample_is_seen_exactly_once_per_epoch(count, sequences, seed):
    batches = microbatches(count, sequences, seed)
    needed = -(-2 * count // sequences)
    seen = [sample for n in range(needed) for sample in held(batches, n)]
    assert sorted(seen[:count]) == list(range(count))
    assert sorted(seen[count : 2 * count]) == list(range(count))


@settings(deadline=None)
@given(count=st.integers(1, 400), half=st.integers(1, 8), n=st.integers(0, 10**6), seed=seeds)
def test_twice_the_sequences_is_two_microbatches_in_one(count, half, n, seed):
    wide, narrow = microbatches(count, 2 * half, seed), microbatches(count, half, seed)
    assert held(wide, n) == held(narrow, 2 * n) + held(narrow, 2 * n + 1)


@settings(deadline=None)
@given(n=st.integers(0, 10**9), seed=seeds)
def test_a_microbatch_does_not_depend_on_what_was_asked_before(n, seed):
    asked = microbatches(1000, 4, seed)
    for other in (n + 1, 0, n):
        asked.get(other)
    assert held(asked, n) == held(microbatches(1000, 4, seed), n)


def test_less_data_than_one_microbatch_wraps_into_the_next_epochs():
    rows = held(microbatches(3, 8), 0)
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2]


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        return tuple(permute(np.arange(1000), 1000, seed, epoch))

    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25


def test_the_order_is_the_same_in_every_release():
    assert permute(np.arange(10), 10, 0, 0).tolist() == [3, 6, 5, 7, 2, 4, 0, 9, 8, 1]
    assert permute(np.arange(3), 10**9, 1, 2).tolist() == [251889052, 692775311, 501678484]


def test_places_are_spread_evenly():
    count, epochs = 12, 3000
    places = np.array([permute(np.arange(count), count, 7, epoch) for epoch in range(epochs)])
    for sample in range(count):
        visits = np.bincount(places[:, sample], minlength=count)
        chi_square = ((visits - epochs / count) ** 2 / (epochs / count)).sum()
        assert chi_square < 35  # 11 degrees of freedom: 0.02% of fair permutations exceed this


def test_neighbours_do_not_stay_neighbours():
    places = permute(np.arange(10_000), 10_000, 1, 1)
    assert np.mean(np.abs(np.diff(places)) <= 1) < 0.002
    assert abs(np.corrcoef(np.arange(10_000), places)[0, 1]) < 0.05


def test_without_reshuffling_every_epoch_has_the_same_order():
    batches = microbatches(10, 5, reshuffle=False)
    assert [held(batches, n) for n in (0, 1)] == [held(batches, n) for n in (2, 3)]


def test_no_data_is_an_error_with_advice():
    with pytest.raises(DataError, match="give more"):
        microbatches(0, 4, if_empty="give more").get(0)


def test_microbatches_have_no_negative_numbers():
    with pytest.raises(IndexError):
        microbatches(10, 4)[-1]


@settings(deadline=None)
@given(count=st.integers(0, 300), more=st.integers(0, 300), salt=st.integers(0, 2**64 - 1))
def test_a_share_does_not_change_when_more_follow(count, more, salt):
    assert np.array_equal(shares(count, salt), shares(count + more, salt)[:count])
    assert ((shares(count, salt) >= 0) & (shares(count, salt) < 1)).all()
