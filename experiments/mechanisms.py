"""What each scheduling mechanism is worth here, against the naive form that it replaces.

    python -m experiments.mechanisms                    all of them: about half an hour on two cores
    python -m experiments.mechanisms envs redundancy    some of them
    python -m experiments.mechanisms --repeats 7        more pairs

Every row of the table is a pair of arms that differ in one thing: the same model, the same engines
(two rollout processes, kept alive throughout), the same seeds and so the same tokens. Weights are
published after every batch as in training, but do not change: what is timed is the wait for a
batch. Arms alternate, and each pair of batches gives one ratio.

The naive forms are the two dispatchers below, `worker.Worker.run_naive` and
`episode.run_lockstep`: a static split of the batch over workers, all environments in step, and
rewards after everything. The paper's ratios are of other lengths, latencies and machines (ROLL
Flash, arXiv 2510.11345, figures of its mechanisms); what is to be compared is the direction.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
from collections import deque
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers
from tqdm import tqdm

import train
from buffer import RolloutTask
from envs import Env, EnvConfig, Row, Task
from plumbing.models import resolve_model
from report.timeline import spans
from rollout import Dispatcher

WORKERS, SLOTS = 2, 32


# -- the naive forms -----------------------------------------------------------------------------


class StaticSplit(Dispatcher):
    """Batch scheduling: all that is queued is cut into one piece a worker, each piece runs in
    lockstep, and nothing more is handed out before the last sample is in."""

    message = "lockstep"

    def assign(self) -> dict[int, list[RolloutTask]]:
        if any(self.held):
            return {}
        tasks = [task for task in self.queue if task.group not in self._ended]
        self.queue = deque()
        pieces = np.array_split(np.arange(len(tasks)), len(self.held))
        given = {w: [tasks[i] for i in piece] for w, piece in enumerate(pieces) if len(piece)}
        for worker, piece in given.items():
            self.held[worker].update(piece)
        return given


class InRounds(Dispatcher):
    """Queue scheduling within a round; what was dropped is replaced after the round only."""

    def assign(self) -> dict[int, list[RolloutTask]]:
        if not any(self.held):
            self.round = len(self.queue)
        later = deque()
        while len(self.queue) > self.round:
            later.appendleft(self.queue.pop())
        before = len(self.queue)
        given = super().assign()
        self.round -= before - len(self.queue)
        self.queue.extend(later)
        return given


class Unreplicated(Dispatcher):
    """The n samples of a prompt as one request: one worker has them all, and gives their places
    free when the last has ended."""

    def assign(self) -> dict[int, list[RolloutTask]]:
        given: dict[int, list[RolloutTask]] = {}
        while self.queue:
            group = [task for task in self.queue if task.group == self.queue[0].group]
            taken = [len({task.group for task in held}) * len(group) for held in self.held]
            worker = int(np.argmin(taken))
            if taken[worker] + len(group) > self.slots:
                break
            self.queue = deque(task for task in self.queue if task.group != group[0].group)
            self.held[worker].update(group)
            given.setdefault(worker, []).extend(group)
        return given


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
RACE = {"consume": "ready"}
PAIRS: dict[str, list[Pair]] = {
    "queue": [
        Pair(
            "queue against batch scheduling, 8 x 8, rewards of 0.3 s, half of the groups filtered",
            "2.16",
            Arm("batch", size(8, 8, env_latency="0.3,0.1", filter_groups=True), StaticSplit),
            Arm("queue", size(8, 8, env_latency="0.3,0.1", filter_groups=True)),
            "Hard",
        ),
        Pair(
            "the same with 16 redundant prompts",
            "3.4",
            Arm("batch", size(8, 8, env_latency="0.3,0.1", filter_groups=True), StaticSplit),
            Arm(
                "queue + 16",
                size(8, 8, env_latency="0.3,0.1", filter_groups=True, redundant_groups=16) | RACE,
            ),
            "Hard",
        ),
    ],
    "replication": [
        Pair(
            f"prompt replication on against off, {groups} x {n}",
            paper,
            Arm("off", size(groups, n), Unreplicated),
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
            Arm("lockstep", size(16, 8, env_latency=latency), StaticSplit),
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
            Arm("in rounds", size(16, 8, filter_groups=True), InRounds),
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


class Bench:
    """Runs arms one after the other on the same rollout processes."""

    def __init__(self, directory: Path):
        self.directory, self.rollouts, self.runs = directory, None, 0
        task = HeavyTail(EnvConfig())
        # Its weights are random: lengths are given, so there is nothing for it to know.
        self.model = resolve_model("tiny", task, "mechanisms", directory, warmup_steps=0)

    def batch_seconds(self, arm: Arm, env: str, batches: int, seed: int) -> tuple[float, float]:
        """Mean seconds a batch, after a first one; and groups with signal a batch."""
        self.runs += 1
        settings = {
            "model": self.model,
            "env": f"{Path(__file__)}:{env}",
            "mode": "sync",
            "batch_timeout": 600,
            "steps": batches + 3,  # the last ones of a run start nothing redundant: not timed
            "rollout_workers": WORKERS,
            "max_num_seqs": SLOTS,
            "tasks_per_worker": SLOTS if env != "FourTurns" else 512,
            "learning_rate": 1e-4,
            "max_model_len": 256,
            "eval_every": 0,
            "filter_limit": 1000,
            "seed": seed,
            "run_dir": self.directory / f"run-{self.runs}",
        } | arm.settings
        run = train.Run(*train.parse(train.as_flags(settings)))
        run.log.bar.disable = True  # there is one for all arms
        try:
            run.start(self.rollouts, arm.dispatcher)
            seconds, useful = [], []
            for _ in range(batches + 1):
                batch = run.get_batch()
                seconds.append(spans.seconds["wait"])
                rewards = np.array([s.reward for s in batch]).reshape(-1, run.buffer.group_size)
                useful.append(int((np.ptp(rewards, 1) > 0).sum()))
                run.publish(run.version + 1)
                run.wait_committed()
            return float(np.mean(seconds[1:])), float(np.mean(useful[1:]))
        finally:
            self.rollouts = run.rollouts or self.rollouts  # to be closed, also if it has just begun
            run.close(keep_workers=True)

    def compare(self, pair: Pair, repeats: int, batches: int, bar: tqdm) -> dict:
        """Alternate the two arms; one ratio a repeat."""
        seconds = {pair.naive.name: [], pair.ours.name: []}
        for repeat in range(repeats):
            arms = (pair.naive, pair.ours) if repeat % 2 else (pair.ours, pair.naive)
            for arm in arms:
                bar.set_postfix_str(arm.name)
                spent, useful = self.batch_seconds(arm, pair.env, batches, seed=repeat)
                seconds[arm.name].append(spent / useful if pair.per_useful else spent)
                bar.update()
        ratios = np.divide(seconds[pair.naive.name], seconds[pair.ours.name])
        return {
            "what": pair.what,
            "paper": pair.paper,
            "naive": [pair.naive.name, *np.round(seconds[pair.naive.name], 4).tolist()],
            "ours": [pair.ours.name, *np.round(seconds[pair.ours.name], 4).tolist()],
            "ratios": np.round(ratios, 3).tolist(),
        }

    def close(self) -> None:
        if self.rollouts:
            self.rollouts.close()


def table(rows: list[dict]) -> str:
    lines = [
        "| what | naive | ours | naive / ours: median (range) | paper |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        arms = row["naive"], row["ours"]
        naive, ours = (f"{name}: {np.median(seconds):.2f} s" for name, *seconds in arms)
        ratios = row["ratios"]
        lines.append(
            f"| {row['what']} | {naive} | {ours} | {np.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {row['paper']} |"
        )
    return "\n".join(lines)


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        bar = tqdm(total=2 * args.repeats * len(pairs), unit="arm")
        try:
            for pair in pairs:
                rows.append(bench.compare(pair, args.repeats, args.batches, bar))
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
        except KeyboardInterrupt:
            print("interrupted; what is done is below", file=sys.stderr)
        finally:
            bar.close()
            bench.close()
    print(f"{platform.machine()}, {date.today()}, {args.repeats} pairs of {args.batches} batches")
    print(table(rows))
    return 0 if len(rows) == len(pairs) else 130


if __name__ == "__main__":
    sys.exit(main())
