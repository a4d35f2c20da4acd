from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from freerun.config import Config, DelayConfig, OptimizerConfig, PipelineConfig, ReplicasConfig
from freerun.errors import ConfigError
from freerun.replicas.checks import check, delay_of

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fraction": 0.0}, r"replicas\.fraction is 0; .*above 0 and at most 1"),
    ({"fraction": 1.5}, r"replicas\.fraction is 1\.5"),
    ({"fraction": float("nan")}, r"replicas\.fraction is nan"),
    ({"delay": "10"}, r"replicas\.delay is '10'; write fixed:N"),
    ({"delay": "fixed:-1"}, r"replicas\.delay is 'fixed:-1'"),
    ({"delay": "fixed:"}, r"replicas\.delay"),
    ({"interval": 0}, r"replicas\.interval is 0"),
    ({"bucket_mib": 0.0}, r"replicas\.bucket_mib"),
    ({"mean_decay": (0.5, 1.0)}, r"replicas\.mean_decay\[1\] is 1"),
    ({"outer_kept": 1.0}, r"replicas\.outer_kept"),
    ({"strategy": "zero1", "payload": "int8"}, r"replicas\.payload is int8, but zero1"),
    ({"strategy": "sparse", "payload": "int8", "delay": "free"}, r"replicas\.payload int8"),
    ({"strategy": "diloco", "fragments": 2, "delay": "free"}, r"replicas\.delay is free, but diloco"),
    ({"strategy": "diloco", "fragments": 3, "interval": 20}, r"replicas\.fragments 3 does not divide"),
    ({"strategy": "diloco", "fragments": 2, "interval": 10}, r"replicas\.delay is fixed:10, but a fragment"),
    ({"strategy": "zero1", "elastic": True}, r"replicas\.elastic is on, but strategy zero1"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Config(replicas=ReplicasConfig(**settings)))


@pytest.mark.parametrize("strategy", ["acco", "dpu"])
def test_steps_behind_the_computation_refuse_what_needs_them_beside_it(strategy: str) -> None:
    replicas = ReplicasConfig(strategy=strategy)
    with pytest.raises(ConfigError, match="delay-compensated"):
        check(Config(replicas=replicas, optimizer=OptimizerConfig(name="delay-compensated")))
    with pytest.raises(ConfigError, match="clip_scope is carried"):
        check(Config(replicas=replicas, optimizer=OptimizerConfig(clip_scope="carried")))


def test_acco_refuses_to_look_ahead_along_its_own_corrections() -> None:
    optimizer = OptimizerConfig(delay=DelayConfig(lookahead=1.0))
    with pytest.raises(ConfigError, match="lookahead"):
        check(Config(replicas=ReplicasConfig(strategy="acco"), optimizer=optimizer))
    check(Config(replicas=ReplicasConfig(strategy="zero1"), optimizer=optimizer))


def test_elastic_accumulation_needs_one_stage() -> None:
    replicas = ReplicasConfig(strategy="acco", elastic=True)
    check(Config(replicas=replicas))
    with pytest.raises(ConfigError, match=r"pipeline\.stages 2"):
        check(Config(replicas=replicas, pipeline=PipelineConfig(stages=2)))


def test_delays_are_read_as_they_are_written() -> None:
    assert delay_of(ReplicasConfig(delay="fixed:0")) == 0
    assert delay_of(ReplicasConfig(delay="fixed:12")) == 12
    assert delay_of(ReplicasConfig(delay="free")) is None


def test_checking_replicas_imports_no_torch() -> None:
    code = "import sys, freerun.replicas.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
