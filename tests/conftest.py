"""What tests of all kinds share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.runs import write_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of tokens to train on."""
    return write_tokens(tmp_path_factory.mktemp("data"))
