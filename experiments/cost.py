"""What a step costs as work grows, and what the owner's thread and a publish cost.

    python -m experiments.cost scaling               step time against batch, group, length, workers
    python -m experiments.cost owner                 CPU time of the owner's thread, a sample
    python -m experiments.cost publish RUN_DIR...    a publish and its share of the step, of runs
    python -m experiments.cost memory                log-probabilities of a large vocabulary

`scaling` trains the model tiny at alpha 1 on sums followed by dots (`compare.LongAnswer`), 16 x 8
samples of median length 16 and one worker, and varies one of these at a time. `owner` replaces the
workers by processes that answer at once with samples of 1,000 tokens: the thread then does all that
it does in a run, receiving included, and nothing else limits it. `memory` is the largest resident
size of a process that computes log-probabilities and their gradient, less what it had before.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py: before torch is imported

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
import transformers
from safetensors import safe_open
from tqdm import tqdm

import algos
import rollout
from buffer import BufferConfig, RolloutTask, Sample, SampleBuffer
from envs import EnvConfig
from episode import Limits
from experiments import compare
from report.log import read_rows
from worker import WorkerSpec

TOKENS = 1000  # of a sample of `owner`

# -- step time as work grows ---------------------------------------------------------------------

AXES = {
    "prompts a batch": (8, 16, 32, 64),
    "samples a group": (4, 8, 16, 32),
    "median length": tuple(compare.LENGTHS),
    "workers": (1, 2, 3),
}


def setting(axis: str, value: int) -> tuple[compare.Case, compare.Arm]:
    """What is trained where `axis` has this value and all else is as at the base."""
    env = compare.LENGTHS[value] if axis == "median length" else compare.LONG
    flags = {
        "batch_size": value if axis == "prompts a batch" else 16,
        "group_size": value if axis == "samples a group" else 8,
    }
    workers = value if axis == "workers" else 1
    arm = compare.Arm(f"{workers} workers", "async", 1, workers, 1, 1)
    return compare.Case(f"{axis} {value}", env, flags), arm


def scaling(args) -> None:
    """Print and draw seconds a step, and microseconds a trained token, along every axis."""
    found: dict[str, dict[int, list[tuple]]] = {axis: {} for axis in AXES}
    with tempfile.TemporaryDirectory() as directory:
        args.out = Path(directory)
        bench = compare.Bench(args, [])
        bar = tqdm(total=args.repeats * sum(map(len, AXES.values())), unit="run")
        try:
            for repeat in range(args.repeats):
                for axis, values in AXES.items():
                    for value in values:
                        case, arm = setting(axis, value)
                        bar.set_postfix_str(case.name)
                        run = bench.run(case, arm, repeat, bench.timed, seconds_and_tokens)
                        found[axis].setdefault(value, []).append(run)
                        bar.update()
        finally:
            bar.close()
            bench.close()
    for axis, values in found.items():
        for value, runs in values.items():
            seconds, tokens = np.array(runs).T
            print(
                f"{axis} {value}: {np.median(seconds):.3f} s a step "
                f"({min(seconds):.3f}-{max(seconds):.3f}), "
                f"{1e6 * np.median(seconds / tokens):.0f} microseconds a trained token"
            )
    draw(found, args.figure)


def seconds_and_tokens(run: compare.Measured) -> tuple[float, float]:
    """Of a step in the middle of the run: its seconds, and the tokens that it trains on."""
    rows = [row for row in run.log.rows if "step" in row][compare.WARM : -compare.TAIL]
    return compare.middle(run), float(np.mean([row["tokens"] for row in rows]))


def draw(found: dict[str, dict[int, list[tuple]]], target: Path) -> None:
    from report.figures import finish, plt  # matplotlib, only here

    figure, axes = plt.subplots(1, len(found), figsize=(14, 3.4))
    for axis, (name, runs) in zip(axes, found.items(), strict=True):
        values = {value: [seconds for seconds, _ in of] for value, of in runs.items()}
        x, medians = list(values), [np.median(seconds) for seconds in values.values()]
        axis.plot(x, medians, "o-")
        axis.fill_between(
            x, [min(s) for s in values.values()], [max(s) for s in values.values()], alpha=0.2
        )
        if name != "workers":
            axis.plot(x, medians[0] * np.array(x) / x[0], ":", color="gray", label="linear")
            axis.set(xscale="log", yscale="log")
            axis.legend()
        axis.set_xticks(x, x, minor=False)
        axis.set_xticks([], minor=True)
        axis.set(
            xlabel=name, ylabel="seconds a step", ylim=(None if name != "workers" else 0, None)
        )
    print(finish(figure, axes, target))


# -- the owner's thread --------------------------------------------------------------------------


def answer_at_once(conn, spec: WorkerSpec) -> None:
    """A rollout process without an engine: every task comes back at once, 8 to a message, as after
    an engine step. Each sample has arrays of its own: pickle sends what is shared only once."""
    version, ids = -1, np.arange(TOKENS, dtype=np.int32)
    mask, logprobs = np.ones(TOKENS, bool), np.zeros(TOKENS, np.float32)
    conn.send(("ready",))
    while True:
        kind, *args = conn.recv()
        if kind == "tasks":
            samples = [
                Sample(
                    task,
                    ids.copy(),
                    mask.copy(),
                    logprobs.copy(),
                    np.full(TOKENS, version, np.int32),
                    float(task.sample % 2),
                )
                for task in args[0]
            ]
            for i in range(0, len(samples), 8):
                conn.send(("results", samples[i : i + 8], [], [], {"tokens": 1}, []))
        elif kind == "update":
            conn.send(("paused", args[0]))
            conn.send(("loaded", args[0], [0.0]))
        elif kind == "commit":
            version = args[0]
        elif kind == "stop":
            return


def owner(args) -> None:
    """Print CPU seconds of the owner's thread for 1,000 samples, that is its share of a core at
    1,000 samples a second."""
    rollout.worker_main = answer_at_once
    steps, config = args.steps, BufferConfig(batch_size=64, group_size=8, alpha=2)
    settings = rollout.RolloutConfig(rollout_workers=2, max_num_seqs=256)
    limits = Limits(TOKENS, 1, TOKENS + 1)
    spec = WorkerSpec(0, "", settings, EnvConfig(), 0, limits, "float32", False, 0.0)
    buffer = SampleBuffer(config, steps)
    rollouts = rollout.Rollouts(spec, buffer, lambda i, s: RolloutTask(i, s, i, 0))
    rollouts.start([None, None], 1)
    try:
        rollouts.publish(0, {}, [], np.zeros(1), lambda: None)
        clock = time.pthread_getcpuclockid(rollouts._thread.ident)
        start, begun = time.clock_gettime(clock), time.perf_counter()
        samples = 0
        for version in tqdm(range(steps), unit="batch"):
            samples += len(rollouts.get_batch(60))
            rollouts.publish(version + 1, {}, [], np.zeros(1), lambda: None)
        rollouts.wait_committed()
        spent, seconds = time.clock_gettime(clock) - start, time.perf_counter() - begun
    finally:
        rollouts.close()
    print(
        f"{samples} samples of {TOKENS} tokens in {seconds:.1f} s ({samples / seconds:.0f} a "
        f"second): the owner's thread took {spent:.2f} s of CPU, so at 1,000 samples a second "
        f"{1000 * spent / samples:.1%} of a core"
    )


# -- publish -------------------------------------------------------------------------------------


def publish(args) -> None:
    """Print, of finished runs, what a publish takes on both sides and its share of a step."""
    for run in args.runs:
        if not (run / "config.json").exists():
            sys.exit(f"cost.py: no config.json in {run}: not a run directory")
        config = json.loads((run / "config.json").read_text())
        steps = [row for row in read_rows(run / "metrics.jsonl") if "step" in row][2:]
        weights = max(run.glob("checkpoint-*/model.safetensors"))
        with safe_open(weights, "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        step = np.median(np.diff([row["wall_s"] for row in steps]))
        sent, load, probe, commit = (
            np.median([row.get(key, 0.0) for row in steps])
            for key in ("t_publish", "t_worker_load", "t_worker_probe", "t_worker_commit")
        )
        print(
            f"{run.name}: {config['mode']}, {sum(map(math.prod, shapes)) / 1e6:.1f} M parameters; "
            f"trainer {sent:.3f} s, worker: receive and load {load:.3f} s, probe {probe:.3f} s, "
            f"commit {commit:.3f} s; a step takes {step:.2f} s, of which the publish is "
            f"{sent / step:.1%} in the trainer, {(load + probe + commit) / step:.1%} in the worker"
        )


# -- memory --------------------------------------------------------------------------------------


def peak(chunk: int | None, tokens: int, vocabulary: int, width: int, result) -> None:
    """Send the GiB that value and gradient take at most, chunked or (`chunk` = tokens) not."""
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    head.weight.grad = torch.zeros_like(head.weight)
    targets = torch.randint(vocabulary, (tokens,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logp, _ = algos.token_logprobs(hidden, head, targets, 1.0, chunk)
    logp.sum().backward()
    result.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)


def memory(args) -> None:
    context = mp.get_context("spawn")
    for name, chunk in (("plain", args.tokens), ("chunked", None)):
        mine, theirs = context.Pipe()
        process = context.Process(target=peak, args=(chunk, args.tokens, 150_000, 64, theirs))
        process.start()
        print(f"{name}: {mine.recv():.2f} GiB for {args.tokens} tokens, vocabulary 150,000")
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("scaling", help="step time as work grows")
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--steps", type=int, default=6, help="timed steps a run")
    command.add_argument("--figure", type=Path, default=Path("scaling.png"))
    command = commands.add_parser("owner", help="CPU time of the owner's thread")
    command.add_argument("--steps", type=int, default=40, help="batches of 64 x 8 samples")
    command = commands.add_parser("publish", help="share of the publish in finished runs")
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    command = commands.add_parser("memory", help="peak of a large vocabulary")
    command.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    {"scaling": scaling, "owner": owner, "publish": publish, "memory": memory}[args.command](args)


if __name__ == "__main__":
    main()
