"""What a config chooses by name, as "module:function" strings, so that reading a config imports nothing.

Adding an optimizer or a replica strategy is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

OPTIMIZERS: Mapping[str, str] = {
    "adamw": "freerun.optim.adamw:build",
    "basis-rotation": "freerun.optim.basis_rotation:build",
    "graded-rotation": "freerun.optim.basis_rotation:build",
    "nesterov": "freerun.optim.nesterov:build",
    "delay-compensated": "freerun.optim.delay_compensated:build",
    "muon": "freerun.optim.muon:build",
}

MATRIX_OPTIMIZERS = frozenset({"basis-rotation", "graded-rotation", "muon"})
"""Those whose step mixes the elements of a matrix, so that a matrix can't be cut among replicas."""

OPTIMIZER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "graded-rotation": {
        "betas": [0.98, 0.999],
        "rotation": {"fresh": 0.4, "tempering": 0.5, "grading": 1.0, "bias_correction": False},
    },
}
"""Settings under [optimizer] that come with a name, unless the config says otherwise."""

STRATEGIES: Mapping[str, str] = {
    "none": "freerun.replicas.none:build",
    "allreduce": "freerun.replicas.allreduce:build",
    "zero1": "freerun.replicas.zero1:build",
    "dpu": "freerun.replicas.dpu:build",
    "acco": "freerun.replicas.acco:build",
    "sparse": "freerun.replicas.sparse:build",
    "diloco": "freerun.replicas.diloco:build",
}


def load(reference: str) -> Callable[..., Any]:
    """The function that a "module:function" string names."""
    module, _, attribute = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function
