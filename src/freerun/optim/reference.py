"""Basis rotation as docs/methods.md writes it down, one matrix at a time: slow, plain, and the oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from freerun.optim.rotation import without_roundoff


@dataclass
class PlainRotation:
    """The state of one matrix, and its update. Everything but S is kept in the matrix's own coordinates."""

    weight: Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    source: str = "second"
    geometry: str = "bilateral"
    interval: int = 10
    fresh: float = 0.0
    tempering: float = 0.0
    grading: float = 0.0
    bias_correction: bool = True
    step: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    """M, S, and as far as the variant has them L, R, U, V."""

    def update(self, g: Tensor, delay: int = 0) -> None:
        """One update of the weight by the gradient g, which is `delay` updates old."""
        self.step += 1
        if self.step == 1:
            self._start(g)
        beta1, beta2 = self.betas
        kept = self.kept
        kept["M"] = beta1 * kept["M"] + (1 - beta1) * g
        if "L" in kept:
            kept["L"] = beta2 * kept["L"] + (1 - beta2) * g @ g.mT
        if "R" in kept:
            kept["R"] = beta2 * kept["R"] + (1 - beta2) * g.mT @ g
        if self.step > 1 and self.step % self.interval == 0:
            self._refresh_from_covariances() if self.source == "second" else self._refresh_from_momentum()
        rotated_g, rotated_m = self._rotated(g), self._rotated(kept["M"])
        if self.step == 1:
            rotated_g = without_roundoff(rotated_g)
            rotated_m = (1 - beta1) * rotated_g
            kept["M"] = self._rotated_back(rotated_m)
        kept["S"] = beta2 * kept["S"] + (1 - beta2) * rotated_g * rotated_g
        step = self._rotated_back(self._step(rotated_g, rotated_m))
        self.weight = self.weight - self.lr * (1 + delay) ** -self.grading * (step + self.weight_decay * self.weight)

    def _step(self, g: Tensor, m: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        if self.bias_correction:
            m = m / (1 - beta1**self.step)
        n = (1 - self.fresh) * m + self.fresh * g
        d = (self.kept["S"] / (1 - beta2**self.step)).sqrt() + self.eps
        u = n / d
        if self.tempering:
            rms = d.square().mean().sqrt()
            damped = u * torch.clamp(d / rms, min=0.05) ** -self.tempering
            u = damped * (u.norm() / damped.norm()) if damped.norm() > 0 else damped
        return u

    def _start(self, g: Tensor) -> None:
        m, n = g.shape
        u, _, vt = torch.linalg.svd(g, full_matrices=True)
        self.kept = {"M": torch.zeros_like(g), "S": torch.zeros_like(g)}
        if self.geometry == "bilateral" or m < n:
            self.kept["U"] = u
            if self.source == "second":
                self.kept["L"] = g.new_zeros(m, m)
        if self.geometry == "bilateral" or m >= n:
            self.kept["V"] = vt.mT
            if self.source == "second":
                self.kept["R"] = g.new_zeros(n, n)

    def _refresh_from_covariances(self) -> None:
        kept = self.kept
        if "U" in kept:
            order = torch.argsort(torch.diag(kept["U"].mT @ kept["L"] @ kept["U"]), descending=True, stable=True)
            kept["S"] = kept["S"][order]
            kept["U"] = torch.linalg.qr(kept["L"] @ kept["U"][:, order])[0]
        if "V" in kept:
            order = torch.argsort(torch.diag(kept["V"].mT @ kept["R"] @ kept["V"]), descending=True, stable=True)
            kept["S"] = kept["S"][:, order]
            kept["V"] = torch.linalg.qr(kept["R"] @ kept["V"][:, order])[0]

    def _refresh_from_momentum(self) -> None:
        kept, moment = self.kept, self.kept["M"]
        if self.geometry == "unilateral":
            side, square = ("U", moment @ moment.mT) if "U" in kept else ("V", moment.mT @ moment)
            basis = kept[side]
            order = torch.argsort(torch.diag(basis.mT @ square @ basis), descending=True, stable=True)
            kept["S"] = kept["S"][order] if side == "U" else kept["S"][:, order]
            kept[side] = torch.linalg.qr(square @ basis[:, order])[0]
            return
        u, v = kept["U"], kept["V"]
        m, n = moment.shape
        paired = torch.argsort(torch.diag(u.mT @ moment @ v).abs(), descending=True, stable=True)
        rows = torch.cat([paired, torch.arange(len(paired), m)])
        columns = torch.cat([paired, torch.arange(len(paired), n)])
        kept["S"] = kept["S"][rows][:, columns]
        u, v = u[:, rows], v[:, columns]
        # The longer side's columns without a partner keep their directions as far as orthogonality allows.
        u = torch.linalg.qr(torch.cat([(moment @ v)[:, :m], u[:, n:]], dim=1))[0]
        v = torch.linalg.qr(torch.cat([(moment.mT @ u)[:, :n], v[:, m:]], dim=1))[0]
        kept["U"], kept["V"] = u, v

    def _rotated(self, x: Tensor) -> Tensor:
        x = self.kept["U"].mT @ x if "U" in self.kept else x
        return x @ self.kept["V"] if "V" in self.kept else x

    def _rotated_back(self, x: Tensor) -> Tensor:
        x = self.kept["U"] @ x if "U" in self.kept else x
        return x @ self.kept["V"].mT if "V" in self.kept else x
