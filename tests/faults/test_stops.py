"""Ctrl-C and SIGTERM: the step is finished, everything is saved, the exit code is 0, and the run can go on."""

from __future__ import annotations

import json
import signal

import pytest

from freerun import config_files
from freerun.simulate.replay import simulate
from helpers.runs import changed, freerun, replay, run_freerun, tiny, updates_logged, wait_until


def stopped_and_resumed(config, folder, number, logged):
    """Start a run, send its launcher a signal, let it go on to the end; updates done at the stop, and the end's sha."""
    file, run = folder / "config.toml", folder / "run"
    folder.mkdir(parents=True)
    config_files.write(changed(config, run__dir=run), file)
    with freerun("train", file) as process:
        wait_until(lambda: updates_logged(run) >= logged, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert str(run) in out
    stopped = json.loads((run / "summary.json").read_text())["steps"]
    done = run_freerun("train", file, "--resume")
    assert done.returncode == 0, done.stderr
    return stopped, json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize(
    ("number", "updates", "mesh"),
    [
        (signal.SIGINT, 200, {}),
        (signal.SIGTERM, 600, {"pipeline__stages": 2, "pipeline__weights": "latest", "model__tied": True}),
    ],
)
def test_a_signal_saves_and_the_resumed_run_ends_with_the_same_weights(number, updates, mesh, tokens, tmp_path):
    config = tiny(tokens, training__updates=updates, training__sequences=16, evaluation__every=100, **mesh)
    stopped, summary = stopped_and_resumed(config, tmp_path / "run", number, 5)
    assert 5 <= stopped < updates, "the signal came too late to test anything"
    assert summary["weights_sha256"] == replay(config, tmp_path / "undisturbed")["weights_sha256"]


MESHES = {
    "stash": {"pipeline__stages": 3},
    "latest-slack-tied": {
        "pipeline__stages": 3,
        "pipeline__weights": "latest",
        "pipeline__slack": 1,
        "model__tied": True,
    },
    "M2": {"pipeline__stages": 3, "pipeline__microbatches": 2},
    "1f1b": {"pipeline__stages": 3, "pipeline__schedule": "1f1b", "pipeline__microbatches": 2},
    "two-version": {"pipeline__stages": 2, "pipeline__schedule": "two-version", "pipeline__microbatches": 3},
    "sparse": {
        "pipeline__stages": 2,
        "replicas__count": 2,
        "replicas__strategy": "sparse",
        "replicas__interval": 1,
        "replicas__delay": "fixed:3",
    },
    "acco": {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "acco"},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_an_early_end_changes_nothing_of_what_follows(mesh, tokens, tmp_path):
    config = tiny(tokens, **MESHES[mesh], training__updates=9, evaluation__every=2, checkpoint__every=1)
    expected = replay(config, tmp_path / "undisturbed")
    for end in (1, 5):
        run = tmp_path / str(end)
        run.mkdir()
        assert simulate(config, run, end=end)["steps"] == end
        found = replay(changed(config, run__resume="true"), run)
        assert found["weights_sha256"] == expected["weights_sha256"]
        assert evaluations(run) == evaluations(tmp_path / "undisturbed") | {end: evaluations(run)[end]}


def evaluations(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["update"]: row["eval_loss"] for row in rows if "eval_loss" in row}
