"""What a run says about itself: JSON lines, a progress line, TensorBoard, W&B, trackio."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from freerun.config import Config
from freerun.errors import ConfigError
from freerun.evaluation import Evaluation
from freerun.files import write_text
from freerun.mesh import Place

Row = dict[str, Any]


class Sink(Protocol):
    """Somewhere that rows of metrics go."""

    def write(self, row: Row) -> None:
        """Take a row: `update`, and numbers."""

    def close(self) -> None:
        """No more rows will come."""


class JsonLines:
    """One JSON object a line, each flushed; rows of what a resumed run does once more are dropped.

    `evaluates` says whether that begins with the evaluation of the update from which it goes on.
    """

    def __init__(self, path: Path, from_update: int, evaluates: bool = False) -> None:
        last = (from_update, not evaluates)
        kept = [line for line in _lines(path) if _place(line) <= last] if from_update else []
        write_text(path, "".join(line + "\n" for line in kept))
        self._file: TextIO = path.open("a", buffering=1)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


class Terminal:
    """A progress bar on a terminal, a line now and then elsewhere."""

    def __init__(self, updates: int, from_update: int) -> None:
        self._updates = updates
        self._progress: Progress | None = None
        self._last_line = -1e9
        console = Console(stderr=True)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("update"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task("train", total=updates, completed=from_update, numbers="")
            self._progress.start()

    def write(self, row: Row) -> None:
        text = describe(row)
        if self._progress is not None:
            if "eval_loss" in row:
                self._progress.console.print(f"update {row['update']}: {text}")
            else:
                self._progress.update(self._task, completed=row["update"], numbers=text)
        elif "eval_loss" in row or row["update"] == self._updates or time.monotonic() - self._last_line > 5:
            self._last_line = time.monotonic()
            left = f"  {row['seconds_left']:.0f} s left" if "seconds_left" in row else ""
            print(f"update {row['update']}/{self._updates}  {text}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class TensorBoard:
    """TensorBoard events in the run's folder."""

    def __init__(self, folder: Path, from_update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=from_update or None)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "update" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["update"])

    def close(self) -> None:
        self._writer.close()


class Tracked:
    """Weights & Biases or trackio, whose calls are the same."""

    def __init__(self, module: str, project: str, folder: Path) -> None:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"run.{module} is {project!r}, but {module} is not installed: pip install 'freerun[{module}]'."
            )
        self._tracker = importlib.import_module(module)
        self._tracker.init(project=project, name=folder.name)

    def write(self, row: Row) -> None:
        self._tracker.log({name: value for name, value in row.items() if name != "update"}, step=row["update"])

    def close(self) -> None:
        self._tracker.finish()


def sinks(config: Config, folder: Path, from_update: int, place: Place, evaluates: bool) -> list[Sink]:
    """Where a process's rows go: only the one that speaks for the run writes more than a file of its own."""
    if not place.reports:
        (folder / "ranks").mkdir(exist_ok=True)
        return [JsonLines(folder / "ranks" / f"{place.rank}.jsonl", from_update)]
    updates = config.training.updates
    chosen: list[Sink] = [JsonLines(folder / "metrics.jsonl", from_update, evaluates), Terminal(updates, from_update)]
    if config.run.tensorboard and importlib.util.find_spec("tensorboard"):
        chosen.append(TensorBoard(folder / "tensorboard", from_update))
    for module in ("wandb", "trackio"):
        project = getattr(config.run, module)
        if project:
            chosen.append(Tracked(module, project, folder))
    return chosen


class Reporter:
    """Turns what the loop knows after an update into a row now and then."""

    def __init__(self, config: Config, every: list[Sink], from_update: int, from_microbatch: int) -> None:
        self.recent: list[float] = []
        self.from_microbatch = from_microbatch
        self._sinks = every
        self._log_every = config.run.log_every
        self._updates = config.training.updates
        self._tokens_per_microbatch = tokens_per_microbatch(config) * config.replicas.count
        self._losses: list[float] = []
        self._aside = 0.0
        self._started = time.perf_counter()
        self._last = (from_update, from_microbatch, 0.0)

    @property
    def training_seconds(self) -> float:
        """Time so far, without evaluations and checkpoints."""
        return time.perf_counter() - self._started - self._aside

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is not training."""
        start = time.perf_counter()
        yield
        self._aside += time.perf_counter() - start

    def updated(self, update: int, microbatches: int, loss: float | None, numbers: Row) -> None:
        """An update is done, the stage has done so many microbatches; `loss` is the update's mean where it is known."""
        if loss is not None:
            self._losses.append(loss)
            self.recent = [*self.recent[-49:], loss]
        if update % self._log_every and update != self._updates:
            return
        now = self.training_seconds
        last_update, last_microbatches, last_time = self._last
        elapsed = max(now - last_time, 1e-9)
        row: Row = {"update": update, "tokens": microbatches * self._tokens_per_microbatch}
        if self._losses:
            row["loss"] = sum(self._losses) / len(self._losses)
        row |= numbers
        row["tokens_per_second"] = (microbatches - last_microbatches) * self._tokens_per_microbatch / elapsed
        row["seconds"] = now
        row["seconds_left"] = max(self._updates - update, 0) * elapsed / max(update - last_update, 1)
        row["memory_mib"] = memory_mib()
        self._losses, self._last = [], (update, microbatches, now)
        self._write(row)

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is done."""
        row = {"update": evaluation.version, "eval_loss": evaluation.loss, "perplexity": evaluation.perplexity}
        if evaluation.disagreement is not None:
            row["disagreement"] = evaluation.disagreement
        self._write(row)

    def close(self) -> None:
        """No more rows will come."""
        for sink in self._sinks:
            sink.close()

    def _write(self, row: Row) -> None:
        for sink in self._sinks:
            sink.write(row)


def tokens_per_microbatch(config: Config) -> int:
    """Tokens in a microbatch."""
    return config.training.sequences * config.model.context


def memory_mib() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if os.uname().sysname == "Linux" else 1024**2)


def describe(row: Row) -> str:
    """A row in words."""
    if "eval_loss" in row:
        return f"evaluation loss {row['eval_loss']:.4f}  perplexity {row['perplexity']:.2f}"
    loss = f"loss {row['loss']:.4f}  " if "loss" in row else ""
    return f"{loss}{row['tokens_per_second']:,.0f} tokens/s  {row['memory_mib']:,.0f} MiB"


def _place(line: str) -> tuple[float, bool]:
    """Where a row belongs: an update, and then its evaluation."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:  # the process was killed while it wrote
        return (float("inf"), False)
    return (row["update"], "eval_loss" in row)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
