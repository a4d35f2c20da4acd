"""Every trainable parameter lands in exactly one group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freerun import config_files
from freerun.config import OptimizerConfig
from freerun.errors import ConfigError
from freerun.optim import GradedRotation
from freerun.optim.param_groups import KINDS, param_groups
from freerun.registry import OPTIMIZERS, load

CONFIG = OptimizerConfig(weight_decay=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)


def kind_of(name: str, parameter: Tensor) -> str:
    if name.startswith(("embedding", "head")):
        return name.partition(".")[0]
    return "matrix" if parameter.ndim == 2 else "vector"


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    net = Net()
    net.inner.weight.requires_grad_(False)
    groups = param_groups(net.named_parameters(), kind_of, CONFIG)
    grouped = [name for group in groups for name in group["names"]]
    assert sorted(grouped) == sorted(name for name, p in net.named_parameters() if p.requires_grad)
    for group in groups:
        assert [dict(net.named_parameters())[name] for name in group["names"]] == group["params"]


def test_groups_come_in_a_fixed_order_with_their_weight_decay() -> None:
    groups = param_groups(Net().named_parameters(), kind_of, CONFIG)
    assert [group["kind"] for group in groups] == list(KINDS)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.1, 0.0]


def test_rules_override_kinds_and_the_first_match_wins() -> None:
    rules = [("inner.weight", "embedding"), ("inner.*", "vector")]
    groups = param_groups(Net().named_parameters(), kind_of, CONFIG, rules)
    kinds = {name: group["kind"] for group in groups for name in group["names"]}
    assert (kinds["inner.weight"], kinds["inner.bias"]) == ("embedding", "vector")


def test_a_pattern_that_matches_nothing_raises() -> None:
    with pytest.raises(ConfigError, match=r"'inner\.wieght' matches no parameter; names look like"):
        param_groups(Net().named_parameters(), kind_of, CONFIG, [("inner.wieght", "vector")])


def test_an_unknown_kind_and_a_matrix_that_is_none_raise() -> None:
    with pytest.raises(ConfigError, match="known kinds"):
        param_groups(Net().named_parameters(), lambda name, p: "tensor", CONFIG)
    with pytest.raises(ConfigError, match=r"shape \(4,\)"):
        param_groups(Net().named_parameters(), lambda name, p: "matrix", CONFIG)


def test_a_tied_tensor_is_taken_once() -> None:
    net = Net()
    net.head.weight = net.embedding.weight
    groups = param_groups(net.named_parameters(remove_duplicate=False), kind_of, CONFIG)
    assert [name for group in groups for name in group["names"]].count("head.weight") == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_from_a_config_and_trains_all_groups(name: str) -> None:
    torch.manual_seed(0)
    net = Net()
    groups = param_groups(net.named_parameters(), kind_of, CONFIG)
    optimizer = load(OPTIMIZERS[name])(groups, CONFIG, 4, 2)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    net.head(net.norm(net.inner(net.embedding(torch.arange(10))))).logsumexp(-1).sum().backward()
    optimizer.step()
    assert all(not torch.equal(before[n], p) for n, p in net.named_parameters())


def test_the_name_graded_rotation_stands_for_the_defaults_of_its_class() -> None:
    config = config_files.read("", [("optimizer.name", "graded-rotation")]).optimizer
    named = load(OPTIMIZERS["graded-rotation"])(param_groups(Net().named_parameters(), kind_of, config), config, 1, 0)
    bare = GradedRotation(Net().parameters(), lr=config.lr)
    differing = {k for k, v in bare.defaults.items() if named.param_groups[0][k] != v}
    assert differing <= {"rotate", "kind", "names", "params"}


def test_what_a_config_says_wins_over_what_comes_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[optimizer]\nname = "graded-rotation"\n[optimizer.rotation]\nfresh = 0.1\n')
    config = config_files.read(str(path), [("optimizer.betas", "0.9,0.99")]).optimizer
    assert (config.betas, config.rotation.fresh, config.rotation.tempering) == ((0.9, 0.99), 0.1, 0.5)
    assert not config.rotation.bias_correction


def test_only_matrices_are_rotated() -> None:
    groups = param_groups(Net().named_parameters(), kind_of, CONFIG)
    optimizer = load(OPTIMIZERS["basis-rotation"])(groups, CONFIG, 4, 2)
    assert [group["rotate"] for group in optimizer.param_groups] == [kind == "matrix" for kind in KINDS]
