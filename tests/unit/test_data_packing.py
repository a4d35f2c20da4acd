"""Blocks of packed documents, and the split into training and evaluation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freerun.config import DataConfig
from freerun.data import build
from freerun.data.batches import Microbatches
from freerun.data.packing import Blocks, held_out, split
from freerun.errors import DataError


def whole(array, context):
    return Blocks([array], np.array([[0, len(array)]], np.int64), context)


@settings(deadline=None)
@given(length=st.integers(1, 200), context=st.integers(1, 20))
def test_blocks_hold_every_token_as_a_label_once_in_order(length, context):
    stream = np.arange(length, dtype=np.uint16)
    blocks = whole(stream, context)
    assert blocks.count == (length - 1) // context
    tokens, labels = blocks.gather(np.arange(blocks.count))
    used = blocks.count * context
    assert np.array_equal(tokens.ravel(), stream[:used])
    assert np.array_equal(labels.ravel(), stream[1 : used + 1])
    assert tokens.dtype == labels.dtype == np.int64


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    chosen=st.integers(0, 2**150 - 1),
    context=st.integers(1, 12),
)
def test_stretches_over_several_arrays_read_as_one_stream(lengths, chosen, context):
    total = sum(lengths)
    flat = np.arange(total, dtype=np.uint16)
    arrays = np.split(flat, np.cumsum(lengths)[:-1])
    mask = np.array([chosen >> token & 1 for token in range(total)])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    blocks = Blocks(arrays, edges.reshape(-1, 2).astype(np.int64), context)
    stream = flat[mask == 1]
    assert blocks.tokens == len(stream)
    tokens, labels = blocks.gather(np.arange(blocks.count))
    assert np.array_equal(tokens.ravel(), stream[: tokens.size])
    assert np.array_equal(labels.ravel(), stream[1 : tokens.size + 1])


def test_batches_can_be_sent_and_reshaped():
    batch = Microbatches(whole(np.arange(100), 5), 4, 0).get(0)
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.tokens.shape == batch.labels.shape == (4, 5)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=200),
    fraction=st.floats(0, 0.9),
    context=st.integers(1, 10),
)
def test_the_split_is_complete_and_disjoint(lengths, fraction, context):
    documents = np.cumsum([0, *lengths])
    training, evaluation = split(documents, fraction, context)
    covered = np.zeros(documents[-1], int)
    for start, stop in [*training.tolist(), *evaluation.tolist()]:
        covered[start:stop] += 1
    assert (covered == 1).all()


def test_documents_are_held_out_whole():
    documents = np.arange(0, 30_001, 30)
    training, evaluation = split(documents, 0.1, 16)
    assert set(training.ravel()) | set(evaluation.ravel()) <= set(documents)
    share = (evaluation[:, 1] - evaluation[:, 0]).sum() / documents[-1]
    assert 0.07 < share < 0.13


@settings(deadline=None)
@given(count=st.integers(1, 500), more=st.integers(0, 500))
def test_new_documents_do_not_move_old_ones_to_the_other_side(count, more):
    assert np.array_equal(held_out(count, 0.1), held_out(count + more, 0.1)[:count])


def test_a_single_document_is_split_near_its_end():
    training, evaluation = split(np.array([0, 1000]), 0.1, 16)
    assert training.tolist() == [[0, 900]]
    assert evaluation.tolist() == [[900, 1000]]


def test_evaluation_has_at_least_one_block():
    training, evaluation = split(np.array([0, 1000]), 0.001, 64)
    assert evaluation.tolist() == [[1000 - 65, 1000]]
    assert training.tolist() == [[0, 1000 - 65]]


@pytest.fixture
def texts(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} " * (5 + number))
    return DataConfig(source=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"), eval_fraction=0.2)


def test_the_split_does_not_depend_on_the_seed_and_the_training_order_does(texts):
    one, other = build(texts, 16, 4, seed=1), build(texts, 16, 4, seed=2)
    assert one.fingerprint == other.fingerprint
    assert one.tokens == other.tokens
    assert (one.evaluation[3].tokens == other.evaluation[3].tokens).all()
    assert not (one.train[0].tokens == other.train[0].tokens).all()


def test_no_training_block_comes_from_a_held_out_document(texts):
    data = build(texts, 16, 1, seed=0)

    def text(batches):
        tokens, _ = batches.rows.gather(np.arange(batches.epoch_length))
        return data.tokenizer.decode(tokens.ravel())

    training, evaluation = text(data.train), text(data.evaluation)
    held = {number for number in range(40) if held_out(40, 0.2)[number]}
    assert held
    for number in range(40):
        phrase = f"document {number} document {number} document {number} "
        assert (phrase in evaluation) == (number in held)
        assert (phrase in training) == (number not in held)


def test_documents_end_with_the_end_of_text(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 9)
    config = DataConfig(source=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"), eval_fraction=0)
    rows = build(config, 19, 1, seed=0).train.rows
    tokens, labels = rows.gather(np.array([0]))
    assert tokens[0].tolist() == [97] * 9 + [256] + [98] * 9
    assert labels[0].tolist() == [97] * 8 + [256] + [98] * 9 + [256]


def test_every_label_of_packed_text_counts(texts):
    assert build(texts, 16, 4, seed=0).train.valid(123) == 64


def test_the_fingerprint_depends_on_content_tokenizer_and_split_but_not_on_the_place(tmp_path):
    def fingerprint(folder, text, **options):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "x.txt").write_text(text)
        config = DataConfig(source=str(tmp_path / folder / "x.txt"), cache=str(tmp_path / folder / "cache"), **options)
        return build(config, 16, 4, 0).fingerprint

    first = fingerprint("one", "some text " * 30)
    assert fingerprint("two", "some text " * 30) == first
    assert fingerprint("three", "same text " * 30) != first
    assert fingerprint("two", "some text " * 30, eval_fraction=0.3) != first


def test_too_little_text_says_so(tmp_path):
    (tmp_path / "x.txt").write_text("short")
    config = DataConfig(source=str(tmp_path / "x.txt"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"leaves 0 tokens.*model\.context 64.*give more text or a shorter context"):
        build(config, 64, 1, 0)


def test_evaluation_without_held_out_documents_says_what_to_set(texts):
    data = build(replace(texts, eval_fraction=0.0), 16, 4, 0)
    assert data.evaluation.epoch_length == 0
    with pytest.raises(DataError, match=r"data\.eval_fraction is 0\.0"):
        data.evaluation.get(0)
