"""Does the study's runs in the laboratory: those that share a model, a text and a schedule side by side."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import Tensor

from freerun import config_files
from freerun.config import Config
from studies.delay.laboratory import WINDOW, Laboratory, crossing
from studies.delay.plan import STUDY
from studies.delay.rules import ROTATING, Setting
from studies.outcome import HOPELESS, TARGET, Outcome
from studies.runner import Run, resolved

MOST_AT_ONCE = 400
EVERY = 50
"""Updates between two points of a curve that is kept."""
OF_A_RUN = ("optimizer.", "lab.", "pipeline.stages", "training.seed")
"""Settings in which runs side by side may differ; the interval of refreshes is one for all."""


def carry_out(runs: Sequence[Run], device: str, source: str = "") -> None:
    """Do the runs that have no result yet; `source` replaces the workload's text."""
    missing = STUDY.missing(runs)
    for run in missing:
        if reason := only_replayed(config_of(run, source)):
            raise SystemExit(f"{run.name} can't be done side by side ({reason}); leave out --side-by-side for it.")
    for together in groups(missing):
        configs = [config_of(run, source) for run in together]
        settings = [setting(run, config) for run, config in zip(together, configs, strict=True)]
        print(f"{len(together)} runs side by side, from {together[0].name}", flush=True)
        longest = together[0].most or configs[0].training.updates
        losses = Laboratory(configs[0], settings, device).run(longest, until=together[0].until)
        reached = crossing(losses, TARGET)
        for index, run in enumerate(together):
            STUDY.write(run, outcome(losses[:, index], reached[index], run, configs[0].training.updates))


def groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Runs that can be done side by side."""
    by_what_they_share: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        shared = {key: value for key, value in run.settings.items() if not key.startswith(OF_A_RUN)}
        shared["interval"] = run.settings.get("optimizer.rotation.interval", "")
        shared["rotates"] = str(run.settings["optimizer.name"] in ROTATING)
        by_what_they_share[json.dumps([shared, run.until, run.most], sort_keys=True)].append(run)
    for same in by_what_they_share.values():
        for start in range(0, len(same), MOST_AT_ONCE):
            yield same[start : start + MOST_AT_ONCE]


def config_of(run: Run, source: str = "") -> Config:
    """The config of a run, but for what only the laboratory has."""
    known = {key: value for key, value in resolved(run.settings).items() if not key.startswith("lab.")}
    if source:
        known = {"data.source": source, **known}
    return config_files.read(str(STUDY.workload), list(known.items()))


def only_replayed(config: Config) -> str:
    """What a run asks for that the laboratory does not have; nothing if it has it all."""
    optimizer, rotation = config.optimizer, config.optimizer.rotation
    has = {
        "optimizer.name": optimizer.name in (*ROTATING, "adamw", "nesterov", "delay-compensated"),
        "pipeline.weights": config.pipeline.weights in ("auto", "stash"),
        "pipeline.microbatches": config.pipeline.microbatches == 1,
        "optimizer.rotation.source": rotation.source == "second",
        "optimizer.rotation.geometry": rotation.geometry == "bilateral",
        "optimizer.rotation.allocation": rotation.allocation == "uniform",
        "optimizer.rotation.block": rotation.block == 0,
    }
    return ", ".join(key for key, there in has.items() if not there)


def setting(run: Run, config: Config) -> Setting:
    """What the laboratory is told of a run."""
    tried = {key.removeprefix("lab."): float(value) for key, value in run.settings.items() if key.startswith("lab.")}
    return Setting.of(config, **tried)


def outcome(losses: Tensor, reached: int | None, run: Run, planned: int) -> Outcome:
    """The numbers of a run, as studies.outcome has them of a replay."""
    means = losses.unfold(0, WINDOW, 1).mean(-1)[::EVERY].tolist()
    curve = [(WINDOW + EVERY * i, round(value, 3) if math.isfinite(value) else None) for i, value in enumerate(means)]
    last = curve[-1][1]
    if last is None or last > HOPELESS:
        status = "diverged"
    elif len(losses) == planned:
        status = "finished"
    else:
        status = "reached" if last < run.until else "stopped"
    return {
        "status": status,
        "updates": len(losses),
        "loss": last,
        "eval_loss": None,
        "crossing": reached,
        "side_by_side": True,
        "curve": curve,
    }
