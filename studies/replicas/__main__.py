"""`python -m studies.replicas`: do what is missing of the study, then draw it. See README.md beside this file."""

from __future__ import annotations

from studies.command import chosen, follow, parser_of
from studies.replicas import figures
from studies.replicas.plan import SECTIONS, STUDY


def main() -> None:
    """Entry point."""
    parser = parser_of("studies.replicas", __doc__ or "", SECTIONS)
    given = parser.parse_args()
    runs = chosen(parser, given, SECTIONS)
    follow(STUDY, runs, given, lambda runs, given: STUDY.carry_out(runs, given.at_once), figures.draw)


if __name__ == "__main__":
    main()
