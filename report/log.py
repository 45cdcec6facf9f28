"""What a run writes and shows: metrics, samples, a progress bar and a summary.

    python report.py plot RUN_DIR...      reward.png and timeline.png of finished runs
    python report.py advise RUN_DIR       which split and alpha its times speak for

The files of a run (see README): config.json, metrics.jsonl, samples.jsonl, trace.json, reward.png.
"""

import argparse
import importlib.util
import json
import pickle
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
from tqdm import tqdm

from report import theory
from report.timeline import TraceFile, spans

SAMPLES_A_STEP = 2  # written to samples.jsonl
TRAINER_TIMES = ("wait", "train", "publish")  # what a trainer's time goes to
WORKER_TIMES = ("decode", "episodes", "load", "probe", "commit", "idle")  # ... and a worker's


def check_destinations(report_to: str) -> None:
    """Raise ValueError for a destination that is unknown or not installed."""
    packages = {"tensorboard": "tensorboard", "wandb": "wandb"}
    for name in filter(None, report_to.split(",")):
        if name not in packages:
            raise ValueError(f"--report_to takes tensorboard and wandb (got {name})")
        if importlib.util.find_spec(packages[name]) is None:
            raise ValueError(f"--report_to {name} needs: pip install {packages[name]}")


def read_rows(path: Path) -> list[dict]:
    """The objects of a JSONL file, without a last line that was cut off in the middle."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class Log:
    """The files of a run and its progress bar. Rank 0 has one."""

    def __init__(self, config, settings: list, env: str, trainers: int, resumed_at: int | None):
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{config.mode}-{env.split(':')[0].split('/')[-1]}"
        free = (Path(f"runs/{name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 99))))
        self.dir = Path(config.run_dir or next(path for path in free if not path.exists()))
        self.dir.mkdir(parents=True, exist_ok=True)
        flat = {key: value for part in settings for key, value in asdict(part).items()}
        flat["run_dir"], flat["resume"], flat["trainers"] = str(self.dir), "", trainers
        (self.dir / "config.json").write_text(json.dumps(flat, indent=2) + "\n")
        self.rows: list[dict] = []
        if resumed_at is not None:
            self._cut(resumed_at)
        self.metrics = (self.dir / "metrics.jsonl").open("a")
        self.samples = (self.dir / "samples.jsonl").open("a")
        self.trace = TraceFile(self.dir / "trace.json", resumed_at)
        self.writers = [OPEN[name](flat, self.dir) for name in config.report_to.split(",") if name]
        self.quiet = not sys.stderr.isatty()
        self.bar = tqdm(
            total=config.steps,
            delay=1e-9,  # draw it at the first step, not while workers start
            initial=resumed_at or 0,
            desc=config.mode,
            unit="step",
            dynamic_ncols=True,
            mininterval=10 if self.quiet else 0.1,  # a file is no place for a bar in motion
        )

    def _cut(self, version: int) -> None:
        """Forget what was written after the checkpoint: those steps are about to be run again."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = read_rows(self.dir / name)
            rows = [row for row in rows if row.get("step", row.get("version", 0)) <= version]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.dir / name).write_text(text)
            self.rows = rows if name == "metrics.jsonl" else self.rows

    def _write(self, row: dict) -> None:
        self.rows.append(row)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        for write in self.writers:
            write(row)

    def step(self, row: dict, batch: list, tokenizer) -> None:
        """Write a step's metrics and a few of its samples; move the bar."""
        self._write(row)
        for sample in batch[:SAMPLES_A_STEP]:
            first = int(sample.mask.argmax())  # of the response
            record = {
                "step": row["step"],
                "group": sample.task.group,
                "sample": sample.task.sample,
                "prompt": tokenizer.decode(sample.ids[:first]),
                "response": tokenizer.decode(sample.ids[first:]),
                "reward": sample.reward,
                "truncated": sample.truncated,
                "versions": sample.versions[sample.mask].tolist(),
            }
            self.samples.write(json.dumps(record) + "\n")
        self.samples.flush()
        seconds = row["t_wait"] + row["t_train"] + row["t_publish"]
        self.bar.set_postfix_str(
            f"reward {row['reward_mean']:.2f}, staleness {row['staleness_mean']:.1f}, "
            f"{row['tokens'] / seconds:.0f} tok/s, idle: trainer {row['trainer_idle']:.0%} "
            f"rollout {row['rollout_idle']:.0%}",
            refresh=False,
        )
        self.bar.update()

    def evaluation(self, version: int, mean: float, solved: float, count: int, seconds: float):
        self._write(
            {
                "version": version,
                "eval/solve_rate": solved,
                "eval/reward_mean": mean,
                "eval/samples": count,
                "t_eval": seconds,
            }
        )
        with self.bar.external_write_mode(file=sys.stderr):
            print(
                f"version {version}: {solved:.1%} of {count} held-out prompts solved",
                file=sys.stderr,
            )

    def dump(self, samples: list) -> Path:
        """Write a batch that training failed on, to be looked at (`pickle.load`)."""
        path = self.dir / "bad_batch.pkl"
        path.write_bytes(pickle.dumps(samples))
        return path

    def close(self) -> None:
        self.bar.close()
        self.metrics.close()
        self.samples.close()
        self.trace.close()

    def summary(self) -> None:
        """The end of a run in a few lines, and its figure."""
        from report.figures import plot_reward  # matplotlib, only here

        self.bar.close()
        figure = plot_reward([self.dir], self.dir / "reward.png")
        print(summarize(self.rows))
        config = json.loads((self.dir / "config.json").read_text())
        if advice := advise_run(self.rows, config):
            print(advice.splitlines()[0])
        print(f"files: {self.dir}/ (metrics.jsonl, samples.jsonl, checkpoint), figure: {figure}")


def batch_metrics(run) -> dict:
    """What the samples, the workers and the clock say about the step that has just ended."""
    batch, at, seconds = run.batch, run.version - 1, spans.seconds
    rewards = np.array([s.reward for s in batch])
    stale = np.array([s.staleness(at) for s in batch])
    lengths = [int(s.mask.sum()) for s in batch]
    counts, dropped = run.rollouts.take_counts(), run.rollouts.dropped()
    workers = run.rollout.rollout_workers
    worker_time = sum(counts[what] for what in WORKER_TIMES) or 1.0
    engine_steps = counts["engine_steps"] or 1
    return {
        "reward_mean": float(rewards.mean()),
        "solve_rate": float((rewards >= 1).mean()),
        "mismatch_max": run.rollouts.mismatches[at][0],
        "mismatch_mean": run.rollouts.mismatches[at][1],
        "staleness_mean": float(stale.mean()),
        "staleness_max": int(stale.max()),
        "staleness_hist": np.bincount(stale).tolist(),  # samples of age 0, 1, ...
        "tokens": int(sum(lengths)),
        "tokens_made": counts["tokens"],
        "samples": len(batch),
        "length_mean": float(np.mean(lengths)),
        "length_max": int(max(lengths)),
        "length_quantiles": np.quantile(lengths, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist(),
        "turns_mean": float(np.mean([len(s.turns) for s in batch])),
        "truncated": float(np.mean([s.truncated for s in batch])),
        **{f"dropped_{why}": dropped[why] for why in ("filtered", "stale", "failed", "redundant")},
        # What was thrown away unfinished or too old, against what is trained on: the bias of
        # `ready` and of redundancy. Lengths are of what had been sampled by then.
        "lost_samples": counts["lost_samples"],
        "lost_length_mean": counts["lost_tokens"] / (counts["lost_samples"] or 1),
        "lost_reward_mean": counts["lost_reward"] / (counts["lost_finished"] or 1),
        **{f"t_{what}": seconds[what] for what in TRAINER_TIMES},
        **{f"t_worker_{what}": counts[what] / workers for what in WORKER_TIMES},
        "slots_used": counts["slots_used"] / engine_steps,
        "steps_below_cap": counts["steps_below_cap"] / engine_steps,
        "steps_starved": counts["steps_starved"] / engine_steps,  # below it while tasks waited
        "failed_samples": counts["failed_samples"],  # first failures, which a retry may mend, too
        "trainer_idle": seconds["wait"] / sum(seconds[what] for what in TRAINER_TIMES),
        "rollout_idle": counts["idle"] / worker_time,
        "prompt_ids": [s.task.prompt for s in batch[:: run.buffer.group_size]],
        "dropped_prompts": run.rollouts.take_dropped(),  # [reason, prompt id]: whom `ready` passes
    }


def summarize(rows: list[dict]) -> str:
    """Reward first → last, times, staleness and idle shares of a run, and what to change."""
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
        f"staleness mean {np.mean([row['staleness_mean'] for row in steps]):.2f}, "
        f"max {max(row['staleness_max'] for row in steps)}; idle: trainer {idle['trainer']:.0%}, "
        f"rollout {idle['rollout']:.0%}",
    ]
    if min(idle.values()) > 0.5:
        lines.append("both wait, for environments: run more episodes (--alpha, --batch_size)")
    elif idle["trainer"] > 0.5:
        lines.append("the trainer waits most of the time: try more rollout workers or --alpha")
    elif idle["rollout"] > 0.5:
        lines.append("the workers wait most of the time: try more trainer ranks or --alpha")
    return "\n".join(lines)


def idle_shares(steps: list[dict]) -> dict[str, float]:
    """Share of all seconds of a run in which trainer and workers waited. A mean of the steps' own
    shares would be another number: short steps wait less."""
    of = {
        "trainer": ("t_wait", [f"t_{what}" for what in TRAINER_TIMES]),
        "rollout": ("t_worker_idle", [f"t_worker_{what}" for what in WORKER_TIMES]),
    }

    def total(*keys: str) -> float:
        return sum(row.get(key, 0.0) for row in steps for key in keys)

    return {side: total(wait) / (total(*keys) or 1.0) for side, (wait, keys) in of.items()}


def advise_run(rows: list[dict], config: dict) -> str:
    """What Proposition 2 (`theory.advise`) makes of the times that a run has measured: a line with
    the split and alpha to use, then what it rests on. Empty without the times of 10 steps.

    `config["trainers"]` is the number of trainer ranks (1 if it is not there). On a machine without
    GPUs the workers of the proposition are processes; in sync both kinds have the whole machine, so
    each counts for all of them. The longest sample is taken to wait for nothing but decoding."""
    steps = [row for row in rows if "step" in row][3:]  # the first ones warm up
    made = sum(row["tokens_made"] for row in steps)
    if len(steps) < 7 or not made:
        return ""
    times = (*TRAINER_TIMES, *(f"worker_{what}" for what in WORKER_TIMES))
    total = {what: sum(row.get(f"t_{what}", 0.0) for row in steps) for what in times}
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
    if not (sizes["longest"] > 0 < sizes["train"]):
        return ""
    said = theory.advise(**sizes)
    measured = sum(total[what] for what in TRAINER_TIMES) / len(steps)
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


# -- other places that metrics can go to ---------------------------------------------------------


def open_tensorboard(settings: dict, directory: Path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))

    def write(row: dict) -> None:
        for key, value in row.items():
            if isinstance(value, int | float):
                writer.add_scalar(key, value, row.get("step", row["version"]))
        writer.flush()

    return write


def open_wandb(settings: dict, directory: Path):
    import wandb

    run = wandb.init(project="roll-flash", name=directory.name, config=settings, dir=str(directory))
    return lambda row: run.log({k: v for k, v in row.items() if isinstance(v, int | float)})


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb}


def print_advice(run: Path) -> int:
    rows = read_rows(run / "metrics.jsonl")
    advice = rows and advise_run(rows, json.loads((run / "config.json").read_text()))
    if not advice:
        print(f"report.py: {run} has not the times of 10 steps to advise on", file=sys.stderr)
        return 2
    print(advice)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of finished runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    plot = commands.add_parser("plot", help="reward and timeline of one or several runs")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    plot.add_argument("--out", type=Path, help="directory of the figures; default: the first run's")
    advise = commands.add_parser("advise", help="which split and alpha a run's times speak for")
    advise.add_argument("runs", nargs=1, type=Path, metavar="RUN_DIR")
    args = parser.parse_args()
    if args.command == "advise":
        return print_advice(args.runs[0])
    from report.figures import plot_reward, plot_timeline

    for run in args.runs:
        if not read_rows(run / "metrics.jsonl"):
            print(f"report.py: no metrics.jsonl with rows in {run}", file=sys.stderr)
            return 2
        print(f"{run}\n{summarize(read_rows(run / 'metrics.jsonl'))}")
    directory = args.out or args.runs[0]
    directory.mkdir(parents=True, exist_ok=True)
    reward = "reward.png" if len(args.runs) == 1 else "compare.png"
    print(plot_reward(args.runs, directory / reward))
    print(plot_timeline(args.runs, directory / "timeline.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
