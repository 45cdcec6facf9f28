"""trace.json: what is written of the spans, in which form, and what a resumed run keeps."""

import json
import time
from itertools import pairwise

import pytest
from conftest import nested_or_apart

from plumbing.spans import MAIN, Spans, spans
from report import timeline
from report.timeline import INSTANT, TraceFile, join_decode, read_trace


def engine_step(start, end, tokens=4):
    return "decode", MAIN, start, end, {"steps": 1, "tokens": tokens}


def drawn(path):
    """The spans of a file, without the events that name processes and lanes."""
    return [event for event in read_trace(path) if event["ph"] == "X"]


# -- engine steps ----------------------------------------------------------------------------------


def test_engine_steps_in_a_row_become_one_span_until_something_else_happens():
    steps = [engine_step(i / 100, (i + 0.9) / 100) for i in range(10)]
    load = "load", MAIN, 0.05, 0.06, {}
    turn = "turn", 1, 0.0, 0.032, {}  # in another lane: no interruption
    instant = "episodes", MAIN, 0.039, 0.039 + 0.9 * INSTANT, {}
    longer = "episodes", MAIN, 0.07 - 1.1 * INSTANT, 0.07, {}
    between = [*steps[:3], turn, steps[3], instant, steps[4], load, steps[6], longer, *steps[7:]]
    assert join_decode(between) == [
        ("decode", MAIN, 0.0, 0.049, {"steps": 5, "tokens": 20}),
        turn,
        load,
        engine_step(0.06, 0.069),
        longer,
        ("decode", MAIN, 0.07, 0.099, {"steps": 3, "tokens": 12}),
    ]


def test_a_joined_span_has_a_longest_length_but_a_slow_step_stays_whole():
    steps = [engine_step(i / 10, (i + 1) / 10) for i in range(9)]
    joined = join_decode([*steps, engine_step(0.9, 2.9)])
    assert [args["steps"] for *_, args in joined] == [2, 2, 2, 2, 1, 1]
    assert all(one[3] <= other[2] for one, other in pairwise(joined))
    assert joined[-1][2:4] == (0.9, 2.9)


# -- the file --------------------------------------------------------------------------------------


def write_steps(trace, steps, lanes=2):
    """So many steps: a publish in each on the trainer's side, engine steps and turns beside it."""
    for step in steps:
        now, mine, worker = time.perf_counter(), Spans(), Spans()
        mine.add("publish", now + 0.0010004, now + 0.003)  # to the end of its step
        mine.add("step", now, now + 0.003, args={"step": step})
        worker.add("decode", now, now + 0.001, args={"steps": 1, "tokens": 2})
        for lane in range(1, lanes + 1):
            worker.add("turn", now, now + 0.002, lane)
        trace.write([mine.take(), worker.take()])
        time.sleep(0.004)


def test_the_file_is_in_the_chrome_trace_format(tmp_path):
    trace = TraceFile(tmp_path / "trace.json")
    write_steps(trace, range(1, 21))
    text = (tmp_path / "trace.json").read_text()
    events = json.loads(text.rstrip(",\n") + "]")  # the bracket is optional to viewers
    assert events == read_trace(tmp_path / "trace.json")
    named = {}
    for event in events:
        if event["ph"] == "M":
            named[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
        else:  # named before its first event
            assert ("process_name", event["pid"], event["tid"]) in named
            assert event["ph"] == "X" and isinstance(event["name"], str) and event["dur"] >= 0
            assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts", "dur"))
    processes = {pid: name for (what, pid, _), name in named.items() if what == "process_name"}
    assert processes == {1: "trainer", 2: "rollout 0"}
    assert {event["pid"] for event in events} == {1, 2}
    assert len(drawn(tmp_path / "trace.json")) == 20 * 5
    assert nested_or_apart(drawn(tmp_path / "trace.json"))
    step = next(event for event in events if event["name"] == "step")
    assert step["dur"] in (2999, 3000, 3001) and step["args"] == {"step": 1}  # microseconds


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_file_that_ends_anywhere_can_be_read(tmp_path, cut):
    path = tmp_path / "trace.json"
    write_steps(TraceFile(path), [1, 2])
    whole = read_trace(path)
    path.write_text(path.read_text()[:-cut])
    assert whole[: len(read_trace(path))] == read_trace(path)
    assert len(whole) - 2 <= len(read_trace(path)) < len(whole)
    assert read_trace(tmp_path / "none.json") == []


def test_a_resumed_run_forgets_what_came_after_the_checkpoint_and_goes_on_from_there(tmp_path):
    path = tmp_path / "trace.json"
    first = TraceFile(path)
    write_steps(first, [1, 2])
    evaluation = Spans()
    evaluation.add("evaluate", time.perf_counter(), time.perf_counter() + 0.001)
    first.write([evaluation.take()])
    time.sleep(0.002)
    write_steps(first, [3, 4])
    first.close()
    path.open("a").write('{"name":"tur')
    again = TraceFile(path, resumed_at=2)
    assert [e["args"]["step"] for e in drawn(path) if e["name"] == "step"] == [1, 2]
    assert [e["name"] for e in drawn(path)][-1] == "evaluate"  # of version 2
    write_steps(again, [3])
    steps = [e for e in drawn(path) if e["name"] == "step"]
    assert [e["args"]["step"] for e in steps] == [1, 2, 3]
    assert steps[1]["ts"] + steps[1]["dur"] <= steps[2]["ts"] and nested_or_apart(drawn(path))
    names = [e for e in read_trace(path) if e["ph"] == "M"]
    assert len(names) == 2 * 4  # each lane was named once


def test_a_full_file_says_so_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "FILE_LIMIT", 30)
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    write_steps(trace, range(1, 20))
    events = read_trace(path)
    assert len(events) == 31 and events[-1]["name"] == "the file is full (30 events)"
    trace.close()
    TraceFile(path, resumed_at=20).close()
    assert read_trace(path) == events


def test_a_step_with_too_many_spans_says_that_some_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "STEP_LIMIT", 3)
    trace = TraceFile(tmp_path / "trace.json")
    write_steps(trace, [1])  # three in the worker, two in the trainer
    notes = [e for e in read_trace(tmp_path / "trace.json") if e["ph"] == "i"]
    assert [(e["pid"], e["name"]) for e in notes] == [
        (2, "of this step only the last 3 spans were kept")
    ]


def test_a_new_run_in_a_process_does_not_write_spans_of_the_last_one(tmp_path):
    spans.add("train", 1.0, 2.0)
    TraceFile(tmp_path / "trace.json")
    assert spans.take() == [] and not spans.seconds
