"""SparseAveraging and Acco around a plain loop; and the programs that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from freerun.errors import ConfigError, PeerError
from freerun.optim import BasisRotation
from freerun.replicas import Acco, SparseAveraging, reference
from freerun.replicas.sparse import Correction
from helpers.processes import spawn
from helpers.replica_runs import gradient_of, loss_of, make_model

PAGE = Path(__file__).parents[2] / "docs" / "replicas-in-your-own-loop.md"
UPDATES = 8
CLOSE = {"atol": 3e-6, "rtol": 1e-5}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def example(number: int) -> dict[str, Any]:
    """Run a program of the page in this process, which has joined the others already."""
    dist.init_process_group = lambda backend: None
    names: dict[str, Any] = {}
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number], str(PAGE), "exec"), names)
    return names


def own_loops(rank: int, count: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        "sparse": sparse_loop(rank),
        "acco": acco_loop(rank, 1),
        "acco by zero_grad": acco_loop(rank, 2, zero_grad=True),
        "resumed": acco_resumed(rank),
    }
    for number, name in enumerate(("sparse page", "acco page")):
        names = example(number)
        results[name] = (names["losses"], flat(names["model"]))
    results["elastic"] = elastic_loop(rank)
    results["unequal"] = unequal_start(rank)
    return results


def sparse_loop(rank: int) -> Tensor:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averaging = SparseAveraging(model.parameters(), None, 0.25, 1, "fixed:2", "drift", seed=3)
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss_of(model, rank, update).backward()
        optimizer.step()
        averaging.step()
    averaging.finish()
    return flat(model)


def make_acco(model: nn.Module, microbatches: int, **more: Any) -> Acco:
    factory = lambda shard: torch.optim.AdamW(shard, lr=1e-2)  # noqa: E731
    return Acco(model.parameters(), factory, microbatches=microbatches, clip=0.5, **more)


def acco_loop(rank: int, microbatches: int, zero_grad: bool = False) -> Tensor:
    model = make_model()
    acco = make_acco(model, microbatches)
    for number in range(UPDATES * microbatches):
        loss_of(model, rank, number).backward()
        if acco.step() and zero_grad:
            model.zero_grad()
    acco.finish()
    assert acco.microbatches_done == UPDATES * microbatches * dist.get_world_size()
    return flat(model)


def acco_resumed(rank: int) -> Tensor:
    model = make_model()
    acco = make_acco(model, 1)
    for number in range(UPDATES):
        if number == 5:
            saved = acco.state_dict()
            model = make_model()
            acco = make_acco(model, 1)
            acco.load_state_dict(saved)
        loss_of(model, rank, number).backward()
        acco.step()
    acco.finish()
    return flat(model)


def elastic_loop(rank: int) -> tuple[Tensor, float, int]:
    model = make_model()
    acco = make_acco(model, 1, elastic=True)
    number = 0
    while acco.microbatches_done < 40:
        loss_of(model, rank, number).backward()
        acco.step()
        number += 1
    acco.finish()
    return flat(model), acco.microbatches_done, number


def unequal_start(rank: int) -> str:
    try:
        SparseAveraging(make_model(seed=rank).parameters())
    except PeerError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return spawn(2, own_loops)


def task(microbatches: int = 1, clip: float = 0.0) -> reference.Task:
    return reference.Task(
        start=[parameter.detach().clone() for parameter in make_model().parameters()],
        gradient=gradient_of,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        rate=lambda progress: 1e-2,
        replicas=2,
        updates=UPDATES,
        microbatches=microbatches,
        clip=clip,
    )


def test_sparse_averaging_in_a_plain_loop_equals_its_reference(results: list[dict[str, Any]]) -> None:
    expected = reference.sparse(task(), fraction=0.25, interval=1, delay=2, correction=Correction("drift"), seed=3)
    for rank in range(2):
        torch.testing.assert_close(results[rank]["sparse"], expected[rank], **CLOSE)


@pytest.mark.parametrize(("name", "microbatches"), [("acco", 1), ("acco by zero_grad", 2)])
def test_acco_in_a_plain_loop_equals_its_reference(results: list[dict[str, Any]], name: str, microbatches: int) -> None:
    expected = reference.flat(reference.acco(task(microbatches, clip=0.5)))
    for rank in range(2):
        torch.testing.assert_close(results[rank][name], expected, **CLOSE)


def test_acco_resumes_with_a_step_under_way(results: list[dict[str, Any]]) -> None:
    for rank in range(2):
        assert torch.equal(results[rank]["resumed"], results[rank]["acco"])


def test_elastic_acco_counts_what_each_replica_has_done(results: list[dict[str, Any]]) -> None:
    (weights, done, first), (others, done_there, second) = (result["elastic"] for result in results)
    assert torch.equal(weights, others)
    assert done == done_there == first + second


def test_the_programs_of_the_page_learn(results: list[dict[str, Any]]) -> None:
    for name in ("sparse page", "acco page"):
        assert torch.equal(results[0][name][1], results[1][name][1])
        losses = results[0][name][0]
        assert sum(losses[-20:]) < sum(losses[:20])


def test_unequal_weights_at_the_start_name_the_replica(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "replica 1 of 2 starts from other weights" in result["unequal"]


def test_optimizers_that_look_at_whole_matrices_must_be_sharded_by_them() -> None:
    rotation = lambda shard: BasisRotation(shard, lr=1e-2)  # noqa: E731
    with pytest.raises(ConfigError, match="whole_matrices=True"):
        Acco(make_model().parameters(), rotation)
    Acco(make_model().parameters(), rotation, whole_matrices=True)
    with pytest.raises(ConfigError, match="LBFGS can't be sharded"):
        Acco(make_model().parameters(), torch.optim.LBFGS)


def test_parameters_that_are_not_fp32_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter 0 is torch\.bfloat16"):
        SparseAveraging(make_model().bfloat16().parameters())


def test_one_process_alone_trains_as_without() -> None:
    model, plain = make_model(), make_model()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    averaging = SparseAveraging(model.parameters(), interval=1)
    for update in range(4):
        for m, o in ((model, optimizer), (plain, other)):
            o.zero_grad()
            loss_of(m, 0, update).backward()
            o.step()
        averaging.step()
    averaging.finish()
    assert torch.equal(flat(model), flat(plain))
