"""The sizes of a model and what follows from them: parameters, arithmetic, memory. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freerun.config import ModelConfig
from freerun.errors import ConfigError

LayerPart = Literal["project", "attend", "expand", "contract"]
LAYER_PARTS: tuple[LayerPart, ...] = ("project", "attend", "expand", "contract")


@dataclass(frozen=True)
class Sizes:
    """The numbers that fix a decoder's shape."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocabulary: int
    context: int
    tied: bool
    gated: bool = True

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width


def is_huggingface(model: ModelConfig) -> bool:
    return bool(model.pretrained or model.architecture)


def sizes(model: ModelConfig, vocabulary: int) -> Sizes:
    """The model's sizes, with every default filled in."""
    if is_huggingface(model):
        from freerun.model.huggingface_config import huggingface_sizes

        return huggingface_sizes(model, vocabulary)
    for key in ("layers", "width", "heads", "context"):
        if getattr(model, key) < 1:
            raise ConfigError(f"model.{key} is {getattr(model, key)}; it must be at least 1.")
    kv_heads = model.kv_heads or model.heads
    if model.width % (2 * model.heads):
        raise ConfigError(
            f"model.heads is {model.heads} and model.width {model.width}; "
            f"the width must be a multiple of twice the heads, {2 * model.heads}."
        )
    if model.heads % kv_heads:
        raise ConfigError(f"model.kv_heads is {kv_heads}; it must divide model.heads, {model.heads}.")
    return Sizes(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=kv_heads,
        head_width=model.width // model.heads,
        hidden=model.hidden or -(-8 * model.width // 48) * 16,
        vocabulary=vocabulary,
        context=model.context,
        tied=model.tied,
    )


def message_widths(shape: Sizes, part: LayerPart) -> tuple[int, ...]:
    """Widths of the tensors that enter a part of a layer: the residual first, then what the part before it made."""
    if part == "attend":
        return (shape.width, shape.query_width, shape.kv_width, shape.kv_width)
    if part == "contract":
        return (shape.width, shape.hidden)
    return (shape.width,)


def part_parameters(shape: Sizes, part: LayerPart) -> int:
    """Weights in the matrices of a part of a layer."""
    return {
        "project": shape.width * (shape.query_width + 2 * shape.kv_width),
        "attend": shape.query_width * shape.width,
        "expand": shape.width * shape.hidden * (2 if shape.gated else 1),
        "contract": shape.hidden * shape.width,
    }[part]


def part_flops(shape: Sizes, part: LayerPart) -> float:
    """Forward operations per token of a part of a layer; a token attends to half of the context on average."""
    scores = 2 * shape.query_width * shape.context if part == "attend" else 0
    return 2.0 * part_parameters(shape, part) + scores


def parameters(model: ModelConfig, vocabulary: int) -> int:
    """How many weights the model has: exact for freerun's decoder, without biases for a Hugging Face model."""
    shape = sizes(model, vocabulary)
    layer = sum(part_parameters(shape, part) for part in LAYER_PARTS) + 2 * shape.width
    embedding = shape.vocabulary * shape.width
    return shape.layers * layer + shape.width + embedding * (1 if shape.tied else 2)


def flops_per_token(model: ModelConfig, vocabulary: int) -> float:
    """Operations per trained token: the forward, and a backward of twice its cost."""
    shape = sizes(model, vocabulary)
    layer = sum(part_flops(shape, part) for part in LAYER_PARTS)
    return 3.0 * (shape.layers * layer + 2.0 * shape.vocabulary * shape.width)


def activation_bytes(
    model: ModelConfig, vocabulary: int, sequences: int, *, layers: int, last: bool, value_bytes: int = 4
) -> int:
    """Memory that a stage of so many layers keeps from one microbatch's forward until its backward; an estimate."""
    shape = sizes(model, vocabulary)
    tokens = sequences * shape.context
    if model.activation_checkpointing:
        per_layer = shape.width
    else:
        norms = 4 * shape.width
        attention = 3 * shape.query_width + 4 * shape.kv_width
        mlp = (4 if shape.gated else 2) * shape.hidden
        per_layer = norms + attention + mlp
    kept = tokens * layers * per_layer * value_bytes
    if last:
        kept += tokens * (2 * shape.width * value_bytes + shape.vocabulary * (value_bytes + 4))
    return kept
