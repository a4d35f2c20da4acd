"""The pipeline against its plain reference: every schedule and weight policy, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.plain_pipeline import plain_pipeline
from helpers.runs import changed, replay, tiny, weights_of

SCHEDULES = {
    "async": {"pipeline__schedule": "async", "pipeline__microbatches": 1},
    "async M=3": {"pipeline__schedule": "async", "pipeline__microbatches": 3},
    "async slack": {"pipeline__schedule": "async", "pipeline__microbatches": 2, "pipeline__slack": 2},
    "latest": {"pipeline__schedule": "async", "pipeline__weights": "latest"},
    "latest M=3": {"pipeline__schedule": "async", "pipeline__weights": "latest", "pipeline__microbatches": 3},
    "two-version": {"pipeline__schedule": "two-version", "pipeline__microbatches": 3},
    "gpipe": {"pipeline__schedule": "gpipe", "pipeline__microbatches": 3},
    "1f1b": {"pipeline__schedule": "1f1b", "pipeline__microbatches": 3},
}


def assert_equal(config, folder, latest=False):
    replay(config, folder)
    found, expected = weights_of(config, folder), plain_pipeline(config, latest=latest).weights
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_equals_its_reference_bit_for_bit(schedule, tied, precision, tokens, tmp_path):
    settings = SCHEDULES[schedule] | {"model__tied": tied, "training__precision": precision}
    config = tiny(tokens, pipeline__stages=3, training__updates=6, optimizer__clip=0, **settings)
    assert_equal(config, tmp_path, latest=schedule.startswith("latest"))


def test_latest_and_stash_are_not_the_same(tokens, tmp_path):
    stash = tiny(tokens, pipeline__stages=3)
    latest = changed(stash, pipeline__weights="latest")
    assert replay(stash, tmp_path / "s")["weights_sha256"] != replay(latest, tmp_path / "l")["weights_sha256"]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_one_stage_is_plain_training(microbatches, tokens, tmp_path):
    config = tiny(tokens, pipeline__microbatches=microbatches, optimizer__clip=0)
    assert_equal(config, tmp_path)


@pytest.mark.parametrize(
    ("stages", "schedule", "scope"),
    [(1, "async", "auto"), (3, "async", "auto"), (2, "async", "carried"), (3, "gpipe", "auto"), (3, "gpipe", "stage")],
)
def test_clipping_is_by_the_norm_that_was_asked_for(stages, scope, schedule, tokens, tmp_path):
    config = tiny(
        tokens, pipeline__stages=stages, pipeline__schedule=schedule, optimizer__clip_scope=scope, optimizer__clip=0.3
    )
    replay(config, tmp_path)
    expected = plain_pipeline(config)
    assert min(map(max, expected.norms)) > config.optimizer.clip, "nothing is clipped, so nothing is tested"
    for name, weight in weights_of(config, tmp_path).items():
        # the norms' sums are taken in another order, so the factors may differ in their last bit
        torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=2e-6)


def test_the_logged_loss_is_the_mean_over_tokens(tokens, tmp_path):
    config = tiny(tokens, pipeline__stages=2, pipeline__schedule="1f1b", pipeline__microbatches=3, optimizer__clip=0)
    replay(config, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx(plain_pipeline(config).losses, rel=1e-6)


@pytest.mark.parametrize("schedule", ["async", "gpipe"])
def test_microbatches_with_unequal_numbers_of_tokens_weigh_by_their_tokens(schedule, tmp_path):
    examples = [
        {"prompt": "ab" * (number % 5 + 1), "response": "cde" * (1 + number * number % 7)} for number in range(80)
    ]
    source = tmp_path / "examples.jsonl"
    source.write_text("".join(json.dumps(example) + "\n" for example in examples))
    config = tiny(
        source,
        data__task="sft",
        data__vocabulary=0,
        model__context=64,
        pipeline__stages=2,
        pipeline__schedule=schedule,
        pipeline__microbatches=3,
        training__sequences=1,
        optimizer__clip=0,
    )
    assert_equal(config, tmp_path / "run")
