"""What an update costs in `freerun simulate` at 8 and at 32 stages, against one synchronous step of the same model.

All run in one process, in turns, on one thread: 8 layers cut in quarters, context 64, 8 sequences, bytes; width 64, as
in studies/delay, where a stage's forward takes 0.4 ms, and width 256.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import CACHE, Claim, Turn, Turns, arguments, machine, quiet, ratio, report, table

from freerun import config_files
from freerun.config import Config
from freerun.data import build
from freerun.mesh import Fabric
from freerun.saving import Saves
from freerun.simulate.replay import fabrics
from freerun.steps import Steps, Together
from freerun.trace import Tracer
from freerun.train import Run, train

Switch = Callable[[], None]

SETTINGS = {
    "model.layers": "8",
    "model.heads": "4",
    "model.context": "64",
    "training.sequences": "8",
    "training.threads": "1",
    "pipeline.granularity": "quarter",
    "pipeline.schedule": "async",
    "evaluation.microbatches": "0",
    "checkpoint.every": "0",
    "data.cache": str(CACHE),
}
KINDS = ("forward", "backward", "update")


class Contender:
    """A replay that lets others have their turn every few updates of its last stage."""

    def __init__(self, width: int, stages: int, every: int, updates: int) -> None:
        own = {"model.width": str(width), "pipeline.stages": str(stages), "training.updates": str(updates)}
        overrides = {**SETTINGS, **own}
        self.config = config_files.read("single", list(overrides.items()))
        self.every = every
        self.tracers: list[Tracer] = []
        self.spent: list[Counter[str]] = []

    def run(self, switch: Switch) -> None:
        """What simulate does, with `switch` in between."""
        torch.set_num_threads(1)
        config, together = self.config, Together()
        data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
        with tempfile.TemporaryDirectory() as folder:

            def one(fabric: Fabric) -> Steps[None]:
                tracer = Tracer(fabric.place.rank, str(fabric.place), 0, 0)
                self.tracers.append(tracer)
                saves = HandingOver(config, fabric, self, switch)
                yield from train(Run(config, fabric, data, torch.device("cpu"), Path(folder), saves, tracer))

            for fabric in fabrics(config, together):
                together.add(one(fabric), line=0)
            together.run()

    def note(self) -> None:
        """Keep what all stages have spent so far on each kind of action."""
        total: Counter[str] = Counter()
        for tracer in self.tracers:
            total.update({kind: tracer.nanoseconds[kind] for kind in KINDS})
        self.spent.append(total)


class HandingOver(Saves):
    """Saves of one place; the last stage's hand over now and then."""

    def __init__(self, config: Config, fabric: Fabric, contender: Contender, switch: Switch) -> None:
        super().__init__(config, fabric.place, fabric.board)
        self._contender, self._switch, self._last = contender, switch, fabric.place.last

    def made(self, version: int, *more: Any) -> None:
        super().made(version, *more)
        if self._last and version % self._contender.every == 0:
            self._contender.note()
            self._switch()


def per_update(turns: list[Turn], contender: Contender, skip: int) -> dict[str, float]:
    """Milliseconds per update: in all, and by kind of action."""
    every = contender.every
    parts = {
        kind: statistics.median(
            (after[kind] - before[kind]) / 1e6 / every
            for before, after in zip(
                contender.spent[skip:], contender.spent[skip + 1 : skip + len(turns)], strict=False
            )
        )
        for kind in KINDS
    }
    total = statistics.median(turn.seconds for turn in turns) / every * 1e3
    cpu = statistics.median(turn.cpu_seconds for turn in turns) / every * 1e3
    least = min(turn.cpu_seconds for turn in turns) / every * 1e3
    rest = total - sum(parts.values())
    return {"total": total, **parts, "between actions": rest, "cpu": cpu, "least_cpu": least}


def of_width(width: int, every: int, rounds: int, skip: int) -> dict[str, Any]:
    """The depths of one width, in turns of so many updates."""
    # the end of a run, when the first stages have no forwards left, is not counted
    contenders = {stages: Contender(width, stages, every, every * rounds + (stages > 1) * 40) for stages in (1, 8, 32)}
    turns = Turns({f"P={stages}": contender.run for stages, contender in contenders.items()}).run(skip)
    measured = {}
    for stages, contender in contenders.items():
        own, one = turns[f"P={stages}"], turns["P=1"]
        measured[f"width {width}, P={stages}"] = {
            "milliseconds": per_update(own, contender, skip),
            "over_one_stage": ratio(own, one),
            "over_one_stage_cpu": ratio(own, one, cpu=True),
        }
    return measured


def main() -> None:
    options = arguments(__doc__)
    quiet(0 if options.quick else options.patience)
    about = machine()
    measured: dict[str, Any] = {}
    for width, *how_long in ((64, 5, 12, 8),) if options.quick else ((64, 10, 40, 5), (256, 4, 26, 10)):
        measured |= of_width(width, *how_long)
    names = list(next(iter(measured.values()))["milliseconds"])
    table(
        ("ms per update", *names, "over P=1", "in CPU time"),
        [
            (name, *m["milliseconds"].values(), m["over_one_stage"], m["over_one_stage_cpu"])
            for name, m in measured.items()
        ],
    )
    claims = [
        Claim(f"{name}: cost of an update over a synchronous step", own["over_one_stage"], 1.15, at_most=True)
        for name, own in measured.items()
        if not name.endswith("P=1")
    ]
    report("replay", options.quick, about, claims, measured)


if __name__ == "__main__":
    main()
