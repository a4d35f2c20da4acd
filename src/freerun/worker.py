"""One process of a run: join the others, train, leave."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from freerun import config_files
from freerun.assembly import device_of
from freerun.config import Config
from freerun.data import build
from freerun.errors import ConfigError, FreerunError, NonFiniteError, PeerError
from freerun.mesh import Fabric, join, leave, solo
from freerun.saving import Saves
from freerun.steps import Steps, run
from freerun.summary import Summary
from freerun.trace import Tracer
from freerun.train import Run, train


def work(config: Config, folder: Path) -> Summary | None:
    """Train this process's part; the process that speaks for the run gets the summary."""
    torch.set_num_threads(threads(config))
    device = device_of(config, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    processes = config.pipeline.stages * config.replicas.count
    fabric = join(config, device) if processes > 1 else solo()
    run(refuse_unequal(config, fabric))
    training = prepare(config, fabric, device, folder)
    training.saves.listen()
    try:
        result = run(train(training))
    except FreerunError as error:
        raise explained(error, training) from error
    run(leave(fabric))
    return result


def prepare(config: Config, fabric: Fabric, device: torch.device, folder: Path) -> Run:
    """What the training loop works with."""
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    return Run(config, fabric, data, device, folder, Saves(config, fabric.place, fabric.board), tracer(config, fabric))


def tracer(config: Config, fabric: Fabric) -> Tracer:
    """A tracer that keeps the spans of the last updates."""
    updates = config.training.updates
    place = fabric.place
    label = f"stage {place.stage}" + (f" of replica {place.replica}" if place.replicas > 1 else "")
    return Tracer(place.rank, label, max(0, updates - config.run.trace_updates), updates, clock_offset())


def clock_offset() -> int:
    """Nanoseconds from this process's performance counter to the time of day, which the ranks share."""
    import time

    return time.time_ns() - time.perf_counter_ns()


def threads(config: Config) -> int:
    """CPU threads for a process: the cores shared among the processes of this machine."""
    processes = config.pipeline.stages * config.replicas.count
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return config.training.threads or max(1, (os.cpu_count() or 1) // local)


def refuse_unequal(config: Config, fabric: Fabric) -> Steps[None]:
    """All processes must have read the same config."""
    own = flat_config(config)
    if fabric.place.rank == 0:
        fabric.board.put("config", own)
        return
    first = yield from fabric.board.get("config", "rank 0")
    different = [key for key in own if own[key] != first.get(key)]
    if different:
        key = different[0]
        raise ConfigError(
            f"rank {fabric.place.rank} has {key} {own[key]!r}, but rank 0 has {first.get(key)!r}; "
            "start every process with the same config."
        )


def flat_config(config: Config) -> dict[str, Any]:
    """A config as dotted keys, in values that JSON can hold."""
    flat: dict[str, Any] = {}

    def walk(tree: dict[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = list(value) if isinstance(value, tuple) else value

    walk(dataclasses.asdict(config), "")
    return flat


def explained(error: FreerunError, training: Run) -> FreerunError:
    """The error, with where it happened and where to go on from."""
    if isinstance(error, (PeerError, NonFiniteError)):
        message = f"{training.fabric.place}, at {training.doing or 'the start'}: {error}"
        if isinstance(error, NonFiniteError):
            message += f"; the last checkpoints are in {training.folder / 'checkpoints'} (--resume goes on from there)"
        return type(error)(message)
    return error


def end_with_parent() -> None:
    """Ask the kernel to end this process when its launcher is gone, however it went."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    """Entry point of the processes that the launcher starts: CONFIG.toml FOLDER."""
    end_with_parent()
    try:
        work(config_files.read(sys.argv[1]), Path(sys.argv[2]))
    except FreerunError as error:
        print(f"freerun: {error}", file=sys.stderr, flush=True)
        # the process groups may still have work under way that will never be done; waiting for it would hang
        os._exit(error.exit_code)


if __name__ == "__main__":
    main()
