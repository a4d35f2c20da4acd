"""What kind of weight a parameter is, from its name and shape: optimizers and decay go by it."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Kind = Literal["matrix", "embedding", "head", "vector"]

EMBEDDINGS = frozenset({"embedding", "embed_tokens", "embed_in", "embed_positions", "wte", "wpe"})
HEADS = frozenset({"head", "lm_head", "embed_out"})


def kind(name: str, parameter: Tensor) -> Kind:
    """matrix: a 2-D weight inside a layer; vector: norms, biases and anything else that is 1-D."""
    if parameter.ndim < 2:
        return "vector"
    words = set(name.split("."))
    if words & EMBEDDINGS:
        return "embedding"
    return "head" if words & HEADS else "matrix"
