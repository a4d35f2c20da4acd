"""Figures and tables, from the results alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from freerun.files import write_text
from studies.delay.plan import STUDY
from studies.outcome import TARGET, Outcome

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

Key = tuple[Any, ...]
Groups = Mapping[Key, Sequence[Outcome]]
"""Results that differ only in the seed."""


def draw() -> None:
    """Draw everything for which there are results."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"figure.dpi": 130, "axes.spines.top": False, "axes.spines.right": False})
    results = {path.stem: STUDY.load(path.stem) for path in sorted(STUDY.results.glob("*.jsonl"))}
    if finals := results.get("final"):
        best = best_rates(finals)
        draw_finals(best, STUDY.results / "final.png")
        draw_slowdown(best, STUDY.results / "slowdown.png")
    if quick := results.get("quick"):
        draw_quick(quick, STUDY.results / "quick.png")
    lines = ["# Results", "", "Written by `python -m studies.delay --draw` from the results beside it.", ""]
    if finals and (clocked := results.pop("clocked", None)):
        lines += wall_time(best, clocked)
    lines += [line for section, runs in results.items() for line in table(section, runs)]
    write_text(STUDY.results / "tables.md", "\n".join(lines) + "\n")


def stages(result: Outcome) -> int:
    """The depth of a run's pipeline."""
    return int(result["settings"]["pipeline.stages"])


def best_rates(results: Sequence[Outcome]) -> Groups:
    """For each method and depth, the runs at the rate with which the target came first, or else the loss was lowest."""
    by_rate: dict[Key, list[Outcome]] = defaultdict(list)
    for result in results:
        by_rate[result["method"], stages(result), result["settings"]["optimizer.lr"]].append(result)
    best: dict[Key, list[Outcome]] = {}
    for (method, depth, _), runs in by_rate.items():
        if (method, depth) not in best or _goodness(runs) < _goodness(best[method, depth]):
            best[method, depth] = runs
    return best


def _goodness(runs: Sequence[Outcome]) -> tuple[float, float]:
    unreached = sum(run["crossing"] is None for run in runs)
    crossing = mean(run["crossing"] or 0 for run in runs) if unreached == 0 else 1e6 * unreached
    return crossing, mean(run["loss"] if run["loss"] is not None else 1e6 for run in runs)


def draw_finals(best: Groups, path: Path) -> None:
    """Loss over updates, a panel for each depth, a line for each seed."""
    import matplotlib.pyplot as plt

    depths = (1, 8, 32)
    figure, panels = plt.subplots(1, len(depths), figsize=(4.2 * len(depths), 3.8), sharey=True)
    for panel, depth in zip(panels, depths, strict=True):
        for (method, there), runs in best.items():
            if there == depth:
                rate = float(runs[0]["settings"]["optimizer.lr"])
                _curves(panel, runs, method, f"{NAMES[method]}, {rate:g}")
        panel.set_title(f"P = {depth}")
        panel.legend(frameon=False, fontsize=7, loc="upper right")
    panels[0].set_ylabel("training loss, mean of 50 updates")
    caption = (
        "Python source in bytes, 8 layers of width 64; three seeds, each method at the best of four learning rates"
    )
    _finish(figure, path, caption)


def draw_quick(results: Sequence[Outcome], path: Path) -> None:
    """The two-minute form."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5, 3.6))
    for result in results:
        _curves(panel, [result], result["method"], NAMES[result["method"]])
    panel.set_ylabel("training loss, mean of 50 updates")
    panel.legend(frameon=False, fontsize=7)
    _finish(figure, path, "P = 8, 600 updates, one seed, 100 documents: a smoke run, its numbers mean little")


def draw_slowdown(best: Groups, path: Path) -> None:
    """Updates to the target over the depth of the pipeline."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5.4, 3.8))
    for method in NAMES:
        reached = sorted(
            (depth, [run["crossing"] for run in runs])
            for (own, depth), runs in best.items()
            if own == method and all(run["crossing"] for run in runs)
        )
        if len(reached) > 1:
            color = COLORS[method]
            panel.plot([d for d, _ in reached], [mean(c) for _, c in reached], "-", color=color, label=NAMES[method])
            for depth, crossings in reached:
                panel.plot([depth] * len(crossings), crossings, "o", color=color, markersize=3.5)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    panel.set_yticks([400, 800, 1600, 3200], ["400", "800", "1600", "3200"])
    panel.set_xlabel("pipeline stages P")
    panel.set_ylabel(f"updates to a training loss of {TARGET}")
    panel.legend(frameon=False, fontsize=8)
    _finish(
        figure, path, "dots: three seeds, at the best rate of each depth; where a line ends, 3,000 updates did not do"
    )


def _curves(panel: Any, runs: Sequence[Outcome], method: str, label: str) -> None:
    for index, run in enumerate(runs):
        if run["curve"]:
            updates, losses = zip(*run["curve"], strict=True)
            panel.plot(updates, losses, color=COLORS[method], label=None if index else label, linewidth=1)
    panel.axhline(TARGET, color="black", linewidth=0.6, linestyle=":")
    panel.set_ylim(1.1, 3.9)
    panel.set_xlabel("update")


def _finish(figure: Any, path: Path, caption: str) -> None:
    import matplotlib.pyplot as plt

    figure.text(0.5, 0.005, caption, ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def wall_time(best: Groups, clocked: Sequence[Outcome]) -> list[str]:
    """Seconds to the target: what an update of a replay takes on one core, times the updates of the finals."""
    lines = [
        "## seconds to the target",
        "",
        "In a replay on one core, one run at a time; updates are means of the finals.",
    ]
    lines += ["", "| method | P | ms per update | updates | seconds |", "| --- | --- | --- | --- | --- |"]
    for run in sorted(clocked, key=lambda run: (stages(run), list(NAMES).index(run["method"]))):
        each = run["seconds"] / run["updates"]
        reached = [final["crossing"] for final in best[run["method"], stages(run)]]
        updates, seconds = ("–", "–") if None in reached else (f"{mean(reached):.0f}", f"{mean(reached) * each:.0f}")
        lines.append(f"| {NAMES[run['method']]} | {stages(run)} | {1e3 * each:.1f} | {updates} | {seconds} |")
    return [*lines, ""]


def table(section: str, runs: Sequence[Outcome]) -> list[str]:
    """What was run and what came of it, seeds in one line."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run["method"], stages(run), int(run["settings"]["training.seed"]))):
        groups[run["run"].split("/")[1].removesuffix(f"-s{run['settings']['training.seed']}")].append(run)
    lines = [f"## {section}", "", f"| run | seeds | updates to {TARGET} | mean | last loss | after | status |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, same in groups.items():
        crossings = [run["crossing"] for run in same]
        average = f"{mean(crossings):.0f}" if all(crossings) else ""
        each = ", ".join(str(crossing or "–") for crossing in crossings)
        losses = ", ".join(str(run["loss"]) for run in same)
        after = ", ".join(sorted({str(run["updates"]) for run in same}))
        status = ", ".join(sorted({run["status"] for run in same}))
        lines.append(f"| {name} | {len(same)} | {each} | {average} | {losses} | {after} | {status} |")
    return [*lines, ""]
