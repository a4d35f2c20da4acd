"""The study of delay: its laboratory equals the replay, its runs can all be read, its results say what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from studies import outcome  # noqa: E402
from studies.delay import plan, side_by_side  # noqa: E402
from studies.delay.laboratory import Laboratory  # noqa: E402
from studies.delay.rules import Setting  # noqa: E402
from studies.runner import Study  # noqa: E402

from freerun import config_files  # noqa: E402
from freerun.simulate.replay import simulate  # noqa: E402

SMALL = {
    "model.layers": "2",
    "model.width": "16",
    "model.heads": "2",
    "model.context": "16",
    "training.sequences": "2",
    "training.updates": "24",
    "data.max_documents": "5",
    "optimizer.warmup": "4",
    "run.log_every": "1",
    "run.trace_updates": "0",
}


def config(tmp_path: Path, settings: dict[str, str]):
    text = {**SMALL, "data.cache": str(tmp_path / "cache"), **settings}
    return config_files.read(str(ROOT / "studies/delay/workload.toml"), list(text.items()))


def test_every_run_of_the_plan_is_a_config_and_has_a_name_of_its_own() -> None:
    runs = [run for section in (*plan.SECTIONS.values(), plan.quick) for run in section()]
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        side_by_side.setting(run, side_by_side.config_of(run))


def test_the_crossing_is_where_the_mean_of_fifty_updates_falls_below_the_target(tmp_path: Path) -> None:
    values = [3.0] * 6 + [1.0] * 10
    lines = [json.dumps({"update": 10 * (i + 1), "loss": value, "seconds": i}) for i, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"update": 170, "lo']))
    result = outcome.outcome(tmp_path, "finished")
    assert result["crossing"] == 100  # four of five rows at 1.0: 1.4; three: 1.8, which is not below
    assert result["loss"] == 1.0


def test_a_run_without_hope_counts_as_diverged() -> None:
    assert outcome.diverged([(310, 6.5)])
    assert outcome.diverged([(60, float("nan"))])
    assert not outcome.diverged([(200, 6.5)])
    assert not outcome.diverged([])


def test_runs_side_by_side_are_replays_but_for_rounding(tmp_path: Path) -> None:
    of_method = [
        [("adamw", 8, 0), ("pipedream-lr", 5, 1), ("nesterov", 3, 0), ("delay-compensated", 8, 0)],
        [("rotation", 8, 0), ("graded", 8, 1), ("graded", 5, 0), ("rotation", 1, 1)],
    ]
    for together in of_method:
        configs = [
            config(tmp_path, {**plan.METHODS[m], "pipeline.stages": str(p), "training.seed": str(s)})
            for m, p, s in together
        ]
        side_by_side = Laboratory(configs[0], [Setting.of(each) for each in configs]).run(24)
        for run, each in enumerate(configs):
            folder = tmp_path / f"{together[run]}"
            folder.mkdir()
            simulate(each, folder)
            replayed = [row["loss"] for row in outcome.losses(folder)]
            assert side_by_side[:, run].tolist() == pytest.approx(replayed, rel=1e-3), together[run]


def test_runs_done_side_by_side_are_kept_and_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**SMALL, "data.cache": str(tmp_path / "cache"), "optimizer.lr": "1e-3", "training.updates": "60"}
    runs = [
        plan.run("some/adamw", "adamw", 4, small, updates=60),
        plan.run("some/graded", "graded", 8, {**small, "lab.others_rate": "2"}, seed=1, updates=60),
        plan.run("some/stopped", "graded", 8, small, updates=60, most=52),
    ]
    study = Study(tmp_path)
    study.workload.write_text(plan.STUDY.workload.read_text())
    monkeypatch.setattr(side_by_side, "STUDY", study)
    assert [[run.name for run in group] for group in side_by_side.groups(runs)] == [[run.name] for run in runs]
    side_by_side.carry_out(runs, "cpu")
    results = {result["run"]: result for result in study.load("some")}
    assert results["some/adamw"]["status"] == results["some/graded"]["status"] == "finished"
    assert results["some/stopped"]["status"] == "stopped"
    assert results["some/graded"]["settings"]["lab.others_rate"] == "2"
    assert results["some/adamw"]["curve"][0][0] == 50
    assert not study.missing(runs)


def test_what_the_laboratory_does_not_have_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path)
    study.workload.write_text(plan.STUDY.workload.read_text())
    monkeypatch.setattr(side_by_side, "STUDY", study)
    runs = [next(plan.finals()), next(plan.latest())]
    with pytest.raises(SystemExit, match=r"latest/adamw-p8 can't be done side by side \(pipeline.weights\)"):
        side_by_side.carry_out(runs, "cpu")
    assert study.missing(runs) == runs


@pytest.mark.timeout(600)
def test_the_two_minute_form_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = Study(tmp_path)
    study.workload.write_text(plan.STUDY.workload.read_text())
    study.carry_out(list(plan.quick()), at_once=2)
    results = {result["method"]: result for result in study.load("quick")}
    assert {result["status"] for result in results.values()} == {"finished"}
    assert results["graded"]["loss"] < results["rotation"]["loss"] < results["adamw"]["loss"]
