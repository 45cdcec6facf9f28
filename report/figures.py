"""Figures of runs: reward, and what every process did when."""

import io
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from plumbing.files import write_whole
from report.rows import idle_shares, read_rows
from report.timeline import read_trace

WINDOW = 3  # steps of the slowest run that the timelines show
VERSION_COLORS = ("#4c78a8", "#f2a65a", "#6fb36f", "#d98cb3", "#9a8bd0", "#5fbcbf")  # taken in turn
COLORS = {
    "wait": "#dddddd", "idle": "#dddddd",
    "episodes": "C9",
    "decode": "C0", "turn": "#a6cbe8",
    "forward": "C2", "backward": "#187a18", "train": "#b8ddb8",
    "publish": "C3", "load": "C3", "commit": "#f2b3b3", "probe": "#f2b3b3",
    "env step": "C1", "reward": "C1", "reset": "#ffcf99",
    "restart": "black",
    "evaluate": "C4", "checkpoint": "C5", "log": "C5",
}  # fmt: skip


def finish(figure, axes, target: Path, dpi: int = 110) -> Path:
    """Put a grid on the axes, write the figure and close it; returns where it is."""
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=target.suffix[1:])
    plt.close(figure)
    write_whole(target, picture.getvalue())
    return target


def plot_reward(runs: list[Path], target: Path) -> Path:
    """Training reward (smoothed) and held-out solve rate against steps and against wall time."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for number, run in enumerate(runs):
        rows = read_rows(run / "metrics.jsonl")
        steps = [row for row in rows if "step" in row]
        evals = [row for row in rows if "eval/solve_rate" in row]
        wall = {0: 0.0} | {row["step"]: row["wall_s"] for row in steps}
        rewards = np.array([row["reward_mean"] for row in steps])
        window = max(1, len(rewards) // 20)
        smooth = [rewards[max(0, i - window) : i + 1].mean() for i in range(len(rewards))]
        for axis, at in ((by_step, lambda step: step), (by_time, wall.get)):
            color = f"C{number}"
            x = [at(row["step"]) for row in steps]
            axis.plot(x, rewards, color=color, alpha=0.25, linewidth=0.8)
            axis.plot(x, smooth, color=color, label=f"{run.name}: training")
            if evals:
                axis.plot(
                    [at(row["version"]) for row in evals],
                    [row["eval/solve_rate"] for row in evals],
                    "o--",
                    color=color,
                    label=f"{run.name}: held out",
                )
    by_step.set(xlabel="step", ylabel="reward")
    by_time.set(xlabel="seconds (evaluation not counted)")
    by_step.legend(fontsize=8)
    return finish(figure, (by_step, by_time), target, dpi=120)


def plot_metrics(runs: list[Path], keys: list[str], target: Path) -> Path:
    """Any numbers of metrics.jsonl against the step, one panel a key. Raises ValueError for a key
    that a run has not, or that is no number."""
    figure, axes = plt.subplots(1, len(keys), figsize=(4.5 * len(keys), 3.6), squeeze=False)
    for key, axis in zip(keys, axes[0], strict=True):
        for run in runs:
            steps = [row for row in read_rows(run / "metrics.jsonl") if "step" in row]
            if not all(isinstance(row.get(key), int | float) for row in steps):
                known = sorted(k for k, v in steps[0].items() if isinstance(v, int | float))
                raise ValueError(f"no number {key!r} in every row of {run}: {', '.join(known)}")
            axis.plot([row["step"] for row in steps], [row[key] for row in steps], label=run.name)
        axis.set(xlabel="step", title=key)
    axes[0][0].legend(fontsize=8)
    return finish(figure, axes[0], target)


def gantt(axis, trace: list[dict], start: float, end: float) -> set[str]:
    """Draw what the trainer, each engine and its episodes (a thin row each) did between two times,
    in seconds of the trace's clock. Returns the names of the spans that were drawn."""
    spans = [e for e in trace if e["ph"] == "X" and e["name"] in COLORS]
    spans = [e for e in spans if e["ts"] < end * 1e6 and e["ts"] + e["dur"] > start * 1e6]
    lanes: dict[int, set[int]] = {}  # of each process
    for event in spans:
        lanes.setdefault(event["pid"], {1}).add(event["tid"])
    top, rows, ticks = 0.0, {}, {}
    for pid in sorted(lanes):  # the trainer, then the workers
        loop, *episodes = sorted(lanes[pid])
        rows[pid, loop] = top, 0.9
        ticks[top + 0.45] = "trainer" if pid == 1 else f"engine {pid - 2}"
        top += 1.0
        for number, lane in enumerate(episodes):
            rows[pid, lane] = top + 2 * number / len(episodes), 2 / len(episodes)
        if episodes:
            ticks[top + 1.0] = f"its {len(episodes)} places\nfor episodes"
            top += 2.1
    spans.sort(key=lambda e: (e["ts"], -e["dur"]))  # what is nested comes later, on top
    drawn: dict[tuple, list] = {}  # one call of matplotlib for all that looks the same
    for event in spans:
        place = rows[event["pid"], event["tid"]]
        bar = event["ts"] / 1e6 - start, event["dur"] / 1e6
        drawn.setdefault((event["name"], place), []).append(bar)
    for (name, place), bars in drawn.items():
        axis.broken_barh(bars, place, color=COLORS[name], linewidth=0)
    axis.set(xlim=(0, end - start), ylim=(max(top, 1.0), -0.1))
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    return {name for name, _ in drawn}


def has_steps(trace: list[dict]) -> bool:
    return any(event["name"] == "step" for event in trace)


def by_version(trace: list[dict], pid: int) -> list[tuple[float, int]]:
    """When (microseconds) an engine began to decode under which version: as its commits end."""
    commits = [e for e in trace if e["name"] == "commit" and e["pid"] == pid and e["ph"] == "X"]
    return [(e["ts"] + e["dur"], e["args"]["version"]) for e in commits]


def pieces(turn: dict, committed: list[tuple[float, int]]) -> list[tuple[int, float, float]]:
    """A turn cut at the weight updates that fell into it: version, begin, end (microseconds)."""
    begin, end = turn["ts"], turn["ts"] + turn["dur"]
    before = [version for at, version in committed if at <= begin]
    inside = [(at, version) for at, version in committed if begin < at < end]
    starts = [(begin, before[-1] if before else 0), *inside]
    ends = [at for at, _ in inside] + [end]
    return [(version, start, end) for (start, version), end in zip(starts, ends, strict=True)]


def plot_turns(runs: dict[str, Path], target: Path, steps: int = 4) -> Path | None:
    """Runs on one scale of time, by their titles: what the trainer did, and below it every place of
    the engine, each turn in the colours of the versions that decoded it. White is waiting. An arrow
    points at the longest turn. Shows so many steps of the first run, and as many seconds of all.
    None, and no figure, if no run has a step in its trace.json; one that has none is left out."""
    traces = {title: read_trace(run / "trace.json") for title, run in runs.items()}
    traces = {title: trace for title, trace in traces.items() if has_steps(trace)}
    if not traces:
        return None
    begin, end = window(next(iter(traces.values())), steps)
    seconds = end - begin
    figure, axes = plt.subplots(
        2 * len(traces), 1, figsize=(11, 3.1 * len(traces)), sharex=True,
        height_ratios=[1, 7] * len(traces), layout="constrained",
    )  # fmt: skip
    for number, (title, trace) in enumerate(traces.items()):
        trainer, engine = axes[2 * number : 2 * number + 2]
        start = window(trace, steps)[0]
        mine = [e for e in trace if e["ph"] == "X" and e["ts"] < (start + seconds) * 1e6]
        mine = [e for e in mine if e["ts"] + e["dur"] > start * 1e6]
        draw_trainer(trainer, mine, start)
        draw_places(engine, trace, mine, start)
        trainer.set_title(title, loc="left", fontsize=11, fontweight="bold")
        for axis in (trainer, engine):
            axis.set(xlim=(0, seconds))
            axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target


def draw_trainer(axis, events: list[dict], start: float) -> None:
    """Training and publishing of a trainer; white where it waits."""
    for name, color in (("train", "#555555"), ("publish", "C3")):
        bars = [e for e in events if e["pid"] == 1 and e["name"] == name]
        bars = [(e["ts"] / 1e6 - start, e["dur"] / 1e6) for e in bars]
        axis.broken_barh(bars, (0, 1), color=color, linewidth=0)
    axis.set(ylim=(0, 1))
    axis.set_yticks([0.5], ["trainer: trains, publishes"], fontsize=8)
    axis.tick_params(length=0)


def color_of(version: int) -> str:
    return VERSION_COLORS[version % len(VERSION_COLORS)]


def draw_places(axis, trace: list[dict], events: list[dict], start: float) -> None:
    """The turns of the first engine, a row a place."""
    turns = [e for e in events if e["pid"] == 2 and e["name"] == "turn"]
    committed = by_version(trace, 2)
    places = max((turn["tid"] for turn in turns), default=2)
    drawn: dict[tuple, list] = {}  # one call of matplotlib for all that looks the same
    for turn in turns:
        for version, begin, end in pieces(turn, committed):
            bar = begin / 1e6 - start, (end - begin) / 1e6
            drawn.setdefault((version, turn["tid"]), []).append(bar)
    for (version, lane), bars in drawn.items():
        axis.broken_barh(bars, (lane - 2, 0.9), color=color_of(version), linewidth=0)
    versions = sorted({version for version, _ in drawn})
    patches = [Patch(color=color_of(version), label=f"version {version}") for version in versions]
    ended = [turn for turn in turns if "tokens" in turn.get("args", {})]  # not cancelled
    whole = [turn for turn in ended if turn["ts"] >= start * 1e6]
    if whole:
        last = max(whole, key=lambda turn: turn["dur"])
        under = ", ".join(str(version) for version, *_ in pieces(last, committed))
        lane, begin, end = last["tid"] - 1.5, last["ts"] / 1e6 - start, last["dur"] / 1e6
        axis.annotate(
            f"longest turn: {last['args']['tokens']} tokens, under version {under}",
            (begin + end / 2, lane), (begin + end / 2, lane + 0.14 * places),
            fontsize=8, ha="center",
            arrowprops={"arrowstyle": "->"}, bbox={"color": "white", "pad": 1},
        )  # fmt: skip
    axis.legend(handles=patches, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axis.set(ylim=(places, 0))
    axis.set_ylabel("places of the engine\n(white: waits)", fontsize=8)


def window(trace: list[dict], steps: int) -> tuple[float, float]:
    """Begin and end, in seconds, of so many train steps in the middle of a run."""
    done = [e for e in trace if e["name"] == "step"]
    first = max(0, (len(done) - steps) // 2)
    last = done[first : first + steps][-1]
    return done[first]["ts"] / 1e6, (last["ts"] + last["dur"]) / 1e6


def plot_timeline(runs: list[Path], target: Path) -> Path:
    """What every process of each run did during a few steps, all on one scale of time; below,
    staleness, idle shares and lengths of the whole runs."""
    traces = {run: read_trace(run / "trace.json") for run in runs}
    traces = {run: trace for run, trace in traces.items() if has_steps(trace)}
    for run in set(runs) - set(traces):
        print(f"{run}: no step in a trace.json, so no timeline of it", file=sys.stderr)
    windows = {run: window(trace, WINDOW) for run, trace in traces.items()}
    longest = max((end - start for start, end in windows.values()), default=0.0)
    count = len(traces)
    figure = plt.figure(figsize=(11, 2.4 * count + 3.2), layout="constrained")
    grid = figure.add_gridspec(count + 1, 3, height_ratios=[2.4] * count + [2.8])
    names: set[str] = set()
    for row, (run, trace) in enumerate(traces.items()):
        axis = figure.add_subplot(grid[row, :])
        start, _ = windows[run]
        names |= gantt(axis, trace, start, start + longest)
        axis.set_title(run.name, fontsize=9, loc="left")
        axis.set_xlabel("seconds")
    colors: dict[str, list[str]] = {}
    for name in COLORS:
        if name in names:
            colors.setdefault(COLORS[name], []).append(name)
    patches = [Patch(color=color, label=", ".join(same)) for color, same in colors.items()]
    if patches:
        figure.legend(handles=patches, fontsize=8, ncols=len(patches), loc="outside upper center")
    stale, idle, length = (figure.add_subplot(grid[count, i]) for i in range(3))
    for number, run in enumerate(runs):
        rows = [row for row in read_rows(run / "metrics.jsonl") if "step" in row]
        _plot_rows(rows, run.name, f"C{number}", number, len(runs), (stale, idle, length))
    stale.set(xlabel="staleness", ylabel="share of samples")
    stale.legend(fontsize=8)
    stale.xaxis.get_major_locator().set_params(integer=True)
    idle.set(ylabel="idle share", ylim=(0, 1))
    idle.set_xticks([0, 1], ["trainer", "rollout"])
    length.set(xlabel="step", ylabel="tokens")
    length.set_title("mean, max (dotted), 5-95 %, 25-75 %", fontsize=8)
    length.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return target


def _plot_rows(rows: list[dict], name: str, color: str, number: int, runs: int, axes) -> None:
    """One run's staleness, idle shares and lengths, beside those of the others."""
    stale, idle, length = axes
    width = 0.8 / runs
    shift = (number - (runs - 1) / 2) * width
    ages = np.zeros(1 + max(row["staleness_max"] for row in rows))
    for row in rows:
        ages[: len(row["staleness_hist"])] += row["staleness_hist"]
    stale.bar(np.arange(len(ages)) + shift, ages / ages.sum(), width, color=color, label=name)
    idle.bar(np.arange(2) + shift, list(idle_shares(rows).values()), width, color=color)
    steps = [row["step"] for row in rows]
    length.plot(steps, [row["length_mean"] for row in rows], color=color)
    length.plot(steps, [row["length_max"] for row in rows], color=color, linestyle=":")
    p5, p25, _, p75, p95 = np.transpose([row.get("length_quantiles", 5 * [0]) for row in rows])
    length.fill_between(steps, p5, p95, color=color, alpha=0.1, linewidth=0)
    length.fill_between(steps, p25, p75, color=color, alpha=0.2, linewidth=0)
