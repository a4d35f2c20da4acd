from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from freerun.collectives import size_of
from freerun.config import Config, OptimizerConfig, ReplicasConfig
from freerun.errors import ConfigError
from freerun.groups import Group
from freerun.optim.sharding import ranges, shares, state_bytes, step_cost
from freerun.optim.stepper import StagePlace
from freerun.registry import STRATEGIES, load
from freerun.replicas.base import StageState
from freerun.steps import Steps
from freerun.weights.flat import FlatParameters, Slice, layout
from helpers.members import in_one_process
from helpers.replica_runs import kinds_of, make_model


def slices_of(shapes: list[tuple[int, ...]]) -> list[Slice]:
    return layout(nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes]))


SHAPES = st.lists(st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.integers(1, 9))), min_size=1)


@given(SHAPES, st.integers(1, 5), st.booleans())
def test_shares_cover_everything_once(shapes: list[tuple[int, ...]], count: int, whole: bool) -> None:
    slices = slices_of(shapes)
    matrices = {part.name for part in slices if whole and len(part.shape) == 2}
    try:
        owned = shares(slices, matrices, count)
    except ConfigError:
        return
    covered = sorted(place for pieces in owned for start, end in ranges(pieces) for place in range(start, end))
    assert covered == list(range(slices[-1].end))
    for pieces in owned:
        for piece in pieces:
            part = next(part for part in slices if part.name == piece.name)
            assert piece.name not in matrices or piece.shape == tuple(part.shape)
            flat = torch.arange(float(slices[-1].end))
            assert torch.equal(piece.of(part.of(flat)).reshape(-1), flat[piece.start : piece.end])


def test_elements_are_shared_out_equally() -> None:
    sizes = [size_of(ranges(pieces)) for pieces in shares(slices_of([(100, 7), (3,), (41, 5)]), (), 4)]
    assert max(sizes) - min(sizes) <= 1


def test_matrices_are_balanced_by_what_a_step_costs() -> None:
    slices = slices_of([(64, 64)] * 4 + [(64, 256), (256, 64)] * 2 + [(50,)])
    matrices = {part.name for part in slices if len(part.shape) == 2}
    owned = shares(slices, matrices, 2)
    loads = [sum(step_cost(piece.shape) for piece in pieces if piece.name in matrices) for pieces in owned]
    assert loads[0] == loads[1]


def test_fewer_matrices_than_replicas_is_refused() -> None:
    slices = slices_of([(4, 4), (4, 4), (9,)])
    with pytest.raises(ConfigError, match=r"replicas\.count is 3, but this stage has only 2 matrices.*at most 2"):
        shares(slices, {"0", "1"}, 3)


def test_fewer_weights_than_replicas_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"replicas\.count is 4"):
        shares(slices_of([(3,)]), (), 4)


def state_share(group: Group, strategy: str) -> Steps[tuple[int, int]]:
    config = Config(replicas=ReplicasConfig(strategy=strategy), optimizer=OptimizerConfig(name="adamw"))
    model = make_model()
    built = load(STRATEGIES[strategy])(
        StageState(FlatParameters(model), kinds_of(model), StagePlace(0, 1, 0), group, None, config, 10)
    )
    built.stage.flat.gradient.fill_(0.1)
    yield from built.update(0, 0)
    yield from built.update(1, 0)
    yield from built.finish()
    return state_bytes(built.stepper.optimizer), len(built.stage.flat.weights)


@pytest.mark.parametrize("strategy", ["zero1", "dpu", "acco"])
@pytest.mark.parametrize("count", [2, 4])
def test_optimizer_state_is_shared_out_evenly(strategy: str, count: int) -> None:
    for own, weights in in_one_process(count, state_share, strategy):
        assert own <= 1.05 * 2 * 4 * weights / count
