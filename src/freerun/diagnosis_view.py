"""A diagnosis as a table in the terminal and as a figure: three panels, a bar per stage."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.console import Console
from rich.table import Table

from freerun.diagnose import Diagnosis, Effort, diagnose, write
from freerun.files import write_beside


def show(folder: Path, update: int | None, probes: int, updates: int) -> None:
    """Diagnose a run, print the numbers, and write diagnosis.json and diagnosis.png into its folder."""
    found = diagnose(folder, update, Effort(probes=probes, updates=updates))
    write(found, folder / "diagnosis.json")
    Console().print(_table(found))
    print(folder / "diagnosis.json")
    if importlib.util.find_spec("matplotlib"):
        draw(found, folder / "diagnosis.png", str(folder))
        print(folder / "diagnosis.png")
    else:
        print("no figure: pip install 'freerun[figures]'")


def _table(found: list[Diagnosis]) -> Table:
    table = Table()
    for column in ("stage", "delay", "misalignment", "rotated", "turns back", "gradient cosine", "update cosine"):
        table.add_column(column, justify="right")
    for one in found:
        numbers = (one.misalignment, one.misalignment_rotated, one.oscillation, one.gradient_cosine, one.update_cosine)
        table.add_row(str(one.stage), str(one.delay), *(f"{number:.3f}" for number in numbers))
    return table


def draw(found: list[Diagnosis], path: Path, title: str) -> None:
    """Write the figure as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    stages = range(len(found))
    labels = [f"{one.stage}\nτ={one.delay}" for one in found]
    left.bar([s - 0.2 for s in stages], [one.misalignment for one in found], 0.4, label="as it is")
    left.bar([s + 0.2 for s in stages], [one.misalignment_rotated for one in found], 0.4, label="rotated")
    left.set(title="Hessian: ‖H‖₁,₁ / n‖H‖_F", xlabel="stage and its delay")
    left.legend()
    middle.bar(stages, [one.oscillation for one in found], color="tab:red")
    middle.axhline(0.5, color="gray", linestyle=":", linewidth=1)
    middle.set(title="updates that turn back\nalong the leading direction", xlabel="stage and its delay", ylim=(0, 1))
    right.bar([s - 0.2 for s in stages], [one.gradient_cosine for one in found], 0.4, label="gradient")
    right.bar([s + 0.2 for s in stages], [one.update_cosine for one in found], 0.4, label="update")
    right.set(title="cosine between late and fresh", xlabel="stage and its delay", ylim=(min(0, -0.05), 1.05))
    right.legend(loc="lower right")
    for axis in (left, middle, right):
        axis.set_xticks(list(stages), labels)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    write_beside(path, lambda beside: figure.savefig(beside, dpi=130, format="png"))
    pyplot.close(figure)
