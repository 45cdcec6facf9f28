"""Figures of finished runs, and the command that draws them."""

import json
import time

import pytest

from plumbing.spans import MAIN
from report import figures
from report.plot import main
from report.timeline import TraceFile, read_trace


@pytest.fixture
def plot(monkeypatch):
    """Run the command; returns its exit code."""

    def run(*argv) -> int:
        monkeypatch.setattr("sys.argv", ["report.plot", *map(str, argv)])
        return main()

    return run


def write_trace(path):
    """Six steps with a publish in each; beside it an engine step and two turns."""
    trace, origin = TraceFile(path), time.perf_counter()
    for step in range(1, 7):
        start = origin + 0.004 * step
        trainer = [
            ("publish", MAIN, start + 0.001, start + 0.003, {}),
            ("step", MAIN, start, start + 0.003, {"step": step}),
        ]
        worker = [("decode", MAIN, start, start + 0.001, {"steps": 1, "tokens": 2})]
        worker += [("turn", lane, start, start + 0.002, {}) for lane in (1, 2)]
        trace.write([trainer, worker])
    trace.close()


def write_run(directory, trace=True):
    """The files of a finished run of six steps."""
    directory.mkdir()
    row = {
        "reward_mean": 0.5, "staleness_max": 1, "staleness_hist": [2, 6], "trainer_idle": 0.3,
        "rollout_idle": 0.1, "length_mean": 3.5, "length_max": 5, "samples": 8,
        "staleness_mean": 0.75,
    }  # fmt: skip
    rows = [row | {"step": step, "version": step - 1, "wall_s": step} for step in range(1, 7)]
    rows.append({"version": 6, "eval/solve_rate": 0.5, "eval/samples": 8})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if trace:
        write_trace(directory / "trace.json")
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


def test_a_run_without_a_timeline_is_named_and_the_rest_is_drawn(tmp_path, plot, capsys):
    runs = [write_run(tmp_path / "new"), write_run(tmp_path / "old", trace=False)]
    assert plot(*runs) == 0
    assert f"{runs[1]}: no step in a trace.json" in capsys.readouterr().err
    assert (runs[0] / "timeline.png").stat().st_size > 10_000
    assert (runs[0] / "compare.png").exists()
    figures.plot_timeline(runs[1:], tmp_path / "alone.png")  # nothing but the other panels
    assert (tmp_path / "alone.png").exists()


def test_any_number_of_the_metrics_is_drawn_by_its_name(tmp_path, plot, monkeypatch, capsys):
    runs, drawn = [write_run(tmp_path / name) for name in ("one", "two")], {}
    assert plot(*runs, "--metrics", "wall_s,length_mean", "--out", tmp_path / "out") == 0
    assert (tmp_path / "out/metrics.png").stat().st_size > 5_000
    assert str(tmp_path / "out/metrics.png") in capsys.readouterr().out.splitlines()

    def finish(figure, axes, target):
        lines = {axis.get_title(): [line.get_xydata() for line in axis.lines] for axis in axes}
        drawn.update({name: [xy.tolist() for xy in runs] for name, runs in lines.items()})

    monkeypatch.setattr(figures, "finish", finish)
    figures.plot_metrics(runs, ["wall_s", "length_mean"], tmp_path / "none.png")
    steps = range(1, 7)
    assert drawn == {
        "wall_s": 2 * [[[step, step] for step in steps]],
        "length_mean": 2 * [[[step, 3.5] for step in steps]],
    }


@pytest.mark.parametrize("wrong", ["speed", "staleness_hist", "length_mean,eval/solve_rate"])
def test_a_metric_that_is_no_number_of_every_step_is_refused_in_one_line(
    tmp_path, plot, capsys, wrong
):
    run = write_run(tmp_path / "run")
    assert plot(run, "--metrics", wrong) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"report.plot: no number {wrong.split(',')[-1]!r} in every row of {run}")
    assert err.count("\n") == 1 and "length_mean" in err and not (run / "metrics.png").exists()


@pytest.mark.parametrize("text", [None, "", '{"version": 0, "eval/solve_rate": 0.1}\n'])
def test_a_run_without_a_step_is_refused_in_one_line(tmp_path, plot, capsys, text):
    (tmp_path / "run").mkdir()
    if text is not None:
        (tmp_path / "run/metrics.jsonl").write_text(text)
    assert plot(tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert err == f"report.plot: no metrics.jsonl with steps in {tmp_path / 'run'}\n"


def test_a_turn_has_the_colours_of_the_versions_that_decoded_it():
    committed = [(0, 3), (10, 4), (20, 5)]  # (microseconds, version)
    assert figures.pieces({"ts": 1, "dur": 4}, committed) == [(3, 1, 5)]
    assert figures.pieces({"ts": 5, "dur": 17}, committed) == [(3, 5, 10), (4, 10, 20), (5, 20, 22)]
    assert figures.pieces({"ts": 10, "dur": 10}, committed) == [(4, 10, 20)]
    assert figures.pieces({"ts": 1, "dur": 2}, []) == [(0, 1, 3)]  # a trace that begins later


def test_the_picture_of_turns_has_one_scale_for_all_runs(tmp_path, monkeypatch):
    def event(name, pid, tid, begin, end, **args):
        place = {"pid": pid, "tid": tid, "ts": int(begin * 1e6), "dur": int((end - begin) * 1e6)}
        return {"name": name, "ph": "X", **place, "args": args}

    def write(run, pace):
        run.mkdir()
        events = []
        for step in range(6):
            at = step * pace
            events.append(event("step", 1, 1, at, at + pace, step=step + 1))
            events.append(event("commit", 2, 1, at, at + 0.01, version=step))
            events.append(event("turn", 2, 2, at + 0.02, at + 0.02 + pace, tokens=7))
        lines = "".join(json.dumps(e) + ",\n" for e in events)
        (run / "trace.json").write_text("[\n" + lines)
        return run

    kept = []
    monkeypatch.setattr(figures.plt, "close", kept.append)
    runs = {"slow": write(tmp_path / "slow", 1.0), "fast": write(tmp_path / "fast", 0.25)}
    figures.plot_turns(runs, tmp_path / "turns.png", steps=2)
    axes = kept[0].axes
    assert [axis.get_xlim() for axis in axes] == [(0.0, 2.0)] * 4
    said = [text.get_text() for axis in axes for text in axis.texts]
    assert said == [
        "longest turn: 7 tokens, under version 2, 3", "longest turn: 7 tokens, under version 2, 3"
    ]  # fmt: skip
    labels = [[t.get_text() for t in axis.get_legend().get_texts()] for axis in axes[1::2]]
    assert labels[0] == ["version 1", "version 2", "version 3", "version 4"]
