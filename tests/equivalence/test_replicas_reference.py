"""Every strategy against its plain reference, on a small model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import torch
from torch import Tensor

from freerun.config import Config, OptimizerConfig, PipelineConfig, ReplicasConfig, RotationConfig, TrainingConfig
from freerun.optim.param_groups import param_groups
from freerun.optim.rates import rate
from freerun.registry import OPTIMIZERS, STRATEGIES, load
from freerun.replicas import reference
from freerun.replicas.diloco import fragments_of
from freerun.replicas.sparse import Correction
from freerun.weights.flat import layout
from helpers.members import in_one_process
from helpers.replica_runs import gradient_of, kinds_of, make_model, train

# Both sides sum the replicas' gradients in the same order, and Adam steps each element alone. What remains are
# roundings in the norm and in sums over microbatches, which Adam's first steps can blow up to a share of the rate.
CLOSE = {"atol": 3e-6, "rtol": 1e-5}

ADAM = OptimizerConfig(lr=1e-2, warmup=3, clip=0.5)


Oracle = Callable[[reference.Task], list[Tensor]]


def config(
    strategy: str, *, microbatches: int = 1, updates: int = 9, optimizer: OptimizerConfig = ADAM, **kw
) -> Config:
    return Config(
        pipeline=PipelineConfig(microbatches=microbatches),
        replicas=ReplicasConfig(strategy=strategy, bucket_mib=0.0002, **kw),
        optimizer=optimizer,
        training=TrainingConfig(updates=updates, seed=5),
    )


def task(config: Config, replicas: int) -> reference.Task:
    optimizer = config.optimizer

    def adamw(weights: list[Tensor]) -> torch.optim.Optimizer:
        decayed = [weight for weight in weights if weight.ndim > 1]
        others = [weight for weight in weights if weight.ndim < 2]
        groups = [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, optimizer.lr, optimizer.betas, optimizer.eps)

    return reference.Task(
        start=[parameter.detach().clone() for parameter in make_model().parameters()],
        gradient=gradient_of,
        optimizer=adamw,
        rate=lambda progress: rate(optimizer, progress, config.training.updates, 0),
        replicas=replicas,
        updates=config.training.updates,
        microbatches=config.pipeline.microbatches,
        clip=optimizer.clip,
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("strategy", "oracle"),
    [
        ("allreduce", reference.synchronous),
        ("zero1", reference.synchronous),
        ("dpu", reference.delayed),
        ("acco", reference.acco),
    ],
)
@pytest.mark.parametrize(("microbatches", "updates"), [(1, 9), (2, 8)])
def test_one_batch_strategies_equal_one_process_with_the_whole_batch(
    strategy: str, oracle: Oracle, replicas: int, microbatches: int, updates: int
) -> None:
    settings = config(strategy, microbatches=microbatches, updates=updates)
    expected = reference.flat(oracle(task(settings, replicas)))
    for outcome in in_one_process(replicas, train, settings):
        torch.testing.assert_close(outcome.weights, expected, **CLOSE)
        torch.testing.assert_close(outcome.mean, expected, **CLOSE)
        assert outcome.spread == 0


@pytest.mark.parametrize("correction", ["none", "drift", "ema"])
@pytest.mark.parametrize(
    ("fraction", "interval", "delay"), [(0.25, 1, 0), (0.25, 1, 3), (0.3, 2, 5), (1.0, 1, 0), (0.05, 2, 1)]
)
def test_sparse_averaging_equals_its_reference(correction, fraction: float, interval: int, delay: int) -> None:
    settings = config(
        "sparse",
        fraction=fraction,
        interval=interval,
        delay=f"fixed:{delay}",
        correction=correction,
        mean_warmup=4,
        updates=12,
    )
    kind = Correction(correction, 1.0, (0.5, 0.99), 4)
    expected = reference.sparse(
        task(settings, 3), fraction=fraction, interval=interval, delay=delay, correction=kind, seed=5
    )
    for outcome, weights in zip(in_one_process(3, train, settings), expected, strict=True):
        torch.testing.assert_close(outcome.weights, weights, **CLOSE)
        torch.testing.assert_close(outcome.mean, reference.mean(expected), **CLOSE)


@pytest.mark.parametrize(("fragments", "interval", "delay"), [(1, 3, 0), (2, 4, 1), (4, 4, 2)])
def test_diloco_equals_its_reference(fragments: int, interval: int, delay: int) -> None:
    settings = config("diloco", fragments=fragments, interval=interval, delay=f"fixed:{delay}", updates=14)
    expected = reference.diloco(
        task(settings, 2),
        fragments=fragments_of(layout(make_model()), fragments),
        interval=interval // fragments,
        delay=delay,
        rate=0.7,
        momentum=0.9,
        kept=0.5 if fragments > 1 else 0.0,
    )
    for outcome, weights in zip(in_one_process(2, train, settings), expected, strict=True):
        torch.testing.assert_close(outcome.weights, weights, **CLOSE)


@pytest.mark.parametrize("name", ["basis-rotation", "muon"])
@pytest.mark.parametrize(
    ("strategy", "oracle"),
    [("zero1", reference.synchronous), ("dpu", reference.delayed), ("acco", reference.acco)],
)
def test_matrix_optimizers_shard_by_whole_matrices(name: str, strategy: str, oracle: Oracle) -> None:
    optimizer = replace(ADAM, name=name, rotation=RotationConfig(interval=3))
    settings = config(strategy, updates=9, optimizer=optimizer)

    def whole(weights: list[Tensor]) -> torch.optim.Optimizer:
        names = [name for name, _ in make_model().named_parameters()]
        named = [(name, weight.requires_grad_()) for name, weight in zip(names, weights, strict=True)]
        kinds = kinds_of(make_model())
        groups = param_groups(named, lambda name, _: kinds[name], optimizer)
        return load(OPTIMIZERS[name])(groups, optimizer, 1, 0)

    with torch.no_grad():
        expected = reference.flat(oracle(replace(task(settings, 3), optimizer=whole)))
    for outcome in in_one_process(3, train, settings):
        torch.testing.assert_close(outcome.weights, expected, **CLOSE)


def test_fraction_one_without_delay_is_parameter_averaging() -> None:
    settings = config("sparse", fraction=1.0, interval=1, delay="fixed:0", updates=6)
    oracle = task(settings, 2)
    learners = [reference.Learner(oracle) for _ in range(2)]
    for update in range(6):
        for replica, learner in enumerate(learners):
            learner.step(oracle.replica_gradient(learner.weights, replica, update), update)
        average = reference.mean([reference.flat(learner.weights) for learner in learners])
        for learner in learners:
            reference.unflatten(average, learner.weights)
    for outcome in in_one_process(2, train, settings):
        torch.testing.assert_close(outcome.weights, average, **CLOSE)
        assert outcome.spread == 0


def test_the_strategy_that_the_documentation_adds_is_periodic_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-a-replica-strategy.md").read_text()
    periodic = ModuleType("periodic_mean_of_the_page")
    exec(compile(page.split("```python\n")[1].split("```")[0], "the page", "exec"), periodic.__dict__)
    monkeypatch.setitem(sys.modules, periodic.__name__, periodic)
    monkeypatch.setitem(cast("dict[str, str]", STRATEGIES), "periodic", f"{periodic.__name__}:build")
    averaging = {"fraction": 1.0, "interval": 3, "delay": "fixed:0", "correction": "none"}
    outcomes = [in_one_process(2, train, config(name, **averaging)) for name in ("periodic", "sparse")]
    for added, known in zip(*outcomes, strict=True):
        assert torch.equal(added.weights, known.weights)
        assert added.spread == known.spread
