"""Tiny trainings for tests: replayed in this process, or run by real ones that are gone afterwards."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from freerun import checkpoint, config_files
from freerun.config import Config
from freerun.mesh import places
from freerun.summary import Summary
from helpers.processes import FROM_SCRATCH, _results

VOCABULARY = 32
LIMIT = 90.0

BASE = {
    "model.layers": "3",
    "model.width": "32",
    "model.heads": "2",
    "model.context": "32",
    "data.vocabulary": str(VOCABULARY),
    "data.eval_fraction": "0.1",
    "optimizer.lr": "0.01",
    "optimizer.warmup": "3",
    "optimizer.clip": "0.5",
    "training.updates": "8",
    "training.sequences": "2",
    "training.threads": "1",
    "evaluation.microbatches": "2",
    "run.time_limit": "60",
    "run.trace_updates": "0",
    "run.tensorboard": "false",
    "run.log_every": "1",
}


def write_tokens(folder: Path) -> Path:
    """Token data in which the next token is mostly a function of the last two; 60 documents."""
    random = np.random.default_rng(0)
    tokens = [1, 2]
    for _ in range(60 * 50):
        surprise = random.random() < 0.2
        tokens.append(int(random.integers(VOCABULARY - 1)) if surprise else (3 * tokens[-1] + tokens[-2]) % 31)
    tokens[49::50] = [VOCABULARY - 1] * len(tokens[49::50])
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.array(tokens, np.uint16))
    return folder / "tokens.npy"


def tiny(data: Path, **settings: Any) -> Config:
    """A config of a few updates on a tiny model; `pipeline__stages=2` sets pipeline.stages."""
    overrides = BASE | {"data.source": str(data), "data.cache": str(data.parent / "cache")}
    overrides |= {key.replace("__", "."): str(value) for key, value in settings.items()}
    return config_files.read("", list(overrides.items()))


def replay(config: Config, folder: Path) -> Summary:
    """The whole mesh in this process."""
    from freerun.simulate.replay import simulate

    folder.mkdir(parents=True, exist_ok=True)
    return simulate(config, folder)


def weights_of(config: Config, folder: Path) -> dict[str, Tensor]:
    """Every parameter of the first replica at the end of a run, from its checkpoint."""
    weights = {}
    for place in places(config.pipeline.stages, config.replicas.count)[: config.pipeline.stages]:
        state = checkpoint.load(folder / "checkpoints", config.training.updates, place)
        weights |= {name: state["weights"][start:end].view(shape) for name, shape, start, end in state["layout"]}
    return weights


def changed(config: Config, **settings: Any) -> Config:
    """A config with some keys set."""
    for key, value in settings.items():
        config = config_files.replace(config, key.replace("__", "."), str(value))
    return config


@dataclass
class Workers:
    """A process per place of a mesh."""

    pids: list[int] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def logged(self, folder: Path, updates: int) -> bool:
        """Whether the run has logged so many updates; raises what a process has failed with."""
        for pipe in self.pipes:
            if pipe.poll() and not (outcome := pickle.loads(pipe.recv_bytes()))[0]:
                raise AssertionError(outcome[1])
        return updates_logged(folder) >= updates

    def summary(self, limit: float = LIMIT) -> Summary:
        """What the one that speaks for the run gives when all are done."""
        summaries = _results(self.pipes, time.monotonic() + limit, limit, ())
        found: Summary = next(summary for summary in summaries if summary is not None)
        return found


@contextmanager
def workers(config: Config, folder: Path, ranks: Sequence[int] | None = None) -> Iterator[Workers]:
    """Real processes, each doing a worker's work; gone afterwards. `ranks` leaves some of them out."""
    folder.mkdir(parents=True, exist_ok=True)
    count = config.pipeline.stages * config.replicas.count
    port = free_port()
    children = []
    started = Workers()
    try:
        for rank in range(count) if ranks is None else ranks:
            ours, theirs = FROM_SCRATCH.Pipe(duplex=False)
            child = FROM_SCRATCH.Process(target=_worker, args=(theirs, config, folder, rank, count, port), daemon=True)
            child.start()
            theirs.close()
            children.append(child)
            started.pipes.append(ours)
            started.pids.append(child.pid)
        yield started
    finally:
        for child in children:
            child.kill()
            child.join()


def in_processes(config: Config, folder: Path, limit: float = LIMIT) -> Summary:
    """The run in real processes; its summary."""
    with workers(config, folder) as started:
        return started.summary(limit)


def _worker(pipe: Connection, config: Config, folder: Path, rank: int, count: int, port: int) -> None:
    import traceback

    os.environ.update(rendezvous(rank, count, port))
    try:
        from freerun.worker import work

        outcome = (True, work(config, folder))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def rendezvous(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def freerun(
    *arguments: str | Path, env: dict[str, str] | None = None, module: str = "freerun"
) -> Iterator[subprocess.Popen[str]]:
    """The command line in a session of its own, with pipes; it and its children are gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            _kill(pid)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def run_freerun(
    *arguments: str | Path, limit: float = LIMIT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command line to its end."""
    with freerun(*arguments, env=env) as process:
        out, err = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and they in turn."""
    parents: dict[int, list[int]] = {}
    for child, (parent, _) in processes().items():
        parents.setdefault(parent, []).append(child)
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def processes() -> dict[int, tuple[int, str]]:
    """Every living process with its parent and its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in "ZX":
                found[int(entry.name)] = (int(parent), command)
    return found


def workers_of(folder: Path) -> dict[int, int]:
    """The worker processes of a run's folder by rank."""
    found = {}
    for pid, (_, command) in processes().items():
        if "freerun.worker" in command and str(folder) in command:
            environment = dict(
                entry.partition("=")[::2]
                for entry in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                if entry
            )
            found[int(environment["RANK"])] = pid
    return found


def wait_until(condition: Any, process: subprocess.Popen[str] | None = None, limit: float = LIMIT) -> Any:
    """Poll until a condition gives something true; fail when the process ends first or the limit is over."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            assert process.stdout is not None and process.stderr is not None
            raise AssertionError(f"ended with {process.returncode}:\n{process.stdout.read()}\n{process.stderr.read()}")
        assert time.monotonic() < deadline, f"not within {limit:g} s"
        time.sleep(0.02)
    return found


def updates_logged(folder: Path) -> int:
    """The newest update in a run's metrics, which log every one."""
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
