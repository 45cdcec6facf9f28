"""What a run writes and shows: metrics, samples, progress bar, summary, figures."""

import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
from tqdm import tqdm


class Log:
    """The files of a run, and its progress bar. Rank 0 only."""

    def __init__(self, train, others):
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{train.mode}-{others[2].env}"
        self.dir = Path(train.run_dir or f"runs/{name}")
        self.dir.mkdir(parents=True, exist_ok=True)
        settings = {k: v for config in (train, *others) for k, v in asdict(config).items()}
        (self.dir / "config.json").write_text(json.dumps(settings, indent=2))
        self.metrics = (self.dir / "metrics.jsonl").open("a")
        self.bar = tqdm(total=train.steps, desc=train.mode, unit="step")

    def write(self, row, batch, tokenizer):
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        self.bar.set_postfix(reward=f"{row['reward_mean']:.2f}", stale=row["staleness_max"])
        self.bar.update()

    def write_eval(self, version, result, seconds):
        row = {"version": version} | {f"eval/{k}": v for k, v in result.items()} | {"t_eval": seconds}
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        self.bar.write(f"version {version}: {result}")


def step_row(run) -> dict:
    """Metrics of the step that has just ended, less those of the trainer."""
    batch = run.batch
    at = run.version - 1
    rewards = np.array([s.reward for s in batch])
    stale = np.array([at - s.oldest_version for s in batch])
    seconds = run.rollouts.take_seconds()
    step = run.t_wait + run.t_train + run.t_publish
    buffer = run.rollouts.buffer
    spent = sum(v for k, v in seconds.items() if k != "tokens") or 1.0
    return {
        "step": run.version,
        "version": at,
        "wall_s": run.wall,
        "reward_mean": float(rewards.mean()),
        "solve_rate": float((rewards >= 1).mean()),
        "mismatch_max": run.rollouts.mismatch[0],
        "mismatch_mean": run.rollouts.mismatch[1],
        "staleness_mean": float(stale.mean()),
        "staleness_max": int(stale.max()),
        "tokens": int(sum(s.mask.sum() for s in batch)),
        "samples": len(batch),
        **{f"dropped_{w}": buffer.count_dropped(w) for w in ("filtered", "stale", "failed", "redundant")},
        "t_wait": run.t_wait, "t_train": run.t_train, "t_publish": run.t_publish,
        **{f"t_{k}": v for k, v in seconds.items() if k != "tokens"},
        "trainer_idle": run.t_wait / step,
        "rollout_idle": seconds["idle"] / spent,
        "prompt_ids": [s.task.prompt for s in batch[:: run.buffer.group_size]],
    }
