"""Fine-tuning data: one conversation per row, loss on the responses and their end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from freerun.config import DataConfig
from freerun.data import build, load_tokenizer, train_tokenizer
from freerun.errors import DataError

END = 256
CHATML = """{% for message in messages %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{%- endif %}"""


@pytest.fixture
def config(tmp_path):
    return DataConfig(source="", task="sft", cache=str(tmp_path / "cache"), eval_fraction=0)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def example(config, tmp_path, row, context=64):
    """Tokens and labels of the only example."""
    data = build(replace(config, source=write_jsonl(tmp_path / "one.jsonl", [row])), context, 1, 0)
    batch = data.train.get(0)
    return data, batch.tokens[0].tolist(), batch.labels[0].tolist()


def learnt(labels):
    return bytes(label if label != END else ord("$") for label in labels if label != -100).decode()


def test_the_loss_is_on_the_response_and_its_end(config, tmp_path):
    data, tokens, labels = example(config, tmp_path, {"prompt": "2+2?", "response": "four"})
    text = b"User: 2+2?\nAssistant: four"
    assert bytes(tokens[: len(text)]) == text
    assert tokens[len(text) :] == [END] * (64 - len(text))
    assert learnt(labels) == " four$"
    first = text.index(b" four")
    assert labels[first - 1 : first + 5] == [*b" four", END]  # shifted by one: predicted from the token before
    assert data.train.valid(0) == 6


def test_messages_with_several_turns_learn_every_response(config, tmp_path):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "never answered"},
    ]
    data, tokens, labels = example(config, tmp_path, {"messages": messages}, context=128)
    assert learnt(labels) == " b$ d$"
    text = bytes(token if token < END else ord("$") for token in tokens).decode().rstrip("$")
    assert text == "System: be brief\nUser: a\nAssistant: b$\nUser: c\nAssistant: d"
    assert data.train.valid(0) == 6


@pytest.mark.parametrize("as_file", [True, False])
def test_a_chat_template_as_file_or_text(config, tmp_path, as_file):
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(CHATML)
    template = str(tmp_path / "chat.jinja") if as_file else CHATML
    row = {"prompt": "hi", "response": "ho"}
    _, tokens, labels = example(replace(config, chat_template=template), tmp_path, row)
    assert bytes(token for token in tokens if token < END).decode() == "<|user|>hi<|end|>\n<|assistant|>ho<|end|>\n"
    assert learnt(labels) == "ho<|end|>\n$"


def test_a_template_that_hides_earlier_thoughts_learns_the_last_response(config, tmp_path):
    pytest.importorskip("jinja2")
    hiding = CHATML.replace(
        "{{ message.content }}", "{{ message.content if loop.last else message.content.split('#')[-1] }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "thought#b"}] * 2
    _, tokens, labels = example(replace(config, chat_template=hiding), tmp_path, {"messages": messages}, context=128)
    assert learnt(labels) == "thought#b<|end|>\n$"
    assert bytes(token for token in tokens if token < END).count(b"thought") == 1


def test_the_template_of_the_tokenizer_is_used_and_its_end_is_not_doubled(config, tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    (tmp_path / "text.txt").write_text("user assistant hi ho " * 20)
    train_tokenizer(DataConfig(source=str(tmp_path / "text.txt")), 270, tmp_path / "bpe")
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}>{{ messages[1].content if "}
    settings["chat_template"] += "messages | length > 1 }}{{ eos_token if messages | length > 1 }}"
    (tmp_path / "bpe" / "tokenizer_config.json").write_text(json.dumps(settings))
    row = {"prompt": "hi", "response": "ho"}
    data, _, labels = example(replace(config, tokenizer=str(tmp_path / "bpe")), tmp_path, row)
    kept = [label for label in labels if label != -100]
    assert data.tokenizer.decode(kept) == "ho"
    assert kept.count(data.tokenizer.end_of_text) == 1 and kept[-1] == data.tokenizer.end_of_text
    chat = load_tokenizer(str(tmp_path / "bpe"))
    assert chat.chat_template == settings["chat_template"]


def test_long_responses_are_cut_at_the_context(config, tmp_path):
    data, tokens, labels = example(config, tmp_path, {"prompt": "q", "response": "x" * 100}, context=32)
    prompt = len("User: q\nAssistant:")
    assert len(tokens) == len(labels) == 32
    assert labels[: prompt - 1] == [-100] * (prompt - 1)
    assert data.train.valid(0) == 32 - (prompt - 1) == len(learnt(labels))


def test_examples_without_room_for_a_response_are_left_out_and_counted(config, tmp_path, caplog):
    rows = [{"prompt": "q" * 50, "response": "lost"}, {"prompt": "q", "response": "kept"}]
    data = build(replace(config, source=write_jsonl(tmp_path / "x.jsonl", rows)), 32, 1, 0)
    assert data.train.epoch_length == 1
    assert learnt(data.train.get(0).labels[0].tolist()) == " kept$"
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 examples are left out: within a context of 32 they have no response to learn."
    ]


def test_a_conversation_without_an_answer_is_no_example(config, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "anyone?"}]}, {"messages": []}]
    rows += [{"messages": [{"role": "assistant", "content": "yes"}]}]
    data = build(replace(config, source=write_jsonl(tmp_path / "x.jsonl", rows)), 32, 1, 0)
    assert data.train.epoch_length == 1


def many(tmp_path):
    rows = [{"prompt": f"question {n}", "response": f"answer {n} " * (n % 4 + 1)} for n in range(60)]
    return write_jsonl(tmp_path / "many.jsonl", rows)


def test_every_example_is_seen_once_on_one_side(config, tmp_path):
    data = build(replace(config, source=many(tmp_path), eval_fraction=0.2), 64, 1, seed=3)
    responses = [
        learnt(side.get(n).labels[0].tolist())
        for side in (data.train, data.evaluation)
        for n in range(side.epoch_length)
    ]
    assert len(set(responses)) == len(responses) == 60
    assert 0 < data.evaluation.epoch_length < 30


def test_valid_counts_the_labels_of_every_microbatch(config, tmp_path):
    data = build(replace(config, source=many(tmp_path), eval_fraction=0.2), 40, 4, seed=3)
    for batches in (data.train, data.evaluation):
        for n in range(20):
            assert batches.valid(n) == int((batches.get(n).labels != -100).sum())


def test_few_examples_still_leave_one_to_evaluate(config, tmp_path):
    rows = [{"prompt": "q", "response": str(number)} for number in range(3)]
    data = build(replace(config, source=write_jsonl(tmp_path / "x.jsonl", rows), eval_fraction=0.01), 32, 1, 0)
    assert (data.train.epoch_length, data.evaluation.epoch_length) == (2, 1)


def test_parquet_and_hugging_face_conversations(config, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "set").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), tmp_path / "set" / "train.parquet")
    for source in (f"hf:{tmp_path / 'set'}", str(tmp_path / "set" / "train.parquet")):
        labels = build(replace(config, source=source), 32, 1, 0).train.get(0).labels[0].tolist()
        assert learnt(labels) == " b$"


def refused(config, **options):
    with pytest.raises(DataError) as caught:
        build(replace(config, **options), 32, 1, 0)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_text_has_no_prompts(config, tmp_path):
    (tmp_path / "x.txt").write_text("text")
    assert "give JSONL, Parquet or hf:NAME" in refused(config, source=str(tmp_path / "x.txt"))


def test_wrong_columns(config, tmp_path):
    message = refused(config, source=write_jsonl(tmp_path / "x.jsonl", [{"question": "a", "answer": "b"}]))
    assert "data.prompt_field and data.response_field are 'prompt' and 'response'" in message
    assert "'answer', 'question'" in message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": 1, "response": "b"},
        {"messages": "text"},
        {"messages": [{"from": "human", "value": "a"}]},
        {"messages": [{"role": "user", "content": ["parts"]}]},
    ],
)
def test_records_that_are_no_conversation(config, tmp_path, row):
    message = refused(config, source=write_jsonl(tmp_path / "x.jsonl", [row]))
    assert "line 1 of" in message and "is no conversation" in message


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("no/such/file.jinja", "neither a file that can be read nor a Jinja template"),
        ("{% for %}", "no valid Jinja template"),
        ("{{ messages[0].nothing.at_all }}", "can't render a conversation"),
        ("{{ raise_exception('roles must alternate') }}", "refuses a conversation of the data (roles must alternate)"),
        ("{{ messages | length }}", "as a continuation of its prompt"),
    ],
)
def test_templates_that_do_not_work(config, tmp_path, template, sentence):
    pytest.importorskip("jinja2")
    source = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a", "response": "b"}])
    assert sentence in refused(config, source=source, chat_template=template)


def test_a_missing_package_names_the_extra(config, tmp_path, monkeypatch):
    def missing(module):
        raise ImportError(module)

    monkeypatch.setattr("freerun.data.extras.import_module", missing)
    source = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a", "response": "b"}])
    assert "pip install 'freerun[hf]'" in refused(config, source=source, chat_template=CHATML)


def test_no_example_left(config, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a" * 100, "response": "b"}])
    assert "leaves no example to train on with model.context 32" in refused(config, source=source)


def test_rows_are_padded_to_the_context(config, tmp_path):
    data = build(replace(config, source=many(tmp_path)), 128, 4, 0)
    batch = data.train.get(0)
    assert batch.tokens.shape == batch.labels.shape == (4, 128)
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert (batch.tokens[:, -1] == END).all() and (batch.labels[:, -1] == -100).all()
