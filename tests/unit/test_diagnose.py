"""A diagnosis of a small run: every stage has its numbers, and a stage without delay has no staleness of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from freerun import config_files
from freerun.diagnose import Effort, diagnose
from freerun.errors import ConfigError
from freerun.simulate.replay import simulate

SMALL = {
    "model.layers": "2",
    "model.width": "16",
    "model.heads": "2",
    "model.context": "16",
    "data.max_documents": "20",
    "pipeline.stages": "2",
    "training.updates": "8",
    "training.sequences": "2",
    "training.threads": "1",
    "evaluation.microbatches": "0",
    "checkpoint.every": "4",
    "run.tensorboard": "false",
}


def run(folder: Path, **more: str) -> None:
    settings = SMALL | {"data.cache": str(folder / "cache"), "run.dir": str(folder)} | more
    config = config_files.read("", list(settings.items()))
    config_files.write(config, folder / "config.toml")
    simulate(config, folder)


@pytest.mark.parametrize("optimizer", ["adamw", "basis-rotation"])
def test_every_stage_is_measured(tmp_path: Path, optimizer: str) -> None:
    run(tmp_path, **{"optimizer.name": optimizer, "model.tied": "true"})
    found = diagnose(tmp_path, None, Effort(probes=2, batches=2, updates=3, power_iterations=2))
    assert [(one.stage, one.delay) for one in found] == [(0, 1), (1, 0)]
    for one in found:
        assert one.misalignment_rotated > 0
        assert one.misalignment > 0
        assert 0 <= one.oscillation <= 1
        assert -1 <= one.update_cosine <= 1.0001


def test_a_run_without_an_early_checkpoint_is_refused(tmp_path: Path) -> None:
    run(tmp_path, **{"checkpoint.every": "0"})
    with pytest.raises(ConfigError, match=r"checkpoint\.every"):
        diagnose(tmp_path, None, Effort())
