"""A pipeline stage: the part of the model that one process owns, as a module from message to message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from freerun.config import ModelConfig
from freerun.model.cut import Piece
from freerun.model.decoder import KeyValueCache, Layer, RMSNorm
from freerun.model.initial import fill_normal
from freerun.model.size import LAYER_PARTS, LayerPart, Sizes, is_huggingface, message_widths, sizes


class Stage(nn.Module):
    """From tokens [B, T] (first) or a message [B, T, input_width] to a message, or to logits [B, T, V] (last).

    Parameters have the names that they have in the whole model. `borrowed` names those that belong to another
    stage: the embedding's weights in the last stage of a tied model.
    """

    input_width: int
    """Last dimension of the message that comes in; 0 for tokens."""
    output_width: int
    """Last dimension of what goes out; the vocabulary for logits."""
    context: int
    """Most positions that the model is made for."""
    borrowed: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()
    """Names of parameters here that another stage borrows."""

    def new_cache(self, capacity: int) -> Any:
        """An empty store for keys and values, to give to forward while generating."""
        raise NotImplementedError

    def forward(self, inputs: Tensor, cache: Any = None) -> Tensor:
        raise NotImplementedError


class DecoderStage(Stage):
    """Consecutive pieces of freerun's own decoder."""

    def __init__(self, model: ModelConfig, shape: Sizes, pieces: Sequence[Piece], first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last, self.tied = first, last, shape.tied
        self.checkpointing = model.activation_checkpointing
        parts = parts_by_layer(pieces)
        if first or (last and shape.tied):
            self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleDict(
            {
                str(layer): Layer(shape, theta=model.rope_theta, eps=model.norm_eps, layer=layer, parts=own)
                for layer, own in parts.items()
            }
        )
        if first and shape.tied and not last:
            self.lent = ("embedding.weight",)
        if last:
            self.norm = RMSNorm(shape.width, model.norm_eps)
            if not shape.tied:
                self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
            elif not first:
                self.borrowed = ("embedding.weight",)
        first_part, last_part = next(iter(parts.values()))[0], list(parts.values())[-1][-1]
        following = LAYER_PARTS[(LAYER_PARTS.index(last_part) + 1) % len(LAYER_PARTS)]
        self.input_width = 0 if first else sum(message_widths(shape, first_part))
        self.output_width = shape.vocabulary if last else sum(message_widths(shape, following))
        self.context = shape.context

    def new_cache(self, capacity: int) -> KeyValueCache:
        return KeyValueCache(capacity)

    def forward(self, inputs: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        hidden = self.embedding(inputs) if self.first else inputs
        recompute = self.checkpointing and self.training and torch.is_grad_enabled()
        for layer in self.layers.values():
            if recompute:
                hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, cache)
        if cache is not None:
            cache.length += inputs.shape[1]
        if not self.last:
            return hidden
        return F.linear(self.norm(hidden), self.embedding.weight if self.tied else self.head.weight)


def parts_by_layer(pieces: Sequence[Piece]) -> dict[int, list[LayerPart]]:
    """The parts of each layer that the pieces cover."""
    parts: dict[int, list[LayerPart]] = {}
    for piece in pieces:
        if piece.part == "layer":
            parts[piece.layer] = list(LAYER_PARTS)
        elif piece.part != "embedding" and piece.part != "head":
            parts.setdefault(piece.layer, []).append(piece.part)
    return parts


def build_stage(
    model: ModelConfig, vocabulary: int, pieces: Sequence[Piece], *, seed: int, first: bool, last: bool
) -> Stage:
    """The stage that owns the pieces, in fp32 on the CPU, with weights that don't depend on the cut."""
    if is_huggingface(model):
        from freerun.model.huggingface import build_huggingface_stage

        return build_huggingface_stage(model, vocabulary, pieces, seed=seed, first=first, last=last)
    shape = sizes(model, vocabulary)
    with torch.device("meta"):
        stage = DecoderStage(model, shape, pieces, first, last)
    stage.to_empty(device="cpu")
    initialise(stage, shape, seed)
    return stage


def initialise(stage: DecoderStage, shape: Sizes, seed: int) -> None:
    """Norms are 1; matrices have a deviation of 0.02, less by √(2 layers) where they write to the residual."""
    for name, parameter in stage.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        elif name.endswith((".output.weight", ".down.weight")):
            fill_normal(parameter, seed, name, 0.02 / math.sqrt(2 * shape.layers))
        else:
            fill_normal(parameter, seed, name, 0.02)
