"""What all processes of a run must have in common before they start."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from freerun.config import Config
from freerun.errors import ConfigError
from freerun.steps import Steps

if TYPE_CHECKING:
    from freerun.mesh import Board


def refuse_unequal(config: Config, board: Board, rank: int) -> Steps[None]:
    """All processes must have read the same config."""
    own = flat_config(config)
    if rank == 0:
        board.put("config", own)
        return
    first = yield from board.get("config", "rank 0")
    different = [key for key in own if own[key] != first.get(key)]
    if different:
        key = different[0]
        raise ConfigError(
            f"rank {rank} has {key} {own[key]!r}, but rank 0 has {first.get(key)!r}; "
            "start every process with the same config."
        )


def flat_config(config: Config) -> dict[str, Any]:
    """A config as dotted keys, in values that JSON can hold."""
    flat: dict[str, Any] = {}

    def walk(tree: dict[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = list(value) if isinstance(value, tuple) else value

    walk(dataclasses.asdict(config), "")
    return flat
