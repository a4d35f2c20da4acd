"""A key that a config has and nothing reads is a promise that is not kept."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import freerun
from freerun.config_files import keys

PACKAGE = Path(freerun.__file__).parent
NO_USE = {PACKAGE / "config.py", PACKAGE / "checks.py", PACKAGE / "replicas" / "checks.py"}
"""Where a key is declared or refused, which does not make it do anything."""


@cache
def names_read() -> set[str]:
    """Attributes that the package reads, and words by which it may read them with getattr."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if path in NO_USE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


@pytest.mark.parametrize("key", list(keys()))
def test_every_key_of_a_config_is_read_somewhere(key: str) -> None:
    assert key.rpartition(".")[2] in names_read()
