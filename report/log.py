"""What a run writes and shows: metrics, samples, a progress bar and a summary.

The files of a run (see docs/flags.md): config.json, metrics.jsonl, samples.jsonl, tokens.jsonl,
trace.json, reward.png. A run cannot do without its metrics; the rest are best effort.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from plumbing import checkpoint, replay
from plumbing.checks import notes_on_batch
from plumbing.devices import usable_gpus
from plumbing.files import WriteError, write_whole
from plumbing.processes import say
from plumbing.ranks import cores
from plumbing.settings import Settings
from report.advice import crowded, hint
from report.rows import read_rows, summarize
from report.timeline import TraceFile
from report.tokens import TokenFile

SAMPLES_A_STEP = 2  # written to samples.jsonl
LINE_EVERY = 10  # seconds, where there is no terminal to draw a bar on


def new_directory(settings: Settings) -> Path:
    """Make runs/<time>-<mode>-<env>; a second run of one second gets another name."""
    env = settings.env.split(":")[0].split("/")[-1]
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{settings.mode}-{env}"
    for suffix in ("", *(f"-{i}" for i in range(2, 99))):
        with contextlib.suppress(FileExistsError):
            path = Path(f"runs/{name}{suffix}")
            path.mkdir(parents=True)
            return path
    raise ValueError(f"runs/{name}: there are many of that name already")


def lock(directory: Path) -> int:
    """Have this process be the one that writes there, while it lives and holds the descriptor that
    is returned. Raises ValueError if another one is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(f"{directory}: another run is writing there") from error
    except OSError:
        pass  # a file system without locks
    return descriptor


class Log:
    """The files of a run and its progress bar. Rank 0 has one."""

    def __init__(self, settings: Settings, trainers: int, resumed_at: int | None):
        """Take the directory; what is in it stays as it is until `open`."""
        self.settings, self.trainers, self.resumed_at = settings, trainers, resumed_at
        self.dir = Path(settings.run_dir) if settings.run_dir else new_directory(settings)
        self.dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.dir)
        checkpoint.sweep(self.dir)
        self.rows: list[dict] = []
        self._failed: set[str] = set()  # files that are no longer written
        self.metrics = self.samples = self.tokens = self.trace = None
        # Its clock begins here; a run that goes on has its events once that is certain.
        self.trace = self._attempt("trace.json", TraceFile, self.dir / "trace.json", resumed_at)
        self.lines = not sys.stderr.isatty()  # a file is no place for a bar in motion
        self.said = 0.0
        self.bar = tqdm(
            total=settings.steps,
            delay=1e-9,  # draw it at the first step, not while workers start
            initial=resumed_at or 0,
            desc=settings.mode,
            unit="step",
            dynamic_ncols=True,
            disable=self.lines,
        )

    def open(self) -> None:
        """The run has started: its settings and rows take the place of those that were there."""
        flat = asdict(self.settings) | {"run_dir": str(self.dir), "resume": ""}
        flat["trainers"] = self.trainers
        with self._needed("config.json"):
            write_whole(self.dir / "config.json", (json.dumps(flat, indent=2) + "\n").encode())
        if self.resumed_at is not None:
            self._cut(self.resumed_at)
        with self._needed("metrics.jsonl"):
            self.metrics = (self.dir / "metrics.jsonl").open("ab", buffering=0)
        self.samples = self._attempt("samples.jsonl", (self.dir / "samples.jsonl").open, "a")
        self.tokens = self._attempt("tokens.jsonl", TokenFile, self.dir / "tokens.jsonl")
        destinations = filter(None, self.settings.report_to.split(","))
        self.writers = [OPEN[name](flat, self.dir) for name in destinations]

    @contextlib.contextmanager
    def _needed(self, name: str):
        """Raises WriteError if the disk does not take it."""
        try:
            yield
        except OSError as error:
            raise WriteError(f"{self.dir / name} cannot be written: {error.strerror}") from error

    def _attempt(self, name: str, call: Callable, *args):
        """What a run can do without: if the disk does not take it, that is said once, and it is not
        written any more."""
        try:
            return None if name in self._failed else call(*args)
        except OSError as error:
            self._failed.add(name)
            say(f"warning: {self.dir / name} is not written any more: {error.strerror}")
            return None

    def begin(self) -> None:
        """The first step begins: so does the clock of the bar."""
        self.bar.unpause()
        self.said = time.monotonic()

    def _cut(self, version: int) -> None:
        """Forget what was written after the checkpoint: those steps are about to be run again."""
        for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
            rows = read_rows(self.dir / name)
            # Without a checkpoint, an evaluation of version 0 is about to be made again as well.
            rows = [r for r in rows if r.get("step", r.get("version", 0)) <= version and version]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            with self._needed(name):
                write_whole(self.dir / name, text.encode())
            self.rows = rows if name == "metrics.jsonl" else self.rows

    def _write(self, row: dict) -> None:
        self.rows.append(row)
        with self._needed("metrics.jsonl"):
            line, end = (json.dumps(row) + "\n").encode(), self.metrics.seek(0, os.SEEK_END)
            try:
                if self.metrics.write(line) < len(line):  # there was room for a part of it
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self.metrics.truncate(end)  # no half of a row stays
                raise
        for write in self.writers:
            write(row)

    def step(self, row: dict, batch: list, seen: list[dict], tokenizer) -> None:
        """Write a step's metrics, tokens (`seen`: of the update), a few samples; move the bar."""
        if not any("step" in before for before in self.rows):
            for note in notes_on_batch(row, self.settings):
                say(f"note: {note}")
        self._write(row)
        if row["step"] == (self.resumed_at or 0) + 5 and (slow := crowded(self.rows[-5:])):
            say(f"note: {slow}")
        if batch and self.tokens:
            self._attempt(
                "tokens.jsonl", self.tokens.write, row["step"], batch, seen, tokenizer
            )
        if self.samples:
            self._attempt("samples.jsonl", self._write_samples, row["step"], batch, tokenizer)
        seconds = row["t_wait"] + row["t_train"] + row["t_publish"]
        now = (
            f"reward {row['reward_mean']:.2f}, staleness {row['staleness_mean']:.1f}, "
            f"{row['tokens'] / seconds:.0f} tok/s, idle: trainer {row['trainer_idle']:.0%} "
            f"rollout {row['rollout_idle']:.0%}"
        )
        self.bar.set_postfix_str(now, refresh=False)
        self.bar.update()
        if self.lines and time.monotonic() - self.said > LINE_EVERY:
            self.said = time.monotonic()
            print(f"step {row['step']} of {self.settings.steps}: {now}", file=sys.stderr)

    def _write_samples(self, step: int, batch: list, tokenizer) -> None:
        for sample in batch[:SAMPLES_A_STEP]:
            first = int(sample.mask.argmax())  # of the response
            record = {
                "step": step,
                "group": sample.ticket.group,
                "sample": sample.ticket.sample,
                "prompt": tokenizer.decode(sample.ids[:first]),
                "response": tokenizer.decode(sample.ids[first:]),
                "reward": sample.reward,
                "truncated": sample.truncated,
                "versions": sample.versions[sample.mask].tolist(),
            }
            self.samples.write(json.dumps(record) + "\n")
        self.samples.flush()

    def write_trace(self, processes: list[list]) -> None:
        """The spans of the trainer and of each of its workers."""
        if self.trace:
            self._attempt("trace.json", self.trace.write, processes)

    def greet(self, plan, trainer: int, worker: int) -> None:
        """Say what is about to start, and where: it takes a while. `plan` is of devices, the rest
        are threads."""
        s = self.settings
        threads = f"threads: {trainer} a trainer rank, {worker} a worker, of {cores()} cores"
        processes = "1 process" if s.rollout_workers == 1 else f"{s.rollout_workers} processes"
        print(
            f"{s.model}, {s.batch_size} x {s.group_size} samples a step, alpha {s.alpha:g}, "
            f"learning rate {s.learning_rate:g}\n{plan}; {threads}\n"
            f"rollout: {processes} with vLLM; to start takes 10 to 30 s on a CPU, minutes on a GPU",
            file=sys.stderr,
        )
        self.said = time.monotonic()

    def starting(self, worker: int, stage: str) -> None:
        """Say how far the first of the workers is."""
        if worker == 0:
            seconds = time.monotonic() - self.said
            print(f"rollout: {stage} ({seconds:.0f} s)", file=sys.stderr)

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
        say(f"version {version}: {solved:.1%} of {count} held-out prompts solved")

    def dump(self, samples: list) -> Path:
        """Write a batch that training failed on, to be looked at (`plumbing.replay.read`)."""
        path = self.dir / "bad_batch.npz"
        self._attempt(path.name, replay.write, path, samples)
        return path

    def close(self) -> None:
        self.bar.close()
        for file in filter(None, (self.metrics, self.samples, self.tokens, self.trace)):
            with contextlib.suppress(OSError):  # it was said when it was written to
                file.close()
        stacks = self.dir / "stacks.txt"
        if stacks.exists() and not stacks.stat().st_size:
            stacks.unlink()  # nobody had to wait that long
        os.close(self._lock)

    def summary(self) -> None:
        """The end of a run in a few lines, and its figure."""
        from report.figures import plot_reward  # matplotlib, only here

        self.bar.close()
        figure = self._attempt("reward.png", plot_reward, [self.dir], self.dir / "reward.png")
        config = json.loads((self.dir / "config.json").read_text())
        print(summarize(self.rows, config))
        taken = config["trainers"] + config["rollout_workers"] * config["tensor_parallel"]
        if change := hint(self.rows, config, (usable_gpus() or cores()) - taken):
            print(change)
        print(f"files: {self.dir}/ (metrics.jsonl, samples.jsonl, checkpoint), figure: {figure}")


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
