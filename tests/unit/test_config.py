"""A config is read from recipes, files and overrides, written whole, and refused in one sentence that names the key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freerun import config_files
from freerun.config import Config
from freerun.errors import ConfigError

NUMBERS = {
    "model.layers": st.integers(1, 64),
    "model.rope_theta": st.floats(1, 1e6),
    "data.eval_fraction": st.floats(0.001, 0.5),
    "optimizer.lr": st.floats(0, 1),
    "optimizer.rotation.fresh": st.floats(0, 1),
    "training.updates": st.integers(1, 10**9),
    "run.time_limit": st.floats(1, 1e5),
}


@given(st.fixed_dictionaries({}, optional=NUMBERS))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read_back(tmp_path: Path, values: dict[str, float]) -> None:
    config = config_files.read("single", [(key, repr(value)) for key, value in values.items()])
    path = tmp_path / "config.toml"
    config_files.write(config, path)
    assert config_files.read(str(path)) == config


@pytest.mark.parametrize("recipe", config_files.recipes())
def test_every_recipe_is_a_config(recipe: str) -> None:
    assert isinstance(config_files.read(recipe), Config)


def test_an_override_changes_its_key_and_nothing_else() -> None:
    plain, changed = config_files.read("demo"), config_files.read("demo", [("optimizer.rotation.interval", "7")])
    rotation = dataclasses.replace(plain.optimizer.rotation, interval=7)
    assert changed == dataclasses.replace(plain, optimizer=dataclasses.replace(plain.optimizer, rotation=rotation))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("optimizer.lrr", "1", "unknown key optimizer.lrr"),
        ("optimizer.lrr", "1", "did you mean optimizer.lr?"),
        ("optimizer", "1", "optimizer is a section"),
        ("training.updates", "many", "training.updates is 'many', but it takes a whole number"),
        ("training.updates", "1.5", "training.updates is 1.5, but it takes a whole number"),
        ("training.updates", "0", "training.updates is 0; it must be at least 1"),
        ("run.tensorboard", "maybe", "run.tensorboard is 'maybe', but it is a switch"),
        ("pipeline.schedule", "2f2b", "pipeline.schedule is '2f2b'; choose gpipe, 1f1b, two-version or async"),
        ("optimizer.name", "adam", "optimizer.name is 'adam'; choose adamw"),
        ("optimizer.betas", "0.9", "optimizer.betas"),
        ("optimizer.betas", "0.9,1", "optimizer.betas[1] is 1; it must be at least 0 and below 1"),
        ("optimizer.rotation.fresh", "1.5", "optimizer.rotation.fresh is 1.5; it is a share"),
        ("optimizer.rotation.grading", "-1", "optimizer.rotation.grading is -1; it must be at least 0"),
        ("model.heads", "3", "which 3 heads (model.heads) do not divide"),
        ("replicas.strategy", "gossip", "replicas.strategy is 'gossip'"),
        ("pipeline.stages", "9", "pipeline.stages is 9"),
    ],
)
def test_a_refusal_names_the_key_and_what_would_work(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_files.read("single", [(key, value)])
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_looking_ahead_inside_the_basis_is_refused_with_graded_rotation() -> None:
    with pytest.raises(ConfigError, match="nesterov sets the weights"):
        config_files.read("single", [("optimizer.name", "graded-rotation"), ("optimizer.rotation.nesterov", "true")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model", "is not valid TOML"),
        ("model = 3", "but it is a section: write [model]"),
        ("optimizer = 3", "but it is a section: write [optimizer]"),
        ("[model]\nlayers = '4'", "model.layers is '4', but it takes a whole number"),
        ("[modle]\nlayers = 4", "unknown key modle"),
    ],
)
def test_a_file_that_can_not_be_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        config_files.read(str(path))
    assert says in str(refusal.value)


def test_a_recipe_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="did you mean demo"):
        config_files.read("demoo")
    with pytest.raises(ConfigError, match="there is no config file nowhere"):
        config_files.read("nowhere.toml")
