"""What can differ between runs in the laboratory: settings of a run, and the update that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from freerun.config import Config
from freerun.optim.adam_rule import MOMENTUM_DECAY
from freerun.optim.rates import rate
from freerun.optim.rotation import rotate, rotate_back, take_columns, take_rows, without_roundoff

if TYPE_CHECKING:
    from studies.delay.laboratory import Part


ROTATING = ("basis-rotation", "graded-rotation")


@dataclass(frozen=True)
class Setting:
    """A run: the numbers that a config has, and those that are only tried."""

    lr: float
    stages: int = 32
    seed: int = 0
    rotates: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    covariance_beta: float = 0.999
    fresh: float = 0.0
    """γ."""
    corrected: bool = True
    """Whether the momentum is divided by 1 − β1ᵗ."""
    nesterov: bool = False
    tempering: float = 0.0
    """q."""
    power: float = 0.0
    """p of the matrices' rate η(1+τ)^−p."""
    others_power: float = 0.0
    """p of everything else."""
    others_rate: float = 1.0
    """The rate of everything else over that of the matrices, before delay."""
    anneal: float = 0.0
    """PipeDream-LR: updates until the rate, divided by the delay, is back to full."""
    damping: float = 0.0
    """c in 1 / (1 + c·τ·(D/rms D)^r), never scaled back."""
    damping_power: float = 1.0
    """r."""
    ahead: float = 0.0
    """Forwards see w + ahead · τ · (last update)."""
    compensation: float = 0.0
    """c in g + c·g⊙g⊙(w_now − w_used)."""
    curvature: float = 0.0
    """c in G̃ + c·h⊙(Uᵀ(w_now − w_used)V), with curvature h guessed from D: rms(D)²·(D/rms D)^r."""
    curvature_power: float = 2.0
    """r of that; 2 is a Fisher matrix's."""
    average: float = 0.0
    """a: forwards see (1 − a)·w + a·(mean of past w)."""
    horizon: float = 30.0
    """Updates that the mean reaches back."""
    limit: float = 0.0
    """Largest |N/D| of a coordinate; 0 is none."""
    beta1_power: float = 0.0
    """m in 1 − β1 · (1+τ)^−m: momentum that lasts longer where gradients are later."""
    fresh_power: float = 0.0
    """g in γ(1+τ)^−g."""
    power_anneal: float = 0.0
    """Updates over which every p falls to nothing; 0 is never."""
    rows: float = 0.0
    """1: rows of the step, back in the weights' coordinates, are made equally long over time, as NorMuon does."""

    @classmethod
    def of(cls, config: Config, **tried: float) -> Setting:
        """The setting that a config describes."""
        optimizer, delay = config.optimizer, config.optimizer.delay
        rotation, rotates = optimizer.rotation, optimizer.name in ROTATING
        powered = delay.lr_power if delay.lr == "power" else 0.0
        given: dict[str, Any] = {
            "lr": optimizer.lr,
            "stages": config.pipeline.stages,
            "seed": config.training.seed,
            "rotates": rotates,
            "beta1": optimizer.betas[0],
            "beta2": optimizer.betas[1],
            "covariance_beta": optimizer.betas[1],
            "nesterov": optimizer.name == "nesterov",
            "power": powered,
            "others_power": powered,
            "anneal": float(delay.lr_anneal or config.training.updates / 4) if delay.lr == "anneal" else 0.0,
            "ahead": delay.lookahead,
            "compensation": delay.compensation,
        }
        if rotates:
            given |= {"fresh": rotation.fresh, "corrected": rotation.bias_correction, "tempering": rotation.tempering}
            given["power"] += rotation.grading
        return cls(**{**given, **tried})


class Rules:
    """The settings of all runs as tensors, and what follows from them at an update."""

    ahead: Tensor

    def __init__(self, settings: Sequence[Setting], base: Config, device: torch.device) -> None:
        kinds = {setting.rotates for setting in settings}
        if len(kinds) > 1:
            raise ValueError("runs that rotate and runs that don't can't be done side by side")
        self.rotates = kinds.pop()
        self.base = base
        self.of: dict[str, Tensor] = {
            f.name: torch.tensor([float(getattr(s, f.name)) for s in settings], device=device) for f in fields(Setting)
        }
        self.ahead = self.of["ahead"]
        self.looks_ahead = bool(self.ahead.any())
        self.compensates = bool(self.of["compensation"].any())
        self.bends = bool(self.of["curvature"].any())
        self.averages = bool(self.of["average"].any())
        self._nesterov = {update: torch.ones(len(settings), device=device) for update in (-1, 0)}

    def schedule(self, update: int) -> float:
        """Warm-up and decay: the share of the peak rate."""
        optimizer = self.base.optimizer
        return rate(optimizer, update, self.base.training.updates, 0) / optimizer.lr

    def rates(self, update: int, delays: Tensor, of_matrices: bool) -> Tensor:
        """The learning rate in each run, for parameters with these delays; delays is (runs, …)."""
        late = delays.clamp(max=update)
        shaped = [-1, *[1] * (delays.ndim - 1)]
        power = self.of["power" if of_matrices else "others_power"].view(shaped)
        falling = self.of["power_anneal"].view(shaped)
        power = power * torch.where(falling > 0, 1 - (update / falling.clamp(min=1)).clamp(max=1), 1.0)
        base = self.of["lr"] * self.schedule(update)
        if not of_matrices:
            base = base * self.of["others_rate"]
        anneal = self.of["anneal"]
        still = torch.where(anneal > 0, 1 - (update / anneal.clamp(min=1)).clamp(max=1), 0.0).view(shaped)
        return base.view(shaped) * (1.0 + late) ** -power * late.clamp(min=1) ** -still

    def steadiness(self, delays: Tensor) -> dict[str, Tensor]:
        """1 − β1, γ and what else stays the same during a run, for parameters with these delays; (runs, …)."""
        shaped, of = [-1, *[1] * (delays.ndim - 1)], self.of
        quick = (1 - of["beta1"]).view(shaped) * (1.0 + delays) ** -of["beta1_power"].view(shaped)
        fresh = of["fresh"].view(shaped) * (1.0 + delays) ** -of["fresh_power"].view(shaped)
        return {"quick": quick, "fresh": fresh, "corrected": of["corrected"].view(shaped).expand_as(quick)}

    def shares(self, update: int, steady: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Weights of the momentum and of the newest gradient in a step of rate 1."""
        step, of, quick = update + 1, self.of, steady["quick"]
        correction = torch.where(steady["corrected"] > 0, 1 - (1 - quick) ** step, 1.0)
        momentum, gradient = (1 - steady["fresh"]) / correction, steady["fresh"]
        if of["nesterov"].any():
            looking = of["nesterov"] > 0
            now, ahead = (of["beta1"] * (1 - 0.5 * 0.96 ** (t * MOMENTUM_DECAY)) for t in (step, step + 1))
            if update not in self._nesterov:
                self._nesterov = {update - 1: self._nesterov[update - 1]}
            product = self._nesterov[update - 1] * now
            self._nesterov[update] = product
            momentum = torch.where(looking, ahead / (1 - product * ahead), momentum)
            gradient = torch.where(looking, (1 - now) / (1 - product), gradient)
        return momentum, gradient


def coordinatewise(rules: Rules, part: Part, gradient: Tensor, used: Tensor, update: int) -> None:
    """Adam's rule on a parameter of every run, in its own coordinates."""
    of, optimizer = rules.of, rules.base.optimizer
    if rules.compensates:
        gradient = gradient + _like(of["compensation"], gradient) * gradient.square() * (part.weights - used)
    if "momentum" not in part.state:
        zeros = torch.zeros_like(gradient)
        part.state |= {"momentum": zeros, "second": zeros.clone(), **rules.steadiness(part.delays)}
    momentum, second = part.state["momentum"], part.state["second"]
    momentum.lerp_(gradient, _like(part.state["quick"], gradient))
    second.lerp_(gradient.square(), _like(1 - of["beta2"], gradient))
    denominator = (second / _like(1 - of["beta2"] ** (update + 1), second)).sqrt() + optimizer.eps
    from_momentum, from_gradient = (_like(share, gradient) for share in rules.shares(update, part.state))
    rates = _like(rules.rates(update, part.delays, of_matrices=not rules.rotates), gradient)
    decay = 0.0 if part.kind == "vector" else optimizer.weight_decay
    part.weights.mul_(1 - rates * decay)
    part.weights.sub_(rates * (from_momentum * momentum + from_gradient * gradient) / denominator)


def start_rotation(gradient: Tensor, left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """The state of a stack of matrices before its first update."""
    zeros = torch.zeros_like(gradient)
    return {
        "momentum": zeros,
        "second": zeros.clone(),
        "left": torch.zeros_like(left),
        "right": torch.zeros_like(right),
        "left_basis": left,
        "right_basis": right,
    }


def rotated(
    rules: Rules,
    state: dict[str, Tensor],
    weights: Tensor,
    used: Tensor | None,
    gradient: Tensor,
    delays: Tensor,
    update: int,
) -> Tensor:
    """The new weights of a stack of matrices; (second, bilateral), as update_blocks does it, with more to try."""
    each = len(gradient) // len(rules.of["lr"])
    of = {name: values.repeat_interleave(each).view(-1, 1, 1) for name, values in rules.of.items()}
    for side, rows in (("left", gradient), ("right", gradient.mT)):
        state[side].lerp_(rows @ rows.mT, 1 - of["covariance_beta"])
    if update > 0 and (update + 1) % rules.base.optimizer.rotation.interval == 0:
        _refresh(state)
    turned = rotate(gradient, state["left_basis"], state["right_basis"])
    if update == 0:
        turned = without_roundoff(turned)
    if "quick" not in state:
        state |= {name: x.reshape(-1, 1, 1) for name, x in rules.steadiness(delays.view(-1, each)).items()}
    state["second"].lerp_(turned.square(), 1 - of["beta2"])
    denominator = (state["second"] / (1 - of["beta2"] ** (update + 1))).sqrt() + rules.base.optimizer.eps
    if used is not None:
        moved = rotate(weights - used, state["left_basis"], state["right_basis"])
        turned = turned + of["curvature"] * _curvature(denominator, of["curvature_power"]) * moved
    state["momentum"].lerp_(turned, state["quick"])
    from_momentum, from_gradient = rules.shares(update, state)
    step = _direction(
        rules,
        of,
        (from_momentum * state["momentum"] + from_gradient * turned) / denominator,
        denominator,
        delays,
        update,
    )
    rates = rules.rates(update, delays.view(-1, each), of_matrices=True).view(-1, 1, 1)
    back = rotate_back(step, state["left_basis"], state["right_basis"])
    if rules.of["rows"].any():
        back = torch.where(of["rows"] > 0, _even_rows(state, back, update), back)
    return weights * (1 - rates * rules.base.optimizer.weight_decay) - rates * back


def _direction(
    rules: Rules, of: dict[str, Tensor], ratio: Tensor, denominator: Tensor, delays: Tensor, update: int
) -> Tensor:
    """N/D, tempered and damped."""
    relative = denominator / denominator.square().mean(dim=(-2, -1), keepdim=True).sqrt()
    if rules.of["limit"].any():
        bound = torch.where(of["limit"] > 0, of["limit"], math.inf)
        ratio = ratio.clamp(-bound, bound)
    if rules.of["tempering"].any():
        bent = ratio * relative.clamp(min=0.05) ** -of["tempering"]
        before, after = (x.square().sum(dim=(-2, -1), keepdim=True).sqrt() for x in (ratio, bent))
        ratio = bent * (before / after.clamp(min=1e-30))
    if rules.of["damping"].any():
        late = delays.clamp(max=update).view(-1, 1, 1)
        ratio = ratio / (1 + of["damping"] * late * relative ** of["damping_power"])
    return ratio


def _curvature(denominator: Tensor, power: Tensor) -> Tensor:
    """How steep each direction is, guessed from the size of its gradients."""
    mean = denominator.square().mean(dim=(-2, -1), keepdim=True)
    return mean * (denominator / mean.sqrt()) ** power


def _even_rows(state: dict[str, Tensor], step: Tensor, update: int, beta: float = 0.99) -> Tensor:
    """Rows divided by the root of their mean square over time, and the whole as long as before."""
    squares = step.square().mean(dim=-1, keepdim=True)
    state.setdefault("rows", torch.zeros_like(squares)).lerp_(squares, 1 - beta)
    even = step / (state["rows"] / (1 - beta ** (update + 1))).sqrt().clamp(min=1e-12)
    before, after = (torch.linalg.matrix_norm(x, keepdim=True) for x in (step, even))
    return even * (before / after.clamp(min=1e-30))


def _refresh(state: dict[str, Tensor]) -> None:
    """One power iteration on each side; momentum is carried into the new basis, S permuted."""
    moment = rotate_back(state["momentum"], state["left_basis"], state["right_basis"])
    for side in ("left", "right"):
        basis = state[f"{side}_basis"]
        product = state[side] @ basis
        order = (basis * product).sum(dim=-2).argsort(dim=-1, descending=True, stable=True)
        state[f"{side}_basis"] = orthonormal(take_columns(product, order))
        take = take_rows if side == "left" else take_columns
        state["second"] = take(state["second"], order)
    state["momentum"] = rotate(moment, state["left_basis"], state["right_basis"])


def orthonormal(matrix: Tensor) -> Tensor:
    """Q of the QR decomposition up to signs, by Cholesky in double precision, twice; by reflections where that fails.

    On a GPU this is many times faster than a batched QR.
    """
    columns = matrix.double()
    columns = columns / columns.norm(dim=-2, keepdim=True).clamp(min=1e-300)
    failed = torch.zeros(len(matrix), dtype=torch.bool, device=matrix.device)
    basis = columns
    for _ in range(2):
        factor, failures = torch.linalg.cholesky_ex(basis.mT @ basis)
        failed |= failures > 0
        basis = torch.linalg.solve_triangular(factor.mT, basis, upper=True, left=False)
    failed |= ~basis.isfinite().flatten(1).all(1)
    if failed.any():
        basis[failed] = torch.linalg.qr(columns[failed].cpu())[0].to(basis)
    return basis.to(matrix.dtype)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """A number for each run, ready to multiply a tensor of all runs."""
    return values.view(-1, *[1] * (tensor.ndim - 1))
