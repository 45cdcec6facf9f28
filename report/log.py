"""What a run writes and shows: metrics, samples, a progress bar and a summary.

The files of a run (see docs/flags.md): config.json, metrics.jsonl, samples.jsonl, tokens.jsonl,
trace.json, reward.png.
"""

import json
import pickle
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from plumbing.checks import notes_on_batch
from plumbing.devices import usable_gpus
from plumbing.ranks import cores
from plumbing.settings import Settings
from report.advice import hint
from report.rows import read_rows, summarize
from report.timeline import TraceFile
from report.tokens import TokenFile

SAMPLES_A_STEP = 2  # written to samples.jsonl
LINE_EVERY = 10  # seconds, where there is no terminal to draw a bar on


class Log:
    """The files of a run and its progress bar. Rank 0 has one."""

    def __init__(self, settings: Settings, trainers: int, resumed_at: int | None):
        env = settings.env.split(":")[0].split("/")[-1]
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{settings.mode}-{env}"
        free = (Path(f"runs/{name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 99))))
        self.settings = settings
        self.dir = Path(settings.run_dir or next(path for path in free if not path.exists()))
        self.dir.mkdir(parents=True, exist_ok=True)
        flat = asdict(settings) | {"run_dir": str(self.dir), "resume": "", "trainers": trainers}
        (self.dir / "config.json").write_text(json.dumps(flat, indent=2) + "\n")
        self.rows: list[dict] = []
        if resumed_at is not None:
            self._cut(resumed_at)
        self.metrics = (self.dir / "metrics.jsonl").open("a")
        self.samples = (self.dir / "samples.jsonl").open("a")
        self.tokens = TokenFile(self.dir / "tokens.jsonl")
        self.trace = TraceFile(self.dir / "trace.json", resumed_at)
        destinations = filter(None, settings.report_to.split(","))
        self.writers = [OPEN[name](flat, self.dir) for name in destinations]
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

    def begin(self) -> None:
        """The first step begins: so does the clock of the bar."""
        self.bar.unpause()
        self.said = time.monotonic()

    def _cut(self, version: int) -> None:
        """Forget what was written after the checkpoint: those steps are about to be run again."""
        for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
            rows = read_rows(self.dir / name)
            rows = [row for row in rows if row.get("step", row.get("version", 0)) <= version]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.dir / name).write_text(text)
            self.rows = rows if name == "metrics.jsonl" else self.rows

    def _write(self, row: dict) -> None:
        self.rows.append(row)
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        for write in self.writers:
            write(row)

    def step(self, row: dict, batch: list, seen: list[dict], tokenizer) -> None:
        """Write a step's metrics, tokens (`seen`: of the update), a few samples; move the bar."""
        if not any("step" in before for before in self.rows):
            for note in notes_on_batch(row, self.settings):
                with self.bar.external_write_mode(file=sys.stderr):
                    print(f"note: {note}", file=sys.stderr)
        self._write(row)
        if batch:
            self.tokens.write(row["step"], batch, seen, tokenizer)
        for sample in batch[:SAMPLES_A_STEP]:
            first = int(sample.mask.argmax())  # of the response
            record = {
                "step": row["step"],
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

    def greet(self, plan: str) -> None:
        """Say what is about to start, and where: it takes a while."""
        s = self.settings
        processes = "1 process" if s.rollout_workers == 1 else f"{s.rollout_workers} processes"
        print(
            f"{s.model}, {s.batch_size} x {s.group_size} samples a step, alpha {s.alpha:g}, "
            f"learning rate {s.learning_rate:g}\n{plan}\n"
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
        with self.bar.external_write_mode(file=sys.stderr):
            print(
                f"version {version}: {solved:.1%} of {count} held-out prompts solved",
                file=sys.stderr,
            )

    def dump(self, samples: list) -> Path:
        """Write a batch that training failed on, to be looked at (`pickle.load`)."""
        path = self.dir / "bad_batch.pkl"
        path.write_bytes(pickle.dumps(samples))
        return path

    def close(self) -> None:
        self.bar.close()
        self.metrics.close()
        self.samples.close()
        self.tokens.close()
        self.trace.close()

    def summary(self) -> None:
        """The end of a run in a few lines, and its figure."""
        from report.figures import plot_reward  # matplotlib, only here

        self.bar.close()
        figure = plot_reward([self.dir], self.dir / "reward.png")
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
