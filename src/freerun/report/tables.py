"""The numbers of a report as HTML: they are there without any script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from freerun.report import words
from freerun.report.read import Json, Run


def subtitle(run: Run) -> str:
    """The run in one line: its mesh, its schedule, its optimizer."""
    pipeline, replicas = run.config.get("pipeline", {}), run.config.get("replicas", {})
    optimizer = run.config.get("optimizer", {})
    parts = []
    if stages := pipeline.get("stages"):
        parts.append(_plural(stages, "stage") + (f" × {_plural(n, 'replica')}" if (n := replicas.get("count")) else ""))
    if schedule := pipeline.get("schedule"):
        parts.append(f"{schedule}, {_plural(pipeline.get('microbatches', 1), 'microbatch', 'es')} per update")
    if replicas.get("count", 1) > 1:
        parts.append(f"{replicas.get('strategy', '')} between replicas")
    if name := optimizer.get("name"):
        parts.append(f"{name} at rate {optimizer.get('lr', words.NOTHING)}")
    return escape(" · ".join(parts))


def _plural(number: int, word: str, ending: str = "s") -> str:
    return f"{number} {word}{ending if number != 1 else ''}"


def measures(run: Run) -> list[tuple[str, str, str]]:
    """The headline numbers: what, how much, and a remark."""
    stages = _stages(run)
    busy = [part["busy_fraction"] for part in stages if part.get("busy_fraction") is not None]
    delays = [int(delay) for part in stages for delay in part.get("delay_histogram", {})]
    sent = run.summary.get("bytes_sent", {})
    eval_loss = run.measure("eval_loss")
    return [
        ("Evaluation loss", words.loss(eval_loss), _perplexity(eval_loss)),
        ("Training loss", words.loss(run.measure("train_loss", "loss")), _averaged(run)),
        ("Tokens per second", words.count(run.measure("tokens_per_second")), f"{_tokens(run)} in all"),
        ("Wall time", words.duration(run.measure("wall_seconds", "seconds")), f"{_updates(run)} updates"),
        ("Stages busy", words.share(sum(busy) / len(busy)) if busy else words.NOTHING, _least(busy)),
        ("Delay", _range(delays), "updates, over all stages"),
        ("Communication hidden", words.share(run.summary.get("hidden_communication_fraction")), "behind compute"),
        ("Sent", words.size(sent.get("pipeline")), f"along pipelines; {words.size(sent.get('replicas'))} to replicas"),
    ]


def _tokens(run: Run) -> str:
    return words.count(run.measure("tokens"))


def _updates(run: Run) -> str:
    return words.count(run.measure("steps", "update"))


def _averaged(run: Run) -> str:
    return "mean of the last updates" if "train_loss" in run.summary else "last that was logged"


def _perplexity(eval_loss: Any) -> str:
    return f"perplexity {math.exp(min(eval_loss, 50)):.4g}" if eval_loss is not None else "not evaluated"


def _least(busy: Sequence[float]) -> str:
    return f"least {words.share(min(busy))}" if busy else "not measured"


def _range(values: Sequence[int]) -> str:
    if not values:
        return words.NOTHING
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}–{max(values)}"


def headline(run: Run) -> str:
    """The headline numbers that are known, as tiles."""
    tiles = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for what, value, remark in measures(run)
        if value != words.NOTHING
    )
    return f'<dl class="tiles">{tiles}</dl>' if tiles else ""


def notes(runs: Sequence[Run]) -> str:
    """What is missing, said at the top of the page."""
    named = len(runs) > 1
    items = [f"{run.name}: {note}" if named else note for run in runs for note in run.missing]
    if not items:
        return ""
    return f'<ul class="notes" role="note">{"".join(f"<li>{escape(item)}</li>" for item in items)}</ul>'


def stages(run: Run) -> str:
    """Per stage: where its time went, the delay of its gradients, the weights it kept."""
    parts = _stages(run)
    if not parts:
        return ""
    replicated = len({part.get("replica", 0) for part in parts}) > 1
    delays = max((int(d) for part in parts for d in part.get("delay_histogram", {})), default=0)
    heaviest = max(part.get("peak_weight_bytes") or 0 for part in parts) or 1
    rows = "".join(_stage_row(part, replicated, delays, heaviest) for part in parts)
    head = ["Stage", "Time", f"Delay of gradients, 0 to {delays}", "Versions", "Weights in memory"]
    return _table(head, rows, "stages")


def _stages(run: Run) -> list[Json]:
    """The summary's stages in the order of the pipeline."""
    parts = [part for part in run.summary.get("stages", ()) if isinstance(part, dict)]
    return sorted(parts, key=lambda part: (part.get("stage", 0), part.get("replica", 0)))


def _stage_row(part: Json, replicated: bool, delays: int, heaviest: int) -> str:
    replica = f' <span class="muted">replica {part.get("replica", 0)}</span>' if replicated else ""
    busy, waiting = part.get("busy_fraction"), part.get("waiting_fraction")
    memory = part.get("peak_weight_bytes")
    cells = (
        f'<th scope="row">{part.get("stage", words.NOTHING)}{replica}</th>',
        f"<td>{_bar([('busy', busy or 0), ('waiting', waiting or 0)])}"
        f'<span class="muted">{words.share(busy)} busy, {words.share(waiting)} waiting</span></td>',
        f"<td>{_histogram(part.get('delay_histogram', {}), delays)}</td>",
        f'<td class="number">{part.get("versions_kept", words.NOTHING)}</td>',
        f'<td>{_bar([("memory", (memory or 0) / heaviest)])}<span class="muted">{words.size(memory)}</span></td>',
    )
    return f"<tr>{''.join(cells)}</tr>"


def _bar(parts: Iterable[tuple[str, float]]) -> str:
    pieces = "".join(f'<i class="{name}" style="width:{min(1.0, value):.2%}"></i>' for name, value in parts)
    return f'<span class="bar">{pieces}</span>'


def _histogram(histogram: Json, largest: int) -> str:
    """Shares of gradients by delay as bars, and the commonest delay in words."""
    counts = {int(delay): float(number) for delay, number in histogram.items()}
    total = sum(counts.values())
    if not total:
        return words.NOTHING
    step = min(14.0, 150 / (largest + 1))
    bars = "".join(
        f'<rect x="{delay * step:.1f}" y="{30 - max(1.5, 28 * number / total):.1f}" '
        f'width="{max(1.0, step - 2):.1f}" height="{max(1.5, 28 * number / total):.1f}">'
        f"<title>delay {delay}: {number:,.0f} gradients</title></rect>"
        for delay, number in sorted(counts.items())
    )
    width = (largest + 1) * step
    commonest = max(counts, key=lambda delay: counts[delay])
    return (
        f'<svg class="histogram" width="{width:.0f}" height="32" viewBox="0 0 {width:.0f} 32" aria-hidden="true">'
        f'<line x1="0" x2="{width:.0f}" y1="30.5" y2="30.5"/>{bars}</svg>'
        f'<span class="muted">{words.share(counts[commonest] / total)} at {commonest}</span>'
    )


def _table(head: Sequence[str], rows: str, name: str) -> str:
    columns = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    table = f'<table class="{name}"><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def comparison(runs: Sequence[Run]) -> str:
    """The headline numbers of several runs side by side."""
    columns = [measures(run) for run in runs]
    rows = "".join(
        f'<tr><th scope="row">{escape(lines[0][0])}</th>'
        + "".join(f"<td>{escape(value)}<small>{escape(remark)}</small></td>" for _, value, remark in lines)
        + "</tr>"
        for lines in zip(*columns, strict=True)
    )
    return _table(["", *(run.name for run in runs)], rows, "comparison")


def _flat(config: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differences(runs: Sequence[Run]) -> str:
    """The settings in which several runs differ."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = [
        key for key in dict.fromkeys(key for one in flat for key in one) if len({str(f.get(key)) for f in flat}) > 1
    ]
    if not keys:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th>'
        + "".join(f"<td>{escape(_value(one.get(key)))}</td>" for one in flat)
        + "</tr>"
        for key in keys
    )
    return _table(["", *(run.name for run in runs)], rows, "comparison")


def settings(run: Run) -> str:
    """Every setting of a run, by section."""
    sections: dict[str, list[str]] = {}
    for key, value in _flat(run.config):
        section, _, name = key.rpartition(".")
        row = f"<div><dt>{escape(name)}</dt><dd>{escape(_value(value))}</dd></div>"
        sections.setdefault(section, []).append(row)
    blocks = (f"<section><h3>{escape(name)}</h3><dl>{''.join(rows)}</dl></section>" for name, rows in sections.items())
    return f'<div class="settings">{"".join(blocks)}</div>' if sections else ""


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or value == "":
        return words.NOTHING
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
