"""Stages × replicas, asynchronous along the pipeline: real processes give what their replay gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freerun.config import Config
from helpers.runs import changed, in_processes, replay, tiny

STRATEGIES: dict[str, dict[str, Any]] = {
    "sparse": {"fraction": 0.25, "interval": 1, "delay": "fixed:3"},
    "acco": {},
    "zero1": {"payload": "bf16"},
    "allreduce": {},
    "diloco": {"interval": 3},
}
OPTIMIZERS = {"sparse": "nesterov", "acco": "basis-rotation", "zero1": "muon"}


def mesh(tokens: Path, strategy: str) -> Config:
    settings = {f"replicas__{key}": value for key, value in STRATEGIES[strategy].items()}
    return tiny(
        tokens,
        pipeline__stages=2,
        replicas__count=2,
        replicas__strategy=strategy,
        optimizer__name=OPTIMIZERS.get(strategy, "adamw"),
        **settings,
    )


@pytest.mark.parametrize("strategy", ["sparse", "acco", "zero1", "allreduce"])
def test_two_stages_of_two_replicas_equal_their_replay(strategy: str, tokens: Path, tmp_path: Path) -> None:
    config = mesh(tokens, strategy)
    real, local = in_processes(config, tmp_path / "real"), replay(config, tmp_path / "replay")
    assert real["weights_sha256"] == local["weights_sha256"]
    assert real["eval_loss"] == local["eval_loss"]
    assert real["bytes_sent"] == local["bytes_sent"]


@pytest.mark.parametrize("strategy", ["sparse", "acco", "diloco"])
def test_a_mesh_resumes_bit_for_bit(strategy: str, tokens: Path, tmp_path: Path) -> None:
    config = mesh(tokens, strategy)
    whole = replay(config, tmp_path / "whole")
    half = changed(config, checkpoint__every=5, checkpoint__keep=9)
    replay(half, tmp_path / "half")
    for part in (tmp_path / "half" / "checkpoints" / "update-00000008").iterdir():
        part.unlink()
    resumed = replay(changed(half, run__resume=True), tmp_path / "half")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
