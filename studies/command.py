"""The command of a study: do what is missing of it, then draw it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence

from studies.runner import Run, Study

Sections = Mapping[str, Callable[[], Iterable[Run]]]
CarryOut = Callable[[Sequence[Run], argparse.Namespace], None]


def parser_of(module: str, about: str, sections: Sections) -> argparse.ArgumentParser:
    """What every study's command understands."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("sections", nargs="*", help=f"which parts: {', '.join(sections)}; none means all")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--list", action="store_true", help="say what is there and what is missing, and stop")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    return parser


def chosen(parser: argparse.ArgumentParser, given: argparse.Namespace, sections: Sections) -> list[Run]:
    """The runs that a command names."""
    unknown = sorted(set(given.sections) - set(sections))
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; choose from {', '.join(sections)}")
    runs = [run for name in given.sections or sections for run in sections[name]()]
    return [run for run in {run.name: run for run in runs}.values() if given.only in run.name]


def follow(
    study: Study, runs: Sequence[Run], given: argparse.Namespace, carry_out: CarryOut, draw: Callable[[], None]
) -> None:
    """List, or run what is missing and draw."""
    if given.list:
        missing = study.missing(runs)
        for run in runs:
            print("missing" if run in missing else "done   ", run.name)
        return
    if not given.draw:
        carry_out(runs, given)
    draw()
