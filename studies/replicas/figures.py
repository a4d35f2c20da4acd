"""A table and a figure, from the JSON alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from freerun.files import write_text
from studies.replicas.plan import METHODS, SECTIONS, SEEDS, STUDY

Result = dict[str, Any]
Groups = Mapping[tuple[str, int, str], Sequence[Result]]
"""Results by method, replicas and learning rate: one for each seed."""
NAMES = {
    "allreduce": "allreduce",
    "dpu": "dpu: one step stale",
    "acco": "acco",
    "sparse-ema": "sparse, ema",
    "sparse-drift": "sparse, drift",
    "sparse-none": "sparse, no correction",
    "diloco": "diloco",
    "diloco-streaming": "diloco, streaming",
}
TITLES = {
    "finals": "Four replicas",
    "workers": "Two and eight replicas, the same batch",
    "search": "Learning rates, one seed, four replicas",
    "limits": "Sparse averaging, one seed, four replicas: fraction and delay",
}


def draw() -> None:
    """Draw what there are results for."""
    results = {result["run"]: result for section in ("runs", "limits") for result in STUDY.load(section)}
    parts = {
        section: grouped([results[run.name] for run in runs() if run.name in results])
        for section, runs in SECTIONS.items()
    }
    lines = ["# Results", "", "Written by `python -m studies.replicas --draw` from the results beside it.", ""]
    for section, title in TITLES.items():
        lines += table(title, parts[section], reference_losses(parts["finals"]))
    write_text(STUDY.results / "tables.md", "\n".join(lines) + "\n")
    if parts["finals"]:
        picture(parts["finals"], STUDY.results / "final.png")


def grouped(results: Sequence[Result]) -> Groups:
    """Seeds together."""
    found: dict[tuple[str, int, str], list[Result]] = defaultdict(list)
    for result in results:
        settings = result["settings"]
        found[result["method"], int(settings["replicas.count"]), settings["optimizer.lr"]].append(result)
    order = [*METHODS, *sorted({method for method, _, _ in found} - set(METHODS))]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1], float(item[0][2]))))


def table(title: str, groups: Groups, reference: Mapping[int, float]) -> list[str]:
    """Held-out losses, and how far they are from those of `allreduce`, seed by seed."""
    if not groups:
        return []
    lines = [f"## {title}", "", "| strategy | replicas | rate | held-out loss | against allreduce | disagreement |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for (method, replicas, lr), results in groups.items():
        held = [r["eval_loss"] for r in results if r["eval_loss"] is not None]
        loss = (
            f"{mean(held):.4f}" + (f" ± {stdev(held):.4f}" if len(held) > 1 else "") if held else results[0]["status"]
        )
        apart = [r["disagreement"] for r in results if r["disagreement"] is not None]
        cells = (
            NAMES.get(method, method),
            replicas,
            lr,
            loss,
            difference(results, reference),
            f"{mean(apart):.1e}" if apart else "",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [*lines, ""]


def reference_losses(finals: Groups) -> dict[int, float]:
    """By seed, the held-out loss of `allreduce` at its best rate."""
    best = [r for (method, _, _), results in finals.items() if method == "allreduce" for r in results]
    return {int(r["settings"]["training.seed"]): r["eval_loss"] for r in best}


def difference(results: Sequence[Result], reference: Mapping[int, float]) -> str:
    """The mean over seeds of how much higher a loss is, in percent, and the standard deviation of that."""
    found = []
    for result in results:
        seed = int(result["settings"]["training.seed"])
        if seed in reference and result["eval_loss"] is not None:
            found.append(100 * (result["eval_loss"] / reference[seed] - 1))
    if not found:
        return ""
    return f"{mean(found):+.2f}%" + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def picture(groups: Groups, path: Path) -> None:
    """How far every method's held-out loss is from that of `allreduce`, a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    reference = reference_losses(groups)
    figure, panel = plt.subplots(figsize=(6.4, 0.8 + 0.3 * len(groups)), dpi=130)
    labels = []
    for place, ((method, _, lr), results) in enumerate(reversed(groups.items())):
        labels.append(f"{NAMES[method]}, {float(lr):g}")
        apart = [100 * (r["eval_loss"] / reference[int(r["settings"]["training.seed"])] - 1) for r in results]
        panel.plot(apart, [place] * len(apart), "o", color="#1f77b4", markersize=5, alpha=0.7)
    panel.axvline(0, color="black", linewidth=0.6)
    panel.axvspan(-0.5, 0.5, color="black", alpha=0.08, linewidth=0)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set_xlabel("held-out loss against allreduce of the same seed, %")
    panel.spines[["top", "right"]].set_visible(False)
    caption = f"4 replicas, the same tokens for all, {len(SEEDS)} seeds, rates as searched; grey: within 0.5%"
    figure.text(0.5, 0.005, caption, ha="center", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)
    plt.close(figure)
