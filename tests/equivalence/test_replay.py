"""What is a replay's own: forwards that it puts off, whose turn it is, and what it can't do."""

from __future__ import annotations

import pytest

from freerun.errors import ConfigError
from freerun.pipeline.executor import Executor
from freerun.simulate import replay as replays
from helpers.runs import replay, tiny


@pytest.mark.parametrize("schedule", ["async", "two-version", "gpipe"])
def test_forwards_put_off_give_the_same_weights(schedule, tokens, tmp_path, monkeypatch):
    config = tiny(tokens, pipeline__stages=3, pipeline__schedule=schedule, pipeline__microbatches=4)
    expected = replay(config, tmp_path / "put off")["weights_sha256"]
    monkeypatch.setattr(replays, "Deferred", lambda: None)
    assert replay(config, tmp_path / "at once")["weights_sha256"] == expected


def test_a_replay_holds_the_activations_of_one_microbatch(tokens, tmp_path, monkeypatch):
    held = []
    executors = set()
    backward = Executor.backward

    def counted(self, action):
        executors.add(self)
        in_flight = {m for each in executors for m, flight in each.in_flight.items() if hasattr(flight, "output")}
        held.append(len(in_flight))
        yield from backward(self, action)

    monkeypatch.setattr(Executor, "backward", counted)
    monkeypatch.setattr(Executor, "__hash__", object.__hash__)
    replay(tiny(tokens, pipeline__stages=3, pipeline__schedule="async"), tmp_path)
    assert max(held) == 1


def test_replicas_that_wait_for_nothing_keep_together(tokens, tmp_path, monkeypatch):
    order = []
    update = Executor.update

    def noted(self, action):
        order.append((self.place.replica, action.update))
        yield from update(self, action)

    monkeypatch.setattr(Executor, "update", noted)
    settings = {"replicas__count": 2, "replicas__strategy": "sparse", "replicas__delay": "free"}
    replay(tiny(tokens, pipeline__stages=2, training__updates=20, **settings), tmp_path)
    done = [0, 0]
    for replica, number in order:
        done[replica] = max(done[replica], number)
        assert abs(done[0] - done[1]) <= 2


def test_elastic_accumulation_is_refused_for_it_asks_the_clock(tokens, tmp_path):
    settings = {"replicas__count": 2, "replicas__strategy": "acco", "replicas__elastic": True}
    with pytest.raises(ConfigError, match=r"replicas\.elastic lets the clock decide"):
        replay(tiny(tokens, **settings), tmp_path)
