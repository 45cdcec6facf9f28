"""What a finished run says: its rows read back, and summed up in a few lines."""

import json
from pathlib import Path

import numpy as np

from report import theory

TRAINER_TIMES = ("wait", "train", "publish")  # what a trainer's time goes to
WORKER_TIMES = ("decode", "episodes", "load", "probe", "commit", "idle")  # ... and a worker's


def read_rows(path: Path) -> list[dict]:
    """The objects of a JSONL file, without a last line that was cut off in the middle."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def summarize(rows: list[dict], config: dict | None = None) -> str:
    """Reward first → last, times, staleness and idle shares of a run. With the run's `config`, the
    staleness that was to be expected too."""
    steps = [row for row in rows if "step" in row]
    evals = [row for row in rows if "eval/solve_rate" in row]
    wall, samples = steps[-1]["wall_s"], sum(row["samples"] for row in steps)
    per_step = {
        name: np.mean([row.get(key, 0.0) for row in steps[1:] or steps])
        for name, key in (
            ("decode", "t_worker_decode"),
            ("train", "t_train"),
            ("publish", "t_publish"),
            ("wait for a batch", "t_wait"),
        )
    }
    first, last = steps[0]["reward_mean"], np.mean([row["reward_mean"] for row in steps[-5:]])
    lines = [
        f"training reward {first:.3f} → {last:.3f} (mean of the last {min(5, len(steps))} steps)"
    ]
    if evals:
        lines.append(
            f"held-out solve rate {evals[0]['eval/solve_rate']:.3f} (version "
            f"{evals[0]['version']}) → {evals[-1]['eval/solve_rate']:.3f} "
            f"(version {evals[-1]['version']}, {evals[-1]['eval/samples']} prompts)"
        )
    idle = idle_shares(steps)
    lines += [
        f"{len(steps)} steps in {wall:.1f} s, {samples / wall:.0f} samples/s; a step: "
        + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in per_step.items()),
        f"staleness mean {np.mean([row['staleness_mean'] for row in steps]):.2f}"
        f"{expected_of(steps, config or {})}, "
        f"max {max(row['staleness_max'] for row in steps)}; idle: trainer {idle['trainer']:.0%}, "
        f"rollout {idle['rollout']:.0%}",
    ]
    return "\n".join(lines)


def expected_of(steps: list[dict], config: dict) -> str:
    """The part of the summary that says what staleness was to be expected: with fifo, where all
    that goes into it was measured, from a cold start."""
    whole = steps[0]["step"] == 1 and all("slots_used" in row for row in steps)
    if config.get("consume") != "fifo" or not whole:
        return ""
    low, high = expected_staleness(steps, config["alpha"], config["rollout_workers"])
    return f" (expected {low:.2f})" if high - low < 0.01 else f" (expected {low:.2f} to {high:.2f})"


def times_of(steps: list[dict]) -> dict[str, float]:
    """Seconds of all steps, by what they went to."""
    times = (*TRAINER_TIMES, *(f"worker_{what}" for what in WORKER_TIMES))
    return {what: sum(row.get(f"t_{what}", 0.0) for row in steps) for what in times}


def expected_staleness(steps: list[dict], alpha: float, rollout_workers: int) -> tuple:
    """`theory.expected_range` from what a run has measured."""
    total = times_of(steps)
    # Sequences that decode at a time: those of an engine step, while there are any.
    busy = total["worker_decode"] + total["worker_episodes"]
    made = sum(row["tokens_made"] for row in steps)
    running = made / max(1, sum(row["tokens_made"] / max(row["slots_used"], 1) for row in steps))
    workers = sum(total[f"worker_{what}"] for what in WORKER_TIMES) or 1.0
    whole = sum(total[what] for what in TRAINER_TIMES)
    return theory.expected_range(
        alpha,
        samples=steps[0]["samples"],
        running=running * rollout_workers * busy / workers,
        update=total["train"] + total["publish"],
        step=whole,
        waits=total["wait"] / whole,
        steps=len(steps),
    )


def idle_shares(steps: list[dict]) -> dict[str, float]:
    """Share of all seconds of a run in which trainer and workers waited. A mean of the steps' own
    shares would be another number: short steps wait less."""
    total = times_of(steps)
    trainer = sum(total[what] for what in TRAINER_TIMES)
    workers = sum(total[f"worker_{what}"] for what in WORKER_TIMES)
    return {
        "trainer": total["wait"] / (trainer or 1.0),
        "rollout": total["worker_idle"] / (workers or 1.0),
    }
