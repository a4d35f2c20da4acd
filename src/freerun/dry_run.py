"""What a run would be: its config, its stages, their delays and memory, without starting it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from freerun import config_files
from freerun.checks import weight_policy
from freerun.config import Config
from freerun.model.cut import Piece, cut, pieces
from freerun.model.size import LAYER_PARTS, activation_bytes, flops_per_token, parameters, part_parameters, sizes
from freerun.pipeline.schedule import max_in_flight, max_versions
from freerun.weights.delay import steady_delay

OPTIMIZER_BYTES = {
    "adamw": 8,
    "nesterov": 8,
    "delay-compensated": 8,
    "muon": 4,
    "basis-rotation": 16,
    "graded-rotation": 16,
}
"""Bytes of state per parameter, about: basis rotation keeps the bases and covariances of square matrices too."""


def show(config: Config, vocabulary: int, console: Console) -> None:
    """Print the resolved config and the table of stages."""
    console.print(config_files.dumps(config), markup=False, highlight=False)
    parts = pieces(config.model, vocabulary, config.pipeline.granularity)
    table = Table(title=f"{config.replicas.count} × {config.pipeline.stages} processes (replicas × stages)")
    for column in ("stage", "pieces", "parameters", "delay", "versions", "in flight", "memory, about"):
        table.add_column(column, justify="left" if column == "pieces" else "right")
    for stage, own in enumerate(cut(parts, config.pipeline.stages, config.pipeline.cut)):
        table.add_row(*_row(config, vocabulary, stage, [parts[index] for index in own]))
    console.print(table)
    console.print(
        f"{parameters(config.model, vocabulary):,} parameters, vocabulary {vocabulary}, "
        f"{flops_per_token(config.model, vocabulary):.3g} operations per token"
    )
    tokens = config.training.sequences * config.model.context * config.pipeline.microbatches * config.replicas.count
    console.print(f"{tokens:,} tokens per update, {tokens * config.training.updates:,} in all")


def _row(config: Config, vocabulary: int, stage: int, own: list[Piece]) -> list[str]:
    pipeline = config.pipeline
    mesh = (stage, pipeline.stages, pipeline.microbatches, pipeline.slack)
    count = sum(_parameters(config, vocabulary, piece) for piece in own)
    versions = max_versions(pipeline.schedule, weight_policy(config), *mesh)
    flight = max_in_flight(pipeline.schedule, *mesh)
    compute = 2 if config.training.precision == "bf16" else 4
    copies = versions if versions > 1 or compute == 2 else 0
    weights = count * (4 + 4 + copies * compute + OPTIMIZER_BYTES.get(config.optimizer.name, 8))
    layers = sum(1 for piece in own if piece.layer >= 0) / (4 if pipeline.granularity == "quarter" else 1)
    last = stage == pipeline.stages - 1
    activations = flight * activation_bytes(
        config.model, vocabulary, config.training.sequences, layers=round(layers), last=last, value_bytes=compute
    )
    return [
        str(stage),
        own[0].name if len(own) == 1 else f"{own[0].name} … {own[-1].name}",
        f"{count:,}",
        str(steady_delay(pipeline.schedule, *mesh)),
        str(versions),
        str(flight),
        f"{(weights + activations) / 2**20:,.0f} MiB",
    ]


def _parameters(config: Config, vocabulary: int, piece: Piece) -> int:
    """Weights of a piece; norms count with the part that they come before."""
    shape = sizes(config.model, vocabulary)
    if piece.part == "embedding":
        return shape.vocabulary * shape.width
    if piece.part == "head":
        return shape.width + (0 if shape.tied else shape.vocabulary * shape.width)
    own = LAYER_PARTS if piece.part == "layer" else [piece.part]
    return sum(part_parameters(shape, part) + (shape.width if part in ("project", "expand") else 0) for part in own)
