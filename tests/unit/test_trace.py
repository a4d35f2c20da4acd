"""Spans: what is kept, what is counted, and what Perfetto reads."""

from __future__ import annotations

import json
from itertools import pairwise
from threading import Thread

import pytest

from freerun import trace
from freerun.trace import Tracer, traced, write_trace


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by one microsecond whenever it is read."""
    now = iter(range(0, 10**12, 1000))
    monkeypatch.setattr(trace, "perf_counter_ns", lambda: next(now))


def train(tracer: Tracer, updates: int) -> None:
    for update in range(updates):
        tracer.at_update(update)
        with tracer.span("wait"):
            pass
        with tracer.span("forward", microbatch=update, version=update):
            pass
        with tracer.span("backward", microbatch=update, version=update):
            pass
        with tracer.span("update", update=update):
            pass


def test_totals_count_every_update_and_spans_only_the_window(clock):
    tracer = Tracer(0, "stage 0", first_update=3, last_update=5)
    train(tracer, 10)
    assert tracer.seconds() == pytest.approx(dict.fromkeys(("wait", "forward", "backward", "update"), 1e-05))
    assert [args["update"] for _, name, _, _, args in tracer.spans if name == "update"] == [3, 4]
    assert len(tracer.spans) == 8


def test_fractions_are_shares_of_training_time_alone(clock):
    tracer = Tracer(0, "stage 0")
    train(tracer, 5)
    before = tracer.fractions()
    with tracer.span("evaluate"):
        for _ in range(100):
            trace.perf_counter_ns()
    assert before["busy"] == pytest.approx(3 * before["waiting"])
    assert tracer.fractions()["busy"] == pytest.approx(before["busy"], rel=0.05)
    tracer.restart()
    assert tracer.fractions() == {"busy": 0, "waiting": 0}


def test_an_error_inside_a_span_passes_through_and_is_counted(clock):
    tracer = Tracer(0, "stage 0")
    with pytest.raises(ValueError, match="inside"), tracer.span("forward"):
        raise ValueError("inside")
    assert tracer.seconds()["forward"] > 0


def test_spans_added_from_many_threads_are_all_counted():
    tracer = Tracer(0, "stage 0")
    threads = [Thread(target=lambda: [tracer.add("communicate", 0, 10) for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracer.seconds() == {"communicate": pytest.approx(8000 * 10 / 1e9)}
    assert len(tracer.spans) == 8000


def test_the_trace_has_named_ranks_and_lanes_on_one_clock(clock, tmp_path):
    ranks = [Tracer(rank, f"stage {rank}", offset_ns=-5000 * rank) for rank in (1, 0)]
    for tracer in ranks:
        train(tracer, 2)
        tracer.add("communicate", 1000, 9000, lane="to next", microbatch=0)
    path = tmp_path / "trace.json"
    write_trace(path, [json.loads(json.dumps(tracer.records())) for tracer in ranks])
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["name"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    assert names[0, "process_name", 0] == "stage 0" and names[1, "process_name", 0] == "stage 1"
    assert names[0, "thread_name", 0] == "compute" and names[0, "thread_name", 1] == "to next"
    spans = [e for e in events if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0
    sent = {e["pid"]: e for e in spans if e["name"] == "communicate"}
    assert sent[0]["ts"] - sent[1]["ts"] == pytest.approx(5)
    assert sent[0]["dur"] == pytest.approx(8) and sent[0]["args"] == {"microbatch": 0}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_run_that_traced_nothing_still_writes_a_trace(tmp_path):
    write_trace(tmp_path / "trace.json", [Tracer(0, "stage 0").records()])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"][0]["args"] == {"name": "stage 0"}


def steps_that_pause(pauses):
    for _ in range(pauses):
        yield "what it waits for"
    return 7


def drive(steps, clock_reads):
    """Give the steps what they wait for after so many microseconds each time; gives their result."""
    try:
        while True:
            next(steps)
            for _ in range(clock_reads):
                trace.perf_counter_ns()
    except StopIteration as stop:
        return stop.value


def test_steps_are_busy_while_they_compute_and_wait_while_they_pause(clock):
    tracer = Tracer(0, "stage 0")
    assert drive(traced(steps_that_pause(2), tracer, "forward", microbatch=3), 100) == 7
    assert [name for _, name, _, _, _ in tracer.spans] == ["forward", "wait", "forward", "wait", "forward"]
    assert all(a[3] == b[2] for a, b in pairwise(tracer.spans))
    assert tracer.seconds()["wait"] == pytest.approx(2 * 101e-6)


def test_waiting_during_an_evaluation_is_not_waiting_of_training(clock):
    tracer = Tracer(0, "stage 0")
    drive(traced(steps_that_pause(2), tracer, "evaluate"), 100)
    assert set(tracer.seconds()) == {"evaluate"}


def test_a_pause_too_short_to_be_a_wait_leaves_the_span_whole(clock):
    tracer = Tracer(0, "stage 0")
    drive(traced(steps_that_pause(5), tracer, "forward", microbatch=3), 2)
    assert [(name, args) for _, name, _, _, args in tracer.spans] == [("forward", {"microbatch": 3})]
