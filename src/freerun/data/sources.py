"""Which files a config names, what they hold, and how they are cut into pieces of work."""

from __future__ import annotations

import glob
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freerun.config import DataConfig
from freerun.data.extras import require
from freerun.errors import DataError

PIECE_BYTES = 8 << 20
"""A file is read in pieces of about this size; where they begin depends on the file alone."""

_ENDINGS = {
    "text": (
        "", ".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".log", ".toml",
        ".yaml", ".yml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js",
        ".ts", ".sh", ".sql", ".lua", ".rb", ".php", ".swift", ".kt", ".scala", ".hs", ".ml", ".jl", ".r",
    ),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "tokens": (".bin", ".npy"),
}  # fmt: skip
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """The files of a config in a fixed order, all of one format: text, jsonl, parquet, arrow or tokens."""

    name: str
    format: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes (text, jsonl), row groups (parquet) or rows (arrow) from start to before stop."""

    path: str
    start: int
    stop: int
    weight: int
    """About how many bytes that is."""
    last: bool
    """The file ends here."""


def find(config: DataConfig) -> Source:
    """The files that data.source names."""
    name = config.source
    if name == "python-stdlib":
        return Source(name, "text", _python_stdlib())
    if name.startswith("hf:") or config.format == "hf":
        return Source(name, "arrow", _hugging_face(config))
    files = _files(name)
    if config.format != "auto":
        return Source(name, config.format, files)
    formats = {_format_by_ending(path): path for path in files}
    if len(formats) > 1:
        examples = " and ".join(repr(str(path)) for path in formats.values())
        raise DataError(f"data.source {name!r} names files of several formats ({examples}); set data.format.")
    if "tokens" in formats and not names_tokens(config):
        raise DataError(f"data.source {name!r} names files of tokens, as {str(files[0])!r}; set data.format to tokens.")
    return Source(name, next(iter(formats)), files)


def names_tokens(config: DataConfig) -> bool:
    """Whether the source holds tokens already, told without looking: a trained model outlives its data."""
    ending = Path(config.source).suffix.lower()
    return config.format == "tokens" or (config.format == "auto" and ending in _ENDINGS["tokens"])


def _python_stdlib() -> tuple[Path, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not _STDLIB_SKIPPED & set(path.relative_to(root).parts)]
    if not found:
        raise DataError(
            f"data.source is 'python-stdlib', but this Python keeps no source files in {str(root)!r}; "
            "give a file or a glob of text files."
        )
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _files(name: str) -> tuple[Path, ...]:
    path = Path(name).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        raise DataError(f"data.source is {name!r}, a folder; name its files with a glob such as '{name}/**/*.txt'.")
    found = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 (the pattern may be absolute)
    files = tuple(match for match in found if match.is_file())
    if not files:
        raise DataError(
            f"data.source is {name!r}, which matches no file; "
            "give a file, a glob such as 'texts/*.txt' in quotes, python-stdlib or hf:NAME."
        )
    return files


def _format_by_ending(path: Path) -> str:
    for kind, endings in _ENDINGS.items():
        if path.suffix.lower() in endings:
            return kind
    raise DataError(
        f"data.source names {str(path)!r}, whose ending data.format auto does not know; "
        "set data.format to text, jsonl, parquet or tokens."
    )


def _hugging_face(config: DataConfig) -> tuple[Path, ...]:
    """The Arrow files of a dataset's train split, downloaded and prepared by the datasets library if need be."""
    datasets = require("datasets", f"data.source {config.source!r}")
    name, _, subset = config.source.removeprefix("hf:").partition(":")
    try:
        dataset = datasets.load_dataset(name, subset or None, split="train")
    except Exception as error:  # the library raises many kinds, from many layers
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"data.source is {config.source!r}, whose train split could not be loaded ({reason}); "
            "give hf:NAME or hf:NAME:SUBSET as on the hub, or hf: and a folder."
        ) from None
    check_columns(dataset.column_names, config, f"{config.source!r}")
    files = tuple(Path(entry["filename"]) for entry in dataset.cache_files)
    if not files:
        raise DataError(f"data.source is {config.source!r}, which has no rows in its train split.")
    return files


def check_columns(columns: Iterable[str], config: DataConfig, where: object) -> None:
    """Refuse records that lack what the task reads."""
    present = set(columns)
    if config.task == "pretrain" and config.field not in present:
        raise DataError(
            f"data.field is {config.field!r}, but {where} has only {_list(present)}; set data.field to one of these."
        )
    if config.task == "sft" and not ({config.prompt_field, config.response_field} <= present or "messages" in present):
        raise DataError(
            f"data.prompt_field and data.response_field are {config.prompt_field!r} and {config.response_field!r}, "
            f"but {where} has only {_list(present)}; set them to two of these, or give a column 'messages'."
        )


def _list(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"


def pieces(source: Source, config: DataConfig) -> list[Piece]:
    """All the work there is, in the order of the documents."""
    cut = {"text": _byte_pieces, "jsonl": _byte_pieces, "parquet": _row_groups, "arrow": _arrow_rows}[source.format]
    files = source.files
    if source.format == "text" and config.max_documents:
        files = tuple(path for path in files if path.stat().st_size)[: config.max_documents]
    try:
        return [piece for path in files for piece in cut(path, config)]
    except OSError as error:
        raise DataError(f"data.source {source.name!r} can't be read ({error}).") from None


def _byte_pieces(path: Path, config: DataConfig) -> Iterator[Piece]:
    """Cut before lines that begin with something visible: neither UTF-8 nor a byte-level tokenizer notices."""
    size = path.stat().st_size
    start = 0
    with path.open("rb") as file:
        while start < size:
            stop = _line_start(file, start + PIECE_BYTES, size)
            yield Piece(str(path), start, stop, stop - start, stop == size)
            start = stop


def _line_start(file: Any, position: int, size: int) -> int:
    file.seek(position)
    while block := file.read(1 << 16):
        if boundary := re.search(rb"\n(?=\S)", block):
            return int(position + boundary.end())
        position += len(block)
    return size


def _row_groups(path: Path, config: DataConfig) -> Iterator[Piece]:
    parquet = require("pyarrow.parquet", f"data.source {config.source!r}")
    arrow = require("pyarrow", f"data.source {config.source!r}")
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise DataError(f"data.source names {str(path)!r}, which is no Parquet file ({error}).") from None
    with file:
        check_columns(file.schema_arrow.names, config, repr(str(path)))
        groups = file.metadata.num_row_groups
        for group in range(groups):
            weight = file.metadata.row_group(group).total_byte_size
            yield Piece(str(path), group, group + 1, weight, group + 1 == groups)


def _arrow_rows(path: Path, config: DataConfig) -> Iterator[Piece]:
    datasets = require("datasets", f"data.source {config.source!r}")
    rows = len(datasets.Dataset.from_file(str(path)))
    size = path.stat().st_size
    step = max(1, rows * PIECE_BYTES // max(size, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield Piece(str(path), start, stop, size * (stop - start) // rows, stop == rows)
