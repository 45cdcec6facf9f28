"""The harness of all experiments that run engines: it times arms that take turns.

    with Bench(directory, total=2 * repeats) as bench:
        seconds = bench.in_turn(arms, repeats, seconds_of)  # A B, then B A
    print(ratio(seconds["A"], seconds["B"]))  # of pairs: the two of one round
    return bench.code

    def seconds_of(arm, repeat):
        run = train.Run(settings_of(arm, bench.new_directory(arm.name)))
        return bench.measure(run, work)

Engines are started once for each kind of arm, and serve one run after the other. Ctrl-C ends the
block, not the program: what is whole by then can be printed, and the code is 130.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py: before torch is imported

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import transformers
from tqdm import tqdm

import train
from plumbing.devices import usable_gpus
from plumbing.processes import Processes
from rollout import Dispatcher


class Bench:
    """Runs one run after the other on engines that are kept, under one progress bar."""

    def __init__(self, directory: Path, total: int = 0, unit: str = "run"):
        """`total`: how often the bar moves; 0 leaves every run its own bar."""
        self.directory, self.runs, self.code = directory, 0, 0
        self.engines: dict[tuple, Processes] = {}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
        transformers.utils.logging.disable_progress_bar()
        self.bar = tqdm(total=total, unit=unit, disable=not total)

    def __enter__(self):
        return self

    def __exit__(self, error, *_) -> bool:
        self.bar.close()
        if error is KeyboardInterrupt:
            print("interrupted; what is done is below", file=sys.stderr)
            self.code = 130
        for workers in self.engines.values():
            workers.close()
        return error is KeyboardInterrupt

    def in_turn(self, arms: list, repeats: int, measure: Callable, what: str = "") -> dict:
        """measure(arm, repeat) of every arm, by its name, a value a round. Every other round goes
        backwards, so that a drift of the machine hits all alike."""
        values = {arm.name: [] for arm in arms}
        for repeat in range(repeats):
            for arm in arms if repeat % 2 == 0 else arms[::-1]:
                self.bar.set_postfix_str(f"{what}, {arm.name}" if what else arm.name)
                values[arm.name].append(measure(arm, repeat))
                self.bar.update()
        return values

    def new_directory(self, name: str) -> str:
        self.runs += 1
        return str(self.directory / f"{self.runs:03}-{name.replace(' ', '-')}")

    def measure(
        self,
        run: train.Run,
        work: Callable,
        dispatcher: type[Dispatcher] = Dispatcher,
        kind: tuple = (),
    ):
        """Start the run on the engines of this kind; returns work(run)."""
        run.log.bar.disable |= not self.bar.disable
        run.log.lines &= self.bar.disable
        if usable_gpus():  # engines of another kind would hold the memory that this one wants
            for other in [held for held in self.engines if held != kind]:
                self.engines.pop(other).close()
        try:
            run.start(self.engines.get(kind), dispatcher)
            return work(run)
        finally:
            if run.workers:
                self.engines[kind] = run.workers  # to be closed, also if it has just begun
            run.close(keep_workers=True)


def train_to_the_end(run: train.Run) -> None:
    """All steps of a run, until its last weights are loaded."""
    (train.train_sync if run.settings.mode == "sync" else train.train_async)(run)
    run.wait_committed()


# -- what was measured: as text, as a file, as a curve -------------------------------------------


def spread(values: list[float], digits: int = 2, middle: Callable = np.median) -> str:
    """Median (or another middle) and range.

    >>> spread([1.0, 2.0, 4.0])
    '2.00 (1.00-4.00)'
    """
    low, high = min(values), max(values)
    return f"{middle(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratio(over: list[float], under: list[float]) -> str:
    """Median and range of paired ratios."""
    return spread(np.divide(over, under))


def table(head: list[str], rows: list[list]) -> str:
    """In Markdown."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def write_json(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def band(axis, x: list, values: list[list[float]], middle: Callable = np.median, **style) -> None:
    """Draw the middle of the values at each x, and their range."""
    (line,) = axis.plot(x, [middle(v) for v in values], "o-", **style)
    low, high = [min(v) for v in values], [max(v) for v in values]
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
