"""Which parameter goes where: every trainable one into exactly one group, by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from freerun.config import OptimizerConfig
from freerun.errors import ConfigError

KINDS = ("matrix", "embedding", "head", "vector")


def param_groups(
    named: Iterable[tuple[str, Tensor]],
    kind_of: Callable[[str, Tensor], str],
    config: OptimizerConfig,
    rules: Sequence[tuple[str, str]] = (),
) -> list[dict[str, Any]]:
    """One group per kind that occurs: {"params", "names", "kind", "weight_decay"}, in the order of KINDS.

    `kind_of` gives a parameter's kind; a rule (pattern, kind) overrides it for the names that the pattern matches, as
    in ("layers.0.*", "embedding"), and the first rule that matches wins. Frozen parameters are left out, a tensor that
    has two names is taken once, by its first. Vectors have no weight decay.
    """
    groups: dict[str, dict[str, Any]] = {
        kind: {
            "params": [],
            "names": [],
            "kind": kind,
            "weight_decay": 0.0 if kind == "vector" else config.weight_decay,
        }
        for kind in KINDS
    }
    unmatched, seen = {pattern for pattern, _ in rules}, set()
    for name, parameter in named:
        matching = [(pattern, kind) for pattern, kind in rules if fnmatchcase(name, pattern)]
        unmatched -= {pattern for pattern, _ in matching}
        if not parameter.requires_grad or parameter in seen:
            continue
        seen.add(parameter)
        kind = matching[0][1] if matching else kind_of(name, parameter)
        _check(name, parameter, kind)
        groups[kind]["params"].append(parameter)
        groups[kind]["names"].append(name)
    if unmatched:
        raise ConfigError(
            f"The parameter pattern {sorted(unmatched)[0]!r} matches no parameter; names look like {_some(groups)}."
        )
    return [group for group in groups.values() if group["params"]]


def _check(name: str, parameter: Tensor, kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"Parameter {name!r} has the kind {kind!r}; known kinds are {', '.join(KINDS)}.")
    if kind == "matrix" and parameter.ndim != 2:
        raise ConfigError(f"Parameter {name!r} of shape {tuple(parameter.shape)} can't be of kind matrix; use vector.")


def _some(groups: dict[str, dict[str, Any]]) -> str:
    names = [name for group in groups.values() for name in group["names"]]
    return ", ".join(names[:3]) or "none (there are no trainable parameters)"
