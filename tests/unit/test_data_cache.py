"""The token cache: made once, never half, by one of many."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from freerun.config import DataConfig
from freerun.data import build, sources, tokenizing
from freerun.data.cache import cached
from freerun.errors import DataError


@pytest.fixture
def config(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text number {number}\n" * 50)
    return DataConfig(source=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"))


@pytest.fixture
def runs(monkeypatch):
    """The jobs that were really run."""
    done = []
    run = tokenizing.run_job
    monkeypatch.setattr(tokenizing, "run_job", lambda job: (done.append(job), run(job)))
    return done


def folders(config):
    return [path for path in Path(config.cache).iterdir() if path.is_dir()]


def test_the_second_build_does_not_tokenize(config, runs):
    first = build(config, 16, 4, 0)
    assert len(runs) == 1
    second = build(config, 16, 4, 0)
    assert len(runs) == 1
    assert first.fingerprint == second.fingerprint
    assert (first.train[5].tokens == second.train[5].tokens).all()


def test_another_context_split_or_seed_uses_the_same_cache(config, runs):
    build(config, 16, 4, 0)
    build(replace(config, eval_fraction=0.5), 32, 2, 9)
    assert len(runs) == 1


def test_a_changed_file_is_tokenized_again(config, runs):
    first = build(config, 16, 4, 0)
    Path(config.source).parent.joinpath("3.txt").write_text("something else\n" * 60)
    assert build(config, 16, 4, 0).fingerprint != first.fingerprint
    assert len(runs) == 2


@pytest.mark.parametrize("harm", ["truncate", "remove", "unsealed", "broken seal", "listless seal"])
def test_a_damaged_cache_is_made_again(config, runs, harm):
    first = build(config, 16, 4, 0)
    (folder,) = folders(config)
    seal, tokens = folder / "complete.json", folder / "tokens.bin"
    if harm == "truncate":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif harm == "remove":
        tokens.unlink()
    elif harm == "unsealed":
        seal.unlink()
    else:
        seal.write_text("{" if harm == "broken seal" else "[]")
    again = build(config, 16, 4, 0)
    assert len(runs) == 2
    assert again.fingerprint == first.fingerprint


def test_what_a_killed_process_left_is_removed(config):
    build(config, 16, 4, 0)
    (folder,) = folders(config)
    folder.rename(folder.with_name(f"{folder.name}.partial-0"))
    build(config, 16, 4, 0)
    assert folders(config) == [folder]


def test_a_failure_leaves_nothing_behind(tmp_path):
    def write(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        cached(tmp_path, {"a": 1}, write)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_key(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache is .*file"):
        build(replace(config, cache=str(tmp_path / "file" / "cache")), 16, 4, 0)


SCRIPT = """
import sys, time
from freerun.config import DataConfig
from freerun.data import build, tokenizing
run = tokenizing.run_job
def counted(job):
    with open(sys.argv[3], "a") as log: log.write("run\\n")
    time.sleep(1)  # long enough for the other to arrive
    run(job)
tokenizing.run_job = counted
print(build(DataConfig(source=sys.argv[1], cache=sys.argv[2]), 16, 4, 0).fingerprint)
"""


def test_of_two_processes_at_once_one_tokenizes_and_the_other_waits(config, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", SCRIPT, config.source, config.cache, str(log)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prints = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert prints[0] == prints[1]
    assert log.read_text() == "run\n"


def test_jobs_in_processes_of_their_own_give_the_same_tokens(config, tmp_path, monkeypatch):
    here = build(config, 16, 4, 0)
    monkeypatch.setattr(tokenizing, "_BYTES_IN_PROCESS", 0)
    monkeypatch.setattr(tokenizing, "_SMALL_JOB", 1)
    monkeypatch.setattr(tokenizing, "_LARGE_JOB", 1000)
    monkeypatch.setattr(tokenizing, "run_job", None)
    elsewhere = build(replace(config, cache=str(tmp_path / "other")), 16, 4, 0, progress=True)
    assert elsewhere.fingerprint == here.fingerprint


def test_a_bad_record_in_another_process_is_the_same_sentence(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": "some text"}) + "\n" for _ in range(50)) + '{"text": 3}\n')
    monkeypatch.setattr(tokenizing, "_BYTES_IN_PROCESS", 0)
    monkeypatch.setattr(tokenizing, "_SMALL_JOB", 1)
    monkeypatch.setattr(sources, "PIECE_BYTES", 500)
    with pytest.raises(DataError, match=r"^data\.field is 'text', but line 51 of .* holds int there"):
        build(DataConfig(source=str(path), cache=str(tmp_path / "cache")), 8, 1, 0)


def test_a_crash_in_another_process_is_an_error(config, monkeypatch):
    monkeypatch.setattr(tokenizing, "_BYTES_IN_PROCESS", 0)
    monkeypatch.setattr(tokenizing, "_SMALL_JOB", 1)
    monkeypatch.setattr(tokenizing.Job, "to_json", lambda job: "nonsense")
    with pytest.raises(DataError, match=r"Tokenizing .* failed"):
        build(config, 16, 4, 0)
