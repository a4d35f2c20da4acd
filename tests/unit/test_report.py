"""The report: all numbers without a script, nothing from elsewhere, and something to see whatever a run left."""

from __future__ import annotations

import json
import re

import pytest

from freerun import report
from freerun.errors import DataError
from freerun.report import words
from freerun.report.payload import MAX_POINTS, curves, smoothed, timeline
from freerun.report.read import read_run
from helpers.browser import needs_browser, opened
from helpers.fake_run import fake_run

FILES = ("config.toml", "metrics.jsonl", "summary.json", "trace.json")


@pytest.fixture
def run(tmp_path):
    return fake_run(tmp_path / "rotation", updates=400)


def page_of(runs, tmp_path):
    output = tmp_path / "report.html"
    report.write(runs, output)
    assert not list(tmp_path.glob("*.part"))
    return output.read_text()


def without_scripts(page):
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)


def test_every_number_is_there_without_a_script(run, tmp_path):
    text = without_scripts(page_of(run, tmp_path))
    summary = json.loads((run / "summary.json").read_text())
    assert words.loss(summary["eval_loss"]) in text and words.loss(summary["train_loss"]) in text
    assert words.count(summary["tokens_per_second"]) in text and summary["weights_sha256"] in text
    assert "4 stages × 1 replica · async, 1 microbatch per update · basis-rotation" in text
    for part in summary["stages"]:
        assert f"{words.share(part['busy_fraction'])} busy" in text
        assert words.size(part["peak_weight_bytes"]) in text
    assert "trace_updates" in text and 'role="note"' not in text


def test_the_page_asks_for_nothing_from_elsewhere(run, tmp_path):
    page = page_of([run, run], tmp_path)
    assert set(re.findall(r"\w+://[^\s\"'<)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(link|img|iframe)|\bsrc=|@import|url\((?!#)", page)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_rest_is_shown(run, tmp_path, name):
    (run / name).unlink()
    text = without_scripts(page_of(run, tmp_path))
    assert f"<li>{name} is missing" in text
    assert ("<h2>Timeline" in text) == (name != "trace.json")
    assert ("<h2>Loss" in text) == (name != "metrics.jsonl")
    assert "Evaluation loss" in text


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_anywhere_still_gives_a_page(run, tmp_path, name):
    whole = (run / name).read_bytes()
    for length in {0, 1, 7, len(whole) // 3, len(whole) // 2, len(whole) - 2}:
        (run / name).write_bytes(whole[:length])
        assert "</html>" in page_of(run, tmp_path)


def test_a_killed_run_shows_the_last_that_was_logged(run, tmp_path):
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:6000])
    text = without_scripts(page_of(run, tmp_path))
    last = read_run(run).train[-1]
    assert "the run has not finished" in text and "1 line that can&#x27;t be read" in text
    assert words.loss(last["loss"]) in text and f"{last['update']} updates" in text


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    text = without_scripts(page_of(tmp_path / "empty", tmp_path))
    assert text.count("is missing") == 4 and "<h2>" not in text


def test_numbers_that_are_none_are_left_out_of_the_curves(run, tmp_path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"update": 410, "loss": NaN, "lr": 0.0, "seconds": 50.0}\n')
    drawn = curves(read_run(run))
    assert drawn["train"]["loss"][-1] is None and drawn["train"]["loss"][-2] is not None
    assert "NaN" not in page_of(run, tmp_path).split('id="data">')[1].split("</script>")[0]


def test_what_a_run_calls_things_can_not_become_markup(run, tmp_path):
    evil = "</script><script>alert(1)</script>"
    (run / "config.toml").write_text(f'[data]\nsource = "{evil}"\n')
    trace = (run / "trace.json").read_text().replace('"stage 0"', json.dumps(evil))
    (run / "trace.json").write_text(trace)
    assert "<script>alert" not in page_of(run, tmp_path)


def test_a_resumed_run_keeps_the_later_line_of_an_update_on_one_clock(tmp_path):
    rows = [(0, 0.0, 3.0), (10, 5.0, 2.0), (20, 10.0, 1.9), (10, 1.0, 2.5), (20, 6.0, 2.4), (30, 11.0, 2.3)]
    lines = [{"update": u, "seconds": s, "loss": loss, "tokens": u} for u, s, loss in rows]
    lines.append({"update": 25, "eval_loss": 2.2})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path)
    assert [(line["update"], line["loss"]) for line in run.train] == [(0, 3.0), (10, 2.5), (20, 2.4), (30, 2.3)]
    seconds = [line["seconds"] for line in run.train]
    assert seconds == sorted(seconds)
    assert run.evaluations[0]["tokens"] == 25


def test_several_runs_stand_side_by_side(run, tmp_path):
    other = fake_run(tmp_path / "flush", kind="1f1b", microbatches=4, optimizer="adamw", updates=300, seed=1)
    text = without_scripts(page_of([run, other], tmp_path))
    assert "2 runs side by side" in text and "Loss against wall time" in text
    differing = text[text.index("Settings that differ") :]
    assert "pipeline.schedule" in differing and "training.updates" in differing and "model.layers" not in differing


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [fake_run(tmp_path / parent / "run", updates=50) for parent in ("a", "b")]
    text = page_of(folders, tmp_path)
    assert "a/run" in text and "b/run" in text


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such directory"):
        report.write(tmp_path / "nowhere", tmp_path / "report.html")
    with pytest.raises(DataError, match="at least one"):
        report.write([], tmp_path / "report.html")


def test_a_long_run_is_thinned_to_what_a_screen_shows(tmp_path):
    lines = [{"update": u, "loss": 2.0, "seconds": u / 10} for u in range(50_000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train = curves(read_run(tmp_path))["train"]
    assert len(train["loss"]) <= MAX_POINTS and set(train["smooth"]) == {2.0}
    assert train["update"] == sorted(train["update"])


def test_smoothing_neither_lags_nor_shifts():
    line = [float(n) for n in range(1000)]
    assert smoothed(line)[:900] == pytest.approx(line[:900])
    assert smoothed([]) == [] and smoothed([None, 3.0]) == [None, 3.0]


def test_the_timeline_holds_every_span_with_its_microbatch_and_version(run):
    drawn = timeline(read_run(run))
    names = drawn["names"]
    forwards = [span for span in drawn["spans"] if names[span[1]] == "forward"]
    assert len(forwards) == 4 * 30
    assert {span[4] for span in forwards} == set(range(30)) and forwards[0][5] == 0
    assert [lane["label"] for lane in drawn["lanes"] if lane["name"] == "compute"] == [f"stage {n}" for n in range(4)]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.count(None), "–"),
        (words.count(0), "0"),
        (words.count(9999), "9,999"),
        (words.count(12345), "12.3k"),
        (words.count(999_999), "1M"),
        (words.count(4.56e9), "4.56B"),
        (words.size(0), "0 B"),
        (words.size(1536), "1.5 KiB"),
        (words.size(3 << 40), "3 TiB"),
        (words.duration(12.34), "12.3 s"),
        (words.duration(3599.9), "59 min 59 s"),
        (words.duration(90061), "1 d 1 h"),
        (words.share(1.0), "100 %"),
        (words.share(0.99999), "> 99.9 %"),
        (words.share(0.5), "50 %"),
    ],
)
def test_numbers_read_well(shown, expected):
    assert shown == expected


PROBE = """
const seen = document.documentElement.dataset;
const move = (target, x, y, kind = "pointermove", more = {}) => {
  const box = target.getBoundingClientRect();
  const event = { clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, ...more };
  target.dispatchEvent(kind === "wheel" ? new WheelEvent(kind, event) : new PointerEvent(kind, event));
};
const chart = document.querySelector("figure.chart"), tip = document.getElementById("tip");
move(chart.querySelector("svg"), 300, 100);
seen.curveTip = tip.innerText;
for (const button of chart.querySelectorAll("button")) button.click();
seen.curves = document.querySelectorAll("figure.chart path").length;
const canvas = document.querySelector("figure.timeline canvas");
seen.spanTip = "";
for (let x = 110; x < 200 && !seen.spanTip.includes("version"); x += 4) {
  move(canvas, x, 40);
  seen.spanTip = tip.innerText;
}
const pixels = () => canvas.toDataURL();
const before = pixels();
move(canvas, 400, 40, "wheel", { deltaY: -200, ctrlKey: true });
seen.zoomed = pixels() !== before;
document.querySelector('button[aria-label="Everything"]').click();
seen.colours = new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;
"""


def data_attribute(dom, name):
    found = re.search(rf'<html[^>]* data-{name}="([^"]*)"', dom)
    return found and found[1]


@needs_browser
@pytest.mark.parametrize("width", [1280, 600])
def test_a_browser_draws_the_page_without_an_error(run, tmp_path, width):
    page_of(run, tmp_path)
    dom = opened(tmp_path / "report.html", tmp_path / "profile", width, PROBE)
    assert data_attribute(dom, "error") is None
    assert data_attribute(dom, "ready") == "true"
    assert int(data_attribute(dom, "curves")) == 6
    assert re.search(r"updates: \d+.*evaluation.*perplexity", data_attribute(dom, "curve-tip"), re.S)
    assert re.search(r"stage 0.*microbatch.*version.*took", data_attribute(dom, "span-tip"), re.S)
    assert data_attribute(dom, "zoomed") == "true"
    assert int(data_attribute(dom, "colours")) > 20


@needs_browser
def test_a_browser_draws_several_runs_and_one_that_was_killed(run, tmp_path):
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:3000])
    (tmp_path / "empty").mkdir()
    page_of([run, killed, tmp_path / "empty"], tmp_path)
    dom = opened(tmp_path / "report.html", tmp_path / "profile")
    assert data_attribute(dom, "error") is None and data_attribute(dom, "ready") == "true"
    assert dom.count("<canvas") == 2 and "<path" in dom
