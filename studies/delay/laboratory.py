"""Hundreds of replays of an asynchronous pipeline at once, stacked along a first dimension: to search, on a GPU.

With one microbatch per update and stashed weights, an asynchronous pipeline is a loop over updates in which every
parameter's gradient was taken on weights as many updates old as its stage's delay. So a run needs no stages, only a
delay for each parameter, and runs that share the model's sizes can be computed side by side, each with a delay, a seed
and an optimizer of its own. Tests hold every run to `freerun simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from freerun.config import Config
from freerun.data import build
from freerun.model.cut import cut, pieces
from freerun.model.decoder import rotary_tables, rotate
from freerun.model.kinds import kind
from freerun.model.size import sizes
from freerun.model.stage import build_stage
from freerun.optim.rotation import singular_bases
from studies.delay.rules import Rules, Setting, coordinatewise, rotated, start_rotation
from studies.outcome import HOPELESS

WINDOW = 50
"""Updates over which a loss is smoothed."""


@dataclass
class Part:
    """One parameter of every run, side by side."""

    name: str
    kind: str
    delays: Tensor
    """τ of its stage, in each run."""
    weights: Tensor
    history: Tensor
    """Versions of the weights, by their number modulo its length."""
    leaf: Tensor
    """What the forward reads, and where its gradient arrives."""
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Stack:
    """Matrices of one shape, tall or turned to be tall, from all layers of all runs: one stack of (runs · parts)."""

    parts: list[Part]
    turned: list[bool]
    state: dict[str, Tensor] = field(default_factory=dict)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        tall = [t.mT if turn else t for t, turn in zip(tensors, self.turned, strict=True)]
        return torch.stack(tall, dim=1).flatten(0, 1)

    def scatter(self, stacked: Tensor, runs: int) -> list[Tensor]:
        each = stacked.view(runs, len(self.parts), *stacked.shape[1:]).unbind(1)
        return [t.mT if turn else t for t, turn in zip(each, self.turned, strict=True)]


class Laboratory:
    """Runs side by side: `base` gives the model, the data and the schedule, `settings` what differs."""

    def __init__(self, base: Config, settings: Sequence[Setting], device: str = "cpu", coarse: bool = False) -> None:
        """`coarse` lets a GPU multiply in TF32 in forward and backward; updates stay in fp32."""
        self.base, self.device, self.runs, self.coarse = base, torch.device(device), len(settings), coarse
        self.rules = Rules(settings, base, self.device)
        self.losses: list[Tensor] = []
        self._load_data(settings)
        vocabulary = self.data[0].tokenizer.vocabulary
        self.shape = sizes(base.model, vocabulary)
        self.parts = self._parts(settings, vocabulary)
        self.stacks = self._stacks() if self.rules.rotates else []
        self.clipped = _same_stage([[int(p.delays[r]) for p in self.parts] for r in range(self.runs)], self.device)

    def run(self, updates: int, until: float = 0.0) -> Tensor:
        """Losses (updates, runs); ends early when every run is below `until` or hopeless."""
        for update in range(updates):
            self.losses.append(self.gradient(update))
            self.update(update)
            if update % WINDOW == WINDOW - 1 and self._over(until):
                break
        return torch.stack(self.losses).cpu()

    def gradient(self, update: int) -> Tensor:
        """Forward and backward on what each stage saw; the loss of every run."""
        with torch.no_grad():
            for part in self.parts:
                part.leaf.copy_(self.seen(part, update))
                part.leaf.grad = None
        tokens, labels = (stock[self.seed_of_run, update].long() for stock in self.stock)
        torch.backends.cuda.matmul.allow_tf32 = self.coarse
        losses = self.forward(tokens, labels)
        losses.sum().backward()
        torch.backends.cuda.matmul.allow_tf32 = False
        return losses.detach()

    def seen(self, part: Part, update: int) -> Tensor:
        """The weights that this update's gradient is taken on."""
        age, runs, length = part.delays.clamp(max=update), torch.arange(self.runs), len(part.history)
        then = part.history[(update - age) % length, runs]
        if not self.rules.looks_ahead or update == 0:
            return then
        before = part.history[(update - age - 1).clamp(min=0) % length, runs]
        return then + _like(self.rules.ahead * age, then) * (then - before)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The decoder of freerun.model, with weights for each run."""
        weights = {part.name: part.leaf for part in self.parts}
        shape, runs = self.shape, self.runs
        flat = tokens.flatten(1)
        hidden = torch.gather(weights["embedding.weight"], 1, flat[:, :, None].expand(-1, -1, shape.width))
        for layer in range(shape.layers):
            inner = self._normed(hidden, weights[f"layers.{layer}.attention_norm.weight"])
            heads = [
                (inner @ weights[f"layers.{layer}.attention.{name}.weight"].mT)
                .view(runs * tokens.shape[1], tokens.shape[2], -1, shape.head_width)
                .transpose(1, 2)
                for name in ("query", "key", "value")
            ]
            cosines, sines = rotary_tables(
                shape.context, shape.head_width, self.base.model.rope_theta, inner.dtype, inner.device
            )
            query, key = (rotate(x, cosines, sines) for x in heads[:2])
            mixed = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(runs, flat.shape[1], -1)
            hidden = hidden + mixed @ weights[f"layers.{layer}.attention.output.weight"].mT
            inner = self._normed(hidden, weights[f"layers.{layer}.mlp_norm.weight"])
            gate, up, down = (weights[f"layers.{layer}.mlp.{name}.weight"].mT for name in ("gate", "up", "down"))
            hidden = hidden + (F.silu(inner @ gate) * (inner @ up)) @ down
        logits = self._normed(hidden, weights["norm.weight"]) @ weights["head.weight"].mT
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(runs, -1)
        counted = (labels.flatten(1) >= 0).sum(1)
        return each.sum(1) / counted

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Every stage's update, in every run, with the gradient that has come."""
        gradients = self._clipped_gradients()
        if update == 0 and self.stacks:
            self._start(gradients)
        for stack in self.stacks:
            mine = [self.parts.index(part) for part in stack.parts]
            delays = torch.stack([part.delays for part in stack.parts], dim=1).flatten()
            weights = stack.gather([part.weights for part in stack.parts])
            used = stack.gather([part.leaf.detach() for part in stack.parts]) if self.rules.bends else None
            late = stack.gather([gradients[i] for i in mine])
            moved = rotated(self.rules, stack.state, weights, used, late, delays, update)
            for part, new in zip(stack.parts, stack.scatter(moved, self.runs), strict=True):
                part.weights.copy_(new)
        stacked = {part.name for stack in self.stacks for part in stack.parts}
        for part, gradient in zip(self.parts, gradients, strict=True):
            if part.name not in stacked:
                used = part.leaf.detach() if self.rules.compensates else part.weights
                coordinatewise(self.rules, part, gradient, used, update)
        for part in self.parts:
            part.history[(update + 1) % len(part.history)] = self._shown(part)

    def _shown(self, part: Part) -> Tensor:
        """What forwards see of the newest weights."""
        if not self.rules.averages:
            return part.weights
        if "mean" not in part.state:
            part.state["mean"] = part.weights.clone()
        mean = part.state["mean"]
        mean.lerp_(part.weights, _like(1 / self.rules.of["horizon"], mean))
        return part.weights.lerp(mean, _like(self.rules.of["average"], mean))

    def _start(self, gradients: list[Tensor]) -> None:
        """Bases from the first gradient, which all runs of a seed share: one decomposition serves them all."""
        first_of_seed = [self.seed_of_run.tolist().index(seed) for seed in range(len(self.data))]
        for stack in self.stacks:
            own = stack.gather([gradients[self.parts.index(part)] for part in stack.parts])
            each = own.view(self.runs, len(stack.parts), *own.shape[1:])[first_of_seed].cpu()
            bases = [basis.to(self.device)[self.seed_of_run.to(self.device)] for basis in singular_bases(each)]
            stack.state = start_rotation(own, *(basis.flatten(0, 1).contiguous() for basis in bases))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], eps=self.base.model.norm_eps) * weight[:, None, :]

    def _clipped_gradients(self) -> list[Tensor]:
        gradients = [part.leaf.grad for part in self.parts]
        squares = torch.stack([g.square().flatten(1).sum(1) for g in gradients if g is not None], dim=1)
        norms = torch.einsum("rp,rpq->rq", squares, self.clipped).sqrt()
        scale = (self.base.optimizer.clip / norms).clamp(max=1.0)
        return [g * _like(scale[:, i], g) for i, g in enumerate(gradients) if g is not None]

    def _over(self, until: float) -> bool:
        if len(self.losses) < WINDOW:
            return False
        smooth = torch.stack(self.losses[-WINDOW:]).mean(0)
        done = (smooth < until) | ~smooth.isfinite()
        if len(self.losses) > 300:
            done |= smooth > HOPELESS
        return bool(done.all())

    def _load_data(self, settings: Sequence[Setting]) -> None:
        base, seeds = self.base, sorted({setting.seed for setting in settings})
        self.data = [build(base.data, base.model.context, base.training.sequences, seed) for seed in seeds]
        self.seed_of_run = torch.tensor([seeds.index(setting.seed) for setting in settings])
        narrow = torch.int16 if self.data[0].tokenizer.vocabulary < 2**15 else torch.int32
        stocks = []
        for data in self.data:
            batches = [data.train.get(n) for n in range(base.training.updates)]
            stocks.append(
                [torch.stack([getattr(b, what) for b in batches]).to(narrow) for what in ("tokens", "labels")]
            )
        self.stock = [torch.stack(same).to(self.device) for same in zip(*stocks, strict=True)]
        self.seed_of_run = self.seed_of_run.to(self.device)

    def _parts(self, settings: Sequence[Setting], vocabulary: int) -> list[Part]:
        base, seeds = self.base, sorted({setting.seed for setting in settings})
        listed = pieces(base.model, vocabulary, "quarter")
        models = [build_stage(base.model, vocabulary, listed, seed=seed, first=True, last=True) for seed in seeds]
        stage_of = {depth: stages_of(base, vocabulary, depth) for depth in {s.stages for s in settings}}
        deepest = max(setting.stages for setting in settings)
        parts = []
        for name, parameter in models[0].named_parameters():
            fresh = torch.stack([dict(model.named_parameters())[name].detach() for model in models])
            weights = fresh.to(self.device)[self.seed_of_run].contiguous()
            delays = [s.stages - 1 - stage_of[s.stages][piece_of(name)] for s in settings]
            history = weights.new_empty(deepest + 1, *weights.shape)
            history[0] = weights
            parts.append(
                Part(
                    name,
                    kind(name, parameter),
                    torch.tensor(delays, device=self.device),
                    weights,
                    history,
                    weights.clone().requires_grad_(),
                )
            )
        return parts

    def _stacks(self) -> list[Stack]:
        by_shape: dict[tuple[int, int], Stack] = {}
        for part in self.parts:
            if part.kind == "matrix":
                rows, columns = part.weights.shape[1:]
                stack = by_shape.setdefault((max(rows, columns), min(rows, columns)), Stack([], []))
                stack.parts.append(part)
                stack.turned.append(rows < columns)
        return list(by_shape.values())


def stages_of(base: Config, vocabulary: int, stages: int) -> dict[str, int]:
    """The stage of each piece of the model."""
    listed = pieces(base.model, vocabulary, base.pipeline.granularity)
    found = {}
    for stage, own in enumerate(cut(listed, stages, base.pipeline.cut)):
        for index in own:
            piece = listed[index]
            names = [piece.name] if piece.part != "layer" else [f"{piece.name}.{part}" for part in PARTS]
            found |= dict.fromkeys(names, stage)
    return found


PARTS = ("project", "attend", "expand", "contract")
PIECES = {
    "attention_norm": "project",
    "attention.query": "project",
    "attention.key": "project",
    "attention.value": "project",
    "attention.output": "attend",
    "mlp_norm": "expand",
    "mlp.gate": "expand",
    "mlp.up": "expand",
    "mlp.down": "contract",
}


def piece_of(name: str) -> str:
    """The quarter of a layer, or the end of the model, that a parameter belongs to."""
    words = name.removesuffix(".weight").split(".")
    if words[0] != "layers":
        return "embedding" if words[0] == "embedding" else "head"
    return f"layers.{words[1]}.{PIECES['.'.join(words[2:])]}"


def crossing(losses: Tensor, target: float) -> list[int | None]:
    """For each run, the first update at which the mean of the last 50 losses is below the target."""
    means = losses.unfold(0, WINDOW, 1).mean(-1)
    below = means < target
    first = below.float().argmax(0)
    return [int(first[r]) + WINDOW if bool(below[:, r].any()) else None for r in range(losses.shape[1])]


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """A number for each run, ready to multiply a tensor of all runs."""
    return values.view(-1, *[1] * (tensor.ndim - 1))


def _same_stage(delays: list[list[int]], device: torch.device) -> Tensor:
    """(runs, parts, parts): 1 where two parameters are clipped together, being of one stage."""
    each = torch.tensor(delays, device=device)
    return (each[:, :, None] == each[:, None, :]).float()
