"""freerun's weights and Hugging Face Llama's are the same weights; generation with a cache changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.model.cut import pieces
from freerun.model.generate import generate, pick
from freerun.model.interchange import export, from_llama, load, to_llama
from freerun.model.stage import build_stage

transformers = pytest.importorskip("transformers")

VOCABULARY = 53
MODEL = ModelConfig(layers=3, width=32, heads=4, context=24, rope_theta=5000.0, norm_eps=1e-4)
MODELS = {
    "plain": MODEL,
    "tied": replace(MODEL, tied=True),
    "grouped": replace(MODEL, kv_heads=2, hidden=40),
    "tied-grouped": replace(MODEL, tied=True, kv_heads=1),
}
TOKENS = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))


def whole(model, state=None):
    stage = build_stage(model, VOCABULARY, pieces(model, VOCABULARY), seed=2, first=True, last=True)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    if state:
        stage.load_state_dict(state)
    return stage.eval()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_an_exported_model_loads_in_transformers_with_equal_logits(tmp_path, model):
    stage = whole(model)
    export(tmp_path / "out", stage.state_dict(), model, VOCABULARY, end=3)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(theirs(TOKENS).logits, stage(TOKENS), rtol=1e-4, atol=1e-4)
    assert theirs.generation_config.eos_token_id == 3
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_what_is_exported_loads_back_as_it_was(tmp_path, model):
    stage = whole(model)
    export(tmp_path, stage.state_dict(), model, VOCABULARY)
    state, found, vocabulary = load(tmp_path)
    assert vocabulary == VOCABULARY
    assert all(torch.equal(tensor, state[name]) for name, tensor in stage.state_dict().items())
    assert torch.equal(whole(found, state)(TOKENS), stage(TOKENS))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_llama_becomes_our_decoder_with_equal_logits(tmp_path, tied):
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=24,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    )
    torch.manual_seed(1)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path, max_shard_size="20KB")
    state, model, vocabulary = load(tmp_path)
    assert (model.tied, model.rope_theta, vocabulary) == (tied, 700.0, VOCABULARY)
    torch.testing.assert_close(whole(model, state)(TOKENS), llama(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "variant", [{"model_type": "gemma"}, {"attention_bias": True}, {"rope_parameters": {"rope_type": "llama3"}}]
)
def test_a_llama_that_our_decoder_does_not_compute_is_refused(variant):
    state, config = to_llama(whole(MODEL).state_dict(), MODEL, VOCABULARY)
    with pytest.raises(ConfigError):
        from_llama(state, {**config, **variant})


def test_a_hugging_face_model_is_exported_under_its_own_config(tmp_path):
    transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    ).save_pretrained(tmp_path / "in")
    model = ModelConfig(architecture=str(tmp_path / "in"), context=24)
    stage = build_stage(model, VOCABULARY, pieces(model, VOCABULARY), seed=2, first=True, last=True).eval()
    export(tmp_path / "out", stage.state_dict(), model, VOCABULARY)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(theirs(TOKENS).logits, stage(TOKENS))


def test_the_tokenizer_travels_with_the_export(tmp_path):
    from tokenizers import Tokenizer, models

    source = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(source))
    export(tmp_path / "out", whole(MODEL).state_dict(), MODEL, VOCABULARY, tokenizer=source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("b")["input_ids"] == [1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_logits_with_a_cache_equal_those_without(model):
    stage = whole(model)
    cache = stage.new_cache(24)
    steps = [stage(TOKENS[:, :10], cache)] + [stage(TOKENS[:, t : t + 1], cache) for t in range(10, 24)]
    torch.testing.assert_close(torch.cat(steps, dim=1), stage(TOKENS), rtol=1e-5, atol=1e-5)


def greedy_without_cache(stage, tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(stage(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[-count:]


def test_greedy_generation_equals_recomputing_everything():
    stage = whole(MODEL)
    assert list(generate(stage, [1, 2, 3], 15, temperature=0)) == greedy_without_cache(stage, [1, 2, 3], 15)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_hugging_face_generation_equals_recomputing_everything(tmp_path, architecture):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0} | ({"num_key_value_heads": 1} if architecture == "qwen3" else {})
    transformers.AutoConfig.for_model(architecture, **sizes).save_pretrained(tmp_path)
    model = ModelConfig(architecture=str(tmp_path), context=24)
    stage = build_stage(model, VOCABULARY, pieces(model, VOCABULARY), seed=2, first=True, last=True).eval()
    assert list(generate(stage, [1, 2, 3], 12, temperature=0)) == greedy_without_cache(stage, [1, 2, 3], 12)


def test_generation_goes_on_when_the_context_is_full_and_stops_at_a_stop_token():
    stage = whole(MODEL)
    tokens = list(generate(stage, range(40), 60, seed=4))
    assert len(tokens) == 60
    assert tokens == list(generate(stage, range(40), 60, seed=4)) != list(generate(stage, range(40), 60, seed=5))
    assert list(generate(stage, range(40), 60, seed=4, stop={tokens[5]})) == tokens[: tokens.index(tokens[5]) + 1]


def test_top_p_draws_only_from_the_likeliest():
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()
    random = torch.Generator().manual_seed(0)
    assert {pick(logits, 1.0, 0.65, random) for _ in range(50)} == {0, 2}
    assert {pick(logits, 1.0, 1e-6, random) for _ in range(10)} == {0}
    assert {pick(logits, 1.0, 1.0, random) for _ in range(200)} == {0, 1, 2, 3}
