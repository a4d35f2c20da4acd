"""A pipeline as METHODS describes it, on one whole model, with an explicit list of every stage's versions.

No messages, no schedule, no slots: microbatch by microbatch, each parameter is taken at the version that its stage's
forward saw, and every update appends one more version to the list. Slow, and the oracle of the real thing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from freerun.config import Config
from freerun.data import Data, build
from freerun.model.cut import cut, pieces
from freerun.model.loss import token_loss
from freerun.model.stage import Stage, build_stage

EMBEDDING, HEAD = "embedding.weight", "tied head"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Plain:
    """What the reference ends with."""

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    """By update, the gradient norm of every stage before clipping."""


def whole_model(config: Config, vocabulary: int) -> Stage:
    parts = pieces(config.model, vocabulary)
    return build_stage(config.model, vocabulary, parts, seed=config.training.seed, first=True, last=True)


def stage_of(config: Config, vocabulary: int) -> dict[str, int]:
    """The stage that owns each parameter."""
    parts = pieces(config.model, vocabulary)
    owner: dict[str, int] = {}
    for stage, own in enumerate(cut(parts, config.pipeline.stages, config.pipeline.cut)):
        first, last = stage == 0, stage == config.pipeline.stages - 1
        module = build_stage(config.model, vocabulary, [parts[i] for i in own], seed=0, first=first, last=last)
        owner |= {name: stage for name, _ in module.named_parameters() if name not in module.borrowed}
    return owner


def version_seen(config: Config, stage: int, microbatch: int) -> int:
    """METHODS, section 0."""
    kind, stages, size = config.pipeline.schedule, config.pipeline.stages, config.pipeline.microbatches
    if kind == "async":
        return max(0, microbatch - (stages - 1 - stage) * (1 + config.pipeline.slack)) // size
    return max(0, microbatch // size - (1 if kind == "two-version" else 0))


def rate(config: Config, update: int) -> float:
    """Linear warm-up, then a cosine."""
    optimizer, updates = config.optimizer, config.training.updates
    if update + 1 < optimizer.warmup:
        return optimizer.lr * (update + 1) / optimizer.warmup
    done = min(max((update - optimizer.warmup) / (updates - optimizer.warmup), 0.0), 1.0)
    return optimizer.lr * (optimizer.final + (1 - optimizer.final) * 0.5 * (1 + math.cos(math.pi * done)))


def plain_pipeline(config: Config, *, latest: bool = False) -> Plain:
    """Train to the end; the loss of an update is its mean over tokens."""
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    model = whole_model(config, data.tokenizer.vocabulary)
    owner = stage_of(config, data.tokenizer.vocabulary)
    masters = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    versions = [{name: master.detach().clone() for name, master in masters.items()}]
    optimizers = [
        adamw(config, {name: master for name, master in masters.items() if owner[name] == stage})
        for stage in range(config.pipeline.stages)
    ]
    plain = Plain({})
    dtype = DTYPES[config.training.precision]
    size = config.pipeline.microbatches
    for update in range(config.training.updates):
        numbers = range(update * size, (update + 1) * size)
        tokens = sum(int((data.train.get(number).labels != -100).sum()) for number in numbers)
        gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
        total = 0.0
        for number in numbers:
            seen = {
                name: versions[version_seen(config, owner[name], number)][name].to(dtype).requires_grad_()
                for name in masters
            }
            later = {name: versions[-1][name].to(dtype) for name in masters} if latest else {}
            loss = gradient_of(config, model, seen, later, data, number, 1 / tokens, gradients)
            total += loss
        if HEAD in gradients:
            gradients[EMBEDDING] += gradients.pop(HEAD)
        for name, master in masters.items():
            master.grad = gradients[name]
        plain.losses.append(total / tokens)
        plain.norms.append(step(config, optimizers, update, plain.norms))
        versions.append({name: master.detach().clone() for name, master in masters.items()})
    plain.weights = versions[-1]
    return plain


def gradient_of(
    config: Config,
    model: Stage,
    seen: dict[str, Tensor],
    later: dict[str, Tensor],
    data: Data,
    number: int,
    scale: float,
    gradients: dict[str, Tensor],
) -> float:
    """Add a microbatch's gradient to `gradients`; its summed loss.

    A head that borrows the embedding is a weight of its own here: one version for its forward and its backward, and a
    gradient that joins the embedding's only when all microbatches have been added up.
    """
    batch = data.train.get(number)
    products = {id(seen[name]): (seen[name], later[name]) for name in later}
    leaves = dict(seen)
    if config.model.tied and config.pipeline.stages > 1:
        leaves[HEAD] = seen[EMBEDDING].detach().clone().requires_grad_()
        gradients.setdefault(HEAD, torch.zeros_like(gradients[EMBEDDING]))
        products[id(seen[EMBEDDING])] = (leaves[HEAD], leaves[HEAD].detach())
    with TwoWeights(products):
        loss = token_loss(functional_call(model, seen, (batch.tokens,)), batch.labels)
        found = torch.autograd.grad(loss * scale, list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        gradients[name] += gradient
    return float(loss.detach())


def step(config: Config, optimizers: list[torch.optim.AdamW], update: int, earlier: list[list[float]]) -> list[float]:
    """Clip each stage's gradient by the norm that the config says, and step; the stages' norms before clipping."""
    scope, stages = config.optimizer.clip_scope, len(optimizers)
    if scope == "auto":
        scope = "global" if config.pipeline.schedule in ("gpipe", "1f1b") or stages == 1 else "stage"
    gradients = [[p.grad for group in o.param_groups for p in group["params"]] for o in optimizers]
    norms = [math.sqrt(sum(float(g.double().square().sum()) for g in own if g is not None)) for own in gradients]
    for stage, optimizer in enumerate(optimizers):
        known = {
            "stage": lambda stage=stage: norms[stage],
            "global": lambda: math.hypot(*norms),
            "carried": lambda stage=stage: math.hypot(*carried(stage, update, norms, earlier)),
        }[scope]()
        if config.optimizer.clip and known > config.optimizer.clip:
            for gradient in gradients[stage]:
                assert gradient is not None
                gradient *= config.optimizer.clip / known
        for group in optimizer.param_groups:
            group["lr"] = rate(config, update)
        optimizer.step()
    return norms


def carried(stage: int, update: int, norms: list[float], earlier: list[list[float]]) -> list[float]:
    """Two asynchronous stages, one microbatch per update: what each knows of the norms when it makes an update.

    The gradient of microbatch u leaves the last stage when it has made update u − 1. The activation of microbatch u
    leaves the first stage before the backward of u − 1, when it has made update u − 2.
    """
    assert len(norms) == 2
    if stage == 0:
        return [norms[0], earlier[update - 1][1] if update >= 1 else 0.0]
    return [earlier[update - 2][0] if update >= 2 else 0.0, norms[1]]


def adamw(config: Config, parameters: dict[str, Tensor]) -> torch.optim.AdamW:
    """torch's AdamW, without weight decay for vectors."""
    settings: dict[str, Any] = {"lr": config.optimizer.lr, "betas": config.optimizer.betas, "eps": config.optimizer.eps}
    decayed = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": config.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], **settings)


class TwoWeights(TorchFunctionMode):
    """Every product with one of some weights has another in its place: one for the forward, one for the backward."""

    def __init__(self, replaced: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = {"linear": LinearOfTwo, "mul": ScaledByTwo}.get(function.__name__)
        if product is not None and id(args[1]) in self._replaced:
            return product.apply(args[0], *self._replaced[id(args[1])])
        return function(*args, **(kwargs or {}))


class LinearOfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, later: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, later)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        inputs, later = ctx.saved_tensors
        return gradient @ later, gradient.flatten(0, -2).t() @ inputs.flatten(0, -2), None


class ScaledByTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, later: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, later)
        return inputs * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        inputs, later = ctx.saved_tensors
        return gradient * later, (gradient * inputs).flatten(0, -2).sum(0), None
