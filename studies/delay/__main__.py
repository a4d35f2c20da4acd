"""`python -m studies.delay`: do what is missing of the study, then draw it. See README.md beside this file."""

from __future__ import annotations

import argparse

from studies.delay import figures, plan
from studies.delay.runner import carry_out, result_path


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m studies.delay", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"which parts: {', '.join(plan.SECTIONS)}; none means all")
    parser.add_argument("--quick", action="store_true", help="the two-minute form: P = 8, three methods, 600 updates")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--list", action="store_true", help="say what is there and what is missing, and stop")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    given = parser.parse_args()
    unknown = set(given.sections) - set(plan.SECTIONS)
    if unknown:
        parser.error(f"there is no section {sorted(unknown)[0]!r}; choose from {', '.join(plan.SECTIONS)}")
    if given.quick:
        runs = list(plan.quick())
    else:
        runs = [run for name in given.sections or plan.SECTIONS for run in plan.SECTIONS[name]()]
    runs = [run for run in runs if given.only in run.name]
    if given.list:
        for run in runs:
            print("done   " if result_path(run).exists() else "missing", run.name)
        return
    if not given.draw:
        carry_out(runs, given.at_once)
    figures.draw()


if __name__ == "__main__":
    main()
