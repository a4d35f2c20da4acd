"""The cut of a model into stages: covers everything once, balances, and refuses what can't be."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.model.cut import balanced_counts, cut, pieces
from freerun.model.size import activation_bytes, flops_per_token, parameters, sizes

granularities = st.sampled_from(["layer", "quarter"])


@given(st.integers(1, 12), st.integers(1, 48), granularities, st.sampled_from(["balanced", "layers"]))
def test_a_cut_covers_every_piece_once_and_in_order(layers, stages, granularity, how):
    parts = pieces(ModelConfig(layers=layers, width=32), 256, granularity)
    if stages > len(parts) - 2:
        with pytest.raises(ConfigError, match=r"pipeline\.stages"):
            cut(parts, stages, how)
        return
    ranges = cut(parts, stages, how)
    assert len(ranges) == stages
    assert [index for own in ranges for index in own] == list(range(len(parts)))
    assert all(any(parts[index].layer >= 0 for index in own) for own in ranges)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.data())
def test_balanced_is_as_good_as_trying_every_cut(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    counts = balanced_counts(costs, stages)

    def largest(inner):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *inner, len(costs)]))

    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert sum(counts) == len(costs) and min(counts) >= 1
    assert largest(list(itertools.accumulate(counts))[:-1]) == pytest.approx(min(map(largest, every)))


def test_among_equally_good_cuts_balanced_takes_the_most_even():
    assert balanced_counts([1, 1, 1, 1, 5], 3) == [2, 2, 1]


def test_a_large_head_moves_layers_to_earlier_stages():
    parts = pieces(ModelConfig(layers=8, width=64), 50_000)
    lengths = [len(own) for own in cut(parts, 2, "balanced")]
    assert lengths == [1 + 7, 1 + 1]


def test_explicit_counts_are_layers_whatever_the_granularity():
    model = ModelConfig(layers=8, width=64)
    assert [len(own) for own in cut(pieces(model, 99), 3, "3,3,2")] == [4, 3, 3]
    assert [len(own) for own in cut(pieces(model, 99, "quarter"), 3, "3,3,2")] == [13, 12, 9]


@pytest.mark.parametrize("how", ["3,3", "3,3,3", "8,0,0", "even"])
def test_counts_that_do_not_fit_are_refused_by_key(how):
    with pytest.raises(ConfigError, match=r"pipeline\.cut"):
        cut(pieces(ModelConfig(layers=8, width=64), 99), 3, how)


def test_eight_layers_in_quarters_make_thirty_two_stages():
    parts = pieces(ModelConfig(layers=8, width=64), 99, "quarter")
    assert len(cut(parts, 32)) == 32


@pytest.mark.parametrize("change", [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}])
def test_impossible_sizes_are_refused_by_key(change):
    with pytest.raises(ConfigError, match=rf"model\.{next(iter(change))}"):
        sizes(ModelConfig(**{"width": 64, "heads": 4, **change}), 99)


def test_flops_are_about_six_per_parameter_and_token():
    model = ModelConfig(layers=8, width=512, heads=8, context=128)
    assert flops_per_token(model, 1000) == pytest.approx(6 * parameters(model, 1000), rel=0.1)


def test_checkpointing_and_fewer_layers_keep_fewer_activations():
    model = ModelConfig(layers=8, width=512, heads=8, context=128)
    full = activation_bytes(model, 1000, 4, layers=8, last=False)
    assert activation_bytes(model, 1000, 4, layers=4, last=False) == full // 2
    recomputed = ModelConfig(layers=8, width=512, heads=8, context=128, activation_checkpointing=True)
    assert activation_bytes(recomputed, 1000, 4, layers=8, last=False) < full / 10


def test_planning_needs_no_torch():
    code = "import sys, freerun.model.cut, freerun.model.size; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
