"""Graded rotation: basis rotation for long delays, with what was found to make up for them (docs/under-delay.md)."""

from __future__ import annotations

from typing import Any

from freerun.optim.basis_rotation import BasisRotation


class GradedRotation(BasisRotation):
    """Basis rotation whose steps are graded: by the delay of the gradient, and by how steep each direction is.

    momentum: decay of the momentum, which starts at zero and is not corrected for it.
    fresh: share of the newest gradient beside the momentum.
    tempering: exponent by which steep directions are damped.
    grading: exponent by which the rate of a rotated matrix falls with the gradient's delay: group["delay"].
    others: what BasisRotation takes.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 8e-3,
        momentum: float = 0.98,
        fresh: float = 0.4,
        tempering: float = 0.5,
        grading: float = 1.0,
        **others: Any,
    ) -> None:
        betas = (momentum, 0.999)
        super().__init__(
            params, lr, betas, fresh=fresh, tempering=tempering, grading=grading, bias_correction=False, **others
        )
