"""Checkpoints without a barrier: every process writes its own part when it gets there; complete ones can be resumed.

A checkpoint is a folder update-N with, for each process, a safetensors file and a JSON file beside it. The JSON file is
written last, so a part that has one is whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from freerun.errors import ConfigError
from freerun.files import write_beside, write_text
from freerun.mesh import Place

Tree = dict[str, Any]


def save(folder: Path, update: int, place: Place, state: Tree) -> None:
    """Write one process's part of checkpoint `update`."""
    here = _folder(folder, update)
    here.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    plain = _take_tensors(state, "", tensors)
    stem = here / _stem(place)
    write_beside(stem.with_suffix(".safetensors"), lambda beside: save_file(tensors, beside))
    write_text(stem.with_suffix(".json"), json.dumps(plain))


def load(folder: Path, update: int, place: Place) -> Tree:
    """Read one process's part of a checkpoint."""
    stem = _folder(folder, update) / _stem(place)
    tensors = load_file(stem.with_suffix(".safetensors"))
    state: Tree = _put_tensors(json.loads(stem.with_suffix(".json").read_text()), tensors)
    return state


def parts(folder: Path, place: Place) -> list[int]:
    """The updates of which this process's part is whole, oldest first."""
    found = [_update(path) for path in folder.glob(f"update-*/{_stem(place)}.json")]
    return sorted(found)


def complete(folder: Path, everyone: Iterable[Place]) -> list[int]:
    """The updates of which every process's part is whole, oldest first, as far as this machine sees."""
    return sorted(set.intersection(*(set(parts(folder, place)) for place in everyone)))


def newest(folder: Path, have: Iterable[Iterable[int]]) -> int:
    """The newest update of which every process has its part; `have` lists what each of them has."""
    common = set.intersection(*(set(updates) for updates in have))
    if not common:
        raise ConfigError(
            f"{folder} holds no checkpoint that is complete for this mesh; start without --resume, or resume with the "
            "pipeline.stages and replicas.count that the run was started with."
        )
    return max(common)


def prune(folder: Path, place: Place, everyone: list[Place], keep: int) -> None:
    """Remove this process's parts of checkpoints older than the newest `keep` complete ones."""
    have = complete(folder, everyone)
    if len(have) < keep:
        return
    for update in parts(folder, place):
        if update < have[-keep]:
            _remove(folder, update, place)
            with suppress(OSError):  # others still have parts in it, or have removed it
                _folder(folder, update).rmdir()


def drop_after(folder: Path, place: Place, update: int) -> None:
    """Remove this process's parts of newer checkpoints: a run that goes on from `update` will make them anew."""
    for newer in parts(folder, place):
        if newer > update:
            _remove(folder, newer, place)


def _remove(folder: Path, update: int, place: Place) -> None:
    stem = _folder(folder, update) / _stem(place)
    stem.with_suffix(".json").unlink()  # first, so that the part stops counting as whole
    stem.with_suffix(".safetensors").unlink()


def _folder(folder: Path, update: int) -> Path:
    return folder / f"update-{update:08d}"


def _update(part: Path) -> int:
    match = re.fullmatch(r"update-(\d+)", part.parent.name)
    return int(match.group(1)) if match else -1


def _stem(place: Place) -> str:
    return f"replica-{place.replica}-of-{place.replicas}-stage-{place.stage}-of-{place.stages}"


def _take_tensors(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with each tensor put aside under its path and replaced by a reference."""
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, dict):
        pairs = [[_plain_key(name), _take_tensors(child, f"{key}/{name}", tensors)] for name, child in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        return {"list": [_take_tensors(child, f"{key}/{index}", tensors) for index, child in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"a checkpoint can't hold {key}, a {type(value).__name__}")


def _plain_key(name: Any) -> int | str:
    if not isinstance(name, (int, str)):
        raise TypeError(f"a checkpoint can't hold the key {name!r}")
    return name


def _put_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {name: _put_tensors(child, tensors) for name, child in content}
    if kind == "list":
        return [_put_tensors(child, tensors) for child in content]
    return content
