"""freerun's loop against a bare PyTorch loop around the same model and data, in one process, in turns.

The bare loop is what one would write by hand: forward, backward, clip, AdamW, a learning-rate schedule, a line now and
then. Peak memory is measured in processes of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import CACHE, Claim, Turn, Turns, arguments, machine, quiet, ratio, report, table

from freerun import config_files
from freerun.assembly import stage_module
from freerun.config import Config
from freerun.data import Data, build
from freerun.mesh import solo
from freerun.model.kinds import kind
from freerun.optim.rates import rate
from freerun.saving import Saves
from freerun.steps import run
from freerun.train import train
from freerun.worker import prepare, threads

Switch = Callable[[], None]

SIZES: dict[str, dict[str, str]] = {
    "demo": {},
    "25M": {
        "model.layers": "8",
        "model.width": "512",
        "model.heads": "8",
        "model.context": "256",
        "training.sequences": "4",
    },
}
FUSED = "bare, fused AdamW"


class HandingOver(Saves):
    """Saves that let the other contenders have their turn every few updates."""

    def __init__(self, config: Config, every: int, switch: Switch) -> None:
        fabric = solo()
        super().__init__(config, fabric.place, fabric.board)
        self._turn, self._switch = every, switch

    def made(self, version: int, *more: Any) -> None:
        super().made(version, *more)
        if version % self._turn == 0:
            self._switch()


def freerun_loop(config: Config, every: int, switch: Switch) -> None:
    """The loop of `freerun train`, metrics and trace included."""
    torch.set_num_threads(threads(config))
    with tempfile.TemporaryDirectory() as folder:
        training = prepare(config, solo(), torch.device("cpu"), Path(folder))
        training.saves = HandingOver(config, every, switch)
        run(train(training))


def bare_loop(config: Config, data: Data, every: int, fused: bool, switch: Switch) -> None:
    """The same by hand."""
    torch.set_num_threads(threads(config))
    settings = config.optimizer
    model = stage_module(config, data.tokenizer.vocabulary, 0)
    parameters = list(model.parameters())
    plain = [p for name, p in model.named_parameters() if kind(name, p) == "vector"]
    matrices = [p for name, p in model.named_parameters() if kind(name, p) != "vector"]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=fused,
    )
    for update in range(config.training.updates):
        batch = data.train.get(update)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(settings, update, config.training.updates, 0)
        optimizer.step()
        optimizer.zero_grad()
        if (update + 1) % every == 0:
            print(f"bare: update {update + 1} loss {loss.item():.4f}", file=sys.stderr)
            switch()


def data_seconds(data: Data, steps: int) -> float:
    """What a microbatch takes to be read, as the mean over some that were never read before."""
    start = time.perf_counter()
    for number in range(10_000, 10_000 + steps):
        data.train.get(number)
    return (time.perf_counter() - start) / steps


def peak_memory(contender: str, size: str, updates: int) -> dict[str, float]:
    """MiB that a process of its own takes at most: when the model is built, while training, and at the very end."""
    command = [sys.executable, __file__, "--alone", contender, "--size", size, "--updates", str(updates)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(output.splitlines()[-1])
    return measured


def alone(contender: str, size: str, updates: int) -> None:
    """Be that process."""
    config = configured(size, updates)
    data = read(config)
    seen: dict[str, float] = {"before": _peak()}

    def switch() -> None:
        seen["training"] = _peak()

    if contender == "freerun":
        freerun_loop(config, 1, switch)
    else:
        bare_loop(config, data, 1, contender == FUSED, switch)
    print(json.dumps({**seen, "end": _peak()}))


def _peak() -> float:
    """Not ru_maxrss, which a process inherits from the one that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def configured(size: str, updates: int) -> Config:
    """The recipe `single` at one of the sizes, without evaluation."""
    settings = {
        "data.cache": str(CACHE),
        "training.updates": str(updates),
        "evaluation.microbatches": "0",
        "checkpoint.every": "0",
        **SIZES[size],
    }
    return config_files.read("single", list(settings.items()))


def read(config: Config) -> Data:
    return build(config.data, config.model.context, config.training.sequences, config.training.seed)


def compared(size: str, every: int, rounds: int) -> dict[str, Any]:
    """One size: turns of `every` updates each."""
    config = configured(size, every * rounds)
    data = read(config)
    turns = Turns(
        {
            "freerun": lambda switch: freerun_loop(config, every, switch),
            "bare": lambda switch: bare_loop(config, data, every, False, switch),
            FUSED: lambda switch: bare_loop(config, data, every, True, switch),
        }
    ).run()
    tokens = every * config.training.sequences * config.model.context

    def rates(taken: list[Turn]) -> list[float]:
        return [tokens / turn.seconds for turn in taken]

    step = min(turn.seconds for turn in turns["bare"]) / every
    return {
        "parameters": sum(p.numel() for p in stage_module(config, data.tokenizer.vocabulary, 0).parameters()),
        "tokens_per_second": {name: rates(taken) for name, taken in turns.items()},
        "cpu_seconds_per_step": {name: [t.cpu_seconds / every for t in taken] for name, taken in turns.items()},
        "of_bare": ratio(turns["bare"], turns["freerun"]),
        "of_bare_cpu": ratio(turns["bare"], turns["freerun"], cpu=True),
        "of_fused": ratio(turns[FUSED], turns["freerun"]),
        "of_fused_cpu": ratio(turns[FUSED], turns["freerun"], cpu=True),
        "data_share": data_seconds(data, 200) / step,
    }


def main() -> None:
    options = arguments(
        __doc__,
        ("--alone", {"choices": ["freerun", "bare", FUSED]}),
        ("--size", {"choices": list(SIZES), "default": "demo"}),
        ("--updates", {"type": int, "default": 6}),
    )
    if options.alone:
        alone(options.alone, options.size, options.updates)
        return
    quiet(0 if options.quick else options.patience)
    about = machine()
    plan = {"demo": (10, 4), "25M": (1, 2)} if options.quick else {"demo": (25, 24), "25M": (3, 12)}
    measured: dict[str, Any] = {}
    claims = []
    for size, (every, rounds) in plan.items():
        result = compared(size, every, rounds)
        result["memory_mib"] = {name: peak_memory(name, size, 4) for name in ("freerun", "bare")}
        memory = result["memory_mib"]["freerun"]["training"] / result["memory_mib"]["bare"]["training"]
        measured[size] = result
        claims += [
            Claim(f"{size}: tokens/s of freerun over the bare loop's", result["of_bare"], 0.97),
            Claim(f"{size}: data's share of a step", result["data_share"], 0.01, at_most=True),
            Claim(f"{size}: peak memory over the bare loop's", memory, 1.05, at_most=True),
        ]
    table(
        ("", "parameters", "of bare", "in CPU time", "of fused", "in CPU time"),
        [
            (size, m["parameters"], m["of_bare"], m["of_bare_cpu"], m["of_fused"], m["of_fused_cpu"])
            for size, m in measured.items()
        ],
    )
    report("training_loop", options.quick, about, claims, measured)


if __name__ == "__main__":
    main()
