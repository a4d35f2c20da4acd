"""Bytes that a replica keeps per weight under each strategy, counted in its own tensors after some updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from common import table
from torch import Tensor, nn

from freerun.config import Config, OptimizerConfig, ReplicasConfig
from freerun.groups import Group, LocalGroup, Mailboxes
from freerun.optim.stepper import StagePlace
from freerun.registry import STRATEGIES, load
from freerun.replicas.base import ReplicaStrategy, StageState
from freerun.steps import Steps, Together
from freerun.weights.flat import FlatParameters

WEIGHTS = 100_000
STRATEGIES_MEASURED: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "zero1": {},
    "dpu": {},
    "acco": {},
    "sparse": {"interval": 1, "delay": "fixed:2"},
    "sparse, drift": {"interval": 1, "delay": "fixed:2", "correction": "drift"},
    "diloco": {"interval": 2},
}


def memory_table(counts: Iterable[int] = (2, 4, 8)) -> dict[str, dict[int, float]]:
    """Print and return bytes per weight: weights, gradient, master, optimizer state and buffers (AdamW, fp32)."""
    counts = list(counts)
    print("bytes per weight that a replica keeps, AdamW (compute copies and activations not counted)")
    measured = {
        name: {count: _bytes_per_weight(name.split(",")[0], settings, count) for count in counts}
        for name, settings in STRATEGIES_MEASURED.items()
    }
    table(("strategy", *(f"{count} replicas" for count in counts)), [(n, *row.values()) for n, row in measured.items()])
    return measured


def _bytes_per_weight(strategy: str, settings: dict[str, Any], count: int) -> float:
    config = Config(
        replicas=ReplicasConfig(strategy=strategy, count=count, **settings), optimizer=OptimizerConfig(name="adamw")
    )
    together, mailboxes = Together(), Mailboxes()
    tasks = [
        together.background(_train(LocalGroup(rank, count, "replicas", mailboxes, together), config))
        for rank in range(count)
    ]
    together.run()
    return max(task.result() for task in tasks) / WEIGHTS


def _train(group: Group, config: Config) -> Steps[int]:
    flat = FlatParameters(nn.ParameterList([nn.Parameter(torch.ones(WEIGHTS))]))
    stage = StageState(flat, {"0": "vector"}, StagePlace(0, 1, 0), group, None, config, 100)
    strategy: ReplicaStrategy = load(STRATEGIES[config.replicas.strategy])(stage)
    for update in range(5):
        flat.gradient.fill_(0.01)
        yield from strategy.update(update, 0)
    held = _tensors(strategy, set())
    yield from strategy.finish()
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())


def _tensors(value: Any, seen: set[int]) -> list[Tensor]:
    """Every tensor that can be reached from an object of freerun's or torch.optim's, but not through a group."""
    if id(value) in seen or isinstance(value, (LocalGroup, Together, type)):
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value, *([] if value.grad is None else [value.grad])]
    if isinstance(value, dict):
        return [tensor for key, item in value.items() for tensor in _tensors(key, seen) + _tensors(item, seen)]
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return [tensor for item in value for tensor in _tensors(item, seen)]
    if type(value).__module__.startswith("freerun"):
        return _tensors(vars(value), seen) if hasattr(value, "__dict__") else []
    return []
