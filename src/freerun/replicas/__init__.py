"""What the replicas of a stage do together; and, around anyone's own loop, SparseAveraging and Acco."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freerun.replicas.own_loop import Acco, SparseAveraging

__all__ = ["Acco", "SparseAveraging"]


def __getattr__(name: str) -> Any:
    # so that checking a config does not import torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from freerun.replicas import own_loop

    return getattr(own_loop, name)
