"""Forwards that a replay puts off: one microbatch's activations at a time, the same numbers."""

from __future__ import annotations

import pytest

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
