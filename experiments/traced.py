"""A simulated run that writes the files of a real one, for `launch.sh plot` and `story`.

    bash launch.sh sim --gpus 16 --alpha 2 --median 2000 --trace DIR
    bash launch.sh plot DIR                                     run.html: the timeline of 16 GPUs

Nothing is learnt in it, so there are no ratios and advantages; a turn has one entry in tokens.jsonl
that stands for all of its tokens, under the version of its first one.
"""

import json
from pathlib import Path

import numpy as np

from experiments.simulator import LANES, Result, Setting, simulate
from plumbing.spans import Span, spans
from report.timeline import TraceFile
from report.tokens import TokenFile


class CountText:
    """An entry of a simulated sample is a number of tokens."""

    def decode(self, ids: list[int]) -> str:
        return f"{ids[0]} tokens"


def split(recorded: list[Span], workers: int) -> list[list[Span]]:
    """The spans of a step by process, the trainer first: all are recorded in this one."""
    processes: list[list[Span]] = [[] for _ in range(workers + 1)]
    for name, lane, start, end, args in recorded:
        process, own = divmod(lane, LANES)
        processes[process].append((name, own, start, end, args))
    return processes


def trace_run(setting: Setting, directory: Path) -> Result:
    """Simulate, and write config.json, metrics.jsonl, tokens.jsonl and trace.json to `directory`.
    Raises ValueError if there is a run in it already."""
    if (directory / "metrics.jsonl").exists():
        raise ValueError(f"there is a run in {directory} already")
    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in setting.buffer.items() if key != "steps"}
    config |= {"mode": "sync" if setting.sync else "async", "env": "simulated"}
    config |= {"rollout_workers": setting.rollout_gpus, "trainers": setting.train_gpus}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    trace, tokens = None, TokenFile(directory / "tokens.jsonl")
    rows = (directory / "metrics.jsonl").open("w")

    def on_step(version: int, batch: list, wall: float, waited: float, recorded) -> None:
        nonlocal trace
        if trace is None:
            trace = TraceFile(directory / "trace.json", origin=0.0)
        trace.write(split(recorded, setting.rollout_gpus))
        tokens.write(version + 1, batch, [], CountText())
        stale = [sample.staleness(version) for sample in batch]
        taken = {s[0]: s[3] - s[2] for s in recorded if s[0] in ("train", "publish")}
        row = {
            "step": version + 1,
            "version": version,
            "wall_s": wall,
            "samples": len(batch),
            "reward_mean": float(np.mean([sample.reward for sample in batch])),
            "staleness_mean": float(np.mean(stale)),
            "staleness_max": int(max(stale)),
            "staleness_hist": np.bincount(stale).tolist(),
            "length_mean": float(np.mean([sample.ids[sample.mask].sum() for sample in batch])),
            "length_max": int(max(sample.ids[sample.mask].sum() for sample in batch)),
            "t_wait": waited,
            "t_train": taken["train"],
            "t_publish": taken["publish"],
            "trainer_idle": waited / (waited + taken["train"] + taken["publish"]),
        }
        rows.write(json.dumps(row) + "\n")

    spans.clear()
    result = simulate(setting, on_step)
    for file in (rows, tokens, trace):
        file.close()
    return result
