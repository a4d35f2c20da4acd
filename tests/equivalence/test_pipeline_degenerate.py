"""Settings in which a pipeline, or replicas, are something that everybody knows."""

from __future__ import annotations

import json

import pytest
import torch

from freerun.data import build
from helpers.plain_pipeline import adamw, rate, whole_model
from helpers.runs import changed, replay, tiny, weights_of


def hand_written_loop(config):
    """What anybody would write."""
    data = build(config.data, config.model.context, config.training.sequences, config.training.seed)
    model = whole_model(config, data.tokenizer.vocabulary)
    optimizer = adamw(config, dict(model.named_parameters()))
    for update in range(config.training.updates):
        for group in optimizer.param_groups:
            group["lr"] = rate(config, update)
        batch = data.train.get(update)
        loss = torch.nn.functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())
        loss.backward()
        if config.optimizer.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_one_process_is_a_hand_written_loop_bit_for_bit(tokens, tmp_path):
    config = tiny(tokens, optimizer__clip=0, training__updates=12)
    replay(config, tmp_path)
    expected = hand_written_loop(config)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(config, tmp_path).items())


def test_one_process_with_clipping_is_a_hand_written_loop(tokens, tmp_path):
    config = tiny(tokens, optimizer__clip=0.3, training__updates=12)
    replay(config, tmp_path)
    expected = hand_written_loop(config)
    for name, weight in weights_of(config, tmp_path).items():
        # torch adds up the norm in fp32, we in fp64
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_flushing_pipelines_equal_one_stage_bit_for_bit(microbatches, precision, tokens, tmp_path):
    whole = tiny(tokens, pipeline__microbatches=microbatches, training__precision=precision, optimizer__clip=0)
    expected = replay(whole, tmp_path / "whole")["weights_sha256"]
    for stages, schedule in [(2, "gpipe"), (3, "gpipe"), (2, "1f1b"), (3, "1f1b"), (1, "gpipe"), (1, "1f1b")]:
        config = changed(whole, pipeline__stages=stages, pipeline__schedule=schedule)
        assert replay(config, tmp_path / f"{schedule}{stages}")["weights_sha256"] == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_flushing_pipelines_clip_by_the_whole_models_norm(schedule, tokens, tmp_path):
    """The sum of squares is added up by stages, so that the norm may differ in fp64's last bit, and no more."""
    whole = tiny(tokens, optimizer__clip=0.3, pipeline__microbatches=2)
    cut = changed(whole, pipeline__stages=3, pipeline__schedule=schedule)
    replay(whole, tmp_path / "whole")
    replay(cut, tmp_path / "cut")
    expected, found = weights_of(whole, tmp_path / "whole"), weights_of(cut, tmp_path / "cut")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_tied_embeddings_in_a_flushing_pipeline_equal_one_stage(schedule, tokens, tmp_path):
    whole = tiny(tokens, model__tied="true", optimizer__clip=0)
    cut = changed(whole, pipeline__stages=3, pipeline__schedule=schedule)
    assert replay(cut, tmp_path / "cut")["weights_sha256"] == replay(whole, tmp_path / "whole")["weights_sha256"]


def test_tied_embeddings_with_several_microbatches_equal_one_stage_but_for_the_order_of_a_sum(tokens, tmp_path):
    """One stage adds e1 + h1 + e2 + h2; two stages add (e1 + e2) + (h1 + h2)."""
    whole = tiny(tokens, model__tied="true", optimizer__clip=0, pipeline__microbatches=3)
    cut = changed(whole, pipeline__stages=3, pipeline__schedule="1f1b")
    replay(whole, tmp_path / "whole")
    replay(cut, tmp_path / "cut")
    expected, found = weights_of(whole, tmp_path / "whole"), weights_of(cut, tmp_path / "cut")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("stages", [1, 2])
def test_two_replicas_with_allreduce_equal_one_with_twice_the_microbatches(stages, tokens, tmp_path):
    """A mean of two sums scaled by 1/n each, against one sum scaled by 1/2n: powers of two, so bit for bit."""
    one = tiny(tokens, pipeline__microbatches=2, pipeline__schedule="gpipe", pipeline__stages=stages, optimizer__clip=0)
    two = changed(one, pipeline__microbatches=1, replicas__count=2, replicas__strategy="allreduce")
    assert replay(two, tmp_path / "two")["weights_sha256"] == replay(one, tmp_path / "one")["weights_sha256"]


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline__schedule": "async", "pipeline__stages": 3},
        {"pipeline__schedule": "async", "pipeline__stages": 3, "pipeline__weights": "latest", "model__tied": "true"},
        {"pipeline__schedule": "async", "pipeline__stages": 3, "optimizer__clip_scope": "carried"},
        {"pipeline__schedule": "gpipe", "pipeline__stages": 2, "model__tied": "true", "training__precision": "bf16"},
        {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "sparse", "replicas__interval": "1"},
        {"pipeline__stages": 2, "replicas__count": 2, "replicas__strategy": "acco"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_evaluation_does_not_disturb_training(settings, tokens, tmp_path):
    quiet = tiny(tokens, **settings, evaluation__microbatches=0)
    often = changed(quiet, evaluation__microbatches=3, evaluation__every=2)
    expected = replay(quiet, tmp_path / "quiet")
    found = replay(often, tmp_path / "often")
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert expected["eval_loss"] is None and found["eval_loss"] > 0


def test_an_evaluation_in_the_middle_is_of_the_version_it_names(tokens, tmp_path):
    """The loss logged at update u is that of a run which ends there without a change of its rate."""
    config = tiny(
        tokens, pipeline__stages=3, optimizer__schedule="constant", evaluation__every=2, training__precision="bf16"
    )
    replay(config, tmp_path / "long")
    rows = [json.loads(line) for line in (tmp_path / "long" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["update"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert sorted(losses) == [2, 4, 6, 8]
    for updates in (2, 4):
        short = changed(config, training__updates=updates)
        assert replay(short, tmp_path / str(updates))["eval_loss"] == losses[updates]


def test_the_summary_counts_delays_and_versions_as_the_schedule_says(tokens, tmp_path):
    config = tiny(tokens, pipeline__stages=3)
    stages = replay(config, tmp_path)["stages"]
    assert [stage["delay_histogram"] for stage in stages] == [{"0": 1, "1": 1, "2": 6}, {"0": 1, "1": 7}, {"0": 8}]
    assert [stage["versions_kept"] for stage in stages] == [3, 2, 1]
    # the master, and a copy for each version where there is more than one
    assert [stage["peak_weight_bytes"] / (4 * stage["parameters"]) for stage in stages] == [4, 3, 1]


def test_latest_keeps_one_version(tokens, tmp_path):
    stages = replay(tiny(tokens, pipeline__stages=3, pipeline__weights="latest"), tmp_path)["stages"]
    assert [stage["versions_kept"] for stage in stages] == [1, 1, 1]
    assert stages[0]["delay_histogram"] == {"0": 1, "1": 1, "2": 6}
