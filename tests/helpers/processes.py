"""Real processes for tests: started together, joined by gloo, gone afterwards whatever happened."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

FROM_SCRATCH = multiprocessing.get_context("forkserver")
FROM_SCRATCH.set_forkserver_preload(["torch.distributed", "torch._dynamo", "freerun.worker"])


def spawn(
    count: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = 60,
    may_die: Collection[int] = (),
    barrier: bool = True,
) -> list[Any]:
    """Run `function(rank, count, *args)` in `count` processes that share a gloo process group; its results by rank.

    `function` is a module's function and what it takes and gives can be pickled. After `limit` seconds, or as soon
    as one process fails, all are killed and the failure is raised here. A rank in `may_die` may end without a
    result, which is then None. Without `barrier` a process that is done does not stay for the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        children, pipes = [], []
        for rank in range(count):
            ours, theirs = FROM_SCRATCH.Pipe(duplex=False)
            child = FROM_SCRATCH.Process(
                target=_child, args=(theirs, rendezvous, rank, count, limit, barrier, function, args), daemon=True
            )
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        try:
            return _results(pipes, time.monotonic() + limit, limit, may_die)
        finally:
            for child in children:
                child.kill()
                child.join()


def _results(pipes: list[Connection], deadline: float, limit: float, may_die: Collection[int]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting.values())} gave no result within {limit:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                if rank in may_die:
                    continue
                raise AssertionError(f"rank {rank} died without a result") from None
            if not succeeded:
                raise AssertionError(f"rank {rank} failed:\n{results[rank]}")
    return results


def _child(
    pipe: Connection,
    rendezvous: str,
    rank: int,
    count: int,
    limit: float,
    barrier: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    signal.alarm(int(limit) + 5)  # ends this process even if the test run was killed
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rendezvous, timedelta(seconds=limit), rank=rank, world_size=count)
        outcome = (True, function(rank, count, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    if outcome[0] and barrier:
        dist.barrier()  # nobody leaves while others still talk to it
