"""All documents of a config as one long row of token ids on disk, made in parallel, once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freerun.config import DataConfig
from freerun.data.cache import cached
from freerun.data.chat import Chat, chat_template
from freerun.data.records import messages_of, read_text, records, text_of
from freerun.data.sources import Piece, Source, pieces
from freerun.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from freerun.errors import DataError

VERSION = 1
"""Part of every cache's key: raise it when the same input gives other tokens or another layout."""

_SMALL_JOB, _LARGE_JOB = 2 << 20, 32 << 20
_BYTES_IN_PROCESS = 256 << 20  # bytes need no work: below this, starting processes would take longer


@dataclass(frozen=True)
class Tokenized:
    """Tokens of all documents, and where each document begins; memory-mapped."""

    tokens: NDArray[Any]
    documents: NDArray[np.int64]
    """Where each document begins, and after the last one where it ends."""
    learn: NDArray[np.uint8] | None
    """Task sft: 1 for each token that is part of a response."""
    content: str
    """A hash of all of it."""


@dataclass(frozen=True)
class Job:
    """What one process tokenizes in one go: pieces of files, to files whose names begin with `output`."""

    config: DataConfig
    format: str
    pieces: tuple[Piece, ...]
    output: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        config, parts = DataConfig(**fields["config"]), tuple(Piece(**piece) for piece in fields["pieces"])
        return Job(config, fields["format"], parts, fields["output"])


Result = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint8]]
"""Tokens, where documents begin in them, and which tokens are learnt (empty where all are)."""


def tokenized(source: Source, config: DataConfig, tokenizer: Tokenizer, progress: bool) -> Tokenized:
    """The tokens of a source, from the cache or made now.

    The cache's key has the files' paths, sizes and times of change rather than their content: it is known without
    reading a byte, however large the data. The content's hash is taken when the tokens are written, and kept.
    """
    if source.format in ("text", "tokens") and config.task == "sft":
        raise DataError(
            f"data.task sft needs prompts and responses, but data.source {source.name!r} holds {source.format}; "
            "give JSONL, Parquet or hf:NAME."
        )
    template = chat_template(config, tokenizer) if config.task == "sft" else ""
    columns = [config.field] if config.task == "pretrain" else [config.prompt_field, config.response_field]
    description = {
        "version": VERSION,
        "files": stamps(source),
        "format": source.format,
        "task": config.task,
        "columns": columns if source.format != "text" else [],
        "chat_template": template,
        "max_documents": config.max_documents,
        "tokenizer": tokenizer.fingerprint,
    }
    if isinstance(tokenizer, HuggingFaceTokenizer):  # so that no process asks the hub again
        config = replace(config, tokenizer=tokenizer.path)
    config = replace(config, chat_template=template)
    root = Path(config.cache).expanduser()
    folder = cached(root, description, lambda path: _write(path, source, config, tokenizer, progress))
    return _open(folder, np.dtype(_dtype(tokenizer)), config)


def stamps(source: Source) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file."""
    found = ((path.resolve(), path.stat()) for path in source.files)
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32


def _open(folder: Path, dtype: np.dtype[Any], config: DataConfig) -> Tokenized:
    content = json.loads((folder / "content.json").read_text(encoding="utf-8"))["sha256"]
    learn = np.memmap(folder / "learn.bin", np.uint8, "r") if config.task == "sft" else None
    documents = np.load(folder / "documents.npy", mmap_mode="r", allow_pickle=False)
    return Tokenized(np.memmap(folder / "tokens.bin", dtype, "r"), documents, learn, content)


def _write(folder: Path, source: Source, config: DataConfig, tokenizer: Tokenizer, progress: bool) -> None:
    """Run all jobs and put their results one behind the other."""
    jobs = _jobs(pieces(source, config), config, source.format, folder)
    results = _run(jobs, isinstance(tokenizer, BytesTokenizer), progress)
    limit = config.max_documents if source.format != "text" else 0  # files beyond the limit are not even listed
    digest = hashlib.sha256()
    starts: list[NDArray[np.int64]] = []
    documents = length = 0
    tokens_path, learn_path = folder / "tokens.bin", folder / "learn.bin"
    with closing(results), tokens_path.open("wb") as tokens_file, learn_path.open("wb") as learn_file:
        for tokens, begun, learn in results:
            if limit and documents + len(begun) > limit:
                keep = limit - documents
                tokens, learn, begun = tokens[: begun[keep]], learn[: begun[keep]], begun[:keep]
            tokens_file.write(tokens.data)
            learn_file.write(learn.data)
            digest.update(tokens.data)
            digest.update(learn.data)
            starts.append(begun + length)
            documents, length = documents + len(begun), length + len(tokens)
            if limit and documents >= limit:
                break
    for leftover in folder.glob("job-*"):
        leftover.unlink()
    if not length:
        raise DataError(f"data.source is {source.name!r}, which holds no text.")
    ends = np.concatenate([*starts, np.array([length], np.int64)])
    digest.update(ends.data)
    np.save(folder / "documents.npy", ends, allow_pickle=False)
    (folder / "content.json").write_text(json.dumps({"sha256": digest.hexdigest()}), encoding="utf-8")


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _jobs(work: list[Piece], config: DataConfig, format: str, folder: Path) -> list[Job]:
    """Neighbouring pieces together, so that there are a few jobs for each processor, and none is tiny."""
    total = sum(piece.weight for piece in work)
    largest = _SMALL_JOB if config.max_documents else _LARGE_JOB  # jobs that may not be needed should be short
    target = min(max(total // (4 * _workers()), _SMALL_JOB), largest)
    groups: list[list[Piece]] = []
    filled = target
    for piece in work:
        if filled >= target:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.weight
    return [Job(config, format, tuple(group), str(folder / f"job-{n}")) for n, group in enumerate(groups)]


def _run(jobs: list[Job], cheap: bool, progress: bool) -> Generator[Result, None, None]:
    """The jobs' results in order, each as soon as it is there; no more are started when the caller stops asking."""
    from rich.progress import Progress  # here, because the processes that tokenize need no rich

    total = sum(piece.weight for job in jobs for piece in job.pieces)
    here = len(jobs) < 2 or (cheap and total < _BYTES_IN_PROCESS)
    pool = ThreadPoolExecutor(1 if here else _workers())
    with Progress(disable=not progress) as bar:
        task = bar.add_task("Tokenizing", total=total)
        try:
            for job, done in [(job, pool.submit(run_job if here else _run_elsewhere, job)) for job in jobs]:
                done.result()
                bar.advance(task, sum(piece.weight for piece in job.pieces))
                yield _take(job)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_elsewhere(job: Job) -> None:
    """Run a job in a process of its own.

    A plain command instead of multiprocessing, whose processes import the main script again (which fails without a
    __main__ guard, or from standard input) and may not be started by its own daemons, as ranks can be.
    """
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "freerun.data.worker"],
        input=job.to_json(),
        env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode == DataError.exit_code:
        raise DataError(done.stderr.strip())
    if done.returncode:
        reason = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise DataError(f"Tokenizing {job.pieces[0].path!r} failed ({reason}).")


def run_job(job: Job) -> None:
    """Tokenize the pieces of a job and write the result beside `job.output`."""
    tokenizer = load_tokenizer(job.config.tokenizer)
    encoded = _encode_text(job, tokenizer) if job.format == "text" else _encode_records(job, tokenizer)
    dtype = _dtype(tokenizer)
    tokens: list[NDArray[Any]] = [np.empty(0, dtype)]
    learn: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    starts: list[int] = []
    length = 0
    for ids, learnt, begins in encoded:
        if begins:
            starts.append(length)
        tokens.append(ids.astype(dtype))
        learn.append(learnt)
        length += len(ids)
    np.save(f"{job.output}.tokens.npy", np.concatenate(tokens), allow_pickle=False)
    np.save(f"{job.output}.starts.npy", np.array(starts, np.int64), allow_pickle=False)
    np.save(f"{job.output}.learn.npy", np.concatenate(learn), allow_pickle=False)


_Encoded = tuple[NDArray[Any], NDArray[np.uint8], bool]
"""Some tokens, which of them are learnt (empty where all are), and whether a document begins with them."""


def _encode_text(job: Job, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """A file is a document, which may have begun in an earlier job and end in a later one."""
    for piece in job.pieces:
        ids = tokenizer.encode(read_text(piece))
        if piece.last:
            ids = np.append(ids, ids.dtype.type(tokenizer.end_of_text))
        yield ids, np.empty(0, np.uint8), piece.start == 0


def _encode_records(job: Job, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    chat = Chat(tokenizer, job.config.chat_template) if job.config.task == "sft" else None
    left = job.config.max_documents or sys.maxsize
    for piece in job.pieces:
        for where, record in records(job.format, piece, job.config):
            if chat is not None:
                ids, learn = chat.encode(messages_of(record, where, job.config))
            else:
                ids, learn = _with_end(tokenizer, text_of(record, where, job.config)), np.empty(0, np.uint8)
            if len(ids) and left:
                left -= 1
                yield ids, learn, True
            if not left:
                return


def _with_end(tokenizer: Tokenizer, text: str) -> NDArray[Any]:
    ids = tokenizer.encode(text)
    return np.append(ids, ids.dtype.type(tokenizer.end_of_text)) if len(ids) else ids


def _take(job: Job) -> Result:
    """Read a job's result and remove its files."""
    names = [Path(f"{job.output}.{kind}.npy") for kind in ("tokens", "starts", "learn")]
    tokens, starts, learn = (np.load(name, allow_pickle=False) for name in names)
    for name in names:
        name.unlink()
    return tokens, starts, learn
