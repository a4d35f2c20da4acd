"""The examples of optimizers on the pages work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from freerun.config import OptimizerConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-an-optimizer.md"


def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_example_optimizer_trains_proposes_and_minds_the_delay() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    groups = [{"params": [weight], "names": ["w"], "kind": "matrix", "weight_decay": 0.0}]
    optimizer = example()["build"](groups, OptimizerConfig(lr=0.01), 4, 3)
    losses, moves = [], {}
    for delay in [0] * 20 + [3]:
        optimizer.param_groups[0]["delay"] = delay
        loss = weight.square().sum()
        weight.grad = 2 * weight.detach()
        before, (proposed,) = weight.detach().clone(), optimizer.propose()
        optimizer.step()
        assert torch.equal(weight, proposed)
        losses.append(loss.item())
        moves[delay] = (weight - before).abs().max().item()
    assert losses == sorted(losses, reverse=True)
    assert abs(moves[0] / moves[3] - 4) < 1e-3


@pytest.mark.parametrize("page", ["README.md", "docs/under-delay.md"])
def test_the_loop_on_a_page_lowers_its_loss(page: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    losses = {}
    for updates in (1, 20):
        names: dict[str, Any] = {"__name__": "example"}
        torch.manual_seed(0)
        exec(compile(code.replace("range(20)", f"range({updates})"), page, "exec"), names)
        losses[updates] = names["loss"].item()
    assert losses[20] < losses[1]
