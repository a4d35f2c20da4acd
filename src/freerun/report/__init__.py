"""A run, or several, as one self-contained HTML page."""

from freerun.report.page import write

__all__ = ["write"]
