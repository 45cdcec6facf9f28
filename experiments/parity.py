"""Does asynchronous training end as good as synchronous training, from as many samples?

    bash launch.sh parity --env grid --steps 80 --batch_size 16 --alphas 0,1,2 --seeds 3
    bash launch.sh parity --env addition --losses ppo,tis --alphas 0,1,4 --seeds 4

Trains every combination of loss, alpha and seed (alpha 0 is synchronous training) and prints the
held-out solve rate at the end, and the difference to synchronous training with the same loss and
seed: its mean and the 95 % interval of that mean (Student's t over seeds). Draws the curves.

All runs use one rollout process, started once. It can be interrupted and called again: runs that
are whole are not repeated, and a run that was made with other flags is refused, not counted. Seeds
come first, so that what is there at any time is balanced.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

import train
from experiments import bench
from plumbing.settings import as_flags, parse
from report.rows import read_rows

# Student's t, 97.5 %, by degrees of freedom: of seeds there are few.
T_975 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
FLAGS = "flags.json"  # in a run's directory, once it is whole: what it was made with


class Arm(NamedTuple):
    loss: str
    alpha: float


def solved(run_dir: Path) -> dict[int, float]:
    """Held-out solve rate by version."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return {row["version"]: row["eval/solve_rate"] for row in rows if "eval/solve_rate" in row}


def file_name(env: str) -> str:
    return env.rpartition("/")[2].replace(":", "-")


def run_dir(out: Path, env: str, arm: Arm, seed: int) -> Path:
    return out / f"{file_name(env)}-{arm.loss}-a{arm.alpha:g}-s{seed}"


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval (NaN for a single one)."""
    n = len(differences)
    if n < 2:
        return float(np.mean(differences)), float("nan")
    spread = np.std(differences, ddof=1) / np.sqrt(n)
    return float(np.mean(differences)), float(t_975(n - 1) * spread)


def t_975(degrees: int) -> float:
    """Beyond the table the Cornish-Fisher expansion, good to 0.003."""
    return T_975.get(degrees, 1.96 + 2.372 / degrees + 2.822 / degrees**2)


class Trials:
    """The runs of a grid, one after the other on one rollout process."""

    def __init__(self, args, flags: list[str]):
        self.args, self.flags = args, flags

    def combinations(self) -> Iterator[tuple[int, Arm]]:
        args = self.args
        for seed, loss, alpha in product(range(args.seeds), args.losses.split(","), args.alphas):
            yield seed, Arm(loss, alpha)

    def flags_of(self, arm: Arm, seed: int) -> list[str]:
        """The command line of a run, without its directory."""
        args = self.args
        settings = {
            "env": args.env,
            "model": args.model,
            "steps": args.steps,
            "eval_every": max(1, args.steps // 4),
            "loss": arm.loss,
            "alpha": arm.alpha,
            "seed": seed,
        }
        return as_flags(settings) + self.flags

    def check(self) -> None:
        """Say what is wrong before the first run is made. Raises ValueError for a run that is there
        with other flags; exits for a wrong flag."""
        for seed, arm in self.combinations():
            parse(self.flags_of(arm, seed))
            made = run_dir(self.args.out, self.args.env, arm, seed) / FLAGS
            if made.exists() and json.loads(made.read_text()) != self.flags_of(arm, seed):
                raise ValueError(
                    f"{made.parent} was made with other flags ({made}): name another --out"
                )

    def go(self) -> int:
        """Train what is not there yet; returns the exit code."""
        todo = list(self.combinations())
        with bench.Bench(self.args.out) as engines:
            for number, (seed, arm) in enumerate(todo, 1):
                directory = run_dir(self.args.out, self.args.env, arm, seed)
                if (directory / FLAGS).exists():
                    continue
                shutil.rmtree(directory, ignore_errors=True)  # it was interrupted
                print(f"[{number}/{len(todo)}] {directory.name}", file=sys.stderr)
                self.train(engines, self.flags_of(arm, seed), directory)
        if engines.code:
            print("the next call goes on from there", file=sys.stderr)
        return engines.code

    def train(self, engines: bench.Bench, flags: list[str], directory: Path) -> None:
        run = train.Run(parse([*flags, "--run_dir", str(directory)]))
        try:
            engines.measure(run, bench.train_to_the_end)
        finally:
            for checkpoint in directory.glob("checkpoint-*"):
                if not self.args.keep:
                    shutil.rmtree(checkpoint)
        (directory / FLAGS).write_text(json.dumps(flags) + "\n")


def results(args, trials: Trials) -> list[dict]:
    """One entry a loss and alpha: what every seed ended at, and the difference to alpha 0."""
    ends: dict[Arm, dict[int, float]] = {}
    for seed, arm in trials.combinations():
        at = solved(run_dir(args.out, args.env, arm, seed))
        if args.steps in at:
            ends.setdefault(arm, {})[seed] = at[args.steps]
    rows = []
    for arm, by_seed in sorted(ends.items()):
        sync = ends.get(Arm(arm.loss, 0.0), {})
        differences = [end - sync[seed] for seed, end in by_seed.items() if seed in sync]
        row = {"loss": arm.loss, "alpha": arm.alpha, "ends": list(by_seed.values())}
        if arm.alpha and differences:
            row["differences"] = differences
            row["difference"], row["half_width"] = interval(differences)
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        gap = "-"
        if "difference" in row:
            gap = f"{row['difference']:+.3f} ± {row['half_width']:.3f}"
        ends = bench.spread(row["ends"], digits=3, middle=np.mean)
        cells.append([row["loss"], f"{row['alpha']:g}", len(row["ends"]), ends, gap])
    ends = "solve rate at the end: mean (range)"
    return bench.table(["loss", "alpha", "seeds", ends, "less alpha 0 (95 %)"], cells)


def draw(args, trials: Trials, rows: list[dict], target: Path) -> Path:
    """Curves of the held-out solve rate (mean over seeds, band: their range), and differences."""
    from report.figures import finish, plt  # matplotlib, only here

    losses = args.losses.split(",")
    figure, axes = plt.subplots(
        1, len(losses) + 1, figsize=(4.5 * (len(losses) + 1), 4), squeeze=False
    )
    *curves, gaps = axes[0]
    arms = sorted({arm for _, arm in trials.combinations()})
    colors = {alpha: f"C{i}" for i, alpha in enumerate(sorted({arm.alpha for arm in arms}))}
    for loss, axis in zip(losses, curves, strict=True):
        for arm in (arm for arm in arms if arm.loss == loss):
            dirs = [run_dir(args.out, args.env, arm, seed) for seed in range(args.seeds)]
            runs = [at for at in map(solved, dirs) if args.steps in at]
            if runs:
                versions = sorted(runs[0])
                at = [[run[version] for run in runs] for version in versions]
                label = "sync" if arm.alpha == 0 else f"async, alpha {arm.alpha:g}"
                bench.band(axis, versions, at, np.mean, color=colors[arm.alpha], label=label)
        axis.set(title=f"{args.env}, {loss}", xlabel="step", ylabel="held-out solve rate")
        if axis.lines:
            axis.legend(fontsize=8)
    compared = [row for row in rows if "difference" in row]
    names = [f"{row['loss']}, {row['alpha']:g}" for row in compared]
    gaps.errorbar(
        range(len(compared)),
        [row["difference"] for row in compared],
        yerr=[row["half_width"] for row in compared],
        fmt="o",
        capsize=4,
    )
    gaps.axhline(0, color="gray", linewidth=0.8)
    gaps.set_xticks(range(len(compared)), names, rotation=45, ha="right", fontsize=8)
    gaps.set(title="difference to sync, 95 %")
    return finish(figure, axes[0], target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other flags go to train.py, for example --batch_size 16 --eval_prompts 256.",
        allow_abbrev=False,
    )
    parser.add_argument("--env", default="addition")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--losses", default="ppo")
    parser.add_argument("--alphas", default="0,1,2", help="with 0, which is synchronous training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("runs/parity"))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    args, flags = parser.parse_known_args()
    if args.seeds < 1 or args.steps < 1:
        parser.error("--seeds and --steps have to be at least 1")
    try:
        args.alphas = sorted(float(alpha) for alpha in args.alphas.split(","))
    except ValueError:
        parser.error(f"--alphas takes numbers by comma (got {args.alphas})")
    if taken := {"--mode", "--loss", "--alpha", "--seed", "--eval_every", "--run_dir"} & set(flags):
        parser.error(f"{', '.join(sorted(taken))}: of every run this command sets it itself")
    trials = Trials(args, flags)
    try:
        trials.check()
    except ValueError as error:
        parser.error(str(error))
    code = trials.go()
    rows = results(args, trials)
    print(table(rows))
    name = f"{file_name(args.env)}-{args.losses.replace(',', '-')}"
    plain = [{k: None if v != v else v for k, v in row.items()} for row in rows]  # JSON has no NaN
    bench.write_json(args.out / f"{name}.json", plain)
    print(draw(args, trials, rows, args.out / f"{name}.png"))
    return code


if __name__ == "__main__":
    sys.exit(main())
