"""What asynchrony is worth, in a minute or two: one number, one picture.

    bash launch.sh demo

Responses have a heavy tail: most end within a few tokens, one in thirty goes on for hundreds. Both
arms have the same model, cores, engine, prompts and seeds, and train on as many samples. In sync
the trainer, and all places of the engine but a few, wait for the longest response of every batch;
in async the next batches are decoded meanwhile, and long responses go on through weight updates.
The picture shows both on one scale; every colour of a turn is the version that decoded that part.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np

import train
from experiments.bench import Bench, train_to_the_end
from experiments.compare import LongAnswer
from plumbing.settings import as_flags, parse
from report.figures import plot_turns

LONG = 320  # tokens of a response in the tail


class HeavyTail(LongAnswer):
    """A sum, and then dots: few, or very many."""

    max_tokens = LONG

    def length(self, seed: int, turn: int) -> int:
        rng = np.random.default_rng(seed)
        return LONG if rng.random() < 1 / 30 else int(rng.integers(4, 13))


FLAGS = {
    "env": f"{__file__}:HeavyTail", "batch_size": 8, "group_size": 8, "learning_rate": 3e-4,
    "max_model_len": 512, "eval_every": 0, "max_restarts": 0,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=2.0, help="how far async may be ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    args = parser.parse_args(argv)
    arms = {"sync": ["--mode", "sync"], "async": ["--alpha", f"{args.alpha:g}"]}
    shutil.rmtree(args.out, ignore_errors=True)
    rows = {}
    with Bench(args.out) as bench:
        for name, mode in arms.items():
            settings = FLAGS | {"steps": args.steps, "seed": args.seed}
            settings["run_dir"] = str(args.out / name)
            run = train.Run(parse([*mode, *as_flags(settings)]))
            bench.measure(run, train_to_the_end)
            rows[name] = run.log.rows
    if bench.code:
        return bench.code
    sync, ahead = (rows[name][-1]["wall_s"] for name in arms)
    stale = max(row["staleness_max"] for row in rows["async"])
    samples = args.steps * FLAGS["batch_size"] * FLAGS["group_size"]
    said = (
        f"{samples} samples: sync {sync:.1f} s, async {ahead:.1f} s, {sync / ahead:.2f} times as "
        f"fast, and no token is more than {stale} versions old when it is trained on."
    )
    picture = plot_turns(
        {
            f"sync: {sync:.1f} s for {samples} samples": args.out / "sync",
            f"async, α = {args.alpha:g}: {ahead:.1f} s for as many": args.out / "async",
        },
        args.out / "demo.png",
    )
    print(said)
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
