"""The virtual clock: schedules run to their end in bounded buffers, as fast as they should."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.errors import ConfigError
from freerun.pipeline.schedule import SCHEDULES, actions
from freerun.simulate.events import Deadlock, simulate


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 17))
def test_one_buffer_per_channel_never_deadlocks(kind, stages):
    for microbatches in range(stages if kind == "two-version" else 1, 17):
        timeline = simulate(kind, stages, microbatches, 3, 1, 2, buffers=1)
        for stage, spans in enumerate(timeline.spans):
            assert [s.action for s in spans] == list(actions(kind, stage, stages, microbatches, 3))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(0, 4),
    st.lists(st.floats(0.1, 5), min_size=16, max_size=16),
    st.floats(0, 4),
)
def test_slack_needs_one_more_buffer_each_whatever_the_costs(stages, microbatches, slack, costs, link):
    costs = costs[:stages]
    timeline = simulate(
        "async", stages, microbatches, 4, costs, costs[::-1], link_seconds=link, slack=slack, buffers=1 + slack
    )
    for spans in timeline.spans:
        assert all(a.end <= b.start for a, b in pairwise(spans))


def test_too_few_buffers_are_reported_as_a_deadlock():
    with pytest.raises(Deadlock, match="stage 0 before Forward"):
        simulate("async", 4, 1, 20, 1, 2, slack=2, buffers=1)


@pytest.mark.parametrize(("kind", "microbatches"), [("async", 1), ("async", 3), ("two-version", 8)])
def test_stages_that_never_flush_are_always_busy(kind, microbatches):
    assert simulate(kind, 8, microbatches, 60, 1, 2).utilisation == pytest.approx(1)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 8])
def test_flushing_leaves_the_known_bubble(kind, stages):
    timeline = simulate(kind, stages, 8, 30, 1, 2)
    assert timeline.utilisation == pytest.approx(8 / (8 + stages - 1))
    assert timeline.makespan == pytest.approx(30 * 3 * (8 + stages - 1))


def test_the_slowest_stage_sets_the_pace():
    uneven = simulate("async", 6, 1, 60, [1, 1, 2, 1, 1, 1], [2, 2, 4, 2, 2, 2])
    assert uneven.seconds_per_update == pytest.approx(6)
    assert uneven.busy_fractions == pytest.approx([0.5, 0.5, 1, 0.5, 0.5, 0.5])


def test_updates_cost_time_too():
    assert simulate("async", 4, 2, 30, 1, 2, update_seconds=0.5).seconds_per_update == pytest.approx(6.5)


@pytest.mark.parametrize("link", [0.3, 1.0, 1.4])
def test_slack_hides_a_link_that_takes_less_than_half_a_microbatch(link):
    hidden = simulate("async", 8, 1, 90, 1, 2, link_seconds=link, slack=1)
    exposed = simulate("async", 8, 1, 90, 1, 2, link_seconds=link)
    assert hidden.utilisation == pytest.approx(1)
    assert exposed.utilisation < 0.9


def test_a_full_link_sets_the_pace_and_latency_does_not():
    assert simulate("async", 3, 1, 90, 1, 2, link_seconds=4, slack=6).seconds_per_update == pytest.approx(4)
    assert simulate("async", 3, 1, 90, 1, 2, latency_seconds=4, slack=6).seconds_per_update == pytest.approx(3)


def test_costs_for_the_wrong_number_of_stages_are_refused():
    with pytest.raises(ConfigError, match="forward_seconds has 3 entries; give one number or 4"):
        simulate("async", 4, 1, 4, [1, 1, 1], 2)


def test_a_run_without_updates_takes_no_time():
    assert simulate("async", 3, 1, 0, 1, 2).makespan == 0
