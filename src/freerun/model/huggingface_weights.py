"""Reading a stage's own tensors out of safetensors files, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from freerun.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RENAMED = {"lm_head.weight": "embed_out.weight"}
"""Names that a file may use instead of today's."""


def fetch(source: str, name: str) -> Path | None:
    """A file of a local folder or of a model on the hub; None when the model has no such file."""
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except EntryNotFoundError:
        return None


def locate(source: str) -> Mapping[str, str]:
    """Which file each tensor of the model is in."""
    index = fetch(source, INDEX)
    if index:
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return files
    single = fetch(source, SINGLE)
    if not single:
        raise ConfigError(
            f"model.pretrained is {source!r}, which has no {SINGLE}; freerun reads safetensors only, never pickles."
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def name_in_file(name: str, prefix: str, files: Mapping[str, str]) -> str | None:
    """The name a file gives to a parameter: its own, one without the base model's prefix, or an older one."""
    candidates = (name, name.removeprefix(f"{prefix}."), RENAMED.get(name, name))
    return next((candidate for candidate in candidates if candidate in files), None)


def read_tensors(source: str, names: Iterable[str], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, one at a time, each file opened once."""
    files = locate(source)
    wanted: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        stored = name_in_file(name, prefix, files)
        if stored is None:
            raise ConfigError(f"model.pretrained is {source!r}, whose files have no tensor named {name}.")
        wanted.setdefault(files[stored], []).append((name, stored))
    for shard, pairs in wanted.items():
        path = fetch(source, shard)
        if path is None:
            raise ConfigError(f"model.pretrained is {source!r}, whose file {shard} is missing.")
        with safe_open(path, framework="pt") as file:
            for name, stored in pairs:
                yield name, file.get_tensor(stored)
