"""Runs `freerun simulate` in processes of its own, a few at a time, and keeps what came of each.

A study is a folder with a `workload.toml` that all its runs share; results are kept in `results/SECTION.jsonl` there,
a line for each run.
"""

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

import torch

from freerun.files import write_text
from studies.outcome import Outcome, diverged, losses, outcome, smoothed

WORK = Path("runs/studies")
"""Folders of runs under way; what is kept of a run is its JSON."""
EVERY = 3.0
"""Seconds between two looks at the runs."""


@dataclass(frozen=True)
class Run:
    """One run: `freerun simulate` on its study's workload with these settings."""

    name: str
    """SECTION/RUN."""
    method: str
    settings: dict[str, str]
    """Everything that differs from the workload."""
    until: float = 0.0
    """Stop when the smoothed loss is this low; 0 runs to the end."""
    most: int = 0
    """Stop after so many updates, whatever the schedule of the learning rate is made for; 0 runs to the end."""

    @property
    def section(self) -> str:
        """The part of the study that keeps its result."""
        return self.name.split("/")[0]

    def about(self) -> dict[str, object]:
        """How a result says what was run."""
        return {"run": self.name, "method": self.method, "settings": self.settings}


def resolved(settings: dict[str, str]) -> dict[str, str]:
    """Settings with {torch} and {studies} filled in: where those are on this machine."""
    places = {"{torch}": str(Path(torch.__file__).parent), "{studies}": str(Path(__file__).parent)}
    found = {}
    for key, value in settings.items():
        for name, place in places.items():
            value = value.replace(name, place)
        found[key] = value
    return found


@dataclass
class Going:
    """A run under way."""

    run: Run
    folder: Path
    process: subprocess.Popen[bytes]

    def verdict(self) -> str:
        """Why the run should stop now: it diverged, has reached what it was for, was long enough; or nothing."""
        curve = smoothed(losses(self.folder))
        if not curve:
            return ""
        if diverged(curve):
            return "diverged"
        if curve[-1][1] < self.run.until:
            return "reached"
        return "stopped" if 0 < self.run.most <= curve[-1][0] else ""


@dataclass(frozen=True)
class Study:
    """A folder of runs."""

    folder: Path

    @property
    def workload(self) -> Path:
        """What all runs share."""
        return self.folder / "workload.toml"

    @property
    def results(self) -> Path:
        """Where results are kept."""
        return self.folder / "results"

    def load(self, section: str) -> list[Outcome]:
        """The results of a section."""
        path = self.results / f"{section}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """The runs that have no result yet."""
        done = {result["run"] for section in {run.section for run in runs} for result in self.load(section)}
        return [run for run in runs if run.name not in done]

    def carry_out(self, runs: Sequence[Run], at_once: int) -> None:
        """Do the runs that have no result yet; one that was interrupted goes on from its last checkpoint."""
        waiting = self.missing(runs)
        going: list[Going] = []
        try:
            while waiting or going:
                while waiting and len(going) < at_once:
                    going.append(self._start(waiting.pop(0)))
                time.sleep(EVERY)
                going = [each for each in going if not self._over(each)]
        finally:
            for each in going:
                each.process.terminate()

    def write(self, run: Run, result: Outcome) -> None:
        """Keep a result."""
        self.results.mkdir(parents=True, exist_ok=True)
        kept = [*self.load(run.section), {**run.about(), **result}]
        lines = sorted(json.dumps(each) for each in kept)
        write_text(self.results / f"{run.section}.jsonl", "\n".join(lines) + "\n")
        print(f"{result['status']:8} {run.name}: loss {result['loss']}, target at {result['crossing']}", flush=True)

    def _start(self, run: Run) -> Going:
        folder = WORK / self.folder.name / run.name
        resume = any((folder / "checkpoints").glob("*"))
        if not resume and folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "freerun", "simulate", str(self.workload), "--run.dir", str(folder)]
        command += [word for key, value in resolved(run.settings).items() for word in (f"--{key}", value)]
        command += ["--resume"] if resume else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        print(f"start {run.name}", flush=True)
        with folder.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(["nice", "-n", "19", *command], stdout=log, stderr=log, env=environment)
        return Going(run, folder, process)

    def _over(self, going: Going) -> bool:
        """Whether a run is over; then its result is written."""
        code = going.process.poll()
        status = {None: going.verdict(), 0: "finished"}.get(code, "failed")
        if not status:
            return False
        if code is None:
            going.process.terminate()
            going.process.wait()
        result = outcome(going.folder, status)
        if status == "failed":
            result["error"] = going.folder.with_suffix(".log").read_text(errors="replace")[-500:]
        self.write(going.run, result)
        shutil.rmtree(going.folder / "checkpoints", ignore_errors=True)
        return True
