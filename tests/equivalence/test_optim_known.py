"""The settings in which our optimizers are ones that torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from freerun.optim import AdamW, BasisRotation, DelayCompensated, Muon, NesterovAdamW, rotated_update
from freerun.optim.error_feedback import ErrorFeedback

SHAPES = [(6, 4), (4, 9), (7,)]


def twins(dtype: torch.dtype) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return [torch.nn.Parameter(v.clone()) for v in values], [torch.nn.Parameter(v.clone()) for v in values]


def step_both(
    pair: Iterable[torch.optim.Optimizer], parameters: tuple[list[Any], list[Any]], updates: int
) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Feed both optimizers the same gradients, and show the weights after each update."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        for one, other in zip(*parameters, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype)
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.step()
        yield [p.detach() for p in parameters[0]], [p.detach() for p in parameters[1]]


@pytest.fixture
def float64_scalars() -> Iterator[None]:
    """torch.optim.NAdam keeps the product of its momenta in the default precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_adamw_is_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    mine, theirs = twins(dtype)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    pair = AdamW(mine, **settings), torch.optim.AdamW(theirs, foreach=False, **settings)
    for ours, torchs in step_both(pair, (mine, theirs), 100):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0)


def test_nesterov_adamw_is_torchs_nadam_with_decoupled_decay(float64_scalars: None) -> None:
    mine, theirs = twins(torch.float64)
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.99, 0.999), "weight_decay": 0.1}
    pair = NesterovAdamW(mine, **settings), torch.optim.NAdam(theirs, decoupled_weight_decay=True, **settings)
    for ours, torchs in step_both(pair, (mine, theirs), 200):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-12)


def test_muon_is_torchs_where_torch_rounds_to_bf16() -> None:
    mine, theirs = twins(torch.float32)
    mine, theirs = mine[:2], theirs[:2]
    pair = Muon(mine, lr=0.01, weight_decay=0.1), torch.optim.Muon(theirs, lr=0.01, adjust_lr_fn="match_rms_adamw")
    start = [p.detach().clone() for p in mine]
    *_, (ours, torchs) = step_both(pair, (mine, theirs), 20)
    for one, other, initial in zip(ours, torchs, start, strict=True):
        assert (one - other).norm() < 0.03 * (one - initial).norm()


IDENTITY_AS_ADAMW = [
    {},
    {"geometry": "unilateral"},
    {"source": "first", "interval": 1000},
    {"stagger": True, "interval": 1000},
]


@pytest.mark.parametrize("settings", IDENTITY_AS_ADAMW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_identity_bases_are_adamw_bit_for_bit(
    dtype: torch.dtype, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def identities(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.eye(side, dtype=matrix.dtype).repeat(len(matrix), 1, 1) for side in matrix.shape[-2:])  # type: ignore[return-value]

    monkeypatch.setattr(rotated_update, "singular_bases", identities)
    monkeypatch.setattr(rotated_update, "_new_bases", lambda group, moment, state: {})
    mine, theirs = twins(dtype)
    pair = BasisRotation(mine, lr=0.01, weight_decay=0.1, **settings), AdamW(theirs, lr=0.01, weight_decay=0.1)
    for ours, adamws in step_both(pair, (mine, theirs), 100):
        torch.testing.assert_close(ours, adamws, rtol=0, atol=0)


WITHOUT_EFFECT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "not rotated": lambda p: BasisRotation([{"params": p, "rotate": False}]),
    "not orthogonalised": lambda p: Muon([{"params": p, "orthogonalise": False}]),
    "no older weights": lambda p: DelayCompensated(p, compensation=1.0),
    "no delay": lambda p: ErrorFeedback(AdamW(p), share=1.0),
}


@pytest.mark.parametrize("make", WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT.keys())
def test_switched_off_methods_are_adamw_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    mine, theirs = twins(torch.float32)
    for ours, adamws in step_both((make(mine), AdamW(theirs)), (mine, theirs), 30):
        torch.testing.assert_close(ours, adamws, rtol=0, atol=0)
