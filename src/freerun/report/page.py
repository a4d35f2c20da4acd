"""A run's folder, or several, as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from freerun.errors import DataError
from freerun.files import write_text
from freerun.report import payload, tables
from freerun.report.read import Run, read_run

SCRIPTS = ("charts.js", "timeline.js", "start.js")
LEDES = {
    "Loss": "Nats per token. The faint line is every logged step.",
    "Loss against updates": "Nats per token. Solid: training, smoothed; dashed: evaluation.",
    "Loss against wall time": "The same curves, by what they cost.",
    "Speed": "Tokens per second, all replicas together.",
    "Timeline": "What every stage did when. Hatched: waiting for a neighbour; blank: between actions.",
    "Stages": "Where the time went, how many updates old the gradients were, and the weights that were kept.",
    "Steps": "The learning rate, and the gradient's norm before clipping.",
    "Settings": "The whole configuration, defaults included.",
    "Settings that differ": "What these runs do not have in common.",
}


def write(run_dir: Path | Sequence[Path], output: Path) -> None:
    """Write the report of a run, or the comparison of several, to `output`.

    What a run left behind is shown; what is missing, as after a kill, is named at the top of the page.
    """
    folders = [run_dir] if isinstance(run_dir, Path) else list(run_dir)
    if not folders:
        raise DataError("a report needs at least one run's folder.")
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a run's folder: there is no such directory.")
    runs = [read_run(folder) for folder in folders]
    _tell_apart(runs, folders)
    write_text(output, _page(runs))


def _tell_apart(runs: Sequence[Run], folders: Sequence[Path]) -> None:
    """Runs whose folders have the same name are named by their parents too."""
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run.name) > 1:
            run.name = f"{folder.resolve().parent.name}/{run.name}"


def _page(runs: Sequence[Run]) -> str:
    timelines = [payload.timeline(run) for run in runs]
    single = len(runs) == 1
    body = _single(runs[0], timelines[0] is not None) if single else _several(runs, [bool(t) for t in timelines])
    heading = runs[0].name if single else f"{len(runs)} runs side by side"
    data = {"curves": [payload.curves(run) for run in runs], "timelines": timelines}
    return Template(_asset("page.html")).substitute(
        title=escape(f"{heading} · freerun"),
        heading=escape(heading),
        subtitle=tables.subtitle(runs[0]) if single else escape(", ".join(run.name for run in runs)),
        notes=tables.notes(runs),
        body=body,
        style=_asset("style.css"),
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script="\n".join(map(_asset, SCRIPTS)),
    )


def _asset(name: str) -> str:
    return (resources.files("freerun.report") / name).read_text(encoding="utf-8")


def _single(run: Run, traced: bool) -> str:
    digest = run.summary.get("weights_sha256")
    weights = f"<footer>SHA-256 of the final weights: <code>{escape(str(digest))}</code></footer>" if digest else ""
    known = bool(run.train)
    rate_and_gradient = f'<div class="pair">{_chart("rate")}{_chart("gradient")}</div>'
    return "\n".join(
        (
            f"<section>{tables.headline(run)}</section>",
            _section("Loss", _chart("loss", "update,seconds,tokens") if known else ""),
            _section("Speed", _chart("speed") if known else ""),
            _section("Timeline", _timeline(0) if traced else ""),
            _section("Stages", tables.stages(run)),
            _section("Steps", rate_and_gradient if known else ""),
            _section("Settings", tables.settings(run)),
            weights,
        )
    )


def _several(runs: Sequence[Run], traced: Sequence[bool]) -> str:
    timelines = (
        _named(run, _timeline(n) if there else "") for n, (run, there) in enumerate(zip(runs, traced, strict=True))
    )
    known = any(run.train for run in runs)
    return "\n".join(
        (
            f"<section>{tables.comparison(runs)}</section>",
            _section("Loss against updates", _chart("loss") if known else ""),
            _section("Loss against wall time", _chart("loss", "seconds") if known else ""),
            _section("Speed", _chart("speed") if known else ""),
            _section("Timeline", "".join(timelines)),
            _section("Stages", "".join(_named(run, tables.stages(run)) for run in runs)),
            _section("Settings that differ", tables.differences(runs)),
        )
    )


def _section(title: str, content: str) -> str:
    """A section with its one idea in a sentence; nothing where nothing is known."""
    return f'<section><h2>{title}</h2><p class="lede">{LEDES[title]}</p>{content}</section>' if content else ""


def _named(run: Run, content: str) -> str:
    return f"<h3>{escape(run.name)}</h3>{content}" if content else ""


def _chart(kind: str, x: str = "update") -> str:
    return f'<figure class="chart" data-chart="{kind}" data-x="{x}"></figure>'


def _timeline(number: int) -> str:
    return f'<figure class="timeline" data-timeline="{number}"></figure>'
