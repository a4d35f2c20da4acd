"""The drawing of a schedule shows every action, the versions, the waiting, and fits its width."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from freerun.errors import ConfigError
from freerun.pipeline.draw import draw
from freerun.pipeline.schedule import SCHEDULES

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("width", [60, 100, 160])
def test_every_line_fits_the_width_and_every_microbatch_is_there(kind, width):
    text = draw(kind, 4, 4, 3, width=width)
    assert max(map(len, text.splitlines())) <= max(width, 107)
    timeline = text[: text.index("forward of microbatch")].rsplit("\n", 1)[0]
    assert max(map(len, timeline.splitlines())) <= width
    for microbatch in range(12):
        assert len(re.findall(rf"F{microbatch} *│", draw(kind, 4, 4, 3, width=2000))) == 4
        assert len(re.findall(rf"B{microbatch} *│", draw(kind, 4, 4, 3, width=2000))) == 4


def test_the_versions_seen_are_under_the_forwards():
    lines = draw("async", 3, 1, 4, width=400).splitlines()
    assert lines[1].startswith("stage 0  F0 │F1 │F2 │····")
    assert lines[2].split("│")[:3] == ["         v0 ", "v0 ", "v0 "]
    assert re.sub(r"[·│\s]+", " ", lines[6]).split() == ["v0", "▸v1", "v1", "▸v2", "v2", "▸v3", "v3", "▸v4"]


def test_stages_that_never_wait_show_no_bubble_between_first_and_last_action():
    text = draw("async", 4, 2, 12, width=4000).splitlines()
    assert "·" not in text[7].strip("· ").removeprefix("stage 3").strip("· ")
    assert sum(line.endswith("100%") for line in text) == 4


def test_colour_adds_nothing_but_colour():
    plain = draw("1f1b", 4, 4, 2, color=False)
    coloured = draw("1f1b", 4, 4, 2, color=True)
    assert "\x1b" not in plain and "\x1b" in coloured
    assert ANSI.sub("", coloured) == plain


def test_an_impossible_schedule_is_refused():
    with pytest.raises(ConfigError, match="at least 4"):
        draw("two-version", 4, 2, 3)


def drawings_of(page):
    """Each command in a page, with the drawing below it."""
    for command, drawing in re.findall(r"```text\n\$ freerun schedule (.*?)\n(.*?)```", page.read_text(), re.S):
        words = shlex.split(command)
        yield dict(zip(words[::2], words[1::2], strict=True)), drawing


def test_the_drawings_in_the_documentation_are_what_the_command_draws():
    page = Path(__file__).parents[2] / "docs" / "schedules.md"
    found = list(drawings_of(page))
    assert {options["--kind"] for options, _ in found} == set(SCHEDULES)
    for options, drawing in found:
        sizes = [int(options[f"--{name}"]) for name in ("stages", "microbatches", "updates")]
        drawn = draw(options["--kind"], *sizes, slack=int(options.get("--slack", 0)))
        assert "\n".join(line.rstrip() for line in drawn.splitlines()).startswith(drawing.rstrip())
