"""Replicas in one process and in many, undisturbed and resumed with a round in flight, give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freerun.config import Config, OptimizerConfig, PipelineConfig, ReplicasConfig, TrainingConfig
from freerun.groups import Group
from freerun.steps import Steps
from helpers.members import in_one_process, in_processes
from helpers.replica_runs import Outcome, train

UPDATES = 7

Outcomes = dict[int, list[dict[str, Outcome]]]
"""By the number of replicas, by replica, by case."""


def config(strategy: str, optimizer: str = "adamw", **settings: Any) -> Config:
    return Config(
        pipeline=PipelineConfig(microbatches=2),
        replicas=ReplicasConfig(strategy=strategy, bucket_mib=0.0008, mean_warmup=3, **settings),
        optimizer=OptimizerConfig(name=optimizer, lr=1e-2, warmup=3, clip=0.5),
        training=TrainingConfig(updates=UPDATES),
    )


CASES = {
    "allreduce": config("allreduce"),
    "zero1": config("zero1", payload="bf16"),
    "dpu": config("dpu"),
    "acco": config("acco"),
    "acco-bf16-rotation": config("acco", "basis-rotation", payload="bf16"),
    "sparse": config("sparse", fraction=0.3, interval=1, delay="fixed:3"),
    "sparse-drift-bf16": config(
        "sparse", fraction=0.3, interval=2, delay="fixed:3", correction="drift", payload="bf16"
    ),
    "sparse-int8": config("sparse", fraction=0.3, interval=1, delay="fixed:3", payload="int8"),
    "diloco": config("diloco", interval=3),
    "diloco-streaming": config("diloco", fragments=2, interval=4, delay="fixed:3", payload="int8"),
}


def train_all(group: Group) -> Steps[dict[str, Outcome]]:
    outcomes = {}
    for name, settings in CASES.items():
        outcomes[name] = yield from train(group, settings)
    return outcomes


@pytest.fixture(scope="module")
def in_one() -> Outcomes:
    return {count: in_one_process(count, train_all) for count in (2, 3)}


@pytest.mark.parametrize("count", [2, 3])
def test_processes_equal_their_replay(count: int, in_one: Outcomes) -> None:
    for real, local in zip(in_processes(count, train_all), in_one[count], strict=True):
        for name in CASES:
            assert torch.equal(real[name].weights, local[name].weights), name
            assert torch.equal(real[name].mean, local[name].mean), name
            assert real[name].spread == local[name].spread
            assert real[name].metrics["replica_bytes_sent"] >= 0


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_with_a_round_in_flight_is_bit_equal(name: str, in_one: Outcomes) -> None:
    for until in (4, 5):
        saved = in_one_process(2, train, CASES[name], until)
        resumed = in_one_process(2, lambda group, states=saved: train(group, CASES[name], None, states[group.rank]))
        for rank, outcome in enumerate(resumed):
            assert torch.equal(outcome.weights, in_one[2][rank][name].weights)


def test_sharded_strategies_leave_the_same_weights_on_every_replica(
    in_one: Outcomes,
) -> None:
    for outcomes in in_one.values():
        for name in ("allreduce", "zero1", "dpu", "acco", "acco-bf16-rotation"):
            assert all(torch.equal(other[name].weights, outcomes[0][name].weights) for other in outcomes)


def test_int8_and_bf16_stay_close_to_fp32(in_one: Outcomes) -> None:
    exact, coarse = in_one[2][0]["sparse"].mean, in_one[2][0]["sparse-int8"].mean
    assert (exact - coarse).norm() < 0.02 * exact.norm()
