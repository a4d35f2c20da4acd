"""The replay of an asynchronous pipeline in half the time, to try ideas on: one process, one model, no stages.

With one microbatch per update and stashed weights, an asynchronous pipeline is this loop: the forward and backward of
microbatch i run on weights whose every parameter is τ updates old, τ being its stage's delay, and every stage then
takes its update i. So the model stays whole, and the matrices of all stages are updated as a few stacks. A test holds
it to `freerun simulate`; figures of the study come from there, and only trials from here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freerun.config import Config
from freerun.data import build
from freerun.model.cut import cut, pieces
from freerun.model.kinds import kind
from freerun.model.loss import token_loss
from freerun.model.stage import build_stage
from freerun.optim.adam_rule import AdamRule
from freerun.optim.rates import rate
from freerun.optim.rotated_update import _into_covariances, _refresh, start
from freerun.optim.rotation import rotate, rotate_back, temper, without_roundoff
from freerun.weights.flat import FlatParameters

HOPELESS = 6.0
"""A smoothed loss above this, after 300 updates, is a diverged run."""


@dataclass
class Trial:
    """What can be tried that a config does not say."""

    others_power: float | None = None
    """Exponent p for what is not rotated; None means the config's."""
    profile: Callable[[int, int], float] | None = None
    """(τ, P) → factor on the learning rate, instead of the config's."""
    profile_now: Callable[[int, int, float], float] | None = None
    """(τ, P, share of the run that is done) → the same factor, where it changes during the run."""
    direction: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(M̃, G̃, D, τ) → step in rotated coordinates for a rate of 1, instead of the tempered N/D."""
    others_damping: tuple[float, float] | None = None
    """(c, r): what is not rotated is divided by 1 + c·τ·(D/rms)^r, element by element."""
    covariance_decay: float | None = None
    """β of L and R, if it differs from β2."""
    ahead: float = 0.0
    """Forwards see w + ahead · τ · (last step)."""
    until: float = 0.0
    """Stop once the loss, smoothed over 50 updates, is below this."""
    stop_at: int = 0
    """Stop after so many updates; 0 means at the end."""


@dataclass
class _Stack:
    """Matrices of one shape from all stages, and the state of their rotation."""

    parts: list[Any]
    delays: Tensor
    flipped: list[bool]
    state: dict[str, Tensor] = field(default_factory=dict)

    def gather(self, flat: Tensor) -> Tensor:
        return torch.stack([p.of(flat).mT if f else p.of(flat) for p, f in zip(self.parts, self.flipped, strict=True)])

    def add_to(self, flat: Tensor, steps: Tensor, keep: Tensor) -> None:
        for part, flip, step, kept in zip(self.parts, self.flipped, steps, keep.tolist(), strict=True):
            part.of(flat).mul_(kept).add_(step.mT if flip else step)


class Screening:
    """One run."""

    def __init__(self, config: Config, trial: Trial | None = None, stack: int = 2**18) -> None:
        self.config, self.trial = config, trial or Trial()
        self.data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
        vocabulary = self.data.tokenizer.vocabulary
        parts = pieces(config.model, vocabulary, config.pipeline.granularity)
        self.model = build_stage(config.model, vocabulary, parts, seed=config.training.seed, first=True, last=True)
        self.used = FlatParameters(self.model)
        self.weights = self.used.weights.clone()
        stage_of = {}
        for stage, own in enumerate(cut(parts, config.pipeline.stages, config.pipeline.cut)):
            stage_of |= {parts[index].name: stage for index in own}
        self.stages = [_stage(part.name, stage_of, config.pipeline.stages) for part in self.used.slices]
        self.kinds = [kind(name, parameter) for name, parameter in self.model.named_parameters()]
        self.spans = _spans(self.stages, self.used.slices)
        self.history: deque[Tensor] = deque([self.weights.clone()], maxlen=config.pipeline.stages + 1)
        self.stacks = self._stacks(stack)
        self.first = torch.zeros_like(self.weights)
        self.second = torch.zeros_like(self.weights)
        self.losses: list[float] = []
        self.seconds = {"model": 0.0, "optimizer": 0.0}

    def run(self) -> list[float]:
        """The loss of every update; ends early on divergence or as the trial says."""
        for update in range(self.trial.stop_at or self.config.training.updates):
            before = time.thread_time()
            self.losses.append(self.gradient(update))
            between = time.thread_time()
            self.update(update)
            self.seconds["model"] += between - before
            self.seconds["optimizer"] += time.thread_time() - between
            if self.over():
                break
        return self.losses

    def over(self) -> bool:
        """Whether the run has diverged, or reached what it was for."""
        if len(self.losses) < 50:
            return False
        smooth = sum(self.losses[-50:]) / 50
        hopeless = len(self.losses) > 300 and smooth > HOPELESS
        return hopeless or not math.isfinite(smooth) or smooth < self.trial.until

    def gradient(self, update: int) -> float:
        """Forward and backward on what each stage saw; leaves the gradient in self.used.gradient."""
        for stage, place in self.spans.items():
            delay = self.config.pipeline.stages - 1 - stage
            self.used.weights[place] = self.seen(min(delay, update), place)
        self.used.gradient.zero_()
        batch = self.data.train.get(update)
        loss = token_loss(self.model(batch.tokens), batch.labels) / self.data.train.valid(update)
        loss.backward()
        return float(loss.detach())

    def seen(self, age: int, place: slice) -> Tensor:
        """The weights that a forward sees whose gradient will be `age` updates old."""
        then = self.history[-1 - age][place]
        if not self.trial.ahead or len(self.history) < age + 2:
            return then
        return then + self.trial.ahead * age * (then - self.history[-2 - age][place])

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Every stage's update with its gradient."""
        clip, gradient = self.config.optimizer.clip, self.used.gradient
        for place in self.spans.values():
            norm = float(torch.linalg.vector_norm(gradient[place]))
            if clip and norm > clip:
                gradient[place].mul_(clip / norm)
        optimizer = self.config.optimizer
        for stack in self.stacks:
            self.rotated(stack, update)
        rule = AdamRule(update + 1, *optimizer.betas, optimizer.eps, *self.shares(update + 1))
        for index, part in enumerate(self.used.slices):
            if self.kinds[index] == "matrix" and self.stacks:
                continue
            place = slice(part.start, part.end)
            lr = self.rate_of(update, self.config.pipeline.stages - 1 - self.stages[index], self.kinds[index])
            rule.into_momentum(self.first[place], gradient[place])
            rule.into_second(self.second[place], gradient[place])
            numerator, factor = rule.numerator(self.first[place], gradient[place])
            denominator = rule.denominator(self.second[place])
            if self.trial.others_damping:
                c, r = self.trial.others_damping
                delay = self.config.pipeline.stages - 1 - self.stages[index]
                denominator *= 1 + c * delay * (denominator / denominator.square().mean().sqrt()) ** r
            decay = 0.0 if self.kinds[index] == "vector" else optimizer.weight_decay
            self.weights[place].mul_(1 - lr * decay)
            self.weights[place].addcdiv_(numerator, denominator, value=-factor * lr)
        self.history.append(self.weights.clone())

    def rotated(self, stack: _Stack, update: int) -> None:
        """The rotated step of a stack of matrices: what update_blocks does, with the direction open to change."""
        optimizer = self.config.optimizer
        rotation = optimizer.rotation
        group = {"precision": "fp32", "source": rotation.source, "geometry": rotation.geometry}
        gradient, state = stack.gather(self.used.gradient), stack.state
        if not state:
            state.update(start(group, gradient))
        rule = AdamRule(update + 1, *optimizer.betas, optimizer.eps, *self.shares(update + 1))
        beta = self.trial.covariance_decay or optimizer.betas[1]
        _into_covariances({**group, "betas": (0.0, beta)}, gradient, state)
        bases = [state.get("left_basis"), state.get("right_basis")]
        if update > 0 and (update + 1) % rotation.interval == 0:
            moment = rotate_back(state["momentum"], *bases)
            _refresh(group, moment.lerp(gradient, 1 - rule.beta1), state)
            bases = [state.get("left_basis"), state.get("right_basis")]
            state["momentum"] = rotate(moment, *bases)
        turned = rotate(gradient, *bases)
        if update == 0:
            turned = without_roundoff(turned)
        rule.into_momentum(state["momentum"], turned)
        rule.into_second(state["second"], turned)
        denominator = rule.denominator(state["second"])
        if self.trial.direction:
            step = self.trial.direction(state["momentum"], turned, denominator, stack.delays)
        else:
            numerator, factor = rule.numerator(state["momentum"], turned)
            step = numerator * factor / denominator
            if rotation.tempering:
                step = temper(step, denominator, rotation.tempering)
        rates = torch.tensor([self.rate_of(update, int(delay), "matrix") for delay in stack.delays])
        stack.add_to(
            self.weights, rotate_back(step, *bases) * -rates[:, None, None], 1 - rates * optimizer.weight_decay
        )

    def shares(self, step: int) -> tuple[float, float]:
        """Weights of the momentum and of the newest gradient in a step of rate 1."""
        rotation, beta1 = self.config.optimizer.rotation, self.config.optimizer.betas[0]
        if self.config.optimizer.name != "basis-rotation":
            return 1 / (1 - beta1**step), 0.0
        correction = 1 - beta1**step if rotation.bias_correction else 1.0
        return (1 - rotation.fresh) / correction, rotation.fresh

    def rate_of(self, update: int, delay: int, what: str) -> float:
        """The learning rate of an update at a stage, for a kind of parameter."""
        optimizer, updates = self.config.optimizer, self.config.training.updates
        now = min(delay, update)
        if self.trial.profile_now:
            return rate(optimizer, update, updates, 0) * self.trial.profile_now(
                now, self.config.pipeline.stages, update / updates
            )
        if self.trial.profile:
            return rate(optimizer, update, updates, 0) * self.trial.profile(now, self.config.pipeline.stages)
        if what != "matrix" and self.trial.others_power is not None:
            return rate(optimizer, update, updates, 0) * (1.0 + now) ** -self.trial.others_power
        return rate(optimizer, update, updates, now)

    def _stacks(self, most: int) -> list[_Stack]:
        if self.config.optimizer.name != "basis-rotation":
            return []
        by_shape: dict[tuple[int, int], list[tuple[Any, int, bool]]] = {}
        for part, stage, what in zip(self.used.slices, self.stages, self.kinds, strict=True):
            if what == "matrix":
                rows, columns = part.shape
                flip = rows < columns
                delay = self.config.pipeline.stages - 1 - stage
                by_shape.setdefault((columns, rows) if flip else (rows, columns), []).append((part, delay, flip))
        stacks = []
        for (rows, columns), members in by_shape.items():
            size = max(1, most // (rows * columns))
            runs = [members[i : i + size] for i in range(0, len(members), size)]
            stacks += [_Stack([m[0] for m in r], torch.tensor([m[1] for m in r]), [m[2] for m in r]) for r in runs]
        return stacks


def _stage(name: str, stage_of: dict[str, int], stages: int) -> int:
    """The stage of a parameter of the whole model."""
    words = name.split(".")
    if words[0] != "layers":
        return 0 if words[0] == "embedding" else stages - 1
    layer = f"layers.{words[1]}"
    if layer in stage_of:
        return stage_of[layer]
    part = {"attention_norm": "project", "mlp_norm": "expand"}.get(words[2])
    part = part or {"output": "attend", "gate": "expand", "up": "expand", "down": "contract"}.get(words[3], "project")
    return stage_of[f"{layer}.{part}"]


def _spans(stages: list[int], slices: list[Any]) -> dict[int, slice]:
    """Where each stage's parameters lie in the flat buffer; they are neighbours."""
    spans: dict[int, slice] = {}
    for stage, part in zip(stages, slices, strict=True):
        start = spans[stage].start if stage in spans else part.start
        assert stage not in spans or spans[stage].stop == part.start
        spans[stage] = slice(start, part.end)
    return spans
