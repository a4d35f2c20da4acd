"""Small trainings of a strategy's replicas, for tests: in one process, in many, saved and resumed in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freerun.config import Config
from freerun.groups import Group
from freerun.optim.stepper import StagePlace
from freerun.registry import STRATEGIES, load
from freerun.replicas.base import ReplicaStrategy, StageState
from freerun.steps import Steps
from freerun.weights.flat import FlatParameters

KINDS = {"embedding": "embedding", "head": "head"}


class Model(nn.Module):
    """Two small layers with matrices, vectors, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 6)])
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def kinds_of(model: nn.Module) -> dict[str, str]:
    return {
        name: KINDS.get(name.split(".")[0], "matrix" if parameter.ndim == 2 else "vector")
        for name, parameter in model.named_parameters()
    }


def loss_of(model: nn.Module, replica: int, number: int) -> Tensor:
    """The mean loss of a replica's microbatch."""
    random = torch.Generator().manual_seed(1000 * replica + number)
    tokens = torch.randint(11, (8,), generator=random)
    return nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % 11)


def gradient_of(weights: list[Tensor], replica: int, number: int) -> list[Tensor]:
    """The gradient of a microbatch at the given weights, for the reference."""
    model = make_model()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    with torch.enable_grad():
        loss_of(model, replica, number).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@dataclass
class Outcome:
    """What a replica has at the end."""

    weights: Tensor
    mean: Tensor
    spread: float
    metrics: dict[str, float]


def build(group: Group, config: Config, model: nn.Module) -> ReplicaStrategy:
    stage = StageState(
        FlatParameters(model), kinds_of(model), StagePlace(0, 1, 0), group, None, config, config.training.updates
    )
    strategy: ReplicaStrategy = load(STRATEGIES[config.replicas.strategy])(stage)
    return strategy


def train(group: Group, config: Config, until: int | None = None, saved: dict[str, Any] | None = None) -> Steps[Any]:
    """Train one replica to the end, or `until` an update and give what a checkpoint would hold."""
    model = make_model()
    strategy = build(group, config, model)
    flat = strategy.stage.flat
    if saved is not None:
        flat.weights.copy_(saved["weights"])
        strategy.load_state_dict(saved["strategy"])
    for update in range(saved["update"] if saved else 0, config.training.updates):
        if update == until:
            state = yield from strategy.state_dict()
            return {"update": update, "weights": flat.weights.clone(), "strategy": state}
        yield from one_update(strategy, model, group.rank, update, config.pipeline.microbatches)
    yield from strategy.finish()
    mean = yield from strategy.mean_weights()
    spread = yield from strategy.disagreement(mean)
    return Outcome(flat.weights.clone(), mean.clone(), spread, strategy.metrics())


def one_update(
    strategy: ReplicaStrategy, model: nn.Module, replica: int, update: int, microbatches: int, *, divide: bool = True
) -> Steps[None]:
    """An update from some microbatches; without `divide`, their gradients are summed and their number is told."""
    for number in range(update * microbatches, (update + 1) * microbatches):
        (loss_of(model, replica, number) / (microbatches if divide else 1)).backward()
    yield from strategy.update(update, 0, None if divide else microbatches)
    strategy.stage.flat.gradient.zero_()
