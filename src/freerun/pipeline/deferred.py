"""Forwards of a replay, put off until their microbatch has reached the last stage.

The version of the weights that a forward sees is kept until its backward, so that forward can as well run when the
last stage's does and give the same numbers. In one process it should: where every backward follows its forward in the
last stage, the activations of one microbatch are in memory and in the caches at a time, not those of all in flight.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Deferred:
    """The forwards that one replica's stages still owe, by microbatch, in the order of stages."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Tensor, list[Callable[[Tensor], Tensor]]]] = {}

    def put_off(self, microbatch: int, inputs: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        """Owe a forward; its inputs are what the stage before will have made, or `inputs` in the first stage."""
        self._waiting.setdefault(microbatch, (inputs, []))[1].append(forward)

    def catch_up(self, microbatch: int, inputs: Tensor) -> Tensor:
        """Run what is owed for a microbatch, and give the last stage's inputs: `inputs` if nothing comes before it."""
        message, forwards = self._waiting.pop(microbatch, (inputs, []))
        for forward in forwards:
            message = forward(message)
        return message
