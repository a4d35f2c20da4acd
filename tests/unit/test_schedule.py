"""What the schedules promise, over every shape of pipeline up to 16 stages and 16 microbatches per update."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.errors import ConfigError
from freerun.pipeline.schedule import (
    SCHEDULES,
    Backward,
    Forward,
    Update,
    actions,
    backward_order,
    delays,
    forward_order,
    in_flight,
    max_in_flight,
    max_versions,
    resumed,
    versions_needed,
)
from freerun.weights.delay import delay_histogram, lag, steady_delay

SMALL = [
    (kind, stages, microbatches, slack)
    for kind in SCHEDULES
    for stages in (1, 2, 3, 4, 7)
    for microbatches in (1, 2, 3, 7, 8)
    for slack in ((0, 1, 2) if kind == "async" else (0,))
    if kind != "two-version" or microbatches >= stages
]


@st.composite
def shapes(draw):
    kind = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.integers(1, 16))
    microbatches = draw(st.integers(stages if kind == "two-version" else 1, 16))
    slack = draw(st.integers(0, 3)) if kind == "async" else 0
    return kind, stages, microbatches, slack


def whole(kind, stage, stages, microbatches, updates, slack):
    return list(actions(kind, stage, stages, microbatches, updates, slack))


def check_stage(kind, stage, stages, microbatches, updates, slack):
    """Every promise about one stage's actions, by walking through them."""
    waiting: dict[int, int] = {}
    done = backwards = most = versions = 0
    for action in actions(kind, stage, stages, microbatches, updates, slack):
        if isinstance(action, Forward):
            assert action.microbatch not in waiting
            assert action.version <= done, "a forward can't see weights that do not exist yet"
            if kind != "two-version":
                assert action.version == done, "a forward sees the newest weights of its stage"
            waiting[action.microbatch] = action.version
        elif isinstance(action, Backward):
            assert waiting.pop(action.microbatch) == action.version
            assert action.microbatch == backwards
            backwards += 1
        else:
            assert action.update == done and backwards == (done + 1) * microbatches
            done += 1
        most = max(most, len(waiting))
        versions = max(versions, done - min(waiting.values(), default=done) + 1)
    assert not waiting and done == updates
    assert most <= max_in_flight(kind, stage, stages, microbatches, slack)
    assert versions <= max_versions(kind, "stash", stage, stages, microbatches, slack)
    return most, versions


@pytest.mark.parametrize(("kind", "stages", "microbatches", "slack"), SMALL)
def test_every_forward_has_its_backward_and_every_update_its_microbatches(kind, stages, microbatches, slack):
    for updates in (0, 1, 2, 9):
        for stage in range(stages):
            check_stage(kind, stage, stages, microbatches, updates, slack)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 12))
def test_any_shape_keeps_the_promises(shape, updates):
    kind, stages, microbatches, slack = shape
    for stage in range(stages):
        check_stage(kind, stage, stages, microbatches, updates, slack)


@pytest.mark.parametrize(("kind", "stages", "microbatches", "slack"), SMALL)
def test_bounds_on_memory_are_reached_not_only_kept(kind, stages, microbatches, slack):
    updates = 4 + 2 * max_in_flight(kind, 0, stages, microbatches, slack) // microbatches
    for stage in range(stages):
        most, versions = check_stage(kind, stage, stages, microbatches, updates, slack)
        assert most == max_in_flight(kind, stage, stages, microbatches, slack)
        if kind == "async":
            assert versions == max_versions(kind, "stash", stage, stages, microbatches, slack)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 12))
def test_neighbours_send_in_the_order_in_which_the_other_receives(shape, updates):
    kind, stages, microbatches, slack = shape
    for stage in range(stages - 1):
        here = whole(kind, stage, stages, microbatches, updates, slack)
        next_ = whole(kind, stage + 1, stages, microbatches, updates, slack)
        assert list(forward_order(here)) == list(forward_order(next_))
        assert list(backward_order(here)) == list(backward_order(next_))


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(1, 40), st.data())
def test_versions_and_delays_are_the_formulas(shape, updates, data):
    kind, stages, microbatches, slack = shape
    stage = data.draw(st.integers(0, stages - 1))
    tau = lag(stage, stages, slack)
    seen: list[int] = []
    for action in actions(kind, stage, stages, microbatches, updates, slack):
        if isinstance(action, Update):
            assert action.delay == action.update - min(seen)
            seen.clear()
        elif isinstance(action, Backward):
            i = action.microbatch
            expected = {
                "gpipe": i // microbatches,
                "1f1b": i // microbatches,
                "two-version": max(0, i // microbatches - 1),
                "async": max(0, i - tau) // microbatches,
            }[kind]
            assert action.version == expected
            seen.append(action.version)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 40), st.data())
def test_delay_histogram_counts_what_the_actions_do(shape, updates, data):
    kind, stages, microbatches, slack = shape
    stage = data.draw(st.integers(0, stages - 1))
    counted = delays(actions(kind, stage, stages, microbatches, updates, slack))
    assert delay_histogram(kind, stage, stages, microbatches, updates, slack) == counted


@pytest.mark.parametrize("stages", range(1, 17))
def test_one_microbatch_per_update_gives_delay_stages_minus_one_minus_stage(stages):
    for stage in range(stages):
        updates = [a for a in actions("async", stage, stages, 1, 3 * stages) if isinstance(a, Update)]
        assert {u.delay for u in updates[stages:]} == {stages - 1 - stage}
        assert [u.delay for u in updates[:stages]] == [min(u, stages - 1 - stage) for u in range(stages)]


def test_two_version_has_delay_one_at_every_stage():
    for stage in range(8):
        seen = [a.delay for a in actions("two-version", stage, 8, 8, 5) if isinstance(a, Update)]
        assert seen == [0, 1, 1, 1, 1]


def test_one_stage_is_plain_training_whatever_the_schedule():
    for kind in ("gpipe", "1f1b", "async"):
        assert delay_histogram(kind, 0, 1, 4, 7) == {0: 28}
    assert whole("async", 0, 1, 2, 3, 0) == whole("1f1b", 0, 1, 2, 3, 0)


@settings(max_examples=80, deadline=None)
@given(shapes(), st.integers(0, 12), st.data())
def test_resuming_replays_what_was_in_flight_and_goes_on_to_the_letter(shape, updates, data):
    kind, stages, microbatches, slack = shape
    stage = data.draw(st.integers(0, stages - 1))
    done = data.draw(st.integers(0, updates))
    past = whole(kind, stage, stages, microbatches, updates, slack)
    cut = next((n + 1 for n, a in enumerate(past) if isinstance(a, Update) and a.update == done - 1), 0)
    before, after = past[:cut], past[cut:]
    backwards = set(backward_order(before))
    flying = [a for a in before if isinstance(a, Forward) and a.microbatch not in backwards]
    left = list(resumed(kind, stage, stages, microbatches, updates, slack, from_update=done))
    assert in_flight(kind, stage, stages, microbatches, updates, slack, after_update=done) == flying
    assert left == flying + after
    needed = versions_needed(kind, stage, stages, microbatches, updates, slack, after_update=done)
    assert {a.version for a in left if isinstance(a, Forward) and a.version <= done} <= set(needed)
    assert len(needed) <= max_versions(kind, "stash", stage, stages, microbatches, slack)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_long_run_costs_nothing_until_it_is_walked(kind):
    many = 10**9
    assert next(iter(actions(kind, 0, 8, 8, many))) == Forward(0, 0)
    late = resumed(kind, 0, 8, 8, many, from_update=many - 1)
    assert sum(isinstance(a, Update) for a in islice(late, 100)) == 1
    assert len(in_flight(kind, 0, 8, 8, many, after_update=many // 2)) in (0, 7)
    assert sum(delay_histogram(kind, 0, 8, 8, many).values()) == 8 * many


def test_steady_delay_is_what_late_updates_have():
    for kind, stages, microbatches, slack in SMALL:
        *_, last = actions(kind, 0, stages, microbatches, 3 * stages * (1 + slack) + 2, slack)
        assert isinstance(last, Update)
        assert last.delay == steady_delay(kind, 0, stages, microbatches, slack)


def test_policies_keep_as_many_versions_as_the_methods_say():
    assert [max_versions("async", "stash", k, 4, 1) for k in range(4)] == [4, 3, 2, 1]
    assert [max_versions("async", "stash", k, 4, 2) for k in range(4)] == [3, 2, 2, 1]
    assert [max_versions("two-version", policy, 3, 4, 8) for policy in ("stash", "two-version")] == [2, 2]
    assert max_versions("async", "latest", 0, 4, 1) == 1
    assert max_versions("gpipe", "stash", 0, 4, 8) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("two-version", 0, 4, 3, 1), "at least 4"),
        (("1f1b", 4, 4, 4, 1), "stage 4"),
        (("1f1b", -1, 4, 4, 1), "stage -1"),
        (("gpipe", 0, 4, 4, 1, 1), "pipeline.slack"),
        (("async", 0, 4, 4, 1, -1), "pipeline.slack"),
        (("zigzag", 0, 4, 4, 1), "zigzag"),
        (("async", 0, 4, 0, 1), "pipeline.microbatches"),
        (("async", 0, 0, 1, 1), "pipeline.stages"),
    ],
)
def test_what_can_not_be_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(ConfigError, match=words):
        actions(*arguments)


def test_weight_policies_that_a_schedule_can_not_keep_are_refused():
    with pytest.raises(ConfigError, match="two-version"):
        max_versions("async", "two-version", 0, 4, 1)
    with pytest.raises(ConfigError, match="latest"):
        max_versions("two-version", "latest", 0, 4, 4)
    with pytest.raises(ConfigError, match=r"pipeline\.weights"):
        max_versions("async", "newest", 0, 4, 4)
    with pytest.raises(ConfigError, match="resume"):
        resumed("async", 0, 4, 4, 10, from_update=11)
