"""Every verb of the command, as its user types it, on one tiny run of a mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 120
SMALL = {
    "model.layers": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.context": 32,
    "pipeline.stages": 2,
    "replicas.count": 2,
    "replicas.strategy": "sparse",
    "replicas.interval": 2,
    "replicas.delay": "fixed:2",
    "training.updates": 12,
    "training.sequences": 2,
    "training.threads": 1,
    "optimizer.name": "graded-rotation",
    "optimizer.warmup": 3,
    "evaluation.microbatches": 2,
    "run.log_every": 4,
    "run.sample": 5,
    "run.time_limit": 60,
}


def freerun(*words: object, folder: Path, launcher: tuple[str, ...] = ("-m", "freerun")) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    command = [sys.executable, *launcher, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)


def overrides(**more: object) -> list[str]:
    settings = SMALL | {key.replace("__", "."): value for key, value in more.items()}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a finished run."""
    folder = tmp_path_factory.mktemp("command")
    for number in range(30):
        (folder / f"{number}.txt").write_text("".join(f"{n} + {number} = {n + number}\n" for n in range(40)))
    done = freerun("train", *overrides(data__source="*.txt", run__dir="run"), folder=folder)
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout + done.stderr
    return folder


def digest(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def test_a_run_leaves_its_files(folder: Path) -> None:
    present = {path.name for path in (folder / "run").iterdir()}
    assert {"config.toml", "metrics.jsonl", "summary.json", "report.html", "checkpoints"} <= present
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["eval_loss"] > 0


def test_processes_started_by_torchrun_give_the_same_weights(folder: Path) -> None:
    words = overrides(data__source="*.txt", run__dir="under-torchrun")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "freerun")
    done = freerun("train", *words, folder=folder, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert digest(folder / "under-torchrun") == digest(folder / "run")


def test_the_replay_of_a_run_s_own_config_gives_the_same_weights(folder: Path) -> None:
    done = freerun("simulate", "run/config.toml", "--run.dir", "replayed", folder=folder)
    assert done.returncode == 0, done.stderr
    assert digest(folder / "replayed") == digest(folder / "run")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("eval", "run"), "perplexity"),
        (("generate", "run", "--prompt", "1 + ", "--tokens", "4"), ""),
        (("export", "run", "exported"), "exported"),
        (("report", "run"), "report.html"),
        (("schedule", "--stages", "4", "--kind", "async"), "stage"),
        (("recipes",), "demo"),
        (("recipes", "single"), "[model]"),
        (("doctor",), "torch"),
        (("train", "demo", "--dry-run"), "parameters"),
        (("tokenizer", "train", "bpe.json", "--vocabulary", "300", "--source", "*.txt"), "bpe.json"),
        (("--version",), "."),
        (("train", "--help"), "--optimizer.lr"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_verb_does_what_it_says(folder: Path, words: tuple[str, ...], says: str) -> None:
    done = freerun(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout + done.stderr


ELASTIC = ("demo", "--replicas.strategy", "acco", "--pipeline.stages", "1", "--replicas.elastic", "true")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trian", "demo"), "trian"),
        (("train", "demoo"), "did you mean demo?"),
        (("train", "single", "--training.updates", "0"), "training.updates is 0; it must be at least 1"),
        (("train", "single", "--data.source", "nothing/*.txt"), "nothing/*.txt"),
        (("train", "single", "--run.dir", "run"), "run"),
        (("simulate", *ELASTIC), "use freerun train"),
        (("eval", "nowhere"), "nowhere"),
        (("generate", "nowhere", "--prompt", "x"), "nowhere"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_what_can_not_be_is_refused_in_one_sentence(folder: Path, words: tuple[str, ...], says: str) -> None:
    done = freerun(*words, folder=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_help_does_not_import_torch(folder: Path) -> None:
    program = "import sys; from freerun.cli import dispatch; dispatch(['--help']); sys.exit('torch' in sys.modules)"
    assert freerun(program, folder=folder, launcher=("-c",)).returncode == 0
