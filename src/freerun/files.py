"""Files that are either there whole or not there: written beside, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file under another name, and rename it once it is on disk."""
    beside = path.with_name(f".{path.name}.part")
    write(beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    write_beside(path, lambda beside: beside.write_text(text, encoding="utf-8"))
