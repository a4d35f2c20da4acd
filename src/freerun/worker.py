"""One process of a run: join the others, train, leave."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from freerun import checkpoint, config_files
from freerun.assembly import device_of
from freerun.config import Config
from freerun.data import build
from freerun.errors import FreerunError, NonFiniteError, PeerError
from freerun.mesh import Fabric, join, leave, solo
from freerun.saving import Saves
from freerun.steps import run
from freerun.summary import Summary
from freerun.trace import Tracer
from freerun.train import Run, train


def work(config: Config, folder: Path) -> Summary | None:
    """Train this process's part; the process that speaks for the run gets the summary."""
    torch.set_num_threads(threads(config))
    device = device_of(config, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = config.pipeline.stages * config.replicas.count == int(os.environ.get("WORLD_SIZE", "1")) == 1
    fabric = solo() if alone else join(config, device)
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


def explained(error: FreerunError, training: Run) -> FreerunError:
    """The error, with where it happened and where to go on from."""
    if isinstance(error, (PeerError, NonFiniteError)):
        message = f"{training.fabric.place}, at {training.doing or 'the start'}: {error}"
        if isinstance(error, NonFiniteError):
            message += f"; {where_saved(training)}"
        return type(error)(message)
    return error


def where_saved(training: Run) -> str:
    """Where to go on from."""
    folder = training.folder / "checkpoints"
    saved = checkpoint.parts(folder, training.fabric.place)
    if not saved:
        return "no checkpoint was saved before (checkpoint.every says how often)"
    return f"the last checkpoint is of update {saved[-1]}, in {folder} (--resume goes on from there)"


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
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        return
    # the process groups may still have work under way that will never be done; waiting for it would hang
    os._exit(code)


if __name__ == "__main__":
    main()
