"""Reading pieces of files: text, or records with named fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from freerun.config import DataConfig
from freerun.data.extras import require
from freerun.data.sources import Piece, check_columns, find, pieces
from freerun.errors import DataError

Record = dict[str, Any]
Message = dict[str, str]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Place:
    """Where a record stands; lines are counted only when somebody wants to read it."""

    piece: Piece
    kind: str
    number: int

    def __str__(self) -> str:
        number = self.number + (_lines_before(self.piece) if self.kind == "line" else 0)
        return f"{self.kind} {number} of {self.piece.path!r}"


def read_bytes(piece: Piece) -> bytes:
    """The bytes of a piece of text or JSONL, without a byte order mark."""
    with Path(piece.path).open("rb") as file:
        file.seek(piece.start)
        content = file.read(piece.stop - piece.start)
    return content.removeprefix(_BYTE_ORDER_MARK) if piece.start == 0 else content


def read_text(piece: Piece) -> str:
    """The text of a piece; bytes that are no UTF-8 become U+FFFD."""
    return read_bytes(piece).decode("utf-8", "replace")


def records(format: str, piece: Piece, config: DataConfig) -> Iterator[tuple[Place, Record]]:
    """Where each record stands, for messages, and what it holds."""
    readers: dict[str, Callable[[Piece, DataConfig], Iterator[tuple[Place, Record]]]]
    readers = {"jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow}
    return readers[format](piece, config)


def _jsonl(piece: Piece, config: DataConfig) -> Iterator[tuple[Place, Record]]:
    for number, line in enumerate(read_bytes(piece).split(b"\n"), 1):
        if not line.strip():
            continue
        where = Place(piece, "line", number)
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"data.source: {where} is no JSON ({error}); JSONL has one object per line.") from None
        if not isinstance(record, dict):
            raise DataError(f"data.source: {where} is no JSON object; JSONL has one object per line.")
        check_columns(record, config, where)
        yield where, record


def _lines_before(piece: Piece) -> int:
    lines = 0
    with Path(piece.path).open("rb") as file:
        while (left := piece.start - file.tell()) > 0:
            lines += file.read(min(left, 1 << 20)).count(b"\n")
    return lines


def _wanted(columns: list[str], config: DataConfig) -> list[str]:
    wanted = [config.field] if config.task == "pretrain" else [config.prompt_field, config.response_field, "messages"]
    return [column for column in wanted if column in columns]


def _parquet(piece: Piece, config: DataConfig) -> Iterator[tuple[Place, Record]]:
    parquet = require("pyarrow.parquet", f"data.source {config.source!r}")
    with parquet.ParquetFile(piece.path) as file:
        groups = list(range(piece.start, piece.stop))
        number = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
        columns = _wanted(file.schema_arrow.names, config)
        for batch in file.iter_batches(batch_size=512, row_groups=groups, columns=columns):
            for record in batch.to_pylist():
                yield Place(piece, "row", number), record
                number += 1


def _arrow(piece: Piece, config: DataConfig) -> Iterator[tuple[Place, Record]]:
    datasets = require("datasets", f"data.source {config.source!r}")
    rows = datasets.Dataset.from_file(piece.path)
    rows = rows.select_columns(_wanted(rows.column_names, config)).select(range(piece.start, piece.stop))
    for number, record in enumerate(rows, piece.start):
        yield Place(piece, "row", number), record


def text_of(record: Record, where: Place, config: DataConfig) -> str:
    """The document in a record; a null counts as an empty one."""
    text = record[config.field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"data.field is {config.field!r}, but {where} holds {type(text).__name__} there; name a column of text."
        )
    return text


def messages_of(record: Record, where: Place, config: DataConfig) -> list[Message]:
    """The conversation in a record, as messages with role and content."""
    names = (config.prompt_field, config.response_field)
    if all(name in record for name in names):
        prompt, response = (record[name] for name in names)
        found: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    else:
        found = record["messages"]
    if not isinstance(found, list) or not all(_is_message(message) for message in found):
        raise DataError(
            f"data.source: {where} is no conversation; give text as {names[0]!r} and {names[1]!r}, "
            "or 'messages' as a list of objects with the texts 'role' and 'content'."
        )
    return found


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def documents(config: DataConfig) -> Iterator[str]:
    """The text of a config's documents one after the other; long files come in pieces."""
    return islice(_all_documents(config), config.max_documents or None)


def _all_documents(config: DataConfig) -> Iterator[str]:
    source = find(config)
    if source.format == "tokens":
        raise DataError(f"data.source is {config.source!r}, which holds tokens already; name text.")
    for piece in pieces(source, config):
        if source.format == "text":
            yield read_text(piece)
            continue
        for where, record in records(source.format, piece, config):
            if config.task == "sft":
                yield "\n".join(message["content"] for message in messages_of(record, where, config))
            else:
                yield text_of(record, where, config)
