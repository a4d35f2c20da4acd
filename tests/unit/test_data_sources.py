"""Every kind of source, and the sentence for everything that can be wrong with one."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freerun.config import DataConfig
from freerun.data import build, sources
from freerun.data.records import documents
from freerun.errors import DataError

TEXTS = ["first document, plain", "zweites Dokument: äöü", "third 文書 with 😀", "the fourth and last one"]


@pytest.fixture
def config(tmp_path):
    """A config without a source; every test names its own."""
    return DataConfig(source="", cache=str(tmp_path / "cache"), eval_fraction=0)


def learnt(config, context=4):
    """The documents that training sees, put together again from its blocks."""
    data = build(config, context, 1, 0)
    tokens, labels = data.train.rows.gather(np.arange(data.train.epoch_length))
    stream = [int(tokens[0, 0]), *labels.ravel().tolist()]
    texts, start = [], 0
    for place, token in enumerate(stream):
        if token == data.tokenizer.end_of_text:
            texts.append(data.tokenizer.decode(stream[start:place]))
            start = place + 1
    return [*texts, data.tokenizer.decode(stream[start:])]


def assert_all_texts(config):
    found = learnt(config)
    assert found[:3] == TEXTS[:3]
    assert TEXTS[3].startswith(found[3])  # less than one context may be cut from the end
    assert list(documents(config)) == TEXTS


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_standard_library_is_always_there_in_a_fixed_order(config):
    source = sources.find(replace(config, source="python-stdlib"))
    names = [path.as_posix() for path in source.files]
    assert len(names) > 100
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert source == sources.find(replace(config, source="python-stdlib"))


def test_a_glob_of_text_files_is_read_in_the_order_of_names(config, tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    assert_all_texts(replace(config, source=str(tmp_path / "*.txt")))


def test_a_recursive_glob_and_empty_files_are_fine(config, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "0.txt").write_text("")
    for number, text in enumerate(TEXTS):
        (tmp_path / "a" / "b" / f"{number}.md").write_text(text, encoding="utf-8")
    assert learnt(replace(config, source=str(tmp_path / "**" / "*.*")))[:3] == TEXTS[:3]


def test_bytes_that_are_no_utf8_are_replaced_and_a_byte_order_mark_is_dropped(config, tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 au lait")
    assert list(documents(replace(config, source=str(tmp_path / "x.txt")))) == ["caf\ufffd au lait"]


def test_jsonl(config, tmp_path):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    assert_all_texts(replace(config, source=write_jsonl(tmp_path / "x.jsonl", rows)))


def test_jsonl_with_another_field_ending_blank_lines_and_null(config, tmp_path):
    rows = [{"body": text} for text in TEXTS]
    path = write_jsonl(tmp_path / "x.data", [*rows[:2], {"body": None}, *rows[2:]])
    with Path(path).open("a") as file:
        file.write("\n\n")
    found = learnt(replace(config, source=path, format="jsonl", field="body"))
    assert found[:3] == TEXTS[:3]


def write_parquet(path, rows, **options):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


def test_parquet_with_several_row_groups(config, tmp_path):
    rows = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
    assert_all_texts(replace(config, source=write_parquet(tmp_path / "x.parquet", rows, row_group_size=3)))


@pytest.fixture
def hugging_face_home(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def test_hugging_face_datasets(config, tmp_path, hugging_face_home):
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": text} for text in TEXTS])
    assert_all_texts(replace(config, source=f"hf:{tmp_path / 'set'}"))


def test_max_documents_takes_the_first(config, tmp_path):
    rows = [{"text": text} for text in TEXTS]
    for path in (write_jsonl(tmp_path / "x.jsonl", rows), write_parquet(tmp_path / "x.parquet", rows)):
        limited = replace(config, source=path, max_documents=2)
        assert learnt(limited, context=1)[:2] == TEXTS[:2]
        assert len(build(limited, 1, 1, 0).train.rows._arrays[0]) == sum(len(text.encode()) + 1 for text in TEXTS[:2])
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    limited = replace(config, source=str(tmp_path / "*.txt"), max_documents=2)
    assert list(documents(limited)) == TEXTS[:2]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1), step=st.integers(1, 40))
def test_pieces_of_a_file_are_the_file(lines, step, config, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", step)
    path = tmp_path / "x.txt"
    path.write_bytes("\n".join(lines).encode())
    named = replace(config, source=str(path))
    pieces = sources.pieces(sources.find(named), named)
    assert "".join(documents(named)) == "\n".join(lines).removeprefix("\ufeff")
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


def test_a_document_may_go_on_over_many_jobs(config, tmp_path, monkeypatch):
    from freerun.data import tokenizing

    text = "".join(f"line {number}\n" for number in range(200))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(text + name)
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    monkeypatch.setattr(tokenizing, "_SMALL_JOB", 300)
    monkeypatch.setattr(tokenizing, "_LARGE_JOB", 300)
    assert learnt(replace(config, source=str(tmp_path / "*.txt")), context=1)[:2] == [text + "a", text + "b"]


def refused(config, **options):
    with pytest.raises(DataError) as caught:
        build(replace(config, **options), 4, 1, 0)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_a_source_that_is_not_there(config, tmp_path):
    message = refused(config, source=str(tmp_path / "nothing*.txt"))
    assert (
        message.startswith("data.source is ") and "matches no file" in message and "python-stdlib or hf:NAME" in message
    )


def test_a_folder(config, tmp_path):
    assert "a folder; name its files with a glob" in refused(config, source=str(tmp_path))


def test_an_ending_that_says_nothing(config, tmp_path):
    (tmp_path / "x.png").write_bytes(b"picture")
    assert "set data.format to text, jsonl, parquet or tokens" in refused(config, source=str(tmp_path / "x.png"))


def test_files_of_several_formats(config, tmp_path):
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "x.jsonl").write_text("{}")
    assert "several formats" in refused(config, source=str(tmp_path / "x.*"))


def test_empty_sources(config, tmp_path):
    (tmp_path / "x.txt").write_text("")
    assert "holds no text" in refused(config, source=str(tmp_path / "x.txt"))
    assert "holds no text" in refused(config, source=write_jsonl(tmp_path / "x.jsonl", [{"text": ""}]))
    (tmp_path / "x.npy").write_text("")
    assert "is empty" in refused(config, source=str(tmp_path / "x.npy"), vocabulary=10)


def test_a_wrong_column_is_answered_with_the_right_ones(config, tmp_path, hugging_face_home):
    rows = [{"content": "text", "id": 1}]
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", rows)
    for source in (
        write_jsonl(tmp_path / "x.jsonl", rows),
        write_parquet(tmp_path / "x.parquet", rows),
        f"hf:{tmp_path / 'set'}",
    ):
        message = refused(config, source=source)
        assert message.startswith("data.field is 'text', but ") and "'content', 'id'" in message


def test_a_column_that_is_no_text(config, tmp_path):
    message = refused(config, source=write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": 7}]))
    assert "line 2 of" in message and "holds int there" in message


@pytest.mark.parametrize("line", ["{not json", "[1, 2]", '"text"'])
def test_lines_that_are_no_objects(config, tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n")
    message = refused(config, source=str(tmp_path / "x.jsonl"))
    assert "line 3 of" in message and "JSONL has one object per line" in message


def test_a_file_that_is_no_parquet(config, tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_text("text")
    assert "no Parquet file" in refused(config, source=str(tmp_path / "x.parquet"))


def test_a_dataset_that_is_not_there(config, hugging_face_home):
    message = refused(config, source="hf:nobody-here/nothing-there")
    assert "data.source is 'hf:nobody-here/nothing-there'" in message


def test_a_missing_package_names_the_extra(config, tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", [{"text": "a"}])
    monkeypatch.setattr("freerun.data.extras.import_module", missing)
    assert "pip install 'freerun[hf]'" in refused(config, source=path)
    assert "needs the package datasets" in refused(config, source="hf:name")


def missing(module):
    raise builtins.ImportError(module)


def test_tokens_have_no_text_to_train_a_tokenizer_on(config, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10))
    with pytest.raises(DataError, match="holds tokens already"):
        list(documents(replace(config, source=str(tmp_path / "x.npy"))))
