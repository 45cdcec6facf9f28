"""What each scheduling mechanism is worth here, against the naive form that it replaces.

    bash launch.sh mechanisms                    all of them: about half an hour on two cores
    bash launch.sh mechanisms envs redundancy    some of them
    bash launch.sh mechanisms --repeats 7        more pairs

Every row of the table is a pair of arms that differ in one thing: the same model, the same engines
(two rollout processes, kept alive throughout), the same seeds and so the same tokens. Weights are
published after every batch as in training, but do not change: what is timed is the wait for a
batch. Arms alternate, and each pair of batches gives one ratio.

The naive forms are in `naive.py`. The paper's ratios are of other lengths, latencies and machines
(ROLL Flash, arXiv 2510.11345, figures of its mechanisms); what is to be compared is the direction.
"""

import argparse
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np

import train
from envs import Env, Row, Task
from experiments import bench, naive
from plumbing.models import resolve_model
from plumbing.settings import Settings
from plumbing.spans import spans
from rollout import Dispatcher

WORKERS, PLACES = 2, 32
FIXED = dict(mode="sync", rollout_workers=WORKERS, max_num_seqs=PLACES, max_model_len=256)
FIXED |= dict(learning_rate=1e-4, eval_every=0, filter_limit=1000.0, batch_timeout=600.0)
FIXED |= dict(max_restarts=0)  # what is timed has to run through


# -- what is generated ---------------------------------------------------------------------------


def lognormal(seed: int, median: float, least: int, most: int) -> int:
    """A length in tokens, of sigma 1.0, that depends on the arguments only."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0)
    return int(np.clip(drawn, least, most))


class HeavyTail(Task):
    """Responses of lognormal lengths: median 16 tokens, sigma 1.0, at most 192."""

    warmup_steps = 0
    blocking = False
    max_tokens = 192
    train = [Row(f"{i:05}=", "") for i in range(8192)]
    test = train[:1]
    solved = 0.5  # share of samples with reward 1

    def length(self, seed: int, turn: int) -> int:
        return lognormal(seed, 16, 1, self.max_tokens)

    def reward(self, row: Row, response: str) -> float:
        draw = np.random.default_rng([*row.prompt.encode(), *response.encode()]).random()
        return float(draw < self.solved)

    def warmup(self, rng) -> list[tuple[str, str]]:
        return [("=", "1")]


class Hard(HeavyTail):
    """Seldom solved: of groups of 8, more than half have no signal."""

    solved = 0.08


class FourTurns(Env):
    """Four turns of four tokens each; the model's words change nothing."""

    warmup_steps = 0
    max_turns, max_tokens = 4, 4
    blocking = False

    @classmethod
    def length(cls, seed: int, turn: int) -> int:
        return cls.max_tokens

    def reset(self, seed: int) -> tuple[str, dict]:
        self.turn = 0
        return f"{seed:05}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        return "more", float(len(action) % 2), self.turn == self.max_turns, False, {}

    @classmethod
    def warmup(cls, rng) -> list[tuple[str, str]]:
        return [("=", "1")]


# -- pairs ---------------------------------------------------------------------------------------


class Arm(NamedTuple):
    name: str
    settings: dict
    dispatcher: type[Dispatcher] = Dispatcher


class Pair(NamedTuple):
    what: str
    paper: str
    naive: Arm
    ours: Arm
    env: str
    per_useful: bool = False  # compare seconds a group with signal, not seconds a batch


def size(groups: int, samples: int, **more) -> dict:
    return {"batch_size": groups, "group_size": samples} | more


SLOW = "0.1,0.05,0.05,20"  # 5 % of the episodes are 20 times slower
LATE = {"env_latency": "0.3,0.1", "filter_groups": True}
RACE = {"consume": "ready"}
PAIRS: dict[str, list[Pair]] = {
    "queue": [
        Pair(
            "queue against batch scheduling, 8 x 8, rewards of 0.3 s, half of the groups filtered",
            "2.16",
            Arm("batch", size(8, 8, **LATE), naive.StaticSplit),
            Arm("queue", size(8, 8, **LATE)),
            "Hard",
        ),
        Pair(
            "the same with 16 redundant prompts",
            "3.4",
            Arm("batch", size(8, 8, **LATE), naive.StaticSplit),
            Arm("queue + 16", size(8, 8, **LATE, redundant_groups=16) | RACE),
            "Hard",
        ),
    ],
    "replication": [
        Pair(
            f"prompt replication on against off, {groups} x {n}",
            paper,
            Arm("off", size(groups, n), naive.Unreplicated),
            Arm("on", size(groups, n)),
            "HeavyTail",
        )
        for groups, n, paper in ((32, 16, "1.30"), (64, 16, "1.84"))
    ],
    "envs": [
        Pair(
            f"env-level async against lockstep, 16 x 8, 4 turns, latency N({latency}) s "
            "(paper: N(10, 10))",
            paper,
            Arm("lockstep", size(16, 8, env_latency=latency), naive.StaticSplit),
            Arm("async", size(16, 8, env_latency=latency)),
            "FourTurns",
        )
        for latency, paper in (("0.1,0.1", "2.46"), ("1,1", "2.46"), ("0.1,0", "1"))
    ],
    "redundancy": [
        Pair(
            "36 x 9 against 32 x 8 episodes for 32 x 8, latency N(0.1, 0.05) s, 5 % 20 x slower "
            "(paper: N(10, 5))",
            "5.40",
            Arm("32 x 8", size(32, 8, env_latency=SLOW)),
            Arm(
                "36 x 9",
                size(32, 8, env_latency=SLOW, redundant_groups=4, redundant_samples=1) | RACE,
            ),
            "FourTurns",
        ),
    ],
    "filtering": [
        Pair(
            "groups without signal replaced at once against after each round, 16 x 8",
            "-",
            Arm("in rounds", size(16, 8, filter_groups=True), naive.InRounds),
            Arm("at once", size(16, 8, filter_groups=True)),
            "Hard",
        ),
        Pair(
            "seconds a group with signal: replaced at once against not at all, 16 x 8",
            "-",
            Arm("no filter", size(16, 8)),
            Arm("filter", size(16, 8, filter_groups=True)),
            "Hard",
            per_useful=True,
        ),
    ],
}


# -- timing --------------------------------------------------------------------------------------


class Run(train.Run):
    worker_main = staticmethod(naive.worker_main)


class WaitingBench(bench.Bench):
    """A bench whose arms generate and publish; what is timed is the wait for a batch."""

    def __init__(self, directory: Path, total: int):
        super().__init__(directory, total, unit="arm")
        task = HeavyTail(Settings())
        # Its weights are random: lengths are given, so there is nothing for it to know.
        self.model = resolve_model("tiny", task, "mechanisms", directory, warmup_steps=0)

    def batch_seconds(self, arm: Arm, env: str, batches: int, seed: int) -> tuple[float, float]:
        """Mean seconds a batch, after a first one; and groups with signal a batch."""
        settings = FIXED | arm.settings | {
            "model": self.model,
            "env": f"{Path(__file__)}:{env}",
            "steps": batches + 3,  # the last ones of a run start nothing redundant: not timed
            "tasks_per_worker": PLACES if env != "FourTurns" else 512,
            "seed": seed,
            "run_dir": self.new_directory(arm.name),
        }

        def work(run: Run) -> tuple[float, float]:
            seconds, useful = [], []
            for _ in range(batches + 1):
                batch = run.get_batch()
                seconds.append(spans.seconds["wait"])
                rewards = np.array([s.reward for s in batch]).reshape(-1, run.settings.group_size)
                useful.append(int((np.ptp(rewards, 1) > 0).sum()))
                run.publish(run.version + 1)
                run.wait_committed()
            return float(np.mean(seconds[1:])), float(np.mean(useful[1:]))

        return self.measure(Run(Settings(**settings)), work, arm.dispatcher)

    def compare(self, pair: Pair, repeats: int, batches: int) -> dict:
        """Let the two arms take turns; one ratio a repeat."""

        def measure(arm: Arm, repeat: int) -> float:
            spent, useful = self.batch_seconds(arm, pair.env, batches, seed=repeat)
            return spent / useful if pair.per_useful else spent

        seconds = self.in_turn([pair.ours, pair.naive], repeats, measure)
        ratios = np.divide(seconds[pair.naive.name], seconds[pair.ours.name])
        return {
            "what": pair.what,
            "paper": pair.paper,
            "naive": [pair.naive.name, *np.round(seconds[pair.naive.name], 4).tolist()],
            "ours": [pair.ours.name, *np.round(seconds[pair.ours.name], 4).tolist()],
            "ratios": np.round(ratios, 3).tolist(),
        }


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        arms = row["naive"], row["ours"]
        medians = [f"{name}: {np.median(seconds):.2f} s" for name, *seconds in arms]
        cells.append([row["what"], *medians, bench.spread(row["ratios"]), row["paper"]])
    head = ["what", "naive", "ours", "naive / ours: median (range)", "paper"]
    return bench.table(head, cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mechanisms", nargs="*", metavar="MECHANISM", help=", ".join(PAIRS))
    parser.add_argument("--repeats", type=int, default=5, help="pairs a row")
    parser.add_argument("--batches", type=int, default=4, help="timed batches an arm")
    parser.add_argument("--out", type=Path, default=Path("runs/mechanisms.json"))
    args = parser.parse_args()
    unknown = set(args.mechanisms) - set(PAIRS)
    if unknown:
        parser.error(f"no mechanism {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    pairs = [pair for name in args.mechanisms or PAIRS for pair in PAIRS[name]]
    rows: list[dict] = []
    total = 2 * args.repeats * len(pairs)
    with tempfile.TemporaryDirectory() as directory, WaitingBench(Path(directory), total) as waits:
        for pair in pairs:
            rows.append(waits.compare(pair, args.repeats, args.batches))
            bench.write_json(args.out, rows)
    print(f"{platform.machine()}, {date.today()}, {args.repeats} pairs of {args.batches} batches")
    print(table(rows))
    return waits.code


if __name__ == "__main__":
    sys.exit(main())
