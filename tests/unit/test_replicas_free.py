"""What may depend on the clock, and what happens when a replica dies."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from freerun.collectives import Wire
from freerun.config import Config, OptimizerConfig, ReplicasConfig, TrainingConfig
from freerun.errors import PeerError
from freerun.groups import Group
from freerun.replicas.base import mean_over
from freerun.replicas.rounds import FREE_ROUNDS
from freerun.replicas.sparse import Correction, SparseRounds
from freerun.steps import Steps, run
from helpers.members import gloo_group, in_one_process
from helpers.processes import spawn
from helpers.replica_runs import build, make_model, one_update, train

UPDATES = 24


def rounds_of(group: Group, weights: torch.Tensor, delay: int | None = None) -> SparseRounds:
    return SparseRounds(
        weights, group, fraction=0.5, interval=2, delay=delay, correction=Correction("drift"), wire=Wire(), seed=0
    )


def uneven(rank: int, count: int, pauses: list[float]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Replicas of very different speeds; one does many more updates while a round is under way."""
    weights = torch.full((64,), float(rank))
    group = gloo_group()
    rounds = rounds_of(group, weights)
    most = 0
    for update in range(1, UPDATES + 1):
        time.sleep(pauses[rank])
        run(rounds.advance(update))
        most = max(most, len(rounds.under_way))
    run(rounds.finish())
    return weights, run(mean_over(group, weights)), most


def test_free_rounds_end_well_between_replicas_of_different_speed() -> None:
    results = spawn(3, uneven, [0.0, 0.005, 0.02])
    for weights, mean, most in results:
        assert torch.equal(mean, results[0][1])
        assert weights.isfinite().all()
        assert most <= FREE_ROUNDS
    # nothing is learnt here, so whatever rounds there were have brought the replicas closer
    start = torch.tensor([0.0, 1.0, 2.0]).var(correction=0)
    assert torch.stack([weights for weights, _, _ in results]).var(dim=0, correction=0).mean() < start


def free_config(updates: int = UPDATES) -> Config:
    return Config(
        replicas=ReplicasConfig(strategy="sparse", fraction=0.5, interval=2, delay="free"),
        optimizer=OptimizerConfig(warmup=3),
        training=TrainingConfig(updates=updates),
    )


def test_free_rounds_work_in_one_process_too() -> None:
    outcomes = in_one_process(3, train, free_config())
    assert all(torch.equal(outcome.mean, outcomes[0].mean) for outcome in outcomes)
    assert outcomes[0].metrics["replica_bytes_sent"] > 0


def test_a_free_run_can_be_saved_and_resumed_at_any_update() -> None:
    for until in (5, 6, 7):
        saved = in_one_process(2, train, free_config(), until)
        assert all(state["strategy"]["rounds"]["under_way"] == [] for state in saved)
        resumed = in_one_process(2, lambda group, states=saved: train(group, free_config(), None, states[group.rank]))
        assert torch.equal(resumed[0].mean, resumed[1].mean)


def elastic(group: Group, extra: int) -> Steps[tuple[torch.Tensor, float, list[int]]]:
    """Replica 1 does `extra` more microbatches in every phase."""
    config = Config(
        replicas=ReplicasConfig(strategy="acco", elastic=True),
        optimizer=OptimizerConfig(warmup=3),
        training=TrainingConfig(updates=10),
    )
    model = make_model()
    strategy: Any = build(group, config, model)
    phases = []
    update = 0
    while not strategy.ended(update):
        count = 1 + (extra if group.rank else 0)
        yield from one_update(strategy, model, group.rank, update, count, divide=False)
        phases.append(count)
        update += 1
    yield from strategy.finish()
    return strategy.stage.flat.weights, strategy.rounds.progress, phases


def test_elastic_phases_advance_the_schedule_by_samples() -> None:
    (weights, progress, phases), (others, progress_there, more) = in_one_process(2, elastic, 2)
    assert torch.equal(weights, others)
    assert progress == progress_there >= 10
    assert len(phases) == len(more)
    # 1 + 3 microbatches a phase are two updates' worth of 1 + 1
    assert progress == sum(phases + more) / 2


def dies(rank: int, count: int, strategy: str) -> str | None:
    config = Config(
        replicas=ReplicasConfig(strategy=strategy, interval=1, fraction=0.5, delay="fixed:2"),
        optimizer=OptimizerConfig(warmup=3),
        training=TrainingConfig(updates=200),
    )
    model = make_model()
    replica = build(gloo_group(limit=5), config, model)
    for update in range(200):
        if rank == 1 and update == 4:
            os._exit(1)
        try:
            run(one_update(replica, model, rank, update, 1))
        except PeerError as error:
            return str(error)
    return None


def test_a_replica_that_dies_is_named_by_the_others() -> None:
    for strategy in ("zero1", "sparse", "acco"):
        message, _, other = spawn(3, dies, strategy, may_die=(1,), limit=40, barrier=False)
        assert "replica 1" in message
        assert "replica" in other


def stalls(rank: int, count: int) -> str | None:
    weights = torch.zeros(8)
    rounds = rounds_of(gloo_group(limit=1), weights, delay=1)
    if rank == 1:
        time.sleep(3)
        return None
    try:
        for update in range(1, 5):
            run(rounds.advance(update))
    except PeerError as error:
        return str(error)
    return None


def test_a_replica_that_stops_answering_is_named_after_the_time_limit() -> None:
    message, _ = spawn(2, stalls, barrier=False)
    assert "from replica 1 took longer than run.time_limit, which is 1 s" in message
