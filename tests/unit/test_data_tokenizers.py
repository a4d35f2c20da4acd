"""Tokenizers: text survives, names are found, streams never show half a character."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.config import DataConfig
from freerun.data import StreamDecoder, build, load_tokenizer, train_tokenizer
from freerun.data.tokenizer import BytesTokenizer
from freerun.errors import ConfigError, DataError

TEXT = "the quick brown fox jumps over the lazy dog, naïve café, 文書を読む 😀 𝄞\n" * 20
texts = st.text(st.characters(codec="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small tokenizer.json, trained by freerun itself."""
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    train_tokenizer(DataConfig(source=str(root / "text.txt")), 320, root / "bpe")
    return root / "bpe"


@pytest.fixture(scope="module")
def tokenizers(folder):
    return [BytesTokenizer(), load_tokenizer(str(folder))]


@settings(deadline=None)
@given(text=texts)
def test_text_survives_encoding_and_decoding(tokenizers, text):
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocabulary and token != tokenizer.end_of_text for token in ids)


@settings(deadline=None)
@given(text=texts)
def test_a_stream_shows_the_text_and_never_half_a_character(tokenizers, text):
    for tokenizer in tokenizers:
        stream = StreamDecoder(tokenizer)
        shown = ""
        for token in tokenizer.encode(text):
            shown += stream.push(int(token))
            assert text.startswith(shown)
        assert shown + stream.flush() == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 256)))
def test_a_stream_of_garbage_ends_where_decoding_at_once_ends(ids):
    tokenizer = BytesTokenizer()
    stream = StreamDecoder(tokenizer)
    shown = "".join(stream.push(token) for token in ids) + stream.flush()
    assert shown.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")


def test_garbage_is_shown_after_a_while():
    stream = StreamDecoder(BytesTokenizer())
    assert any(stream.push(255) for _ in range(20))


def test_what_is_not_unicode_in_a_string_is_replaced():
    assert BytesTokenizer().encode("\ud800").tolist() == [ord("?")]


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 256, 98]) == "ab"


def test_training_makes_a_tokenizer_that_compresses(folder):
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocabulary <= 320
    assert len(tokenizer.encode(TEXT)) < 0.6 * len(TEXT.encode())
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


def test_training_twice_gives_the_same_tokenizer(folder, tmp_path):
    source = str(folder.parent / "text.txt")
    path = train_tokenizer(DataConfig(source=source), 320, tmp_path / "again.json")
    assert path == tmp_path / "again.json"
    assert load_tokenizer(str(path)).fingerprint == load_tokenizer(str(folder)).fingerprint
    assert [found.name for found in tmp_path.iterdir()] == ["again.json"]


def test_file_folder_and_fingerprint_agree(folder):
    by_file, by_folder = load_tokenizer(str(folder / "tokenizer.json")), load_tokenizer(str(folder))
    assert by_file.fingerprint == by_folder.fingerprint != load_tokenizer("bytes").fingerprint


def test_the_tokenizer_loads_in_transformers_and_gives_the_same_ids(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert theirs.encode(TEXT) == load_tokenizer(str(folder)).encode(TEXT).tolist()


def edited(folder, target, change):
    """A copy of the tokenizer whose tokenizer.json was changed."""
    shutil.copytree(folder, target)
    content = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (target / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return str(target)


def test_truncation_and_padding_set_in_the_file_are_ignored(folder, tmp_path):
    def limit(content):
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        content["padding"] = {
            "strategy": {"Fixed": 4000}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
        }  # fmt: skip

    limited = load_tokenizer(edited(folder, tmp_path / "limited", limit))
    assert limited.encode(TEXT).tolist() == load_tokenizer(str(folder)).encode(TEXT).tolist()


def test_long_texts_are_cut_without_changing_a_token(folder, monkeypatch):
    tokenizer = load_tokenizer(str(folder))
    whole = tokenizer.encode(TEXT)
    monkeypatch.setattr("freerun.data.tokenizer._PIECE", 100)
    assert np.array_equal(tokenizer.encode(TEXT), whole)


def test_the_end_of_text_is_the_one_that_the_folder_names(folder, tmp_path):
    def add(content):
        content["added_tokens"].append({
            "id": 900, "content": "<stop>", "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        })  # fmt: skip

    path = edited(folder, tmp_path / "named", add)
    plain = load_tokenizer(path)
    (tmp_path / "named" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    named = load_tokenizer(path)
    stop = named.backend.token_to_id("<stop>")
    assert (plain.end_of_text, named.end_of_text) == (0, stop)
    assert named.vocabulary == stop + 1
    assert named.fingerprint != plain.fingerprint


def test_text_is_trained_on_with_such_a_tokenizer(folder, tmp_path):
    source = str(folder.parent / "text.txt")
    config = DataConfig(source=source, tokenizer=str(folder), cache=str(tmp_path / "cache"))
    data = build(config, 16, 2, 0)
    assert data.tokenizer.decode(data.train.rows.gather(np.array([0]))[0][0]) in TEXT
    assert data.fingerprint != build(replace(config, tokenizer="bytes"), 16, 2, 0).fingerprint


def refused(name):
    with pytest.raises(DataError) as caught:
        load_tokenizer(name)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_a_tokenizer_that_is_not_there(tmp_path):
    assert "give bytes, a tokenizer.json" in refused(str(tmp_path / "no.json"))


def test_a_folder_without_a_tokenizer(tmp_path):
    assert "has no tokenizer.json" in refused(str(tmp_path))


def test_a_file_that_is_no_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is no tokenizer.json" in refused(str(tmp_path))


def test_a_tokenizer_without_an_end_of_text(folder, tmp_path):
    def rename(content):
        content["added_tokens"][0]["content"] = "<odd>"
        vocabulary = content["model"]["vocab"]
        vocabulary["<odd>"] = vocabulary.pop("<|endoftext|>")

    assert "has no end-of-text token" in refused(edited(folder, tmp_path / "endless", rename))


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(name, allow_patterns):
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    assert "could not be fetched from the hub (no network)" in refused("nobody/nothing")


def test_a_name_that_the_hub_has(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    assert load_tokenizer("somebody/something").fingerprint == load_tokenizer(str(folder)).fingerprint


def test_a_missing_package_names_the_extra(folder, monkeypatch):
    def missing(module):
        raise ImportError(module)

    monkeypatch.setattr("freerun.data.extras.import_module", missing)
    for name in (str(folder), "somebody/something"):
        assert "pip install 'freerun[hf]'" in refused(name)


def test_a_vocabulary_too_small_for_bytes(tmp_path):
    with pytest.raises(ConfigError, match="give at least 257"):
        train_tokenizer(DataConfig(), 100, tmp_path)


def test_a_place_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be written"):
        train_tokenizer(DataConfig(source=str(folder.parent / "text.txt")), 300, tmp_path / "file" / "x")
