"""Tokens that others have made are used where they lie."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from freerun.config import DataConfig
from freerun.data import build
from freerun.data.arrays import open_arrays, tokenizer_of
from freerun.data.sources import find
from freerun.errors import DataError

END = 99
TOKENS = np.array([1, 2, 3, END, 4, 5, END, 6, 7, 8, 9, END], np.int64)


@pytest.fixture
def config(tmp_path):
    return DataConfig(source="", vocabulary=100, cache=str(tmp_path / "cache"), eval_fraction=0)


def opened(config):
    return open_arrays(find(config), config, tokenizer_of(config))


def assert_tokens(config, documents=(0, 4, 7, 12)):
    arrays = opened(config)
    assert np.array_equal(np.concatenate(arrays.tokens), TOKENS)
    assert arrays.documents.tolist() == list(documents)
    rows = build(config, 11, 1, 0).train.rows
    tokens, labels = rows.gather(np.array([0]))
    assert tokens[0].tolist() == TOKENS[:-1].tolist() and labels[0].tolist() == TOKENS[1:].tolist()


def test_bin_as_nanogpt_writes_it(config, tmp_path):
    TOKENS.astype(np.uint16).tofile(tmp_path / "train.bin")
    assert_tokens(replace(config, source=str(tmp_path / "train.bin")))


def test_bin_with_the_header_of_llm_c(config, tmp_path):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(TOKENS)
    (tmp_path / "train.bin").write_bytes(header.tobytes() + TOKENS.astype(np.uint16).tobytes())
    assert_tokens(replace(config, source=str(tmp_path / "train.bin")))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64])
def test_npy_of_any_integers(config, tmp_path, dtype):
    np.save(tmp_path / "x.npy", TOKENS.astype(dtype))
    assert_tokens(replace(config, source=str(tmp_path / "x.npy")))


def test_several_files_follow_each_other(config, tmp_path):
    np.save(tmp_path / "0.npy", TOKENS[:5])
    np.save(tmp_path / "1.npy", TOKENS[5:])
    assert_tokens(replace(config, source=str(tmp_path / "*.npy")), documents=(0, 4, 5, 7, 12))


def test_megatron_says_itself_where_documents_begin(config, tmp_path):
    lengths = [3, 4, 5]  # not where END stands: the index decides
    TOKENS.astype(np.int32).tofile(tmp_path / "x.bin")
    pointers = np.cumsum([0, *lengths[:-1]]) * 4
    (tmp_path / "x.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 4)
        + np.array(lengths, np.int32).tobytes()
        + pointers.astype(np.int64).tobytes()
        + np.arange(4, dtype=np.int64).tobytes()
    )
    assert_tokens(replace(config, source=str(tmp_path / "x.bin")), documents=(0, 3, 7, 12))


def test_nothing_is_copied(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS.astype(np.uint16))
    arrays = opened(replace(config, source=str(tmp_path / "x.npy")))
    assert isinstance(arrays.tokens[0], np.memmap)
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


def test_the_second_opening_reads_nothing(config, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", TOKENS)
    named = replace(config, source=str(tmp_path / "x.npy"))
    first = opened(named)
    monkeypatch.setattr("freerun.data.arrays._scan", None)
    assert opened(named).content == first.content


def test_max_documents(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS)
    named = replace(config, source=str(tmp_path / "x.npy"))
    limited = replace(named, max_documents=2)
    assert opened(limited).documents.tolist() == [0, 4, 7]
    assert build(limited, 2, 1, 0).fingerprint != build(named, 2, 1, 0).fingerprint


def test_tokens_are_held_out_by_document(config, tmp_path):
    np.save(tmp_path / "x.npy", np.tile(np.array([1, 2, 3, 4, END]), 200))
    data = build(replace(config, source=str(tmp_path / "x.npy"), eval_fraction=0.2), 4, 8, 0)
    assert data.tokens % 5 == 0
    assert data.evaluation.rows.tokens == 1000 - data.tokens > 0


def test_without_a_tokenizer_text_is_the_ids(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS)
    tokenizer = build(replace(config, source=str(tmp_path / "x.npy")), 2, 1, 0).tokenizer
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (100, END)
    assert tokenizer.decode([4, 17, END]) == "4 17"
    assert tokenizer.encode("4 17").tolist() == [4, 17]
    for wrong in ("hello", "4 100", "-1"):
        with pytest.raises(DataError, match=r"data\."):
            tokenizer.encode(wrong)


@pytest.mark.parametrize(
    "options", [{"source": "gone/*.npy"}, {"source": "gone.bin"}, {"source": "x", "format": "tokens"}]
)
def test_the_vocabulary_is_known_when_the_data_is_gone(config, options):
    assert tokenizer_of(replace(config, **options)).vocabulary == 100


def test_the_vocabulary_of_text_is_the_tokenizers(config):
    assert tokenizer_of(replace(config, source="gone.txt", vocabulary=0)).vocabulary == 257


def test_257_ids_are_bytes(config, tmp_path):
    np.save(tmp_path / "x.npy", np.frombuffer(b"some text", np.uint8))
    data = build(replace(config, source=str(tmp_path / "x.npy"), vocabulary=257), 2, 1, 0)
    assert data.tokenizer.decode([115, 111]) == "so"


def refused(config, **options):
    with pytest.raises(DataError) as caught:
        build(replace(config, **options), 4, 1, 0)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_the_vocabulary_has_to_be_known(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS)
    assert "set data.vocabulary" in refused(config, source=str(tmp_path / "x.npy"), vocabulary=0)


def test_ids_beyond_the_vocabulary(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS)
    message = refused(config, source=str(tmp_path / "x.npy"), vocabulary=50)
    assert "holds the id 99; set data.vocabulary to at least 100" in message
    np.save(tmp_path / "y.npy", -TOKENS)
    assert "ids are not negative" in refused(config, source=str(tmp_path / "y.npy"))


@pytest.mark.parametrize("array", [np.ones((2, 3), np.int64), np.ones(3, np.float32), np.empty(0, np.int64)])
def test_arrays_that_are_no_tokens(config, tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    assert "tokens are one row of integers" in refused(config, source=str(tmp_path / "x.npy"))


def test_files_that_are_no_arrays(config, tmp_path):
    (tmp_path / "x.npy").write_text("text")
    assert "no NumPy array" in refused(config, source=str(tmp_path / "x.npy"))
    (tmp_path / "y.bin").write_bytes(b"1234")
    (tmp_path / "y.idx").write_bytes(b"something else")
    assert "no index of Megatron tokens" in refused(config, source=str(tmp_path / "y.bin"))


def test_pickles_are_refused(config, tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    assert "no NumPy array" in refused(config, source=str(tmp_path / "x.npy"))


def test_a_glob_that_does_not_tell_what_it_names(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS)
    assert "set data.format to tokens" in refused(config, source=str(tmp_path / "x*"))


def test_tokens_cannot_be_fine_tuned_on(config, tmp_path):
    np.save(tmp_path / "x.npy", TOKENS)
    assert "data.task sft" in refused(config, source=str(tmp_path / "x.npy"), task="sft")
