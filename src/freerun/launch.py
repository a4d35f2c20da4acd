"""Start all processes of a run on this machine, watch them, and leave none behind; or be one that torchrun started."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from freerun import config_files
from freerun.config import Config
from freerun.errors import ConfigError, FreerunError

GRACE = 10.0  # seconds that processes get to end by themselves once one has failed


def launch(config: Config, name: str) -> Path:
    """Run a config to its end; gives the run's folder."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return join_torchrun(config)
    folder = make_folder(config, name)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    config_files.write(config, folder / "config.toml")
    prepare_once(config)
    if config.pipeline.stages * config.replicas.count == 1:
        from freerun.worker import work

        work(config, folder)
    else:
        Processes(config, folder).watch()
    return folder


def join_torchrun(config: Config) -> Path:
    """Be one of the processes that torchrun started; they must agree on the folder, so it must be named."""
    from freerun.worker import work

    if not config.run.dir:
        raise ConfigError("run.dir is empty; under torchrun name the run's folder, so that all processes agree on it.")
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        refuse_overwriting(config, folder)
        config_files.write(config, folder / "config.toml")
    work(config, folder)
    return folder


def make_folder(config: Config, name: str) -> Path:
    """The run's folder, made if need be; a run that is there already is only ever resumed."""
    folder = Path(config.run.dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    refuse_overwriting(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def refuse_overwriting(config: Config, folder: Path) -> None:
    """A folder with a run in it is either resumed or left alone."""
    if config.run.resume and not (folder / "config.toml").exists():
        raise ConfigError(f"run.dir {folder} holds no run to resume; leave out --resume, or name the run's folder.")
    if not config.run.resume and (folder / "metrics.jsonl").exists():
        raise ConfigError(f"run.dir {folder} holds a run already; add --resume to go on with it, or name another one.")


def prepare_once(config: Config) -> None:
    """What is better done once than by every process: tokenize into the cache, compare a cut with the whole model."""
    from freerun.data import build
    from freerun.model.cut import cut, pieces
    from freerun.model.size import is_huggingface

    data = build(config.data, config.model.context, config.training.sequences, config.training.seed, progress=True)
    if is_huggingface(config.model):
        from freerun.model.huggingface import verify_cut

        vocabulary = data.tokenizer.vocabulary
        parts = pieces(config.model, vocabulary, config.pipeline.granularity)
        cuts = cut(parts, config.pipeline.stages, config.pipeline.cut)
        if not verify_cut(config.model, vocabulary, cuts, seed=config.training.seed):
            print("the model does not fit in memory whole, so its stages were not compared with it", file=sys.stderr)


class Processes:
    """The processes of a run on this machine."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._count = config.pipeline.stages * config.replicas.count
        (folder / "ranks").mkdir(exist_ok=True)
        environment = self._environment()
        self._ended: set[int] = set()
        self._all = [self._start(rank, environment) for rank in range(self._count)]

    def watch(self) -> None:
        """Wait for all; when one fails, end the others and say which failed first and why."""
        previous = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._running():
                if any(process.returncode for process in self._all):
                    self._end()
                    raise self._failure()
                time.sleep(0.05)
            if any(process.returncode for process in self._all):
                raise self._failure()
        finally:
            self._end()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _running(self) -> bool:
        """Whether any process still runs; asks them all, because only asking tells a failed one's exit code."""
        return None in [process.poll() for process in self._all]

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "freerun.worker", str(self._folder / "config.toml"), str(self._folder)]
        speaks = rank == self._config.pipeline.stages - 1
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=None if speaks else log,
                stderr=None if speaks else log,
                start_new_session=True,  # so that Ctrl-C reaches them once, through us
            )

    def _environment(self) -> dict[str, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = self._config.training.threads or max(1, (os.cpu_count() or 1) // self._count)
        own = {
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
        }
        return {**os.environ, **own}

    def _log(self, rank: int) -> Path:
        return self._folder / "ranks" / f"{rank}.log"

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        for process in self._all:
            if process.poll() is None:
                process.send_signal(number)

    def _end(self) -> None:
        """Give the processes a moment to end by themselves, then end them."""
        deadline = time.monotonic() + GRACE
        for rank, process in enumerate(self._all):
            if any(other.returncode for other in self._all):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, min(deadline - time.monotonic(), 1.0)))
            if process.poll() is None:
                self._ended.add(rank)
                process.kill()
                process.wait()

    def _failure(self) -> FreerunError:
        """The error of the process that failed by itself rather than because another one was gone."""
        codes = [(rank, process.returncode) for rank, process in enumerate(self._all)]
        failed = [(rank, code) for rank, code in codes if code and rank not in self._ended]
        gone_peer = 3  # PeerError.exit_code
        killed = -int(signal.SIGKILL)
        rank, code = min(failed, key=lambda one: (one[1] == gone_peer, one[1] == killed, one[0]))
        return _Failed(f"rank {rank} {self._reason(rank, code)}", abs(code) if code > 0 else 1)

    def _reason(self, rank: int, code: int) -> str:
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}; resume the run with --resume."
        lines = self._log(rank).read_text(errors="replace").strip().splitlines() if self._log(rank).exists() else []
        said = [line for line in lines if line.startswith("freerun: ")] or lines[-1:]
        return f"failed: {said[-1].removeprefix('freerun: ')}" if said else f"failed with exit code {code} (see above)."


class _Failed(FreerunError):
    """A process of the run failed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
