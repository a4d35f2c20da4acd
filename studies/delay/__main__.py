"""`python -m studies.delay`: do what is missing of the study, then draw it. See README.md beside this file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from studies.command import chosen, follow, parser_of
from studies.delay import figures, plan, side_by_side
from studies.runner import Run


def main() -> None:
    """Entry point."""
    parser = parser_of("studies.delay", __doc__ or "", plan.SECTIONS)
    parser.add_argument("--quick", action="store_true", help="the two-minute form: P = 8, three methods, 600 updates")
    parser.add_argument(
        "--side-by-side", default="", metavar="DEVICE", help="do the runs in the laboratory on cpu or cuda"
    )
    parser.add_argument("--source", default="", help="with --side-by-side: a text in place of the workload's")
    given = parser.parse_args()
    runs = list(plan.quick()) if given.quick else chosen(parser, given, plan.SECTIONS)
    follow(plan.STUDY, runs, given, carry_out, figures.draw)


def carry_out(runs: Sequence[Run], given: argparse.Namespace) -> None:
    """Side by side, or each in a process of its own."""
    if given.side_by_side:
        side_by_side.carry_out(runs, given.side_by_side, given.source)
    else:
        plan.STUDY.carry_out(runs, given.at_once)


if __name__ == "__main__":
    main()
