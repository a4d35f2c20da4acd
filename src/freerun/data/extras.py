"""Packages that only some sources and tokenizers need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from freerun.errors import DataError


def require(module: str, purpose: str) -> Any:
    """The module, or an error that says how to get it; `purpose` is the sentence's subject."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        message = f"{purpose} needs the package {package}, which is not installed; try pip install 'freerun[hf]'."
        raise DataError(message) from None
