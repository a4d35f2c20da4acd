"""Killed at any moment and resumed, a run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial

import pytest

from freerun import checkpoint
from freerun.summary import everyone
from helpers.runs import changed, in_processes, replay, tiny, updates_logged, wait_until, workers

KILLS = 10


@pytest.mark.parametrize("mesh", [{"model__tied": True}, {"pipeline__weights": "latest", "replicas__count": 2}])
def test_a_run_that_is_killed_ten_times_ends_with_the_weights_of_an_undisturbed_one(mesh, tokens, tmp_path):
    config = tiny(
        tokens,
        pipeline__stages=2,
        training__updates=60,
        evaluation__every=4,
        checkpoint__every=3,
        replicas__strategy="sparse",
        replicas__interval=1,
        replicas__delay="fixed:2",
        **mesh,
    )
    expected = replay(config, tmp_path / "undisturbed")
    run, chance = tmp_path / "run", random.Random(1)
    for _ in range(KILLS):
        saved = checkpoint.complete(run / "checkpoints", everyone(config))
        with workers(changed(config, run__resume="true") if saved else config, run) as started:
            goal = min(updates_logged(run) + chance.randint(0, 8), 55)
            wait_until(partial(started.logged, run, goal))
            time.sleep(chance.random() * 0.1)
            for pid in chance.sample(started.pids, chance.randint(1, len(started.pids))):
                os.kill(pid, signal.SIGKILL)
    found = in_processes(changed(config, run__resume="true"), run)
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["eval_loss"] == expected["eval_loss"]
