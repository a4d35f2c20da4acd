"""Runs `freerun simulate` in processes of its own, a few at a time, and keeps what came of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freerun.files import write_text
from studies.delay.outcome import diverged, losses, outcome, smoothed
from studies.delay.plan import Run

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WORK = Path("runs/delay")
"""Folders of runs under way; what is kept of a run is its JSON in results/."""
EVERY = 3.0
"""Seconds between two looks at the runs."""


@dataclass
class Going:
    """A run under way."""

    run: Run
    folder: Path
    process: subprocess.Popen[bytes]

    def verdict(self) -> str:
        """Why the run should stop now: it diverged, or it has reached what it was for; or nothing."""
        curve = smoothed(losses(self.folder))
        if diverged(curve):
            return "diverged"
        return "reached" if curve and curve[-1][1] < self.run.until else ""


def result_path(run: Run) -> Path:
    """Where a run's result is kept."""
    return RESULTS / f"{run.name}.json"


def carry_out(runs: Sequence[Run], at_once: int) -> None:
    """Do the runs that have no result yet; one that was interrupted goes on from its last checkpoint."""
    waiting = [run for run in runs if not result_path(run).exists()]
    going: list[Going] = []
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                going.append(_start(waiting.pop(0)))
            time.sleep(EVERY)
            going = [each for each in going if not _over(each)]
    finally:
        for each in going:
            each.process.terminate()


def _start(run: Run) -> Going:
    folder = WORK / run.name
    resume = any((folder / "checkpoints").glob("*"))
    if not resume and folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "freerun", "simulate", str(HERE / "workload.toml"), "--run.dir", str(folder)]
    command += [word for key, value in run.overrides().items() for word in (f"--{key}", value)]
    command += ["--resume"] if resume else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    print(f"start {run.name}", flush=True)
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(["nice", "-n", "19", *command], stdout=log, stderr=log, env=environment)
    return Going(run, folder, process)


def _over(going: Going) -> bool:
    """Whether a run is over; then its result is written."""
    code = going.process.poll()
    status = {None: going.verdict(), 0: "finished"}.get(code, "failed")
    if not status:
        return False
    if code is None:
        going.process.terminate()
        going.process.wait()
    result = {"run": going.run.name, "method": going.run.method, "stages": going.run.stages}
    result |= {"seed": going.run.seed, "settings": going.run.overrides(), **outcome(going.folder, status)}
    if status == "failed":
        result["error"] = going.folder.with_suffix(".log").read_text(errors="replace")[-500:]
    path = result_path(going.run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result) + "\n")
    shutil.rmtree(going.folder / "checkpoints", ignore_errors=True)
    print(f"{status:8} {going.run.name}: loss {result['loss']}, target at {result['crossing']}", flush=True)
    return True
