"""A model as a list of pieces, and how the list is cut into stages. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.model.size import LAYER_PARTS, LayerPart, is_huggingface, part_flops, sizes

Part = Literal["embedding", "layer", "head"] | LayerPart


@dataclass(frozen=True)
class Piece:
    """The smallest part of the model that a stage can own."""

    name: str
    layer: int
    """Index of the layer, −1 for the embedding and the head."""
    part: Part
    cost: float
    """Forward operations per token, estimated."""


def pieces(model: ModelConfig, vocabulary: int, granularity: Literal["layer", "quarter"] = "layer") -> list[Piece]:
    """The model from the embedding to the head; the head piece includes the final norm."""
    if granularity == "quarter" and is_huggingface(model):
        raise ConfigError("pipeline.granularity is quarter, which only freerun's own decoder has; use layer.")
    shape = sizes(model, vocabulary)
    cost = {part: part_flops(shape, part) for part in LAYER_PARTS}
    middle = []
    for layer in range(shape.layers):
        if granularity == "layer":
            middle.append(Piece(f"layers.{layer}", layer, "layer", sum(cost.values())))
        else:
            middle += [Piece(f"layers.{layer}.{part}", layer, part, cost[part]) for part in LAYER_PARTS]
    embedding = Piece("embedding", -1, "embedding", float(shape.width))
    head = Piece("head", -1, "head", 2.0 * shape.vocabulary * shape.width)
    return [embedding, *middle, head]


def cut(parts: Sequence[Piece], stages: int, how: str = "balanced") -> list[range]:
    """Which pieces each stage owns, as ranges of their indices.

    how is balanced (the costliest stage is as cheap as possible), layers (as even as possible in layers), or
    counts of layers like 3,3,2. The embedding goes with the first stage and the head with the last.
    """
    between = parts[1:-1]
    if stages < 1:
        raise ConfigError(f"pipeline.stages is {stages}; it must be at least 1.")
    if stages > len(between):
        raise ConfigError(
            f"pipeline.stages is {stages}, but the model has only {len(between)} pieces to share out; "
            f"use at most {len(between)} stages or more model.layers."
        )
    if how == "balanced":
        costs = [piece.cost for piece in between]
        costs[0] += parts[0].cost
        costs[-1] += parts[-1].cost
        counts = balanced_counts(costs, stages)
    elif how == "layers":
        counts = [len(between) * (k + 1) // stages - len(between) * k // stages for k in range(stages)]
    else:
        counts = explicit_counts(between, stages, how)
    ends = list(accumulate(counts, initial=1))
    ends[0], ends[-1] = 0, len(parts)
    return [range(start, end) for start, end in pairwise(ends)]


def explicit_counts(between: Sequence[Piece], stages: int, how: str) -> list[int]:
    """Pieces per stage from a list of layers per stage."""
    layers = between[-1].layer + 1
    try:
        counts = [int(word) for word in how.split(",")]
    except ValueError:
        raise ConfigError(f"pipeline.cut is {how!r}; use balanced, layers, or layers per stage like 3,3,2.") from None
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ConfigError(
            f"pipeline.cut is {how}; it needs one count of at least 1 for each of the {stages} stages, "
            f"adding up to the model's {layers} layers."
        )
    return [count * (len(between) // layers) for count in counts]


def balanced_counts(costs: Sequence[float], stages: int) -> list[int]:
    """Lengths of consecutive, nonempty groups: first the least possible largest sum, then the most even ones."""
    limit = best_groups(costs, stages, lambda best, group: max(best, group))[0]
    return best_groups(costs, stages, lambda best, group: best + group**2 if group <= limit else float("inf"))[1]


def best_groups(costs: Sequence[float], stages: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The cut into groups whose joined sums are least, exactly, by dynamic programming over (groups, prefix)."""
    sums = list(accumulate(costs, initial=0.0))
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for group in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        for end in range(group, len(costs) - (stages - group) + 1):
            row[end] = min(
                (join(value, sums[end] - sums[start]), start) for start, (value, _) in best[-1].items() if start < end
            )
        best.append(row)
    end, counts = len(costs), []
    for row in reversed(best[1:]):
        start = row[end][1]
        counts.append(end - start)
        end = start
    return best[-1][len(costs)][0], counts[::-1]
