"""A whole mesh in one process: the same code, the same schedules, the same numbers, bit for bit.

Every stage of every replica is the same generator that a process would run; messages go through mailboxes, and each
goes on whenever what it waits for is there. The order in which they happen to run changes nothing, since which weights
a forward sees follows from the schedule; but for `replicas.delay free`, where replicas take what has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from freerun.assembly import device_of
from freerun.checks import validate_replay
from freerun.config import Config
from freerun.data import build
from freerun.errors import FreerunError
from freerun.groups import Group, LocalGroup, Mailboxes, Solo
from freerun.mesh import Fabric, LocalBoard, Place, places
from freerun.pipeline.deferred import Deferred
from freerun.saving import Saves
from freerun.steps import Steps, Together
from freerun.summary import Summary
from freerun.trace import Tracer
from freerun.train import Run, train
from freerun.worker import explained, threads

WRITTEN_ONCE = ("activations", "gradients")
"""Groups whose messages neither side writes again, so that the replay need not copy them."""


def simulate(config: Config, folder: Path, end: int | None = None) -> Summary:
    """Replay a run of any mesh in this process, to its end or up to an earlier update; gives the summary."""
    validate_replay(config)
    torch.set_num_threads(threads(config))
    together = Together()
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    device = device_of(config, 0)
    results: list[Summary] = []

    def one(fabric: Fabric) -> Steps[None]:
        saves = Saves(config, fabric.place, fabric.board)
        saves.end = end or saves.end
        tracer = Tracer(fabric.place.rank, f"stage {fabric.place.stage}", 0, 0)
        training = Run(config, fabric, data, device, folder, saves, tracer)
        try:
            result = yield from train(training)
        except FreerunError as error:
            raise explained(error, training) from error
        if result is not None:
            results.append(result)

    for fabric in fabrics(config, together):
        together.add(one(fabric), line=fabric.place.replica)
    together.run()
    return results[0]


def fabrics(config: Config, together: Together) -> Iterator[Fabric]:
    """The mesh inside one process: a fabric for every place."""
    board = LocalBoard()
    boxes: dict[tuple[str, int], Mailboxes] = {}
    deferred = [Deferred() for _ in range(config.replicas.count)]

    def group(kind: str, line: int, rank: int, size: int) -> Group:
        if size == 1:
            return Solo()
        shared = boxes.setdefault((kind, line), Mailboxes(kind in WRITTEN_ONCE))
        return LocalGroup(rank, size, f"{kind} {line}", shared, together)

    def fabric(place: Place) -> Fabric:
        row = (place.replica, place.stage, place.stages)
        column = (place.stage, place.replica, place.replicas)
        return Fabric(
            place,
            activations=group("activations", *row),
            gradients=group("gradients", *row),
            tied_weights=group("tied weights", *row),
            tied_gradients=group("tied gradients", *row),
            norms=group("norms", *row),
            replicas=group("replicas", *column),
            side=group("side", *column),
            board=board,
            deferred=deferred[place.replica],
        )

    return map(fabric, places(config.pipeline.stages, config.replicas.count))
