"""Figures and tables, from the JSON alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from freerun.files import write_text
from studies.delay.plan import STUDY
from studies.outcome import TARGET

Result = dict[str, Any]
NAMES = {
    "adamw": "AdamW",
    "pipedream-lr": "PipeDream-LR",
    "nesterov": "NesterovAdamW",
    "delay-compensated": "delay compensation",
    "muon": "Muon",
    "rotation": "basis rotation",
    "graded": "graded rotation (ours)",
}
COLORS = dict(zip(NAMES, ("#7f7f7f", "#8c564b", "#2ca02c", "#bcbd22", "#9467bd", "#1f77b4", "#d62728"), strict=True))


def draw() -> None:
    """Draw everything for which there are results."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"figure.dpi": 130, "axes.spines.top": False, "axes.spines.right": False})
    results = load()
    for section, picture in (("final", draw_finals), ("slowdown", draw_slowdown), ("quick", draw_quick)):
        if section in results:
            picture(results[section], STUDY.results / f"{section}.png")
    write_text(STUDY.results / "tables.md", "\n".join(tables(results)) + "\n")


def load() -> dict[str, list[Result]]:
    """All results, by section."""
    found: dict[str, list[Result]] = defaultdict(list)
    for path in sorted(STUDY.results.glob("*/*.json")):
        found[path.parent.name].append(json.loads(path.read_text()))
    return found


def draw_finals(results: Iterable[Result], path: Path) -> None:
    """Loss over updates, a panel for each depth, a line for each seed."""
    import matplotlib.pyplot as plt

    depths = sorted({result["stages"] for result in results})
    figure, panels = plt.subplots(1, len(depths), figsize=(4.2 * len(depths), 3.6), sharey=True, squeeze=False)
    for panel, stages in zip(panels[0], depths, strict=True):
        here = [result for result in results if result["stages"] == stages]
        _curves(panel, here)
        panel.set_title(f"P = {stages}")
    panels[0][0].set_ylabel("training loss, mean of 50 updates")
    seeds = len({result["seed"] for result in results})
    _finish(figure, path, f"python-stdlib bytes, 8 layers of width 64; {seeds} seed(s), rates as searched (tables.md)")


def draw_quick(results: Iterable[Result], path: Path) -> None:
    """The two-minute form."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5, 3.6))
    _curves(panel, list(results))
    panel.set_ylabel("training loss, mean of 50 updates")
    _finish(figure, path, "P = 8, 600 updates, one seed, 100 documents: a smoke run, its numbers mean little")


def draw_slowdown(results: Iterable[Result], path: Path) -> None:
    """Updates to the target over the depth of the pipeline."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5, 3.6))
    for method in NAMES:
        points = sorted((r["stages"], r["crossing"]) for r in results if r["method"] == method and r["crossing"])
        if points:
            panel.plot(*zip(*points, strict=True), "o-", color=COLORS[method], label=NAMES[method])
    panel.set_xscale("log", base=2)
    panel.set_xlabel("pipeline stages P")
    panel.set_ylabel(f"updates to a training loss of {TARGET}")
    panel.legend(frameon=False, fontsize=8)
    _finish(figure, path, "one seed; a point that is missing never got there")


def _curves(panel: Any, results: list[Result]) -> None:
    labelled = set()
    for result in results:
        method = result["method"]
        label = None if method in labelled else NAMES[method]
        labelled.add(method)
        if result["curve"]:
            updates, losses = zip(*result["curve"], strict=True)
            panel.plot(updates, losses, color=COLORS[method], label=label, linewidth=1)
    panel.axhline(TARGET, color="black", linewidth=0.6, linestyle=":")
    panel.set_ylim(1.1, 3.2)
    panel.set_xlabel("update")
    panel.legend(frameon=False, fontsize=7)


def _finish(figure: Any, path: Path, caption: str) -> None:
    import matplotlib.pyplot as plt

    figure.text(0.5, 0.005, caption, ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def tables(results: dict[str, list[Result]]) -> list[str]:
    """A table for each section: what was run, and what came of it."""
    lines = ["# Results", "", "Written by `python -m studies.delay --draw` from the JSON beside it.", ""]
    for section, runs in results.items():
        lines += [f"## {section}", "", f"| run | status | updates | last loss | updates to {TARGET} | ms per update |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for run in runs:
            pace = 1e3 * run["seconds"] / run["updates"] if run["updates"] else float("nan")
            name = run["run"].split("/")[1]
            cells = (name, run["status"], run["updates"], run["loss"], run["crossing"] or "–", f"{pace:.0f}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return lines
