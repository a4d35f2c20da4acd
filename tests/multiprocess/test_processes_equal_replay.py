"""Real processes give the weights that the replay gives, bit for bit, in every kind of mesh."""

from __future__ import annotations

import pytest

from helpers.runs import in_processes, replay, tiny

MESHES = {
    "async-stash-bf16-tied-eval": {
        "pipeline__stages": 3,
        "model__tied": True,
        "training__precision": "bf16",
        "evaluation__every": 2,
    },
    "async-latest-carried": {
        "pipeline__stages": 2,
        "pipeline__weights": "latest",
        "optimizer__clip_scope": "carried",
        "evaluation__every": 3,
    },
    "async-M3-slack": {"pipeline__stages": 2, "pipeline__microbatches": 3, "pipeline__slack": 2},
    "two-version": {"pipeline__stages": 2, "pipeline__schedule": "two-version", "pipeline__microbatches": 3},
    "1f1b-tied": {"pipeline__stages": 2, "pipeline__schedule": "1f1b", "model__tied": True, "evaluation__every": 3},
    "gpipe-M3-bf16": {
        "pipeline__stages": 2,
        "pipeline__schedule": "gpipe",
        "pipeline__microbatches": 3,
        "training__precision": "bf16",
    },
}

REPLICAS = {
    "sparse": {"replicas__strategy": "sparse", "replicas__interval": 1, "replicas__delay": "fixed:2"},
    "acco": {"replicas__strategy": "acco"},
    "zero1": {"replicas__strategy": "zero1", "pipeline__schedule": "gpipe"},
    "allreduce": {"replicas__strategy": "allreduce", "evaluation__every": 3},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_stages_in_processes_equal_the_replay(mesh, tokens, tmp_path):
    config = tiny(tokens, **MESHES[mesh])
    assert_equal(config, tmp_path)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_stages_of_replicas_in_processes_equal_the_replay(strategy, tokens, tmp_path):
    config = tiny(tokens, pipeline__stages=2, replicas__count=2, **REPLICAS[strategy])
    assert_equal(config, tmp_path)


def test_a_second_run_gives_the_same_weights(tokens, tmp_path):
    config = tiny(tokens, pipeline__stages=2)
    first, second = in_processes(config, tmp_path / "first"), in_processes(config, tmp_path / "second")
    assert first["weights_sha256"] == second["weights_sha256"]


def assert_equal(config, folder):
    expected, found = replay(config, folder / "replay"), in_processes(config, folder / "processes")
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["eval_loss"] == expected["eval_loss"]
    assert found["bytes_sent"] == expected["bytes_sent"]
    for real, replayed in zip(found["stages"], expected["stages"], strict=True):
        for key in ("delay_histogram", "versions_kept", "peak_weight_bytes", "parameters"):
            assert real[key] == replayed[key]
