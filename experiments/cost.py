"""What a step costs as work grows, and what the scheduler's thread and a publish cost.

    P="$PWD/.venv/bin/python -m experiments.cost"
    $P scaling               step time against batch, group, length, workers
    $P scheduler             CPU time of the scheduler's thread, a sample
    $P publish RUN_DIR...    a publish and its share of the step, of runs
    $P memory                log-probabilities of a large vocabulary

`scaling` trains the model tiny at alpha 1 on sums followed by dots (`compare.LongAnswer`), 16 x 8
samples of median length 16 and one worker, and varies one of these at a time. `scheduler` replaces
the workers by processes that answer at once with samples of 1,000 tokens: the thread then does all
that it does in a run, receiving included, and nothing else limits it. `memory` is the largest
resident size of a process that computes log-probabilities and their gradient, less what it had
before.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py: before torch is imported

import argparse
import json
import math
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from tqdm import tqdm

import algos
from buffer import Sample, SampleBuffer, Ticket
from experiments import compare
from experiments.bench import band
from plumbing.processes import Processes
from plumbing.settings import Settings
from plumbing.weights import Manifest
from report.rows import read_rows
from rollout import Scheduler

TOKENS = 1000  # of a sample of `scheduler`

# -- step time as work grows ---------------------------------------------------------------------

AXES = {
    "prompts a batch": (8, 16, 32, 64),
    "samples a group": (4, 8, 16, 32),
    "median length": tuple(compare.LENGTHS),
    "workers": (1, 2, 3),
}
BASE = {"prompts a batch": 16, "samples a group": 8, "median length": 16, "workers": 1}


def case_of(axis: str, value: int) -> compare.Case:
    """What is trained where `axis` has this value and all else is as at the base."""
    prompts, samples, median, workers = (BASE | {axis: value}).values()
    flags = {"batch_size": prompts, "group_size": samples, "rollout_workers": workers}
    return compare.Case(f"{axis} {value}", compare.LENGTHS[median], flags)


def scaling(args) -> int:
    """Print and draw seconds a step, and microseconds a trained token, along every axis. Returns
    the exit code."""
    found: dict[str, list[tuple[float, float]]] = {}
    total = args.repeats * sum(map(len, AXES.values()))
    with (
        tempfile.TemporaryDirectory() as directory,
        compare.TrainingBench(Path(directory), args.steps, [], total) as bench,
    ):

        def measure(case: compare.Case, repeat: int) -> tuple[float, float]:
            arm = compare.Arm("async 1", "async", 1, case.flags["rollout_workers"], 1, 1)
            return bench.train(case, arm, repeat, bench.timed, seconds_and_tokens)

        for axis, values in AXES.items():
            cases = [case_of(axis, value) for value in values]
            found |= bench.in_turn(cases, args.repeats, measure)
    for name, runs in found.items():
        seconds, tokens = np.array(runs).T
        print(
            f"{name}: {np.median(seconds):.3f} s a step ({min(seconds):.3f}-{max(seconds):.3f}), "
            f"{1e6 * np.median(seconds / tokens):.0f} microseconds a trained token"
        )
    if not bench.code:
        draw(found, args.figure)
    return bench.code


def seconds_and_tokens(run: compare.Measured) -> tuple[float, float]:
    """Of a step in the middle of the run: its seconds, and the tokens that it trains on."""
    rows = [row for row in run.log.rows if "step" in row][compare.WARM : -compare.TAIL]
    return compare.middle(run), float(np.mean([row["tokens"] for row in rows]))


def draw(found: dict[str, list[tuple[float, float]]], target: Path) -> None:
    from report.figures import finish, plt  # matplotlib, only here

    figure, axes = plt.subplots(1, len(AXES), figsize=(14, 3.4))
    for axis, (name, x) in zip(axes, AXES.items(), strict=True):
        values = [[seconds for seconds, _ in found[f"{name} {value}"]] for value in x]
        band(axis, x, values)
        axis.set(xlabel=name, ylabel="seconds a step")
        if name == "workers":
            axis.set_ylim(0, None)
        else:
            linear = np.median(values[0]) * np.array(x) / x[0]
            axis.plot(x, linear, ":", color="gray", label="linear")
            axis.set(xscale="log", yscale="log")
            axis.legend()
        axis.set_xticks(x, x, minor=False)
        axis.set_xticks([], minor=True)
    print(finish(figure, axes, target))


# -- the scheduler's thread ----------------------------------------------------------------------


def answer_at_once(conn, spec: None) -> None:
    """A rollout process without an engine: every ticket comes back at once, 8 to a message, as
    after an engine step. Each sample has arrays of its own: pickle sends shared ones only once."""
    version, ids = -1, np.arange(TOKENS, dtype=np.int32)
    mask, logprobs = np.ones(TOKENS, bool), np.zeros(TOKENS, np.float32)
    conn.send(("ready",))
    while True:
        kind, *args = conn.recv()
        if kind == "tickets":
            samples = [
                Sample(
                    ticket,
                    ids.copy(),
                    mask.copy(),
                    logprobs.copy(),
                    np.full(TOKENS, version, np.int32),
                    float(ticket.sample % 2),
                )
                for ticket in args[0]
            ]
            for i in range(0, len(samples), 8):
                conn.send(("results", samples[i : i + 8], [], [], {"tokens": 1}, []))
        elif kind == "update":
            conn.send(("paused", args[0]))
            conn.send(("loaded", args[0], [0.0], [(0, 0)]))
        elif kind == "commit":
            version = args[0]
        elif kind == "stop":
            return


def scheduler_thread(args) -> None:
    """Print CPU seconds of the scheduler's thread for 1,000 samples, that is its share of a core at
    1,000 samples a second."""
    sizes = {"steps": args.steps, "batch_size": 64, "group_size": 8, "alpha": 2.0}
    settings = Settings(**sizes, rollout_workers=2, max_num_seqs=256)
    buffer, workers = SampleBuffer(**settings.pick(SampleBuffer)), Processes()
    scheduler = Scheduler(workers, settings, buffer, lambda i, s: Ticket(i, s, i, 0))
    nothing = Manifest([], [], "float32", 1), [], np.zeros(1)  # is sent, and scores 0
    workers.start(answer_at_once, [None, None], [None, None], 1)
    try:
        workers.listen(scheduler, settings)
        workers.await_word("ready", 60)
        scheduler.pause(0, *nothing)
        scheduler.publisher.sent(0)
        thread = next(t for t in threading.enumerate() if t.name == "scheduler")
        clock = time.pthread_getcpuclockid(thread.ident)
        start, begun = time.clock_gettime(clock), time.perf_counter()
        samples = 0
        for version in tqdm(range(args.steps), unit="batch"):
            samples += len(scheduler.get_batch(60))
            scheduler.pause(version + 1, *nothing)
            scheduler.publisher.sent(0)
        scheduler.wait_committed()
        spent, seconds = time.clock_gettime(clock) - start, time.perf_counter() - begun
    finally:
        workers.close()
    print(
        f"{samples} samples of {TOKENS} tokens in {seconds:.1f} s ({samples / seconds:.0f} a "
        f"second): the scheduler's thread took {spent:.2f} s of CPU, so at 1,000 samples a second "
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
            f"commit {commit:.3f} s; the median step takes {step:.2f} s, of which the publish is "
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("scaling", help="step time as work grows")
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--steps", type=int, default=6, help="timed steps a run")
    command.add_argument("--figure", type=Path, default=Path("scaling.png"))
    command = commands.add_parser("scheduler", help="CPU time of the scheduler's thread")
    command.add_argument("--steps", type=int, default=40, help="batches of 64 x 8 samples")
    command = commands.add_parser("publish", help="share of the publish in finished runs")
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    command = commands.add_parser("memory", help="peak of a large vocabulary")
    command.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    command = {
        "scaling": scaling,
        "scheduler": scheduler_thread,
        "publish": publish,
        "memory": memory,
    }
    return command[args.command](args) or 0


if __name__ == "__main__":
    sys.exit(main())
