"""Spans, the file that they are written to, and what is drawn of them."""

import asyncio
import json
import sys
import threading
import time
from itertools import pairwise

import pytest
from conftest import nested_or_apart

from report import figures, timeline
from report import log as report
from report.timeline import INSTANT, MAIN, Spans, TraceFile, join_decode, read_trace


def engine_step(start, end, tokens=4):
    return "decode", MAIN, start, end, {"steps": 1, "tokens": tokens}


def drawn(path):
    """The spans of a file, without the events that name processes and lanes."""
    return [event for event in read_trace(path) if event["ph"] == "X"]


# -- recording -------------------------------------------------------------------------------------


def test_a_span_has_name_lane_times_and_args_also_when_the_block_raises():
    spans, before = Spans(), time.perf_counter()
    with spans("turn", lane=3, group=7) as args:
        args["tokens"] = 5
        time.sleep(0.01)
    with pytest.raises(KeyError), spans("load"):
        raise KeyError
    (turn, load), after = spans.take(), time.perf_counter()
    name, lane, start, end, args = turn
    assert (name, lane, args) == ("turn", 3, {"group": 7, "tokens": 5})
    assert before <= start <= end - 0.01 and end <= load[2] <= load[3] <= after
    assert load[:2] == ("load", MAIN) and spans.take() == []


def test_seconds_are_summed_up_by_name_for_the_loop_alone():
    spans = Spans()
    spans.add("decode", 1.0, 1.5)
    spans.add("decode", 2.0, 2.25)
    spans.add("env step", 0.0, 9.0, lane=1)
    assert spans.seconds == {"decode": 0.75}
    assert [name for name, *_ in spans.take()] == ["decode", "decode", "env step"]
    spans.clear()
    assert not spans.seconds


def test_a_decorated_function_and_a_coroutine_are_timed_at_every_call():
    spans = Spans()

    @spans("pack")
    def double(x):
        return 2 * x

    async def answer():
        await asyncio.sleep(0.01)
        return 42

    assert [double(1), double(2)] == [2, 4]
    assert asyncio.run(spans.around(answer(), "reward", 2)) == 42
    one, other, reward = spans.take()
    assert one[0] == other[0] == "pack" and one[3] <= other[2]
    assert reward[:2] == ("reward", 2) and reward[3] - reward[2] >= 0.01


def test_threads_may_record_while_spans_are_taken():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    spans, taken = Spans(), []

    def record():
        for i in range(2000):
            spans.add("env step", i, i + 1, lane=1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += spans.take()
    sys.setswitchinterval(interval)
    assert len(taken + spans.take()) == 8000


def test_what_nobody_takes_is_bounded():
    spans = Spans()
    for i in range(timeline.STEP_LIMIT + 10):
        spans.add("turn", i, i + 1, lane=1)
    assert [span[2] for span in spans.take()] == list(range(10, timeline.STEP_LIMIT + 10))


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
    timeline.spans.add("train", 1.0, 2.0)
    TraceFile(tmp_path / "trace.json")
    assert timeline.spans.take() == [] and not timeline.spans.seconds


# -- figures ---------------------------------------------------------------------------------------


def write_run(directory, trace=True):
    """The files of a finished run of six steps."""
    directory.mkdir()
    row = {
        "reward_mean": 0.5, "staleness_max": 1, "staleness_hist": [2, 6], "trainer_idle": 0.3,
        "rollout_idle": 0.1, "length_mean": 3.5, "length_max": 5, "samples": 8,
        "staleness_mean": 0.75,
    }  # fmt: skip
    rows = [row | {"step": step, "version": step - 1, "wall_s": step} for step in range(1, 7)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if trace:
        write_steps(TraceFile(directory / "trace.json"), range(1, 7))
    return directory


def test_the_timeline_shows_steps_in_the_middle_and_only_what_lies_in_them(tmp_path):
    trace = read_trace(write_run(tmp_path / "run") / "trace.json")
    steps = [e for e in trace if e["name"] == "step"]
    start, end = figures.window(trace, 2)
    assert start == steps[2]["ts"] / 1e6 and end == (steps[3]["ts"] + steps[3]["dur"]) / 1e6
    assert figures.window(trace, 99)[1] == (steps[5]["ts"] + steps[5]["dur"]) / 1e6
    axis = figures.plt.figure().add_subplot()
    assert figures.gantt(axis, trace, start, end) == {"publish", "decode", "turn"}
    assert [text.get_text() for text in axis.get_yticklabels()] == [
        "trainer", "engine 0", "its 2 places\nfor episodes",
    ]  # fmt: skip
    bars = [path for drawn in axis.collections for path in drawn.get_paths()]
    assert len(bars) == 2 * (1 + 1 + 2)  # in each of two steps: publish, decode, two turns
    assert figures.gantt(axis, trace, end + 9, end + 10) == set()


def test_a_run_without_a_timeline_is_named_and_the_rest_is_drawn(tmp_path, capsys, monkeypatch):
    runs = [write_run(tmp_path / "new"), write_run(tmp_path / "old", trace=False)]
    monkeypatch.setattr("sys.argv", ["report.py", "plot", *map(str, runs)])
    assert report.main() == 0
    assert f"{runs[1]}: no step in a trace.json" in capsys.readouterr().err
    assert (runs[0] / "timeline.png").stat().st_size > 10_000
    assert (runs[0] / "compare.png").exists()
    figures.plot_timeline(runs[1:], tmp_path / "alone.png")  # nothing but the other panels
    assert (tmp_path / "alone.png").exists()
