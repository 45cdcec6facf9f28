"""Asynchronous against synchronous training, on the same cores or GPUs.

    bash launch.sh compare                             all tasks: about an hour on two cores
    bash launch.sh compare grid --repeats 5 --env_latency 0.3,0.3
    bash launch.sh compare rlvr --reward_steps 100     and reward against wall time
    bash launch.sh compare --sweep                     at which lengths and latencies it pays

Every arm has the whole machine. *Naive* sync is what the paper compares with, as far as is known:
the batch is split over the workers beforehand, environments run in step, rewards after everything.
*Strongest* sync is the fastest of several: one worker or a worker a core, engine and trainer on one
thread or on all, with queue scheduling and prompt replication. What changes the data is off in all
arms: redundancy, filtering. Async has a core for the trainer and the others for workers. On GPUs
there is one trainer process in every arm: compare on two of them, or on one.

Arms take turns, and ratios are of runs of one round (and so of one seed). A step is timed in the
middle of a run, where the pipeline is full, from one end of a step to the next, logging included.
Held-out reward is measured on weights kept during the run, after its end: no evaluation interrupts
it, and generation has none of the trainer's time for free.

*Alone* is what bounds an asynchronous step: generation with a trainer that does nothing, and the
trainer on batches that are there, each with the publish that belongs to it, until it is loaded.
It is of the first alpha: with a greater one more samples are under way, and an engine does more of
them at once.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py: before torch is imported

import argparse
import itertools
import platform
import re
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import train
from envs import Row
from experiments import naive
from experiments.bench import Bench, band, ratio, spread, table, train_to_the_end, write_json
from experiments.mechanisms import lognormal
from plumbing.devices import usable_gpus
from plumbing.models import resolve_model
from plumbing.settings import Settings, as_flags, parse
from plumbing.spans import spans
from report.figures import finish, plot_timeline, plt
from rollout import Dispatcher
from tasks.find import make_task
from tasks.puzzles import Addition

FIXED = dict(batch_size=16, learning_rate=3e-4, max_model_len=1024, eval_every=0, eval_prompts=512)
FIXED |= dict(max_restarts=0)  # what is timed has to run through
ALONE = "each side alone"
WARM, TAIL = 3, 3  # steps before and after those that are timed: the pipeline fills and empties


class LongAnswer(Addition):
    """A sum, and then dots: responses of lognormal lengths, as of a model that thinks for long."""

    median = 16
    max_tokens = 192

    def length(self, seed: int, turn: int) -> int:
        return lognormal(seed, self.median, 4, self.max_tokens)  # 4: three digits and an end

    def reward(self, row: Row, response: str) -> float:
        return float(re.match(r"\d*", response).group() == row.answer)

    def warmup(self, rng) -> list[tuple[str, str]]:
        ((text, answer),) = super().warmup(rng)
        return [(text, answer + "." * rng.randint(1, 3))]


class Median4(LongAnswer):  # with the same limit, in medians, as all: 12
    median, max_tokens = 4, 48


class Median8(LongAnswer):
    median, max_tokens = 8, 96


class Median32(LongAnswer):
    median, max_tokens = 32, 384


class Median64(LongAnswer):
    median, max_tokens = 64, 768


class Case(NamedTuple):
    """What is trained: an environment and its flags."""

    name: str
    env: str
    flags: dict = {}


LENGTHS = {  # of each median, the name of its env
    task.median: f"{__file__}:{task.__name__}"
    for task in (Median4, Median8, LongAnswer, Median32, Median64)
}
LONG = LENGTHS[LongAnswer.median]
CASES = {
    "addition": Case("addition", "addition"),
    "rlvr": Case("lognormal lengths, median 16, sigma 1.0", LONG),
    "grid": Case("grid game, latency N(0.1, 0.1) s", "grid", {"env_latency": "0.1,0.1"}),
}
SWEEPS = {
    "median length (tokens)": [
        (median, Case(f"median {median}", env)) for median, env in LENGTHS.items()
    ],
    "environment latency N(x, x) (s)": [
        (s, Case(f"latency {s:g}", "grid", {"env_latency": f"{s:g},{s:g}"}))
        for s in (0.01, 0.03, 0.1, 0.3)
    ],
}


class Arm(NamedTuple):
    """A way to train: which mode, how many workers, threads of each and of the trainer."""

    name: str
    mode: str
    alpha: float
    workers: int
    worker_threads: int
    trainer_threads: int
    dispatcher: type[Dispatcher] = Dispatcher


def arms_of(cores: int, alphas: list[float]) -> list[Arm]:
    """Naive sync first, then the candidates for the strongest, then async."""
    if gpus := usable_gpus():  # in sync trainer and workers share the GPUs, in async they split
        sync = [Arm("sync", "sync", 0, gpus, 1, 1)]
        split = max(1, gpus - 1)
    else:
        sync = [
            Arm(f"sync {w}x{t}+{n}", "sync", 0, w, t, n)
            for w, t, n in dict.fromkeys(
                [(1, 1, 1), (1, 1, cores), (1, cores, cores), (cores, 1, cores)]
            )
        ]
        split = max(1, cores - 1)
    weakest = sync[-1]._replace(name="naive sync", dispatcher=naive.StaticSplit)
    return [weakest, *sync, *(Arm(f"async {a:g}", "async", a, split, 1, 1) for a in alphas)]


class Measured(train.Run):
    """A run that keeps its weights now and then, and its batches if asked to."""

    worker_main = staticmethod(naive.worker_main)
    every = 0  # steps between weights that are kept
    idle_trainer = False

    def start(self, *args) -> None:
        self.kept: list[tuple[float, dict]] = []  # seconds since the start, weights
        self.batches: list[list] = []
        super().start(*args)
        self.ends = [time.perf_counter()]  # of the start, and of each step with all that it logs
        self._keep()

    def _keep(self) -> None:
        if self.every:
            weights = self.trainer.policy.model.state_dict()
            seconds = time.perf_counter() - self.ends[0]
            self.kept.append((seconds, {name: w.clone() for name, w in weights.items()}))

    def train_on(self, batch) -> None:
        self.batches.append(batch)
        if self.idle_trainer:
            self.metrics, self.trained = {"grad_norm": 0.0}, self.version + 1
        else:
            super().train_on(batch)

    def finish_step(self) -> None:
        super().finish_step()
        self.ends.append(time.perf_counter())
        if self.every and self.version % self.every == 0:
            self._keep()

    def save(self) -> None:
        """No checkpoint: `kept` is what this is about."""

    def curve(self) -> list[tuple[float, float]]:
        """Seconds and held-out solve rate of the weights that were kept."""
        points = []
        for seconds, weights in self.kept:
            self.trainer.policy.model.load_state_dict(weights)
            self.publish(self.version + 1)
            self.wait_committed()
            self.evaluate()
            points.append((seconds, self.log.rows[-1]["eval/solve_rate"]))
        return points

    def train_alone(self) -> float:
        """Seconds a step on batches that are there, with the publish, the workers at rest."""
        seconds = []
        for batch in self.batches[WARM:-TAIL]:
            spans.seconds.clear()
            self.train_on(batch)
            self.publish(self.version + 1)
            self.wait_committed()
            seconds.append(spans.seconds["train"] + spans.seconds["publish"])
        return float(np.mean(seconds))


def model_of(env: str) -> str:
    """All lengths start from one model: their warm-up is the same."""
    env = LONG if env.startswith(__file__) else env
    return resolve_model("tiny", make_task(Settings(env=env)), env)


class TrainingBench(Bench):
    """A bench whose arms train. `flags` of train.py are for all of them."""

    def __init__(self, directory: Path, steps: int, flags: list[str], total: int):
        super().__init__(directory, total)
        self.flags, self.timed = flags, WARM + steps + TAIL  # steps of a run that is timed
        self.shown: dict[tuple[str, str], Path] = {}  # directory of a case's and arm's last run

    def train(self, case: Case, arm: Arm, seed: int, steps: int, what: Callable, **traits):
        """Train for so many steps; returns what(run) of the finished run."""
        settings = FIXED | {
            "model": model_of(case.env),
            "env": case.env,
            "mode": arm.mode,
            "alpha": arm.alpha,
            "rollout_workers": arm.workers,
            "steps": steps,
            "seed": seed,
            "run_dir": self.new_directory(arm.name),
        }
        run = Measured(parse(as_flags(settings | case.flags) + self.flags))
        self.shown[case.name, arm.name] = run.log.dir
        for name, value in traits.items():
            setattr(run, name, value)
        torch.set_num_threads(arm.trainer_threads)
        run.worker_threads = arm.worker_threads

        def work(run: Measured):
            train_to_the_end(run)
            return what(run)

        return self.measure(run, work, arm.dispatcher, (arm.workers, arm.worker_threads))

    def step_seconds(self, case: Case, arm: Arm, seed: int, **traits) -> float:
        """Mean seconds a step, of those in the middle of a run."""
        return self.train(case, arm, seed, self.timed, middle, **traits)

    def alone(self, case: Case, arm: Arm, seed: int) -> tuple[float, float]:
        """Seconds a step of generation alone, and of training alone, publish included."""
        generate = self.step_seconds(case, arm, seed, idle_trainer=True)
        return generate, self.train(case, arm, seed, self.timed, Measured.train_alone)


def middle(run: Measured) -> float:
    ends = run.ends
    return (ends[-1 - TAIL] - ends[WARM]) / (len(ends) - 1 - WARM - TAIL)


def strongest(seconds: dict[str, list[float]]) -> str:
    """The synchronous arm with the lowest median, the naive one aside."""
    return min((a for a in seconds if a.startswith("sync")), key=lambda a: np.median(seconds[a]))


def time_table(case: Case, seconds: dict[str, list[float]]) -> str:
    best, naive_sync = strongest(seconds), next(iter(seconds))
    head = [case.name, "seconds a step: median (range)", "naive sync / it", f"{best} / it"]
    rows = [
        [
            f"{name} (strongest)" if name == best else name,
            spread(values),
            ratio(seconds[naive_sync], values),
            ratio(seconds[best], values),
        ]
        for name, values in seconds.items()
    ]
    return table(head, rows)


def reached(curve: list[tuple[float, float]], target: float) -> float:
    """Seconds until the solve rate first is `target`, between two points by a straight line; NaN
    if it never is."""
    for (t0, r0), (t1, r1) in zip([curve[0], *curve], curve, strict=False):
        if r1 >= target:
            return t1 if r1 == r0 else t0 + (t1 - t0) * (target - r0) / (r1 - r0)
    return float("nan")


def reward_table(curves: dict[str, list], best: str) -> str:
    """Wall time to 90 % of the gain that every run reaches, sync against async."""
    runs = [curve for of_arm in curves.values() for curve in of_arm]
    start = np.mean([curve[0][1] for curve in runs])
    target = start + 0.9 * (min(max(r for _, r in curve) for curve in runs) - start)
    head = ["", f"seconds to a held-out solve rate of {target:.2f}", f"{best} / it", "at the end"]
    sync, rows = [reached(curve, target) for curve in curves[best]], []
    for name, of_arm in curves.items():
        times = [reached(curve, target) for curve in of_arm]
        ends = ", ".join(f"{curve[-1][1]:.2f}" for curve in of_arm)
        rows.append([name, ", ".join(f"{t:.0f}" for t in times), ratio(sync, times), ends])
    return table(head, rows)


def draw(results: dict[str, dict], target: Path) -> Path:
    """A row a task: seconds a step, and reward against wall time where it was measured."""
    figure, axes = plt.subplots(len(results), 2, figsize=(11, 3.6 * len(results)), squeeze=False)
    for (bars, lines), (name, result) in zip(axes, results.items(), strict=True):
        seconds = result["seconds"]
        medians = [np.median(values) for values in seconds.values()]
        ranges = [[m - min(v), max(v) - m] for m, v in zip(medians, seconds.values(), strict=True)]
        colors = ["C1" if arm.startswith("async") else "C0" for arm in seconds]
        bars.barh(list(seconds), medians, xerr=np.transpose(ranges), color=colors, capsize=3)
        bars.invert_yaxis()
        bars.set(title=name, xlabel="seconds a step (bars: range)")
        for number, (arm, curves) in enumerate(result.get("curves", {}).items()):
            for i, curve in enumerate(curves):
                lines.plot(*zip(*curve, strict=True), f"C{number}o-", label=None if i else arm)
        lines.set(xlabel="seconds", ylabel="held-out solve rate")
        if result.get("curves"):
            lines.legend()
        else:
            lines.set_visible(False)
    return finish(figure, axes.flat, target)


def draw_sweep(sweeps: dict[str, dict], target: Path) -> Path:
    """Strongest sync / async over length and over latency."""
    figure, axes = plt.subplots(1, len(sweeps), figsize=(5 * len(sweeps), 3.6), squeeze=False)
    for axis, (what, points) in zip(axes[0], sweeps.items(), strict=True):
        values = sorted(points)
        for number, arm in enumerate(points[values[0]]):
            ratios = [points[value][arm] for value in values]
            band(axis, values, ratios, color=f"C{number + 1}", label=arm)
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(xscale="log", xlabel=what, ylabel="strongest sync / async")
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.set_xticks([], minor=True)
        axis.legend()
    return finish(figure, axes.flat, target)


# -- commands ------------------------------------------------------------------------------------


def compare(bench: TrainingBench, case: Case, arms: list[Arm], args) -> dict:
    """Everything about one task: times, what bounds them, and reward against wall time."""

    def measure(arm: Arm, repeat: int):
        return (bench.alone if arm.name == ALONE else bench.step_seconds)(case, arm, repeat)

    asynchronous = arms[-len(args.alphas) :]
    sides = asynchronous[0]._replace(name=ALONE)
    seconds = bench.in_turn([*arms, sides], args.repeats, measure, case.name)
    alone, best = seconds.pop(ALONE), strongest(seconds)
    result = {"seconds": seconds, "alone": alone}
    shown = [bench.shown[case.name, name] for name in (best, asynchronous[0].name)]
    target = plot_timeline(shown, args.out / f"timeline-{case.env.rpartition(':')[2]}.png")
    print(f"what bounds them: {target}", file=sys.stderr)
    if args.reward_steps:
        chosen = [arm for arm in arms if arm.name == best or arm in asynchronous]
        how = {"steps": args.reward_steps, "every": max(1, args.reward_steps // 10)}
        curve = partial(bench.train, case, what=Measured.curve, **how)
        what = f"{case.name}, reward"
        result["curves"] = bench.in_turn(chosen, args.reward_seeds, curve, what)
    return result


def describe(case: Case, result: dict) -> str:
    """The tables of one task, and what bounds its asynchronous step."""
    seconds = result["seconds"]
    parts = [time_table(case, seconds)]
    name = next(arm for arm in seconds if arm.startswith("async"))
    alone = np.array(result["alone"])  # [rounds, 2]
    generation, training = np.median(alone, axis=0)
    parts.append(
        f"{name}: {np.median(seconds[name]):.3f} s a step; alone, with their publish: generation "
        f"{generation:.3f} s, training {training:.3f} s; step / longer one "
        f"{ratio(seconds[name], alone.max(1))}"
    )
    if "curves" in result:
        parts.append(reward_table(result["curves"], strongest(seconds)))
    return "\n\n".join(parts)


def sweep(bench: TrainingBench, arms: list[Arm], repeats: int, found: dict[str, dict]) -> None:
    """Into `found`, paired ratios of the strongest sync to each async arm, over lengths and
    latencies."""
    for what, points in SWEEPS.items():
        for value, case in points:
            measure = partial(bench.step_seconds, case)
            seconds = bench.in_turn(arms[1:], repeats, measure, case.name)
            best = seconds[strongest(seconds)]
            found.setdefault(what, {})[value] = {
                arm: np.divide(best, seconds[arm]).tolist()
                for arm in seconds
                if arm.startswith("async")
            }


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="compare.py [TASK ...] [flags]",
        epilog=f"Tasks: {', '.join(CASES)}. Other flags go to train.py: --batch_size 32.",
    )
    parser.add_argument("--alphas", default="1,2", help="asynchronous ratios, by comma")
    parser.add_argument("--repeats", type=int, default=5, help="runs an arm")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a run")
    parser.add_argument("--reward_steps", type=int, default=0, help="steps of the runs for reward")
    parser.add_argument("--reward_seeds", type=int, default=2, help="runs an arm for reward")
    parser.add_argument("--sweep", action="store_true", help="over lengths and latencies instead")
    parser.add_argument("--out", type=Path, help="default: runs/compare-<n>")
    # Tasks stand before all flags: else the value of a flag of train.py would be one.
    tasks = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    args, flags = parser.parse_known_args(sys.argv[1 + len(tasks) :])
    args.tasks = tasks or list(CASES)
    if unknown := set(args.tasks) - set(CASES):
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    try:
        args.alphas = [float(alpha) for alpha in args.alphas.split(",")]
    except ValueError:
        parser.error(f"--alphas takes numbers by comma (got {args.alphas})")
    if min(args.repeats, args.steps, args.reward_seeds) < 1 or args.reward_steps < 0:
        parser.error("--repeats, --steps and --reward_seeds have to be at least 1")
    if args.out and args.out.exists():
        parser.error(f"--out {args.out} exists already")
    free = (Path(f"runs/compare-{n}") for n in range(1, 10_000))
    args.out = args.out or next(path for path in free if not path.exists())
    parse(flags)  # a wrong flag is said now
    return args, flags


def runs_in_all(args, arms: list[Arm]) -> int:
    """What the bar counts."""
    if args.sweep:
        return args.repeats * (len(arms) - 1) * sum(map(len, SWEEPS.values()))
    rewards = (1 + len(args.alphas)) * args.reward_seeds * bool(args.reward_steps)
    return (args.repeats * (len(arms) + 1) + rewards) * len(args.tasks)


def main() -> int:
    args, flags = parse_args()
    cores = len(os.sched_getaffinity(0))
    arms, results = arms_of(cores, args.alphas), {}
    args.out.mkdir(parents=True)
    with TrainingBench(args.out, args.steps, flags, runs_in_all(args, arms)) as bench:
        if args.sweep:
            sweep(bench, arms, args.repeats, results)
        for name in () if args.sweep else args.tasks:
            results[name] = compare(bench, CASES[name], arms, args)
            write_json(args.out / "results.json", results)
    print(f"{platform.machine()}, {cores} cores, {date.today()}, {args.repeats} runs an arm")
    write_json(args.out / "results.json", results)
    if args.sweep and results:
        for what, points in results.items():
            for value, ratios in points.items():
                text = ", ".join(f"{arm} {spread(r)}" for arm, r in ratios.items())
                print(f"{what} {value:g}: strongest sync / {text}")
        print(draw_sweep(results, args.out / "sweep.png"))
    elif results:
        for name, result in results.items():
            print(describe(CASES[name], result), end="\n\n")
        print(draw(results, args.out / "compare.png"))
    return bench.code


if __name__ == "__main__":
    sys.exit(main())
