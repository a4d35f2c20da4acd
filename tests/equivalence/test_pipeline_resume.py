"""A run that goes on from any of its checkpoints ends with the weights of the undisturbed one."""

from __future__ import annotations

import json
import shutil

import pytest

from freerun.errors import ConfigError
from helpers.runs import changed, in_processes, replay, tiny

MESHES = {
    "one stage": {},
    "stash": {"pipeline__stages": 3},
    "stash-M2-bf16": {"pipeline__stages": 3, "pipeline__microbatches": 2, "training__precision": "bf16"},
    "slack": {"pipeline__stages": 2, "pipeline__slack": 2},
    "latest": {"pipeline__stages": 3, "pipeline__weights": "latest"},
    "latest-M2": {"pipeline__stages": 3, "pipeline__weights": "latest", "pipeline__microbatches": 2},
    "velocity": {"pipeline__stages": 3, "pipeline__weights": "latest", "optimizer__delay__velocity_decay": 0.9},
    "lookahead": {"pipeline__stages": 3, "optimizer__delay__lookahead": 1.0},
    "lookahead-latest": {"pipeline__stages": 3, "pipeline__weights": "latest", "optimizer__delay__lookahead": 1.0},
    "two-version": {"pipeline__stages": 2, "pipeline__schedule": "two-version", "pipeline__microbatches": 2},
    "1f1b-tied": {"pipeline__stages": 2, "pipeline__schedule": "1f1b", "model__tied": "true"},
    "tied": {"pipeline__stages": 3, "model__tied": "true"},
    "tied-latest-bf16": {
        "pipeline__stages": 3,
        "model__tied": "true",
        "pipeline__weights": "latest",
        "training__precision": "bf16",
    },
    "carried": {"pipeline__stages": 3, "optimizer__clip_scope": "carried", "optimizer__clip": 0.3},
    "rotation": {
        "pipeline__stages": 2,
        "optimizer__name": "basis-rotation",
        "optimizer__rotation__interval": 3,
        "optimizer__rotation__allocation": "stage-aware",
    },
    "compensated": {"pipeline__stages": 3, "optimizer__name": "delay-compensated", "optimizer__delay__compensation": 1},
    "allreduce": {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "allreduce"},
    "zero1": {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "zero1"},
    "acco": {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "acco"},
    "sparse in flight": {
        "pipeline__stages": 2,
        "replicas__count": 2,
        "replicas__strategy": "sparse",
        "replicas__fraction": 0.3,
        "replicas__interval": 1,
        "replicas__delay": "fixed:3",
    },
    "diloco": {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "diloco", "replicas__interval": 3},
}


def copy_of_checkpoint(folder, update, target):
    """A run's folder as a kill right after a checkpoint leaves it."""
    name = f"update-{update:08d}"
    shutil.copytree(folder / "checkpoints" / name, target / "checkpoints" / name)
    return target


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_checkpoint_leads_to_the_same_weights(mesh, tokens, tmp_path):
    config = tiny(tokens, **MESHES[mesh], evaluation__every=2)
    expected = replay(config, tmp_path / "undisturbed")
    saving = changed(config, checkpoint__every=1, checkpoint__keep=99)
    assert replay(saving, tmp_path / "saving")["weights_sha256"] == expected["weights_sha256"]
    for update in (1, 2, 5):
        folder = copy_of_checkpoint(tmp_path / "saving", update, tmp_path / f"from {update}")
        resumed = replay(changed(saving, run__resume="true"), folder)
        assert resumed["weights_sha256"] == expected["weights_sha256"], f"resumed from update {update}"
        assert resumed["eval_loss"] == expected["eval_loss"]
        for real, whole in zip(resumed["stages"], expected["stages"], strict=True):
            assert real["delay_histogram"] == whole["delay_histogram"]


@pytest.mark.parametrize("weights", ["stash", "latest"])
def test_what_is_saved_does_not_depend_on_how_often(weights, tokens, tmp_path):
    """With seldom checkpoints, `latest` keeps old versions only shortly before one."""
    config = tiny(tokens, pipeline__stages=3, pipeline__weights=weights, checkpoint__every=5)
    expected = replay(config, tmp_path / "whole")["weights_sha256"]
    folder = copy_of_checkpoint(tmp_path / "whole", 5, tmp_path / "resumed")
    assert replay(changed(config, run__resume="true"), folder)["weights_sha256"] == expected


def test_the_replay_goes_on_from_what_processes_saved_and_they_from_what_it_saved(tokens, tmp_path):
    config = tiny(tokens, pipeline__stages=2, model__tied="true", checkpoint__every=3, checkpoint__keep=9)
    resume = changed(config, run__resume="true")
    expected = replay(config, tmp_path / "replay")["weights_sha256"]
    assert in_processes(config, tmp_path / "processes")["weights_sha256"] == expected
    by_replay = copy_of_checkpoint(tmp_path / "processes", 3, tmp_path / "by replay")
    by_processes = copy_of_checkpoint(tmp_path / "replay", 6, tmp_path / "by processes")
    assert replay(resume, by_replay)["weights_sha256"] == expected
    assert in_processes(resume, by_processes)["weights_sha256"] == expected


def test_metrics_of_a_resumed_run_are_those_of_one_run(tokens, tmp_path):
    """Rows from beyond the checkpoint are dropped, and nothing is there twice."""
    config = tiny(tokens, pipeline__stages=2, evaluation__every=2, checkpoint__every=4, checkpoint__keep=9)
    replay(config, tmp_path)
    whole = rows_of(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "update-00000008")
    replay(changed(config, run__resume="true"), tmp_path)

    def essence(rows):
        return [(row["update"], row.get("loss"), row.get("eval_loss")) for row in rows]

    assert essence(rows_of(tmp_path)) == essence(whole)


def test_a_finished_run_that_is_resumed_stays_as_it_is(tokens, tmp_path):
    config = tiny(tokens, pipeline__stages=2)
    expected = replay(config, tmp_path)
    found = replay(changed(config, run__resume="true"), tmp_path)
    for key in ("weights_sha256", "eval_loss", "steps", "tokens"):
        assert found[key] == expected[key]


def test_going_on_from_a_finished_pipeline_is_refused_with_the_reason(tokens, tmp_path):
    """The pipeline has run empty: the versions that further forwards should have seen were never kept."""
    config = tiny(tokens, pipeline__stages=3)
    replay(config, tmp_path)
    with pytest.raises(ConfigError, match=r"training\.updates"):
        replay(changed(config, run__resume="true", training__updates=12), tmp_path)


def test_a_finished_run_of_one_stage_can_go_on(tokens, tmp_path):
    long = tiny(tokens, training__updates=10, optimizer__schedule="constant")
    expected = replay(long, tmp_path / "long")["weights_sha256"]
    replay(changed(long, training__updates=6), tmp_path / "parts")
    assert replay(changed(long, run__resume="true"), tmp_path / "parts")["weights_sha256"] == expected


def test_resuming_with_another_cut_is_refused(tokens, tmp_path):
    replay(tiny(tokens, pipeline__stages=2), tmp_path)
    with pytest.raises(ConfigError, match=r"pipeline\.stages"):
        replay(tiny(tokens, pipeline__stages=3, run__resume="true"), tmp_path)
    with pytest.raises(ConfigError, match="another model or cut"):
        replay(tiny(tokens, pipeline__stages=2, pipeline__cut="1,2", run__resume="true"), tmp_path)


def test_resuming_on_other_data_is_refused(tokens, tmp_path):
    replay(tiny(tokens), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.source"):
        replay(tiny(tokens, data__eval_fraction=0.3, run__resume="true"), tmp_path)
