"""Basis rotation without delay against SOAP as pytorch-optimizer has it (extra "peers").

SOAP is run with its own covariances, power iterations, projections and Adam. It differs on purpose, and the test takes
this out, in these points:
- Its first call only computes the bases from that call's gradient; ours updates with them too. So SOAP gets the first
  gradient twice.
- It updates covariances and bases after the weights; METHODS does so before, so that the newest bases serve at once.
  So the test calls its update of the preconditioner itself.
- It puts ε beside √S before the bias correction; so its ε is scaled by √(1−β2ᵗ).
- It decays the weights after the step instead of before; so there is no decay.
- It takes its QR in float32 whatever the parameter's precision; so the tolerance is that of float32.
"""

from __future__ import annotations

import pytest
import torch

from freerun.optim import BasisRotation

peers = pytest.importorskip("pytorch_optimizer", reason="needs the extra 'peers'")

BETAS, EPS, INTERVAL = (0.9, 0.99), 1e-8, 10


@pytest.mark.filterwarnings("ignore")
def test_second_bilateral_without_delay_is_soap(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start = torch.randn(8, 8, dtype=torch.float64)
    mine, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours = BasisRotation([mine], lr=0.01, betas=BETAS, eps=EPS, weight_decay=0.0, interval=INTERVAL)
    soap = peers.SOAP([theirs], lr=0.01, betas=BETAS, weight_decay=0.0, precondition_frequency=INTERVAL)
    left, right = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    update_preconditioner = soap.update_pre_conditioner
    for step in range(1, 101):
        mine.grad = left @ torch.randn(8, 8, dtype=torch.float64) @ right
        theirs.grad = mine.grad.clone()
        if step == 1:
            soap.step()
            monkeypatch.setattr(soap, "update_pre_conditioner", lambda *args, **kwargs: None)
        else:
            update_preconditioner(theirs.grad, soap.state[theirs], step=step)
        soap.param_groups[0]["eps"] = EPS * (1 - BETAS[1] ** step) ** 0.5
        before = mine.detach().clone()
        ours.step()
        soap.step()
        moved = (mine - before).norm().item()
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-4 * moved)
