"""A schedule drawn in the terminal: one row per stage, time running right, the version that each forward sees."""

from __future__ import annotations

from collections.abc import Iterator

from freerun.pipeline.schedule import Backward, Forward, Update, max_in_flight, max_versions
from freerun.simulate.events import Span, simulate
from freerun.weights.delay import steady_delay

FORWARD_COST, BACKWARD_COST = 1, 2
IDLE = "·"
STYLES = {Forward: "\x1b[48;5;25;38;5;231m", Backward: "\x1b[48;5;29;38;5;231m"}
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def draw(
    kind: str, stages: int, microbatches: int, updates: int, slack: int = 0, color: bool = False, width: int = 100
) -> str:
    """The timeline of a schedule in blocks no wider than `width`, and what it comes to per stage when it has settled.

    A forward costs one unit of time and a backward two; updates and links cost nothing.
    """
    timeline = simulate(kind, stages, microbatches, updates, FORWARD_COST, BACKWARD_COST, slack=slack)
    makespan = round(timeline.makespan)
    unit = len(f"F{microbatches * updates}") + 2
    rows = [_Row(spans, makespan, unit) for spans in timeline.spans]
    margin = len(f"stage {stages - 1}  ")
    step = max(1, (width - margin) // unit) * unit
    blocks = [
        _block(rows, start, min(start + step, makespan * unit), unit, margin, color)
        for start in range(0, makespan * unit, step)
    ]
    legend = (
        "F5 v2: forward of microbatch 5 on weights that have had 2 updates   B5: its backward\n"
        f"▸v6: the update that follows makes version 6   {IDLE * 3}: waiting   time in forwards, a backward takes two"
    )
    table = "\n".join(_table(kind, stages, microbatches, slack))
    return "\n\n".join([*blocks, legend, table]) + "\n"


class _Row:
    """Two lines of text for one stage: what runs, and on which weights."""

    def __init__(self, spans: list[Span], makespan: int, unit: int) -> None:
        self.lines = [[IDLE] * (makespan * unit), [IDLE] * (makespan * unit)]
        self.styles = [DIM] * (makespan * unit)
        cells = [span for span in spans if not isinstance(span.action, Update)]
        made = {span.start: f"▸v{span.action.update + 1}" for span in spans if isinstance(span.action, Update)}
        for span in cells:
            start, end = round(span.start) * unit, round(span.end) * unit
            what, weights = _labels(span, made)
            self.lines[0][start:end] = f"{what:<{end - start - 1}}│"
            self.lines[1][start:end] = f"{weights:<{end - start - 1}}│"
            self.styles[start:end] = [STYLES[type(span.action)]] * (end - start)

    def text(self, line: int, start: int, end: int, color: bool) -> str:
        """One of the two lines between two columns."""
        if not color:
            return "".join(self.lines[line][start:end])
        parts, last = [], ""
        for char, style in zip(self.lines[line][start:end], self.styles[start:end], strict=True):
            parts.append(char if style == last else PLAIN + style + char)
            last = style
        return "".join(parts) + PLAIN


def _labels(span: Span, made: dict[float, str]) -> tuple[str, str]:
    """What a cell says: the microbatch, and the version that a forward sees or that an update right after makes."""
    if isinstance(span.action, Forward):
        return f"F{span.action.microbatch}", f"v{span.action.version}"
    assert isinstance(span.action, Backward)
    return f"B{span.action.microbatch}", made.get(span.end, "")


def _block(rows: list[_Row], start: int, end: int, unit: int, margin: int, color: bool) -> str:
    """All stages between two columns, under a ruler."""
    every = 5
    ticks = (f"{t:<{unit * every}}" for t in range(-(-start // unit // every) * every, end // unit + 1, every))
    offset = (-(start // unit) % every) * unit
    ruler = " " * margin + (" " * offset + "".join(ticks))[: end - start]
    lines = [ruler.rstrip()]
    for stage, row in enumerate(rows):
        lines.append(f"{f'stage {stage}':<{margin}}" + row.text(0, start, end, color))
        lines.append(" " * margin + row.text(1, start, end, color))
    return "\n".join(lines)


def _table(kind: str, stages: int, microbatches: int, slack: int) -> Iterator[str]:
    """Per stage, once the pipeline is full: the delay of its updates, what it keeps, and how busy it is."""
    settled = 12 + 6 * max_in_flight(kind, 0, stages, microbatches, slack) // microbatches
    timeline = simulate(kind, stages, microbatches, settled, FORWARD_COST, BACKWARD_COST, slack=slack)
    yield "          delay   in flight   versions   busy"
    for stage, busy in enumerate(timeline.busy_fractions):
        shape = (stage, stages, microbatches, slack)
        kept = max_versions(kind, "stash", *shape)
        delay = steady_delay(kind, *shape)
        yield f"{f'stage {stage}':<9} {delay:>5} {max_in_flight(kind, *shape):>11} {kept:>10} {busy:>6.0%}"
