"""Stages of Hugging Face models: exact for each known architecture, refused for the others."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.model.cut import cut, pieces
from freerun.model.kinds import kind
from freerun.model.loss import token_loss
from freerun.model.size import parameters
from freerun.model.stage import build_stage

transformers = pytest.importorskip("transformers")
from freerun.model import huggingface, huggingface_config  # noqa: E402
from freerun.model.huggingface_weights import locate  # noqa: E402

VOCABULARY = 67
COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": VOCABULARY,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4},
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 4},
    "gpt2": {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY},
    "gpt_neox": COMMON,
    "phi": COMMON,
}
TOKENS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


def fresh(folder, architecture, **changes):
    """A model config that trains a tiny model of the architecture from fresh weights."""
    sizes = {**ARCHITECTURES.get(architecture, GROUPED), "bos_token_id": 1, "eos_token_id": 2, **changes}
    transformers.AutoConfig.for_model(architecture, **sizes).save_pretrained(folder)
    return ModelConfig(architecture=str(folder), context=12)


def saved(folder, architecture, **changes):
    """A model config that starts from a tiny saved model, and that model."""
    fresh(folder, architecture, **changes)
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(folder)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(folder, max_shard_size="6KB")
    return ModelConfig(pretrained=str(folder), context=12), whole.eval()


def stages_of(model, stages):
    parts = pieces(model, VOCABULARY)
    return [
        build_stage(model, VOCABULARY, [parts[i] for i in own], seed=5, first=k == 0, last=k == stages - 1)
        for k, own in enumerate(cut(parts, stages, "layers"))
    ]


def run(stages, inputs=TOKENS):
    for stage in stages:
        inputs = stage(inputs)
    return inputs


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_of_a_saved_model_give_its_logits(tmp_path, architecture, tied):
    model, whole = saved(tmp_path, architecture, tie_word_embeddings=tied)
    expected = whole(TOKENS).logits
    names = set(dict(whole.named_parameters()))
    for count in (1, 2, 3):
        stages = stages_of(model, count)
        assert torch.equal(run(stages), expected)
        assert {name for stage in stages for name, _ in stage.named_parameters()} == names
        assert bool(stages[-1].borrowed) == (tied and count > 1)
        assert set(stages[-1].borrowed) <= set(dict(stages[0].named_parameters()))
        assert huggingface.verify_cut(model, VOCABULARY, cut(pieces(model, VOCABULARY), count), seed=5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fresh_weights_do_not_depend_on_the_cut(tmp_path, architecture, tied):
    model = fresh(tmp_path, architecture, tie_word_embeddings=tied)
    whole, parts = stages_of(model, 1), stages_of(model, 3)
    assert torch.equal(run(whole), run(parts))
    assert huggingface.verify_cut(model, VOCABULARY, cut(pieces(model, VOCABULARY), 3), seed=5)
    state = dict(whole[0].named_parameters())
    for stage in parts:
        assert all(torch.equal(parameter, state[name]) for name, parameter in stage.named_parameters())


def test_fresh_weights_follow_the_models_own_rules(tmp_path):
    (stage,) = stages_of(fresh(tmp_path, "gpt2", n_embd=64, initializer_range=0.05), 1)
    state = stage.state_dict()
    assert state["transformer.h.1.mlp.c_fc.weight"].std() == pytest.approx(0.05, rel=0.05)
    assert state["transformer.h.1.mlp.c_proj.weight"].std() == pytest.approx(0.05 / 6**0.5, rel=0.05)
    assert torch.equal(state["transformer.ln_f.weight"], torch.ones(64))


def test_gradients_of_a_cut_equal_the_whole_models(tmp_path):
    model, _ = saved(tmp_path, "llama")
    whole = stages_of(model, 1)
    parts = copy.deepcopy(stages_of(replace(model, activation_checkpointing=True), 3))
    for stages in (whole, parts):
        token_loss(run(stages), TOKENS.roll(-1)).backward()
    expected = {name: parameter.grad for name, parameter in whole[0].named_parameters()}
    for stage in parts:
        assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in stage.named_parameters())


def test_a_stage_reads_no_file_that_holds_only_others_tensors(tmp_path):
    model, _ = saved(tmp_path, "llama")
    expected = stages_of(model, 3)[2].state_dict()
    files = locate(str(tmp_path))
    for shard in set(files.values()) - {files[name] for name in expected}:
        (tmp_path / shard).unlink()
    parts = pieces(model, VOCABULARY)
    own = [parts[i] for i in cut(parts, 3, "layers")[2]]
    found = build_stage(model, VOCABULARY, own, seed=0, first=False, last=True).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="missing"):
        stages_of(model, 1)


def test_a_copy_in_bf16_keeps_rotary_frequencies_in_fp32(tmp_path):
    model, _ = saved(tmp_path, "llama")
    stage = stages_of(model, 2)[1]
    other = copy.deepcopy(stage).to(torch.bfloat16)
    hidden = torch.randn(2, 12, 16, dtype=torch.bfloat16)
    assert other(hidden).dtype == torch.bfloat16
    assert next(stage.parameters()).dtype == torch.float32
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, dict(stage.named_buffers())[name])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kinds_of_hugging_face_parameters(tmp_path, architecture):
    (stage,) = stages_of(fresh(tmp_path, architecture, tie_word_embeddings=False), 1)
    kinds = {name: kind(name, parameter) for name, parameter in stage.named_parameters()}
    layers = {name: value for name, value in kinds.items() if ".layers." in name or ".h." in name}
    assert {value for name, value in layers.items() if stage.get_parameter(name).ndim == 2} == {"matrix"}
    outside = sorted(value for name, value in kinds.items() if name not in layers and value != "vector")
    assert outside == ["embedding"] * (2 if architecture == "gpt2" else 1) + ["head"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_parameter_estimate_is_within_a_few_percent(tmp_path, architecture):
    model = fresh(tmp_path, architecture, **({"n_embd": 64} if architecture == "gpt2" else {"hidden_size": 64}))
    (stage,) = stages_of(model, 1)
    assert parameters(model, VOCABULARY) == pytest.approx(sum(p.numel() for p in stage.parameters()), rel=0.1)


@pytest.mark.parametrize("architecture", ["gemma2", "bloom"])
def test_an_architecture_that_is_not_known_to_be_exact_is_refused_by_name(tmp_path, architecture):
    with pytest.raises(ConfigError, match=architecture):
        stages_of(fresh(tmp_path, architecture), 2)


def test_a_split_that_differs_is_found_by_comparing_logits(tmp_path, monkeypatch):
    class Something(torch.nn.Module):
        def forward(self, positions):
            return torch.arange(16.0)

    model = fresh(tmp_path, "gpt2")
    monkeypatch.setattr(huggingface, "Nothing", Something)
    with pytest.raises(ConfigError, match="gpt2"):
        huggingface.verify_cut(model, VOCABULARY, cut(pieces(model, VOCABULARY), 2), seed=5)


def test_a_model_too_large_to_compare_is_not_compared(tmp_path, monkeypatch):
    model = fresh(tmp_path, "gpt2")
    monkeypatch.setattr(huggingface, "available_memory", lambda: 1000.0)
    assert not huggingface.verify_cut(model, VOCABULARY, cut(pieces(model, VOCABULARY), 2), seed=5)


def test_what_can_not_be_read_is_refused_with_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.architecture"):
        pieces(ModelConfig(architecture=str(tmp_path / "nowhere")), VOCABULARY)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ConfigError, match=r"model\.pretrained"):
        pieces(ModelConfig(pretrained=str(tmp_path)), VOCABULARY)


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    model, _ = saved(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"model\.context"):
        pieces(replace(model, context=64), VOCABULARY)
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        pieces(model, VOCABULARY + 1)
    with pytest.raises(ConfigError, match=r"pipeline\.granularity"):
        pieces(model, VOCABULARY, "quarter")


def test_dropout_is_turned_off(tmp_path):
    model = fresh(tmp_path, "gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    stages = stages_of(model, 2)
    assert all(stage.training for stage in stages)
    assert torch.equal(run(stages), run(stages))
    assert huggingface_config.read_config(model, VOCABULARY).resid_pdrop == 0
