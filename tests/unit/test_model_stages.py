"""freerun's decoder: the same numbers however it is cut."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from freerun.config import ModelConfig
from freerun.model.cut import cut, pieces
from freerun.model.kinds import kind
from freerun.model.loss import IGNORED, token_loss
from freerun.model.size import parameters
from freerun.model.stage import build_stage

VOCABULARY = 61
MODEL = ModelConfig(layers=4, width=32, heads=4, kv_heads=2, context=16)
TIED = replace(MODEL, tied=True)
TOKENS = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
CUTS = [("layer", 2, "balanced"), ("layer", 3, "1,2,1"), ("layer", 4, "layers"), ("quarter", 5, "balanced")]
CUTS += [("quarter", 16, "balanced")]


def stages_of(model, granularity="layer", stages=1, how="balanced"):
    parts = pieces(model, VOCABULARY, granularity)
    return [
        build_stage(model, VOCABULARY, [parts[i] for i in own], seed=7, first=k == 0, last=k == stages - 1)
        for k, own in enumerate(cut(parts, stages, how))
    ]


def run(stages, inputs=TOKENS):
    for stage in stages:
        inputs = stage(inputs)
        assert inputs.shape[-1] == stage.output_width and inputs.is_contiguous()
    return inputs


def gradients(stages):
    """Gradients by name; those of a borrowed parameter are added to its owner's."""
    token_loss(run(stages), TOKENS.roll(-1)).backward()
    total = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            total[name] = total[name] + parameter.grad if name in total else parameter.grad
    return total


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", CUTS)
def test_every_cut_gives_the_same_logits_and_gradients_bit_for_bit(model, dtype, shape):
    whole = [stage.to(dtype) for stage in stages_of(model)]
    parts = [stage.to(dtype) for stage in stages_of(model, *shape)]
    assert run(parts).dtype == dtype
    assert torch.equal(run(whole), run(parts))
    expected, found = gradients(whole), gradients(parts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_each_stage_takes_what_the_one_before_gives():
    for shape in CUTS:
        stages = stages_of(MODEL, *shape)
        assert stages[0].input_width == 0
        assert stages[-1].output_width == VOCABULARY
        assert [stage.output_width for stage in stages[:-1]] == [stage.input_width for stage in stages[1:]]


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_fresh_weights_depend_on_seed_and_name_alone(model):
    whole = stages_of(model)[0].state_dict()
    parts = {name: tensor for stage in stages_of(model, "quarter", 16) for name, tensor in stage.state_dict().items()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not torch.equal(whole["layers.0.mlp.up.weight"], whole["layers.1.mlp.up.weight"])


def test_fresh_weights_have_the_stated_deviations():
    state = stages_of(ModelConfig(layers=2, width=256))[0].state_dict()
    assert state["layers.0.attention.query.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["layers.0.attention.output.weight"].std() == pytest.approx(0.01, rel=0.05)
    assert state["layers.1.mlp.down.weight"].std() == pytest.approx(0.01, rel=0.05)
    assert torch.equal(state["norm.weight"], torch.ones(256))


def test_a_tied_head_borrows_the_embedding_only_when_another_stage_owns_it():
    first, last = stages_of(TIED, stages=2)
    assert (first.borrowed, last.borrowed) == ((), ("embedding.weight",))
    assert torch.equal(first.state_dict()["embedding.weight"], last.state_dict()["embedding.weight"])
    (whole,) = stages_of(TIED)
    assert whole.borrowed == ()
    assert [name for name, _ in whole.named_parameters()].count("embedding.weight") == 1
    assert all(stage.borrowed == () for stage in stages_of(MODEL, stages=3))


@pytest.mark.parametrize("model", [MODEL, TIED, replace(MODEL, kv_heads=1, hidden=48)])
def test_the_parameter_count_is_exact(model):
    assert parameters(model, VOCABULARY) == sum(p.numel() for p in stages_of(model)[0].parameters())


def test_a_copy_of_a_stage_holds_other_weights_and_no_buffers():
    for stage in stages_of(TIED, stages=2):
        other = copy.deepcopy(stage)
        assert list(stage.buffers()) == []
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert not torch.equal(next(stage.parameters()), next(other.parameters()))


def test_checkpointing_gives_equal_gradients():
    expected = gradients(stages_of(MODEL, stages=2))
    found = gradients(stages_of(replace(MODEL, activation_checkpointing=True), stages=2))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_checkpointing_keeps_less_for_the_backward():
    def kept(model):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()), lambda t: t):
            run(stages_of(model))
        return sum(saved)

    assert kept(replace(MODEL, activation_checkpointing=True)) < kept(MODEL) / 3


def test_a_token_sees_only_those_before_it():
    (whole,) = stages_of(MODEL)
    changed = TOKENS.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % VOCABULARY
    assert torch.equal(whole(TOKENS)[:, :9], whole(changed)[:, :9])
    assert not torch.equal(whole(TOKENS)[:, 9:], whole(changed)[:, 9:])


def test_the_loss_is_a_sum_in_fp32_over_the_labels_that_count():
    logits = torch.randn(2, 3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[1, IGNORED, 3], [IGNORED, 5, 6]])
    likelihood = logits.log_softmax(-1)
    expected = -sum(likelihood[b, t, labels[b, t]] for b in range(2) for t in range(3) if labels[b, t] >= 0)
    torch.testing.assert_close(token_loss(logits, labels), expected)
    assert token_loss(logits.bfloat16(), labels).dtype == torch.float32


def test_kinds_of_our_parameters():
    kinds = {name: kind(name, parameter) for name, parameter in stages_of(MODEL)[0].named_parameters()}
    assert kinds.pop("embedding.weight") == "embedding"
    assert kinds.pop("head.weight") == "head"
    assert all(value == ("vector" if "norm" in name else "matrix") for name, value in kinds.items())
