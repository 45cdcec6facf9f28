"""What a run's times speak for: which split of the machine, and which asynchronous ratio.

    .venv/bin/python -m report.advice RUN_DIR
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from report import theory
from report.rows import TRAINER_TIMES, WORKER_TIMES, idle_shares, read_rows, times_of


def hint(rows: list[dict], config: dict, free: int) -> str:
    """One sentence on what to change, with the reason; empty if nothing that is at hand would help
    much. `free`: cores, or GPUs, that no process of the run has."""
    steps = [row for row in rows if "step" in row][3:]  # the first ones warm up
    if len(steps) < 7:
        return ""
    if slow := crowded(steps):
        return slow
    idle, more = idle_shares(steps), "--batch_size" + (", --alpha" if config["alpha"] else "")
    trainer, rollout = (f"{idle[side]:.0%}" for side in ("trainer", "rollout"))
    if min(idle.values()) > 0.5:  # in sync, each waits for the other half of the time
        return (
            f"Trainer and workers wait at once ({trainer} and {rollout} of the time), for "
            f"environments or rewards: more samples under way would fill that ({more})."
        )
    if config["alpha"] and free > 0:
        if idle["trainer"] > 0.5:
            return (
                f"The trainer waits {trainer} of the time for samples, and there is room for "
                f"another worker (--rollout_workers {config['rollout_workers'] + 1})."
            )
        if idle["rollout"] > 0.5:
            return (
                f"The workers wait {rollout} of the time for the trainer, and there is room for "
                f"another rank of it (NPROC={config.get('trainers', 1) + 1})."
            )
    sizes = sizes_of(steps, config)
    if config["alpha"] or not sizes:
        return ""
    said, measured = theory.advise(**sizes), step_time(steps)
    if not said.alpha or said.seconds > 0.9 * measured:
        return ""
    return (
        f"A step took {measured:.2f} s; it would take at most {said.seconds:.2f} s if training "
        f"went on while the next batch is generated (--mode async --alpha {said.alpha})."
    )


def crowded(steps: list[dict]) -> str:
    """One sentence if blocking environments and rewards compute for long: they share an interpreter
    with the loop that decodes, and so its time. Empty otherwise."""
    busy = sum(row.get("t_env_cpu", 0.0) for row in steps)
    total = times_of(steps)
    whole = sum(total[f"worker_{what}"] for what in WORKER_TIMES)
    if busy <= 0.25 * whole:
        return ""
    return (
        f"Environments or rewards compute for {busy / whole:.0%} of a worker's time, in threads of "
        "its process, which slows decoding: have them wait for another process (docs/rewards.md)."
    )


def sizes_of(steps: list[dict], config: dict) -> dict:
    """What Proposition 2 asks for, from the times of a run's steps; empty if they do not tell.

    `config["trainers"]` is the number of trainer ranks (1 if it is not there). On a machine without
    GPUs the workers of the proposition are processes; in sync both kinds have the whole machine, so
    each counts for all of them. The longest sample is taken to wait for nothing but decoding."""
    made = sum(row.get("tokens_made", 0) for row in steps)
    if not made:
        return {}
    total = times_of(steps)
    rollouts, trainers = config["rollout_workers"], config.get("trainers", 1)
    length = float(np.mean([row["length_mean"] for row in steps]))
    engine_steps = sum(row["tokens_made"] / max(row["slots_used"], 1.0) for row in steps)
    decoding = rollouts * (total["worker_decode"] + total["worker_episodes"])
    busy = decoding + rollouts * sum(total[f"worker_{w}"] for w in ("load", "probe", "commit"))
    workers = rollouts + trainers
    sync = config["alpha"] == 0
    sizes = {
        "samples": steps[0]["samples"],
        "workers": workers,
        # Seconds of a worker a sample: it makes many at a time.
        "mean": busy / (made / length) * (workers / rollouts if sync else 1),
        "longest": max(row.get("length_max", 0) for row in steps) * decoding / engine_steps,
        "train": (workers if sync else trainers)
        * (total["train"] + total["publish"])
        / (len(steps) * steps[0]["samples"]),
    }
    return sizes if sizes["longest"] > 0 < sizes["train"] else {}


def step_time(steps: list[dict]) -> float:
    """Mean seconds of the trainer a step."""
    total = times_of(steps)
    return sum(total[what] for what in TRAINER_TIMES) / len(steps)


def advise_run(rows: list[dict], config: dict) -> str:
    """What Proposition 2 (`theory.advise`) makes of the times that a run has measured: a line with
    the split and alpha to use, then what it rests on. Empty without the times of 10 steps."""
    steps = [row for row in rows if "step" in row][3:]  # the first ones warm up
    sizes = sizes_of(steps, config) if len(steps) >= 7 else {}
    if not sizes:
        return ""
    said, measured = theory.advise(**sizes), step_time(steps)
    how = f"alpha {said.alpha}, {said.rollout_workers} rollout + {said.trainers} trainer processes"
    if not said.alpha:
        how = "sync, all processes in both phases"
    now = f"{measured:.3f} s at alpha {config['alpha']:g}"
    promise = f"{how}, at most {said.seconds:.3f} s a step; of sync {said.sync_seconds:.3f} s"
    if measured <= said.seconds:
        advice = f"stay with this setting (measured: {now}). The bounds promise less: {promise}"
    else:
        advice = f"{promise} (measured: {now}; staleness is not weighed)"
    bounds = ", ".join(
        f"alpha {alpha} {theory.best_async_bound(**sizes, alpha=alpha):.3f} s"
        for alpha in theory.ALPHAS[1:]
    )
    return "\n".join(
        [
            f"advice: {advice}",
            f"measured: a sample takes a worker {1e3 * sizes['mean']:.2f} ms to generate and a "
            f"trainer {1e3 * sizes['train']:.2f} ms, the longest {sizes['longest']:.3f} s",
            f"bounds at the best split, of whole processes or not: {bounds}; greatest speed-up "
            f"over sync {theory.max_speedup(**sizes):.2f}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Which split and alpha a run's times speak for.")
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    run = parser.parse_args().run
    rows = read_rows(run / "metrics.jsonl")
    advice = rows and advise_run(rows, json.loads((run / "config.json").read_text()))
    if not advice:
        print(f"report.advice: {run} has not the times of 10 steps to advise on", file=sys.stderr)
        return 2
    print(advice)
    return 0


if __name__ == "__main__":
    sys.exit(main())
