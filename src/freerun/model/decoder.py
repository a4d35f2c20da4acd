"""The plain decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A layer can be built in full or as some of its four parts, so that a cut may pass through it. Parameters keep the
names they have in the whole model. Rotary positions follow Hugging Face Llama (halves are rotated), so that weights
interchange as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from freerun.model.size import LAYER_PARTS, LayerPart, Sizes, message_widths


class RMSNorm(nn.Module):
    """Divides by the root mean square, computed in fp32 whatever the weights are."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.float(), hidden.shape[-1:], eps=self.eps).to(hidden.dtype) * self.weight


@lru_cache(maxsize=16)
def rotary_tables(
    length: int, width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, width/2], made once per process and shared by all layers and stages."""
    with torch.inference_mode(False):
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), theta**-exponents)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns each pair (i, i + half) of a head's coordinates by its position's angle."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class KeyValueCache:
    """The keys and values of the tokens that a generation has seen, for each layer."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the new tokens' keys and values of a layer; returns those of all tokens so far."""
        if layer not in self.layers:
            shape = (*key.shape[:2], self.capacity, key.shape[3])
            self.layers[layer] = (key.new_empty(shape), value.new_empty(shape))
        end = self.length + key.shape[2]
        keys, values = self.layers[layer]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]


class Attention(nn.Module):
    """Causal attention; heads of queries share heads of keys and values in groups."""

    def __init__(self, shape: Sizes, theta: float, layer: int, parts: Sequence[LayerPart]) -> None:
        super().__init__()
        self.shape, self.theta, self.layer = shape, theta, layer
        if "project" in parts:
            self.query = nn.Linear(shape.width, shape.query_width, bias=False)
            self.key = nn.Linear(shape.width, shape.kv_width, bias=False)
            self.value = nn.Linear(shape.width, shape.kv_width, bias=False)
        if "attend" in parts:
            self.output = nn.Linear(shape.query_width, shape.width, bias=False)

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.query(hidden), self.key(hidden), self.value(hidden)

    def attend(self, projected: Sequence[Tensor], cache: KeyValueCache | None) -> Tensor:
        query, key, value = (
            tensor.view(*tensor.shape[:2], -1, self.shape.head_width).transpose(1, 2) for tensor in projected
        )
        start = 0 if cache is None else cache.length
        end = start + query.shape[2]
        tables = rotary_tables(
            max(end, self.shape.context), self.shape.head_width, self.theta, query.dtype, query.device
        )
        cosines, sines = (table[start:end] for table in tables)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=start == 0, enable_gqa=self.shape.kv_heads < self.shape.heads
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Sizes, parts: Sequence[LayerPart]) -> None:
        super().__init__()
        if "expand" in parts:
            self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
            self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        if "contract" in parts:
            self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def expand(self, hidden: Tensor) -> Tensor:
        inner: Tensor = F.silu(self.gate(hidden)) * self.up(hidden)
        return inner

    def contract(self, inner: Tensor) -> Tensor:
        return self.down(inner)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer of the decoder, or consecutive parts of one.

    Inside a layer the residual and what the last part made travel together, one after the other in the memory of one
    tensor, so that taking them apart copies nothing; between layers the residual alone does.
    """

    def __init__(
        self, shape: Sizes, *, theta: float, eps: float, layer: int, parts: Sequence[LayerPart] = LAYER_PARTS
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.input_widths = list(message_widths(shape, self.parts[0]))
        if "project" in parts:
            self.attention_norm = RMSNorm(shape.width, eps)
        if "project" in parts or "attend" in parts:
            self.attention = Attention(shape, theta, layer, parts)
        if "expand" in parts:
            self.mlp_norm = RMSNorm(shape.width, eps)
        if "expand" in parts or "contract" in parts:
            self.mlp = MLP(shape, parts)

    def forward(self, message: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        residual, *carried = _unpacked(message, self.input_widths)
        for part in self.parts:
            if part == "project":
                carried = [*self.attention.project(self.attention_norm(residual))]
            elif part == "attend":
                residual, carried = residual + self.attention.attend(carried, cache), []
            elif part == "expand":
                carried = [self.mlp.expand(self.mlp_norm(residual))]
            else:
                residual, carried = residual + self.mlp.contract(*carried), []
        return _packed([residual, *carried])


def _packed(tensors: list[Tensor]) -> Tensor:
    """Tensors [B, T, width] as one of all their widths: its memory holds one after the other."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.flatten() for tensor in tensors]).view(*tensors[0].shape[:2], -1)


def _unpacked(message: Tensor, widths: list[int]) -> list[Tensor]:
    """What `_packed` has put together."""
    if len(widths) == 1:
        return [message]
    batch, length = message.shape[:2]
    parts = torch.split(message.flatten(), [batch * length * width for width in widths])
    return [part.view(batch, length, width) for part, width in zip(parts, widths, strict=True)]
