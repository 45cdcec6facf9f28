"""The paper's experiments on a virtual clock, without its GPUs.

    bash launch.sh sim                          all: the paper's number, ours, the deviation
    bash launch.sh sim scaling alpha --quick    some of them, over fewer steps
    bash launch.sh sim --figure docs/sim.png    and a figure: speed-up over GPUs, alpha and split
    bash launch.sh sim --gpus 16 --alpha 2 --median 2000 --trace DIR    one run, for `plot`
    bash launch.sh sim validate RUN_DIR...      finished runs against their simulation
    bash launch.sh sim validate RUN_DIR --rates_of OTHER     from what another run has measured

The scheduler is the program's own (`simulator.py`). What is assumed stands with each experiment and
is printed with its table: rates follow from data sheets, and the paper does not give lengths, GPU
counts of its smaller figures or latencies' tails, so those are fitted, once for each of four groups
of experiments (scaling with split and alpha; queue with replication; envs; redundancy). `naive` is
batch scheduling (`naive.StaticSplit`): a static split over workers, environments in step, rewards
after everything; `queue` is this project's sync mode.

Paper: ROLL Flash (arXiv 2510.11345); RollArt (arXiv 2512.22560) where it says so.
"""

import argparse
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from buffer import SampleBuffer
from experiments.naive import StaticSplit, Unreplicated
from experiments.simulator import Load, Rates, Setting, SimEnv, simulate
from experiments.traced import trace_run
from report.rows import read_rows
from rollout import Dispatcher

# An 8B model on one GPU with 3.35 TB/s and 990 TFLOP/s (bf16), at 0.75 of the one and 0.4 of the
# other: 16.4 GB of weights are read a decode step, 147 kB of KV cache a token; prefill takes
# 2 * 8.2 GFLOP a token, a train step 10 (with the logprobs that it recomputes). Times of weights
# and of changing phases are assumed; `slots` is fitted with `scaling`.
GPU = Rates(
    decode_s=0.0065,
    decode_kv_s=5.9e-8,
    prefill=24_000,
    slots=16,
    train=5_000,
    train_s=2,
    publish_s=2,
    load_s=1,
    switch_s=20,
)
BASE = dict(median=1000, sigma=0.5, longest=32_768)  # light tail
THINK = dict(median=2000, sigma=1.2, longest=32_768)  # heavy tail: 1 % reach the limit
MIDDLE = dict(median=1000, sigma=0.8, longest=32_768)  # of the mechanisms' figures
TRAIN_SHARE = 5 / 16  # of the GPUs in async


class Row(NamedTuple):
    """A line of a table. `paper` is None where the paper gives no number."""

    what: str
    ours: float
    paper: float | None = None
    unit: str = "x"
    point: tuple | None = None  # panel, curve and x in the figure

    def line(self) -> str:
        shown = "-" if self.paper is None else f"{self.paper:.3g} {self.unit}"
        off = "-" if not self.paper else f"{self.ours / self.paper - 1:+.0%}"
        return f"| {self.what} | {shown} | {self.ours:.3g} {self.unit} | {off} |"


class Scale(NamedTuple):
    """How much is simulated."""

    quick: bool
    seed: int

    def steps(self, alpha: float = 0) -> int:
        """Timed steps, in whole cycles of 1 + alpha: batches come in such bursts. And those that
        fill and empty the pipeline."""
        cycle = math.ceil(1 + alpha)
        return (2 if self.quick else 3) * cycle + 2 * math.ceil(alpha) + 1


def batches(groups: int, n: int, alpha: float = 0, **more) -> dict:
    """What a buffer is made with."""
    return {"batch_size": groups, "group_size": n, "alpha": alpha} | more


def rlvr(scale: Scale, lengths: dict, gpus: int, alpha: float | None, share=TRAIN_SHARE, **more):
    """Seconds a step of 256 x 16 samples; `alpha` None: sync, all GPUs do both phases."""
    load = Load(**lengths, seed=scale.seed)
    groups, rates = more.pop("groups", 256), more.pop("rates", GPU)
    train = gpus if alpha is None else round(share * gpus)
    rollout = gpus if alpha is None else gpus - train
    config = batches(groups, 16, alpha or 0)
    steps = scale.steps(alpha or 0)
    result = simulate(Setting(rates, load, config, rollout, train, alpha is None, steps, **more))
    return result.step_seconds(alpha or 0), result


# -- experiments: each yields its rows, its docstring says what is assumed -----------------------


def scaling(scale: Scale) -> Iterator[Row]:
    """End to end on 16 to 128 GPUs, alpha 2, 256 prompts x 16 a step, 5/16 of the GPUs train.

    Fitted to the two ratios at 128 GPUs: medians and sigmas of both lognormal length distributions,
    16 places a GPU, the share that trains and the 20 s that a change of phases takes in sync: more
    than there are numbers, so these two rows show what is possible. Points between are not known
    from a source to be trusted: ours stand alone.
    """
    per_gpu = {}
    for name, lengths, paper in (("Think", THINK, 2.12), ("Base", BASE, 2.24)):
        for gpus in (128, 16) if scale.quick else (128, 64, 32, 16):
            naive, run = rlvr(scale, lengths, gpus, None, dispatcher=StaticSplit)
            fast, _ = rlvr(scale, lengths, gpus, 2)
            per_gpu[name, gpus] = fast
            known = paper if gpus == 128 else None
            what = f"{name}, {gpus} GPUs: async against naive sync"
            yield Row(what, naive / fast, known, point=("GPUs", name, gpus))
            if gpus == 128:
                queue, _ = rlvr(scale, lengths, gpus, None)
                yield Row(f"{name}, {gpus} GPUs: async against sync with queue", queue / fast)
                share = 100 * run.wait / run.seconds
                yield Row(f"{name}, {gpus} GPUs: share of rollout in sync", share, 70, "% or more")
        gain = per_gpu[name, 16] / per_gpu[name, 128]
        yield Row(f"{name}: throughput of async, 128 over 16 GPUs", gain, 7.6)
        for change in ({"switch_s": 0}, {"slots": 128}):  # what the first row would be without
            rates = replace(GPU, **change)
            naive, _ = rlvr(scale, lengths, 128, None, rates=rates, dispatcher=StaticSplit)
            fast, _ = rlvr(scale, lengths, 128, 2, rates=rates)
            ((key, value),) = change.items()
            yield Row(f"{name}, 128 GPUs, with {key} {value}", naive / fast)


def split(scale: Scale) -> Iterator[Row]:
    """How 40 GPUs are split between rollout and training: Think lengths, alpha 2, 80 prompts x 16,
    as many samples a GPU as on 128 in `scaling`.

    Nothing is fitted here. The paper's row is known from one secondary source ("about 2").
    """
    naive, _ = rlvr(scale, THINK, 40, None, dispatcher=StaticSplit, groups=80)
    for train in (16,) if scale.quick else (8, 12, 16, 20, 24):
        fast, _ = rlvr(scale, THINK, 40, 2, train / 40, groups=80)
        known = 2.0 if train == 16 else None
        what = f"{40 - train} rollout + {train} train: async against naive sync"
        yield Row(what, naive / fast, known, point=("training GPUs of 40", "Think", train))


def alpha(scale: Scale) -> Iterator[Row]:
    """Asynchronous ratio on 128 GPUs. Nothing is fitted here.

    The paper gives the best alpha, which also weighs accuracy; ours is the smallest one whose step
    time is within 5 % of the best. alpha 0 is split like the others here, and not sync.
    """
    settings = [("Think, 256 x 16", {}, 256, 2.0), ("Think, 32 x 16", {}, 32, 4.0)]
    settings += [("lengths up to 4,096, 256 x 16", {"longest": 4096, "median": 200}, 256, 1.0)]
    for name, lengths, groups, paper in settings[: 1 if scale.quick else None]:
        seconds = {}
        for ratio in (0, 1, 2, 4):
            seconds[ratio], _ = rlvr(scale, THINK | lengths, 128, ratio, groups=groups)
            if ratio:
                gain = seconds[0] / seconds[ratio]
                point = ("alpha", name, ratio)
                yield Row(f"{name}: alpha {ratio} against 0", gain, point=point)
        enough = min(a for a, s in seconds.items() if s <= 1.05 * min(seconds.values()))
        yield Row(f"{name}: smallest alpha within 5 % of the best", enough, paper, "")


FEW = dict(rollout_gpus=4, train_gpus=4)  # the mechanisms' figures
WAITING = Rates(GPU.decode_s, 0.0, GPU.decode_kv_s, GPU.prefill, 64)  # a batch is all they time


def wait_seconds(scale: Scale, load: Load, config: dict, steps: int, **more) -> float:
    """Mean seconds that a trainer waits for a batch, in sync."""
    steps = max(2, steps // 4) if scale.quick else steps
    setting = FEW | {"rates": WAITING, "steps": steps + 3, "sync": True} | more
    result = simulate(Setting(load=load, buffer=config, **setting))
    starts = [0.0, *result.batches]  # the last batches have no redundant groups: left out
    return starts[steps] / steps


def queue(scale: Scale) -> Iterator[Row]:
    """Queue scheduling, 8 x 8 samples a batch, groups without signal are replaced.

    Fitted with `replication`: lengths of median 1,000 and sigma 0.8, 4 workers of 64 places. Here:
    0.3 of the groups have no signal, rewards take N(2, 1) s. What was naive in the paper is not
    known to us. Ours replaces filtered groups round by round; the queue alone cannot be twice as
    fast as that, since both wait for one chain of replacements.
    """
    load = Load(**MIDDLE, no_signal=0.3, latency="2,1", seed=scale.seed)
    config = batches(8, 8, filter_groups=True, filter_limit=1e9)
    extra = config | {"consume": "ready", "redundant_groups": 16}
    naive = wait_seconds(scale, load, config, 24, dispatcher=StaticSplit)
    yield Row("batch scheduling", naive, 125, "s")
    for name, buffer, seconds in (("queue", config, 58), ("queue, 16 redundant", extra, 37)):
        ours = wait_seconds(scale, load, buffer, 24)
        yield Row(f"{name} prompts", ours, seconds, "s")
        yield Row(f"{name}: against batch scheduling", naive / ours, 125 / seconds)


def replication(scale: Scale) -> Iterator[Row]:
    """Prompt replication: n requests a prompt against one that holds n places until its slowest
    ends. Lengths and workers as in `queue`, fitted to all rows of both.

    In the paper twice the samples take *less* time with replication (89, 81 and 83 s): no fixed
    set of rates does that, so seconds cannot all be met, and the second ratio falls short.
    """
    load = Load(**MIDDLE, seed=scale.seed)
    for groups, n, off_s, on_s in ((32, 16, 116, 89), (64, 16, 149, 81), (16, 64, 162, 83)):
        config = batches(groups, n)
        more = {"tasks_per_worker": WAITING.slots}
        off = wait_seconds(scale, load, config, 8, dispatcher=Unreplicated, **more)
        on = wait_seconds(scale, load, config, 8)
        yield Row(f"{groups} x {n}: off", off, off_s, "s")
        yield Row(f"{groups} x {n}: on", on, on_s, "s")
        yield Row(f"{groups} x {n}: off against on", off / on, off_s / on_s)


ENGINE = Rates(decode_s=0.0065, decode_kv_s=5.9e-9, prefill=200_000, slots=512)  # some ten GPUs
PLAY = dict(rollout_gpus=1, train_gpus=1, rates=ENGINE, tasks_per_worker=4096)


def envs(scale: Scale) -> Iterator[Row]:
    """Env-level asynchronous rollout against environments in step: 32 x 8 episodes, steps of
    N(10, std) s, cut at 0.

    Fitted to N(10, 10), the only known point: 20 turns of 150 tokens (lognormal, sigma 0.6).
    """
    for std in (10,) if scale.quick else (0, 2.5, 5, 10):
        load = Load(150, 0.6, 2048, turns=20, latency=f"10,{std}", seed=scale.seed)
        arms = (("in step", StaticSplit, 892), ("async", Dispatcher, 362))
        seconds = {}
        for name, dispatcher, paper in arms:
            more = PLAY | {"dispatcher": dispatcher}
            seconds[name] = wait_seconds(scale, load, batches(32, 8), 8, **more)
            yield Row(f"N(10, {std:g}): {name}", seconds[name], paper if std == 10 else None, "s")
        gain = seconds["in step"] / seconds["async"]
        yield Row(f"N(10, {std:g}): in step against async", gain, 2.46 if std == 10 else None)


def redundancy(scale: Scale) -> Iterator[Row]:
    """Redundant environments, groups x size for 32 x 8 episodes, steps of N(10, 5) s.

    Fitted to all rows: 3 turns of 100 tokens, and 3 % of the episodes are 6 times slower.
    """
    load = Load(100, 0.6, 2048, turns=3, latency="10,5,0.03,6", seed=scale.seed)
    papers = {(32, 8): 243, (36, 9): 45, (36, 12): 46}
    shapes = papers if scale.quick else [(g, n) for g in (32, 34, 36) for n in (8, 9, 12)]
    seconds = {}
    for groups, n in shapes:
        race = {"redundant_groups": groups - 32, "redundant_samples": n - 8}
        race["consume"] = "fifo" if (groups, n) == (32, 8) else "ready"
        config = batches(32, 8, **race)
        seconds[groups, n] = wait_seconds(scale, load, config, 8, **PLAY)
        yield Row(f"{groups} x {n}", seconds[groups, n], papers.get((groups, n)), "s")
    for shape in ((36, 9), (36, 12)):
        gain, paper = seconds[32, 8] / seconds[shape], papers[32, 8] / papers[shape]
        yield Row(f"32 x 8 against {shape[0]} x {shape[1]}", gain, paper)


# -- validation: a finished run against its simulation -------------------------------------------


class Measured(Load):
    """Turns of a run: all of its mean length, and as many an episode as its samples had."""

    def __init__(self, config: dict, rows: list[dict], lengths: list[int]):
        turn = np.mean([row["length_mean"] / row["turns_mean"] for row in rows])
        single = max(row["turns_mean"] for row in rows) == 1
        super().__init__(turn, 0, max(lengths), latency=config["env_latency"])
        self.max_turns = 1 if single else max(1, round(max(lengths) / turn))
        self.lengths = lengths if single else [max(1, round(turn))]
        self.turns = [1] if single else [max(1, round(length / turn)) for length in lengths]
        self.draw = random.Random(config["seed"])

    def length(self, seed: int, turn: int) -> int:
        """Of one of the samples that the run has logged, at random: they are few."""
        return self.lengths[np.random.default_rng((seed, turn)).integers(len(self.lengths))]

    def make_env(self) -> SimEnv:
        return SimEnv(self, self.draw.choice(self.turns))


def engine_rates(rows: list[dict], workers: int) -> tuple[float, float]:
    """Seconds of an engine step, and more for each sequence in it: least squares over the steps of
    a run, of what its workers spent on decoding and on episodes between. Both are at least 0."""
    tokens = np.array([row["tokens_made"] for row in rows], float)
    steps = tokens / np.maximum([row["slots_used"] for row in rows], 1.0)
    spent = [workers * (row["t_worker_decode"] + row["t_worker_episodes"]) for row in rows]
    (step_s, token_s), *_ = np.linalg.lstsq(np.stack([steps, tokens], 1), np.array(spent), None)
    if token_s < 0:
        return sum(spent) / steps.sum(), 0.0
    if step_s < 0:
        return 1e-9, sum(spent) / tokens.sum()
    return float(step_s), float(token_s)


def measured(run: Path) -> tuple[Setting, list[dict]]:
    """A run's setting, with the rates that it measured itself, and its steady steps: without the
    first three, and those after an evaluation, meanwhile workers had gone ahead.

    None of the rates is a step time: they are seconds of an engine step, of a train step, of a
    publish and of a load. Raises ValueError if the run is too short, or not of one node."""
    if not (run / "config.json").exists():
        raise ValueError(f"no config.json in {run}: not a run directory")
    config = json.loads((run / "config.json").read_text())
    rows = read_rows(run / "metrics.jsonl")
    evaluated = {row["version"] for row in rows if "eval/solve_rate" in row}
    steps = [row for row in rows if "step" in row and row["version"] not in evaluated][3:]
    if len(steps) < 10:
        raise ValueError(f"{run}: {len(steps)} steady steps, at least 10 are needed")
    lengths = [len(row["versions"]) for row in read_rows(run / "samples.jsonl")]
    workers = config["rollout_workers"]
    step_s, sequence_s = engine_rates(steps, workers)
    mean = {key: float(np.mean([row[key] for row in steps])) for key in steps[0] if key[:2] == "t_"}
    loading = sum(mean.get(f"t_worker_{what}", 0.0) for what in ("load", "probe", "commit"))
    rates = Rates(
        decode_s=step_s,
        decode_seq_s=sequence_s,
        slots=config["max_num_seqs"],
        train_s=mean["t_train"],
        publish_s=mean["t_publish"],
        load_s=max(0.0, loading - mean["t_publish"]),
    )
    known = inspect.signature(SampleBuffer).parameters
    buffer = {name: value for name, value in config.items() if name in known}
    sync = config["mode"] == "sync" or buffer["alpha"] == 0
    load = Measured(config, steps, lengths)
    setting = Setting(rates, load, buffer, workers, 1, sync, 40, config["tasks_per_worker"])
    return setting, steps


def validate(runs: list[Path], rates_of: Path | None = None) -> str:
    """Measured and simulated seconds a step of finished runs, from the rates of each, or all from
    those of another run: then no time of the run itself is used."""
    if not runs:
        raise ValueError("validate needs at least one RUN_DIR")
    rates = measured(rates_of)[0].rates if rates_of else None
    lines = ["| run | s a step | simulated | deviation | wait for a batch | simulated |"]
    lines += ["|---|---|---|---|---|---|"]
    for run in runs:
        setting, rows = measured(run)
        result = simulate(replace(setting, rates=rates or setting.rates))
        seconds = np.mean([row["t_wait"] + row["t_train"] + row["t_publish"] for row in rows])
        ours = result.step_seconds(setting.buffer["alpha"])
        wait, our_wait = np.mean([row["t_wait"] for row in rows]), result.wait / setting.steps
        lines.append(
            f"| {run.name} | {seconds:.3f} | {ours:.3f} | {ours / seconds - 1:+.0%} | {wait:.3f} "
            f"| {our_wait:.3f} |"
        )
    return "\n".join(lines)


EXPERIMENTS: dict[str, Callable[[Scale], Iterator[Row]]] = {
    "scaling": scaling,
    "split": split,
    "alpha": alpha,
    "queue": queue,
    "replication": replication,
    "envs": envs,
    "redundancy": redundancy,
}


RATES = {name: GPU for name in ("scaling", "split", "alpha")}
RATES |= {name: WAITING for name in ("queue", "replication")}
RATES |= {name: ENGINE for name in ("envs", "redundancy")}


def describe(rates: Rates) -> str:
    """What one worker and one trainer do, as simulated."""
    values = {field.name: getattr(rates, field.name) for field in fields(rates)}
    shown = (f"{name} {value:g}" for name, value in values.items() if value not in (0, math.inf))
    return f"Rates (seconds; tokens/s; places): {', '.join(shown)}."


def draw(points: list[tuple], target: Path) -> None:
    """Speed-up over each panel's x: `points` of (panel, curve, x, speed-up)."""
    from report.figures import finish, plt

    panels = list(dict.fromkeys(panel for panel, *_ in points))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for curve in dict.fromkeys(c for p, c, *_ in points if p == panel):
            drawn = sorted((x, y) for p, c, x, y in points if (p, c) == (panel, curve))
            axis.plot(*zip(*drawn, strict=True), "o-", label=curve)
        against = "alpha 0, split alike" if panel == "alpha" else "naive sync"
        axis.set(xlabel=panel, ylabel=f"times as fast as {against}", ylim=(0, None))
        axis.legend(fontsize=8)
    finish(figure, axes[0], target, dpi=120)


def tables(names: list[str], scale: Scale) -> list[tuple]:
    """Print the table of each experiment as its rows come; returns the points of the figure."""
    points = []
    if scale.quick:
        print("--quick: fewer steps and settings, so other numbers than without it")
    for name in names:
        print(f"\n## {name}\n\n{inspect.getdoc(EXPERIMENTS[name])}\n")
        print(f"{describe(RATES[name])}\n")
        print("| what | paper | ours | deviation |\n|---|---|---|---|", flush=True)
        for row in tqdm(EXPERIMENTS[name](scale), desc=name, unit="row", leave=False):
            with tqdm.external_write_mode():
                print(row.line(), flush=True)
            if row.point:
                points.append((*row.point, row.ours))
    return points


def one_run(args) -> str:
    """Simulate one run of 32 x 8 samples with a heavy tail, and write its files to --trace."""
    if args.gpus < 2 or args.alpha < 0 or not 1 <= args.median <= THINK["longest"]:
        limits = f"--gpus is 2 or more, --alpha 0 or more, --median 1 to {THINK['longest']}"
        raise ValueError(limits)
    if args.steps < (least := 2 * math.ceil(args.alpha) + 2):
        raise ValueError(
            f"--steps {args.steps}: at --alpha {args.alpha:g} the pipeline takes {least - 2} steps "
            f"to fill and to empty; {least} or more have a middle to be timed"
        )
    sync = args.alpha == 0
    train = args.gpus if sync else max(1, round(TRAIN_SHARE * args.gpus))
    rollout = args.gpus if sync else args.gpus - train
    load = Load(**THINK | {"median": args.median}, seed=args.seed)
    config = batches(32, 8, args.alpha)
    setting = Setting(GPU, load, config, rollout, train, sync, args.steps)
    result = trace_run(setting, args.trace)
    return (
        f"{rollout} rollout + {train} training GPUs{' (the same)' if sync else ''}, alpha "
        f"{args.alpha:g}: {result.step_seconds(args.alpha):.1f} s a step, staleness mean "
        f"{np.mean(result.staleness):.2f}; now: bash launch.sh plot {args.trace}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer steps and settings")
    parser.add_argument("--rates_of", type=Path, help="validate: the run whose rates to use")
    parser.add_argument("--figure", type=Path, help="draw scaling, alpha and split to this file")
    parser.add_argument("--trace", type=Path, help="simulate one run, and write its files there")
    parser.add_argument("--gpus", type=int, default=16, help="of --trace")
    parser.add_argument("--alpha", type=float, default=2.0, help="of --trace; 0: sync")
    parser.add_argument("--median", type=float, default=2000, help="of --trace: response, tokens")
    parser.add_argument("--steps", type=int, default=12, help="of --trace")
    args = parser.parse_args()
    names = args.names or list(EXPERIMENTS)
    try:
        if args.trace:
            print(one_run(args))
            return 0
        if names[0] == "validate":
            print(validate([Path(name) for name in names[1:]], args.rates_of))
            return 0
        if unknown := set(names) - set(EXPERIMENTS):
            known = ", ".join(EXPERIMENTS)
            parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {known}")
        points = tables(names, Scale(args.quick, args.seed))
        if args.figure and points:
            draw(points, args.figure)
            print(f"\nfigure: {args.figure}")
    except (ValueError, OSError) as error:
        print(f"sim.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sim.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
