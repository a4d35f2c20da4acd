"""What a machine has for freerun: versions, devices, backends, the links between processes."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from freerun import __version__

EXTRAS = {
    "hf": ("transformers", "tokenizers", "datasets", "pyarrow"),
    "figures": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
MEGABYTE = 2**20


def examine() -> None:
    """Print everything; under torchrun also the speed of the links between ranks."""
    if os.environ.get("RANK", "0") == "0":
        console = Console()
        console.print(_machine())
        console.print(_extras())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _links()
    else:
        print(
            "links: start `torchrun --nproc-per-node 2 -m freerun doctor` (on each host) to measure them between ranks."
        )


def _machine() -> Table:
    table = Table(title=f"freerun {__version__}", show_header=False)
    table.add_row("python", platform.python_version())
    table.add_row("torch", torch.__version__)
    table.add_row("cores", f"{os.cpu_count()} ({torch.backends.cpu.get_cpu_capability()})")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            table.add_row(f"cuda {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    else:
        table.add_row("cuda", "none; training runs on the CPU")
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    table.add_row("backends", ", ".join(name for name, there in backends.items() if there) or "none")
    table.add_row("bf16 on this CPU", _bf16())
    return table


def _bf16() -> str:
    """How bf16 matrix products compare with fp32 ones."""

    def seconds(dtype: torch.dtype) -> float:
        a = torch.randn(512, 512).to(dtype)
        a @ a
        start = time.perf_counter()
        for _ in range(10):
            a @ a
        return time.perf_counter() - start

    ratio = seconds(torch.float32) / seconds(torch.bfloat16)
    advice = "worth using (training.precision bf16)" if ratio > 1.2 else "not worth using here"
    return f"{ratio:.1f} × the speed of fp32, {advice}"


def _extras() -> Table:
    table = Table(title="extras")
    for column in ("extra", "package", "here"):
        table.add_column(column)
    for extra, packages in EXTRAS.items():
        for package in packages:
            table.add_row(extra, package, _version(package) or f"missing: pip install 'freerun\\[{extra}]'")
    return table


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "here"


def _links() -> None:
    """Send a few megabytes from each rank to the next, and say how fast and how soon they arrive."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for sender in range(world):
        receiver = (sender + 1) % world
        if world > 1 and rank in (sender, receiver):
            megabytes, milliseconds = _measure(rank == sender, receiver if rank == sender else sender)
            if rank == sender:
                print(
                    f"rank {sender} ({socket.gethostname()}) → rank {receiver}: "
                    f"{megabytes:,.0f} MB/s, round trip {milliseconds:.2f} ms",
                    flush=True,
                )
        dist.barrier()
    dist.destroy_process_group()


def _measure(sends: bool, other: int) -> tuple[float, float]:
    def exchange(size: int) -> float:
        there, back = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        start = time.perf_counter()
        if sends:
            dist.send(there, other)
            dist.recv(back, other)
        else:
            dist.recv(there, other)
            dist.send(back, other)
        return time.perf_counter() - start

    exchange(1)
    round_trip = min(exchange(1) for _ in range(10))
    bulk = min(exchange(4 * MEGABYTE) for _ in range(3))
    return 4 * MEGABYTE / 1e6 / bulk, round_trip * 1e3
