"""All that a process must save to go on exactly where it was, and how it takes it up again."""

from __future__ import annotations

from typing import Any

import torch

from freerun.errors import ConfigError
from freerun.pipeline.executor import Executor
from freerun.steps import Steps

Tree = dict[str, Any]


def state_of(executor: Executor, versions: range, fingerprint: str) -> Steps[Tree]:
    """The state after an update; `versions` are those that the forwards in flight saw, and the newest."""
    strategy = yield from executor.strategy.state_dict()
    return {
        "fingerprint": fingerprint,
        "ended": executor.strategy.ended(executor.versions.newest),
        "weights": executor.flat.weights,
        "layout": [[part.name, list(part.shape), part.start, part.end] for part in executor.flat.slices],
        "versions": {version: executor.versions.read(version) for version in versions},
        "strategy": strategy,
        "policy": executor.policy.state(),
        "norms": executor.norms,
        "flight_norms": {microbatch: flight.norms for microbatch, flight in executor.in_flight.items()},
        "microbatches": executor.microbatches_done,
        "delays": dict(executor.delays),
        "skipped": executor.losses.skipped,
    }


def load_state(executor: Executor, state: Tree, fingerprint: str) -> None:
    """Take up a saved state; the forwards that were in flight are then repeated on the versions they saw."""
    if state["fingerprint"] != fingerprint:
        raise ConfigError(
            "the data is not what the checkpoint was trained on (data.source, data.tokenizer or the files changed); "
            "restore it, or start anew without --resume."
        )
    layout = [[part.name, list(part.shape), part.start, part.end] for part in executor.flat.slices]
    if state["layout"] != layout:
        raise ConfigError("the checkpoint is of another model or cut; resume with the config.toml of its run.")
    with torch.no_grad():
        executor.flat.weights.copy_(state["weights"])
    executor.versions.restore(state["versions"])
    executor.strategy.load_state_dict(state["strategy"])
    executor.policy.load(state["policy"])
    executor.norms.copy_(state["norms"])
    executor.replayed_norms.update(state["flight_norms"])
    executor.skip_to(state["microbatches"])
    executor.delays.update(state["delays"])
    executor.losses.skipped = state["skipped"]
