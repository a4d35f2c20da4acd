"""Folders that are made once: whoever comes first makes one, everybody else waits, nobody sees half of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from freerun.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: two may do the same work, the rename below still lets only one result be seen
    fcntl = None  # type: ignore[assignment]

_SEAL = "complete.json"


def cached(root: Path, description: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """The folder inside `root` that holds what `write` makes of everything that `description` says.

    `write` fills an empty folder, which is then sealed with the sizes of its files and renamed. A folder whose seal is
    missing or wrong is made again.
    """
    name = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
    folder = root / name
    if _complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock"):
            if not _complete(folder):
                _make(folder, description, write)
    except OSError as error:
        raise DataError(f"data.cache is {str(root)!r}, where tokens can't be written ({error}).") from None
    return folder


def _complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _SEAL).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(folder: Path, description: dict[str, Any], write: Callable[[Path], None]) -> None:
    if fcntl is not None:  # the lock is ours, so these are leftovers of processes that were killed
        for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.partial-{uuid4().hex}")
    partial.mkdir()
    try:
        write(partial)
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        seal = {"description": description, "sizes": sizes}
        (partial / _SEAL).write_text(json.dumps(seal, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            partial.replace(folder)
        except OSError:
            if not _complete(folder):  # otherwise somebody without a lock was faster, with the same result
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases even if this process is killed."""
    with path.open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
