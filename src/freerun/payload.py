"""The number formats in which flat buffers travel between machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Payload(Protocol):
    """Turns fp32 numbers into what is sent, and back."""

    def empty(self, count: int, device: torch.device) -> Tensor:
        """Room for `count` numbers as they travel."""

    def encode(self, values: Tensor) -> Tensor:
        """What is sent for these fp32 numbers; may share their memory."""

    def decode(self, encoded: Tensor, count: int) -> Tensor:
        """The fp32 numbers that the receiver makes of it."""


@dataclass(frozen=True)
class Floats:
    """Floating-point numbers of some width."""

    dtype: torch.dtype

    def empty(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count, dtype=self.dtype, device=device)

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def decode(self, encoded: Tensor, count: int) -> Tensor:
        return encoded.float()


@dataclass(frozen=True)
class Bytes:
    """Signed bytes with one fp32 scale per block, so 1 + 4/block bytes per number; lossy, for error feedback."""

    block: int = 256

    def empty(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count + 4 * self._blocks(count), dtype=torch.uint8, device=device)

    def encode(self, values: Tensor) -> Tensor:
        blocks = self._blocks(values.numel())
        padded = values.new_zeros(blocks * self.block)
        padded[: values.numel()] = values
        padded = padded.view(blocks, self.block)
        scales = padded.abs().amax(dim=1) / 127
        whole = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), whole.view(-1)[: values.numel()].view(torch.uint8)])

    def decode(self, encoded: Tensor, count: int) -> Tensor:
        blocks = self._blocks(count)
        scales = encoded[: 4 * blocks].view(torch.float32)
        whole = encoded[4 * blocks :].view(torch.int8).float()
        return whole * scales.repeat_interleave(self.block)[:count]

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)


FP32 = Floats(torch.float32)

PAYLOADS: dict[str, Payload] = {"fp32": FP32, "bf16": Floats(torch.bfloat16), "int8": Bytes()}
