"""What a step costs: basis rotation against its plain reference, SOAP by two others, Muon and AdamW, in turns.

The parameters are those of a decoder of 12 layers and width 512: per layer four matrices 512×512 and two 512×2048. The
gradients are random, with spectra that fall off as a network's do; every contender is fed the same.

The first update computes the bases, and staggered refreshes begin only after the first interval: neither counts. What
is counted, two intervals unless --updates says otherwise, has as many refreshes per update as a long run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Claim, Turn, arguments, machine, quiet, report, table
from torch import Tensor

from freerun.optim import AdamW, BasisRotation, Muon
from freerun.optim.reference import PlainRotation

INTERVAL = 10
PLAIN, OURS, CHEAPEST = "plain reference", "ours", "ours, blocks, bf16"
Weights = list[torch.nn.Parameter]


class Plain:
    """The plain reference on all matrices, dressed as an optimizer."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.matrices = [PlainRotation(weight.detach(), interval=INTERVAL) for weight in weights]

    def step(self) -> None:
        for weight, matrix in zip(self._weights, self.matrices, strict=True):
            assert weight.grad is not None
            matrix.update(weight.grad)
            weight.data = matrix.weight

    def nbytes(self) -> int:
        return sum(tensor.nbytes for matrix in self.matrices for tensor in matrix.kept.values())


def soap(weights: Weights) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(weights, lr=1e-3, betas=(0.9, 0.999), precondition_frequency=INTERVAL)


def heavyball_soap(weights: Weights) -> Any:
    from heavyball import SOAP, utils

    utils.compile_mode = None  # its autotuning takes minutes per shape on a CPU
    exact = {"merge_dims": False, "max_precond_dim": 10_000, "use_precond_schedule": False, "compile_step": False}
    return SOAP(weights, lr=1e-3, betas=(0.9, 0.999), shampoo_beta=0.999, precondition_frequency=INTERVAL, **exact)


def contenders(width: int) -> dict[str, Callable[[Weights], Any]]:
    """Every optimizer, by the name in the table."""

    def rotation(**settings: Any) -> Callable[[Weights], Any]:
        return lambda weights: BasisRotation(weights, interval=INTERVAL, **settings)

    return {
        PLAIN: Plain,
        "ours, all refresh at once": rotation(),
        OURS: rotation(stagger=True),
        "ours, unilateral": rotation(stagger=True, geometry="unilateral"),
        "ours, bf16": rotation(stagger=True, precision="bf16"),
        "ours, blocks": rotation(stagger=True, block=width),
        CHEAPEST: rotation(stagger=True, block=width, precision="bf16"),
        "SOAP, pytorch-optimizer": soap,
        "SOAP, heavyball": heavyball_soap,
        "Muon": Muon,
        "AdamW": AdamW,
    }


def shapes(layers: int, width: int) -> list[tuple[int, int]]:
    """The matrices of a decoder."""
    return [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * layers


def gradients(sizes: list[tuple[int, int]], kept: int = 4) -> Iterator[list[Tensor]]:
    """Endless gradients: random mixtures of a few, whose singular values fall off by a power law."""
    generator = torch.Generator().manual_seed(0)

    def one(size: tuple[int, int]) -> Tensor:
        falling = (torch.arange(1, side + 1) ** -0.5 for side in size)
        rows, columns = (f[torch.randperm(len(f), generator=generator)] for f in falling)
        return rows[:, None] * torch.randn(size, generator=generator) * columns

    stock = [[one(size) for size in sizes] for _ in range(kept)]
    while True:
        shares = torch.randn(kept, generator=generator).tolist()
        yield [
            sum((s * g for s, g in zip(shares, same, strict=True)), start=torch.zeros(()))
            for same in zip(*stock, strict=True)
        ]


@dataclass
class Contender:
    """An optimizer with its own copy of the weights, and what its steps took."""

    weights: Weights
    optimizer: Any
    turns: list[Turn] = field(default_factory=list)

    def step(self, given: list[Tensor]) -> None:
        for weight, gradient in zip(self.weights, given, strict=True):
            weight.grad = gradient.clone()
        before = time.perf_counter(), time.process_time()
        self.optimizer.step()
        self.turns.append(Turn(time.perf_counter() - before[0], time.process_time() - before[1]))
        for weight in self.weights:
            weight.grad = None

    def counted(self) -> list[Turn]:
        return self.turns[1 + INTERVAL :]

    def nbytes(self) -> int:
        return self.optimizer.nbytes() if isinstance(self.optimizer, Plain) else held(self.optimizer)


def held(optimizer: Any) -> int:
    """Bytes of state, also where an optimizer nests it."""

    def walk(value: Any) -> int:
        if isinstance(value, Tensor):
            return value.nbytes
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return sum(walk(part) for part in inner)

    return sum(walk(state) for state in optimizer.state.values())


def race(sizes: list[tuple[int, int]], width: int, updates: int) -> dict[str, Contender]:
    """All contenders, update by update."""
    start = [0.02 * torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in sizes]
    field_: dict[str, Contender] = {}
    for name, make in contenders(width).items():
        weights = [torch.nn.Parameter(value.clone()) for value in start]
        field_[name] = Contender(weights, make(weights))
    for update, given in zip(range(updates + 1), gradients(sizes), strict=False):
        order = list(field_) if update % 2 else list(field_)[::-1]
        for name in order:
            field_[name].step(given)
    return field_


def difference(one: Contender, other: Contender, sizes: list[tuple[int, int]]) -> float:
    """How far two contenders ended from each other, relative to how far they came."""
    start = [0.02 * torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in sizes]
    apart = sum((a - b).square().sum().item() for a, b in zip(one.weights, other.weights, strict=True))
    moved = sum((a - b).square().sum().item() for a, b in zip(other.weights, start, strict=True))
    return (apart / moved) ** 0.5


def summary(contender: Contender, plain: Contender, sizes: list[tuple[int, int]]) -> dict[str, float]:
    """What the table shows of a contender."""
    ours, plains = contender.counted(), plain.counted()
    seconds = [turn.seconds for turn in ours]
    return {
        "mean s": statistics.mean(seconds),
        "median s": statistics.median(seconds),
        "slowest/median": max(seconds) / statistics.median(seconds),
        "first s": contender.turns[0].seconds,
        "faster": sum(turn.seconds for turn in plains) / sum(seconds),
        "faster, cpu": sum(turn.cpu_seconds for turn in plains) / sum(turn.cpu_seconds for turn in ours),
        "state MB": contender.nbytes() / 1e6,
        "state": contender.nbytes() / plain.nbytes(),
        "from plain": difference(contender, plain, sizes),
    }


def main() -> None:
    asked = arguments(__doc__, ("--layers", {"type": int, "default": 12}), ("--updates", {"type": int, "default": 30}))
    layers, width, updates = (2, 64, 30) if asked.quick else (asked.layers, 512, asked.updates)
    torch.set_num_threads(2)
    about = machine()
    about["load_before"] = quiet(0 if asked.quick else asked.patience)
    sizes = shapes(layers, width)
    finished = race(sizes, width, updates)
    measured = {name: summary(contender, finished[PLAIN], sizes) for name, contender in finished.items()}
    columns = list(measured[PLAIN])
    table(("optimizer", *columns), [(name, *row.values()) for name, row in measured.items()])
    claims = [
        Claim("ours over the plain reference, identical results", measured[OURS]["faster"], 2.5),
        Claim("cheapest setting over the plain reference", measured[CHEAPEST]["faster"], 4.0),
        Claim("slowest update over the median", measured[OURS]["slowest/median"], 1.3, at_most=True),
        Claim("cheapest: slowest update over the median", measured[CHEAPEST]["slowest/median"], 1.3, at_most=True),
        Claim("bf16: state over the plain reference's", measured["ours, bf16"]["state"], 0.6, at_most=True),
        Claim("cheapest: state over the plain reference's", measured[CHEAPEST]["state"], 0.6, at_most=True),
        Claim(
            "all at once: relative distance from plain",
            measured["ours, all refresh at once"]["from plain"],
            1e-3,
            at_most=True,
        ),
    ]
    each = {
        name: {**measured[name], "seconds": [turn.seconds for turn in contender.turns]}
        for name, contender in finished.items()
    }
    report("optimizers", asked.quick, about, claims, each)


if __name__ == "__main__":
    main()
