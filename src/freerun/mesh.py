"""Ranks as a mesh of replicas × stages, and the groups that talk: the only place that makes process groups."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from freerun.agreement import refuse_unequal
from freerun.config import Config
from freerun.errors import ConfigError, PeerError
from freerun.groups import BACKENDS, OVER, DistributedGroup, Group, Solo
from freerun.nccl import NcclCollectives
from freerun.pipeline.deferred import Deferred
from freerun.steps import Steps, run


@dataclass(frozen=True)
class Place:
    """Where a process stands in the mesh."""

    replica: int
    stage: int
    replicas: int
    stages: int

    @property
    def rank(self) -> int:
        return self.replica * self.stages + self.stage

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def reports(self) -> bool:
        """Whether this process speaks for the run: the last stage of the first replica, which knows the loss."""
        return self.replica == 0 and self.last

    def __str__(self) -> str:
        replica = f" of replica {self.replica}" if self.replicas > 1 else ""
        return f"stage {self.stage}{replica} (rank {self.rank})"


def places(stages: int, replicas: int) -> list[Place]:
    """Every place of a mesh, in the order of ranks."""
    return [Place(replica, stage, replicas, stages) for replica in range(replicas) for stage in range(stages)]


class Board(Protocol):
    """Small facts that every process can put up and read."""

    def put(self, key: str, value: Any) -> None:
        """Put up a value (anything JSON can hold)."""

    def get(self, key: str, owner: str) -> Steps[Any]:
        """Wait for a value; `owner` is who should have put it up, for the error when it does not come."""

    def look(self, key: str) -> Any | None:
        """The value if it is there."""


@dataclass
class Fabric:
    """All that a process needs to talk to the others of its run."""

    place: Place
    activations: Group
    """The stages of this replica, for messages to the next stage."""
    gradients: Group
    """The stages of this replica, for messages to the stage before."""
    tied_weights: Group
    """The stages of this replica, for the weights that first and last share."""
    tied_gradients: Group
    """The stages of this replica, for the last stage's gradients of those."""
    norms: Group
    """The stages of this replica, for gradient norms."""
    replicas: Group
    """The replicas of this stage."""
    side: Group
    """The replicas of this stage, for what is exchanged beside training: evaluation, metrics."""
    board: Board
    deferred: Deferred | None = None
    """In a replay, where the stages of this replica put off forwards."""


class LocalBoard:
    """A board inside one process."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self._values[key] = value

    def look(self, key: str) -> Any | None:
        return self._values.get(key)

    def get(self, key: str, owner: str) -> Steps[Any]:
        yield OVER if key in self._values else _Posted(self._values, key)
        return self._values[key]


@dataclass
class _Posted:
    values: dict[str, Any]
    key: str

    def ready(self) -> bool:
        return self.key in self.values

    def wait(self) -> None:
        raise RuntimeError(f"{self.key} is waited for before it was put up")


class StoreBoard:
    """A board on the run's key-value store."""

    def __init__(self, store: Store, limit: float) -> None:
        self._store = store
        self._limit = limit

    def put(self, key: str, value: Any) -> None:
        self._store.set(f"freerun/{key}", json.dumps(value))

    def look(self, key: str) -> Any | None:
        return json.loads(self._store.get(f"freerun/{key}")) if self._store.check([f"freerun/{key}"]) else None

    def get(self, key: str, owner: str) -> Steps[Any]:
        yield _Stored(self._store, f"freerun/{key}", owner, self._limit)
        return json.loads(self._store.get(f"freerun/{key}"))


@dataclass
class _Stored:
    store: Store
    key: str
    owner: str
    limit: float

    def ready(self) -> bool:
        return bool(self.store.check([self.key]))

    def wait(self) -> None:
        try:
            self.store.wait([self.key], timedelta(seconds=self.limit))
        except (RuntimeError, dist.DistError) as error:
            what = self.key.removeprefix("freerun/")
            raise PeerError(f"{self.owner} did not answer within {self.limit:g} s (waiting for {what})") from error


def collect(board: Board, key: str, everyone: list[Place]) -> Steps[list[Any]]:
    """What every process has put up under `key/RANK`, in the order of ranks."""
    values = {}
    for place in everyone:
        values[place.rank] = yield from board.get(f"{key}/{place.rank}", str(place))
    return list(values.values())


def solo() -> Fabric:
    """The fabric of a run of one process."""
    group = Solo()
    return Fabric(Place(0, 0, 1, 1), group, group, group, group, group, group, group, LocalBoard())


def join(config: Config, device: torch.device) -> Fabric:
    """Meet the other processes of the run (as torchrun or freerun's launcher started them) and make all groups."""
    limit = config.run.time_limit
    stages, replicas = config.pipeline.stages, config.replicas.count
    store, rank, world = _find_store(limit)
    if world != stages * replicas:
        raise ConfigError(
            f"{world} processes were started, but pipeline.stages {stages} × replicas.count {replicas} needs "
            f"{stages * replicas}; start that many (torchrun --nproc-per-node) or change the mesh."
        )
    board = StoreBoard(store, limit)
    _meet(store, rank, world, limit)
    run(refuse_unequal(config, board, rank))
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit)
    )
    everyone = places(stages, replicas)
    place = everyone[rank]
    rows = [[p.rank for p in everyone if p.replica == replica] for replica in range(replicas)]
    columns = [[p.rank for p in everyone if p.stage == stage] for stage in range(stages)]

    def make(lines: list[list[int]], name: str) -> Group:
        return _group(lines, name, everyone, rank, limit, device)

    return Fabric(
        place,
        make(rows, "activations"),
        make(rows, "gradients"),
        make(rows, "tied weights"),
        make(rows, "tied gradients"),
        make(rows, "norms"),
        make(columns, "replicas"),
        make(columns, "side"),
        board,
    )


def leave(fabric: Fabric) -> Steps[None]:
    """Part from the others; rank 0, which may hold the board, goes last."""
    if not dist.is_initialized():
        return
    place = fabric.place
    everyone = places(place.stages, place.replicas)
    fabric.board.put(f"done/{place.rank}", True)
    yield from collect(fabric.board, "done", everyone)
    fabric.board.put(f"bye/{place.rank}", True)
    if place.rank == 0:
        yield from collect(fabric.board, "bye", everyone)
    dist.destroy_process_group()


def _find_store(limit: float) -> tuple[Store, int, int]:
    """The run's key-value store, this rank and how many there are, as torchrun or freerun's launcher says.

    Rank 0 holds the store unless torchrun does. Nobody waits here for ranks that are late: `_meet` names them.
    """
    unset = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if unset:
        raise ConfigError(f"the environment variable {unset[0]} is not set; start the processes with torchrun.")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            host, port, is_master=holds, timeout=timedelta(seconds=limit), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        if holds:
            reason = str(error).splitlines()[0][:200]
            raise ConfigError(f"MASTER_PORT is {port}, where rank 0 can't listen: {reason}") from error
        raise PeerError(
            f"rank 0 did not answer at {host}:{port} within {limit:g} s; start it, or set MASTER_ADDR and MASTER_PORT "
            "to where it is"
        ) from error
    return store, rank, world


def _meet(store: Store, rank: int, world: int, limit: float) -> None:
    """Wait for every rank, and name the ones that do not come."""
    store.set(f"freerun/here/{rank}", socket.gethostname())
    deadline = time.monotonic() + limit
    missing = list(range(world))
    while missing:
        missing = [other for other in missing if not store.check([f"freerun/here/{other}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(str(other) for other in missing)
            raise PeerError(
                f"rank {names} of {world} did not start within {limit:g} s; start every rank, then try again"
            )
        if missing:
            time.sleep(0.02)


def _group(
    lines: list[list[int]], name: str, everyone: list[Place], rank: int, limit: float, device: torch.device
) -> Group:
    """Make the group of every line of the mesh (all processes must take part), and give back this process's own."""
    mine: Group = Solo()
    for ranks in lines:
        if len(ranks) == 1:
            continue
        made = dist.new_group(ranks, timeout=timedelta(seconds=limit), group_desc=f"freerun {name}")
        if rank in ranks:
            assert made is not None
            labels = [f"{everyone[other]} ({name})" for other in ranks]
            collectives = NcclCollectives if device.type == "cuda" else None
            mine = DistributedGroup(made, ranks, labels, limit, collectives=collectives)
    return mine
