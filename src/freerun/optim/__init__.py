"""Optimizers that a late gradient can't hurt; each is a torch.optim.Optimizer, usable in anyone's loop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freerun.optim.adamw import AdamW
    from freerun.optim.base import Adapted, ProposingOptimizer, adapt
    from freerun.optim.basis_rotation import BasisRotation
    from freerun.optim.delay_compensated import DelayCompensated
    from freerun.optim.error_feedback import ErrorFeedback
    from freerun.optim.graded_rotation import GradedRotation
    from freerun.optim.muon import Muon
    from freerun.optim.nesterov import NesterovAdamW

_HOMES = {
    "AdamW": "adamw",
    "Adapted": "base",
    "BasisRotation": "basis_rotation",
    "DelayCompensated": "delay_compensated",
    "ErrorFeedback": "error_feedback",
    "GradedRotation": "graded_rotation",
    "Muon": "muon",
    "NesterovAdamW": "nesterov",
    "ProposingOptimizer": "base",
    "adapt": "base",
}

__all__ = [
    "AdamW",
    "Adapted",
    "BasisRotation",
    "DelayCompensated",
    "ErrorFeedback",
    "GradedRotation",
    "Muon",
    "NesterovAdamW",
    "ProposingOptimizer",
    "adapt",
]


def __getattr__(name: str) -> Any:
    """Load an optimizer's file when it is first asked for, so that reading a config stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
