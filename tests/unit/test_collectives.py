from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from freerun.collectives import Range, Wire, all_gather, all_reduce, equal_parts, exchange_scalars, reduce_scatter
from freerun.groups import Group, Solo
from freerun.payload import FP32, PAYLOADS
from freerun.steps import Steps, run
from helpers.members import in_one_process, in_processes

SIZE = 1001
SCATTERED: list[list[Range]] = [[(0, 10), (500, 700)], [(10, 400)], [(400, 500), (700, 701), (701, 1001)]]


def values(rank: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def sum_in_rank_order(count: int) -> Tensor:
    total = values(0)
    for rank in range(1, count):
        total = total + values(rank)
    return total


def of(parts: list[Range], flat: Tensor) -> Tensor:
    return torch.cat([flat[start:end] for start, end in parts])


def scatter_steps(group: Group, parts: list[list[Range]], wire: Wire) -> Steps[Tensor]:
    into = torch.empty(sum(end - start for start, end in parts[group.rank]))
    yield from reduce_scatter(group, values(group.rank), parts, into, wire)
    return into


def gather_steps(group: Group, parts: list[list[Range]], wire: Wire) -> Steps[Tensor]:
    into = torch.full((SIZE,), math.nan)
    yield from all_gather(group, of(parts[group.rank], values(0)), parts, into, wire)
    return into


def reduce_steps(group: Group, wire: Wire) -> Steps[tuple[Tensor, int]]:
    flat = values(group.rank)
    yield from all_reduce(group, flat, wire)
    return flat, group.bytes_sent


def scalar_steps(group: Group) -> Steps[list[list[float]]]:
    return (yield from exchange_scalars(group, [group.rank + 0.1, math.pi]))


@pytest.mark.parametrize("bucket", [7, 128, 10**6])
@pytest.mark.parametrize("parts", [SCATTERED, equal_parts(SIZE, 3), [[], [(0, SIZE)], []]])
def test_each_rank_gets_the_sum_of_its_part_and_gathers_all(bucket: int, parts: list[list[Range]]) -> None:
    wire = Wire(FP32, bucket)
    for rank, part in enumerate(in_one_process(3, scatter_steps, parts, wire)):
        assert torch.equal(part, of(parts[rank], sum_in_rank_order(3)) if parts[rank] else torch.empty(0))


@pytest.mark.parametrize("bucket", [7, 128, 10**6])
@pytest.mark.parametrize("parts", [SCATTERED, equal_parts(SIZE, 3)])
def test_all_gather_gives_everyone_everything(bucket: int, parts: list[list[Range]]) -> None:
    for whole in in_one_process(3, gather_steps, parts, Wire(FP32, bucket)):
        assert torch.equal(whole, values(0))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("payload", ["fp32", "bf16", "int8"])
def test_all_reduce_gives_all_members_the_same_bits(count: int, payload: str) -> None:
    results = in_one_process(count, reduce_steps, Wire(PAYLOADS[payload], 300))
    for flat, _ in results:
        assert torch.equal(flat, results[0][0])
    tolerance = {"fp32": 0.0, "bf16": 0.02, "int8": 0.1}[payload] if count > 1 else 0.0
    assert (results[0][0] - sum_in_rank_order(count)).abs().max() <= tolerance * count


def test_all_reduce_sends_the_least_possible() -> None:
    for count in (2, 3, 4):
        for _, sent in in_one_process(count, reduce_steps, Wire(FP32, 100)):
            assert abs(sent - 2 * (count - 1) / count * SIZE * 4) <= 8 * count


def test_bf16_halves_and_int8_quarters_the_bytes() -> None:
    sent = {name: in_one_process(2, reduce_steps, Wire(PAYLOADS[name]))[0][1] for name in PAYLOADS}
    assert sent["bf16"] * 2 == sent["fp32"]
    assert sent["int8"] * 4 <= sent["fp32"] * 1.02


def test_scalars_arrive_in_full_precision_a_row_per_rank() -> None:
    for rows in in_one_process(3, scalar_steps):
        assert rows == [[0.1, math.pi], [1.1, math.pi], [2.1, math.pi]]
    assert run(exchange_scalars(Solo(), [0.5])) == [[0.5]]


def error_steps(group: Group, rounds: int) -> Steps[tuple[Tensor, Tensor]]:
    """Send the same numbers again and again; what one round loses the next one makes up for."""
    error = torch.zeros(SIZE)
    received = torch.zeros(SIZE)
    for _ in range(rounds):
        flat = values(group.rank) + error
        error.zero_()
        yield from all_reduce(group, flat, Wire(PAYLOADS["int8"], 300), error)
        received += flat
    return received / rounds, error


def test_error_feedback_loses_nothing_in_the_long_run() -> None:
    rounds = 40
    for mean, _ in in_one_process(3, error_steps, rounds):
        assert (mean - sum_in_rank_order(3)).abs().max() < 0.3 / rounds
    results = in_one_process(3, error_steps, 1)
    lost = sum_in_rank_order(3) - results[0][0]
    torch.testing.assert_close(sum(error for _, error in results), lost, atol=1e-5, rtol=0)


def everything(group: Group) -> Steps[list[Tensor]]:
    wire = Wire(PAYLOADS["bf16"], 128)
    parts = equal_parts(SIZE, group.size)
    part = yield from scatter_steps(group, parts, wire)
    whole = yield from gather_steps(group, parts, Wire(FP32, 128))
    beside = group.channel(1)
    task = beside.background(reduce_steps(beside, wire))
    scalars = yield from scalar_steps(group)
    reduced, _ = yield from reduce_steps(group, Wire(FP32, 128))
    yield task
    return [part, whole, task.result()[0], reduced, torch.tensor(scalars, dtype=torch.float64)]


@pytest.mark.parametrize("count", [2, 3])
def test_processes_and_members_of_one_process_get_the_same_bits(count: int) -> None:
    for real, local in zip(in_processes(count, everything), in_one_process(count, everything), strict=True):
        for a, b in zip(real, local, strict=True):
            assert torch.equal(a, b)
