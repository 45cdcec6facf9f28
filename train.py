"""Asynchronous RL for language models: the entry point, and the two training loops.

    bash launch.sh                                        quick run for this machine, with set-up
    python train.py --mode async --alpha 1                one trainer rank, one rollout process
    python train.py --mode sync                           the same, generation and training in turn
    python train.py settings.yaml --steps 50              flags from a file, then from here
    torchrun --nproc_per_node 2 train.py                  two trainer ranks (FSDP2) on this machine
    torchrun --nnodes 2 --nproc_per_node 8 ... train.py   two machines; each feeds its own ranks

Read `train_sync` and `train_async` first: the two loops, side by side. `buffer.py` has the rule
that bounds staleness, `rollout.py` and `worker.py` what goes on in the other processes,
`trainer.py` the update, `algos.py` the mathematics.

Paper: ROLL Flash (arXiv 2510.11345), rollout-train decoupling.
"""

import os

# Threads that spin while they wait starve a busy neighbour; has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import math
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

from algos import AlgoConfig, notes
from buffer import BufferConfig, RolloutTask, Sample, SampleBuffer, derive_seed
from envs import EnvConfig, encode_prompt, make_task, prompt_order
from episode import Limits
from plumbing import replay
from plumbing.models import PRESETS, byte_tokenizer, one_line_if_missing, resolve_model
from report import log as report
from report.timeline import spans
from rollout import Dispatcher, RolloutConfig, RolloutError, Rollouts
from trainer import STATE_FILE, Cell, NonFiniteError, Publisher, Trainer, TrainerConfig
from worker import WorkerSpec


@dataclass
class RunConfig:
    mode: str = field(
        default="async",
        metadata={"help": "async: train while generation goes on; sync: in turn (alpha is 0)"},
    )
    model: str = field(
        default="",
        metadata={
            "help": "tiny, smollm2, a directory or a hub name; default: tiny, "
            "on a GPU Qwen/Qwen2.5-0.5B-Instruct"
        },
    )
    steps: int = field(default=150, metadata={"help": "train steps, one batch each"})
    max_model_len: int = field(
        default=0, metadata={"help": "tokens of a whole sample; 0: the model's preset"}
    )
    eval_every: int = field(
        default=50, metadata={"help": "versions between evaluations; 0: no evaluation at all"}
    )
    eval_prompts: int = field(
        default=0, metadata={"help": "held-out prompts an evaluation; 0: the model's preset"}
    )
    save_every: int = field(
        default=0, metadata={"help": "steps between checkpoints; 0: one, at the end"}
    )
    seed: int = field(default=0, metadata={"help": "of data order, sampling and the tiny model"})
    run_dir: str = field(
        default="", metadata={"help": "where the run writes; default runs/<time>-<mode>-<env>"}
    )
    resume: str = field(
        default="",
        metadata={"help": "run directory to go on with, from its last checkpoint and its settings"},
    )
    report_to: str = field(
        default="", metadata={"help": "tensorboard, wandb or both by comma: metrics go there too"}
    )
    dump_batches: bool = field(
        default=False, metadata={"help": "write every batch to <run_dir>/batches, for a replay"}
    )
    replay_batches: str = field(
        default="",
        metadata={"help": "directory of such batches: train on them, without an engine"},
    )
    batch_timeout: float = field(
        default=1800.0, metadata={"help": "seconds that a batch or an evaluation may take"}
    )

    def __post_init__(self):
        if self.mode not in ("sync", "async"):
            raise ValueError(f"--mode is sync or async (got {self.mode})")
        for name in ("steps", "batch_timeout"):
            if not getattr(self, name) > 0:  # also true of NaN
                raise ValueError(f"--{name} must be above 0 (got {getattr(self, name)})")
        for name in ("max_model_len", "eval_every", "eval_prompts", "save_every", "seed"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} must be 0 or more (got {getattr(self, name)})")


# -- the two loops -------------------------------------------------------------------------------


def train_sync(run: "Run") -> None:
    """Generate a batch, train on it, publish: each phase has the machine to itself."""
    while run.version < run.config.steps:
        batch = run.get_batch()  # alpha is 0: nothing more has been admitted, the workers now wait
        run.train_on(batch)
        run.publish(run.version + 1)
        run.wait_committed()  # all workers hold the new weights, and begin on the next batch
        run.finish_step()


def train_async(run: "Run") -> None:
    """The same steps while generation goes on: the workers are up to alpha batches ahead."""
    while run.version < run.config.steps:
        batch = run.get_batch()  # with luck it is there already
        run.train_on(batch)  # meanwhile the workers decode and compute rewards
        run.publish(run.version + 1)  # they pause and receive; they load while the next step begins
        run.finish_step()


# -- one run -------------------------------------------------------------------------------------


class Run:
    """What the two loops work on: the parts of a run, and its clock."""

    def __init__(
        self,
        config: RunConfig,
        trainer: TrainerConfig,
        rollout: RolloutConfig,
        buffer: BufferConfig,
        env: EnvConfig,
        algo: AlgoConfig,
    ):
        """Check everything and load the model. Raises ValueError, with one line, for bad input."""
        self.config, self.rollout, self.buffer = config, rollout, buffer
        self.task = make_task(env, config.seed)
        check(config, buffer, algo)
        preset = PRESETS.get(config.model, PRESETS["default"])
        buffer.batch_size = buffer.batch_size or preset.batch_size
        config.eval_prompts = config.eval_prompts or preset.eval_prompts
        self.cell = cell = Cell(rollout)
        if buffer.batch_size % cell.nodes or buffer.redundant_groups % cell.nodes:
            raise ValueError(
                f"--batch_size and --redundant_groups must divide by the number of nodes "
                f"({cell.nodes})"
            )
        state, resumed_from = load_checkpoint(config.resume, cell.nodes, buffer)
        self.max_tokens = rollout.max_tokens or self.task.max_tokens
        self.max_model_len = config.max_model_len or preset.max_model_len
        made_here = config.model.startswith("tiny")
        if made_here:  # its tokenizer is known before it is made: say early what does not fit
            self.tokenizer = byte_tokenizer()
            check_prompts(self)
        if cell.rank == 0:
            resolve_model(config.model, self.task, env.env)  # makes it, if it has to be made
        cell.barrier()
        base = resolve_model(config.model, self.task, env.env)
        self.dtype = preset.dtype if cell.device.type == "cuda" else "float32"
        trainer.learning_rate = trainer.learning_rate or preset.learning_rate
        self.tokenizer, longest = load_tokenizer(base)
        if config.max_model_len > longest:
            raise ValueError(f"--max_model_len {config.max_model_len}: the model takes {longest}")
        self.max_model_len = min(self.max_model_len, longest)
        if not made_here:
            check_prompts(self)
        threads, self.worker_threads = cpu_threads(buffer.alpha == 0, cell, rollout)
        torch.set_num_threads(threads)
        turns = rollout.max_turns or self.task.max_turns
        algo.constant_length = algo.constant_length or self.max_tokens * turns
        if cell.rank == 0:
            for note in notes(algo):
                print(f"note: {note}", file=sys.stderr)
        self.trainer = Trainer(
            cell, trainer, algo, resumed_from or base, base, buffer.group_size,
            rollout.temperature, self.dtype,
        )  # fmt: skip
        if state:
            self.trainer.restore(state)
        self.log, self.rollouts = None, None
        if cell.rank == 0:
            settings = [config, trainer, rollout, buffer, env, algo]
            self.log = report.Log(config, settings, env.env, cell.world, state.get("version"))
        self.version = state.get("version", 0)
        self.wall = state.get("wall", 0.0)  # seconds, without evaluations
        self.publisher = Publisher(self.trainer)
        self.probe = probe_ids(self)
        self.for_workers = self._for_workers(base, env, state)

    def _for_workers(self, base: str, env: EnvConfig, state: dict) -> tuple:
        """What this node's `Rollouts` is made of: the workers' settings, the buffer, the tasks."""
        cell, config, buffer = self.cell, self.config, self.buffer
        spec = WorkerSpec(
            rank=0,
            model=base,
            rollout=self.rollout,
            env=env,
            seed=config.seed,
            limits=Limits(
                self.max_tokens,
                self.rollout.max_turns or self.task.max_turns,
                self.max_model_len,
                math.ceil(buffer.alpha) if buffer.consume == "ready" else math.inf,
            ),
            dtype=self.dtype,
            # The prompts of the tiny model's single-turn tasks are shorter than a block.
            prefix_caching=self.task.max_turns > 1 or not config.model.startswith("tiny"),
            gpu_share=cell.gpu_share,
        )
        share = replace(
            buffer,
            batch_size=buffer.batch_size // cell.nodes,
            redundant_groups=buffer.redundant_groups // cell.nodes,
        )
        progress = state.get("cells", [{}] * cell.nodes)[cell.node]
        samples = SampleBuffer(share, config.steps, self.version, **progress)
        return spec, samples, self.rollout_task

    def start(self, rollouts: Rollouts | None = None, dispatcher: type = Dispatcher) -> None:
        """Start the workers, or go on with those of an earlier run, and give them their first
        weights: of version 0, or the checkpoint's."""
        if self.cell.local_rank == 0:
            if self.config.replay_batches:
                self.rollouts = replay.Replay(self.config.replay_batches, self.version)
            elif rollouts:
                self.rollouts = rollouts
                rollouts.begin(*self.for_workers, dispatcher)
            else:
                self.rollouts = Rollouts(*self.for_workers, dispatcher)
                if self.log:
                    self._greet()
                with spans("start"):
                    self.rollouts.start(self.cell.worker_devices, self.worker_threads)
        self.publisher.connect(self.rollouts, self.rollout.start_timeout)
        self.publish(self.version)
        self.wait_committed()
        if self.config.eval_every and self.version == 0:
            self.evaluate()

    def _greet(self) -> None:
        print(
            f"{self.config.model}, {self.buffer.batch_size} x {self.buffer.group_size} samples a "
            f"step, alpha {self.buffer.alpha:g}, learning rate "
            f"{self.trainer.config.learning_rate:g}; starting vLLM in "
            f"{self.rollout.rollout_workers} rollout process(es) ...",
            file=sys.stderr,
        )

    def close(self, keep_workers: bool = False) -> None:
        if self.rollouts and not keep_workers:
            self.rollouts.close()
        self.write_spans()
        if self.log:
            self.log.close()
        self.task.close()

    def rollout_task(self, index: int, sample: int) -> RolloutTask:
        """The task of one sample. Nodes take turns at the prompts: every nodes-th is this one's."""
        place = index * self.cell.nodes + self.cell.node
        prompt = prompt_order(len(self.task.train), self.config.seed, place)
        return RolloutTask(index, sample, prompt, derive_seed(self.config.seed, place, sample))

    # -- the verbs of the loops ------------------------------------------------------------------

    def get_batch(self) -> list[Sample]:
        """This node's part of the next batch, on each of its ranks."""
        self.started = time.perf_counter()
        spans.seconds.clear()
        with spans("wait"):
            batch = self.rollouts and self.rollouts.get_batch(self.config.batch_timeout)
            if self.log and self.config.dump_batches:
                replay.dump(self.log.dir / "batches", self.version + 1, batch)
            self.batch = self.cell.from_local_rank_zero(batch)
        return self.batch

    @spans("train")
    def train_on(self, batch: list[Sample]) -> None:
        self.metrics = self.trainer.step(batch, self.version)

    @spans("publish")
    def publish(self, version: int) -> None:
        """Send the weights to every worker. Returns when they have left; see wait_committed."""
        reference = self.trainer.score(self.probe)

        def send() -> None:
            self.cell.barrier()  # every node's workers have paused
            self.publisher.send()

        if self.rollouts:
            self.rollouts.publish(version, self.publisher.info, self.probe, reference, send)
        else:
            send()
        self.version = version

    def wait_committed(self) -> None:
        if self.rollouts:
            with spans("publish"), spans("acknowledge"):
                self.rollouts.wait_committed()

    def finish_step(self) -> None:
        """Close the books of a step; now and then evaluate, or save."""
        config, step = self.config, self.version
        now = time.perf_counter()
        self.wall += now - self.started
        spans.add("step", self.started, now, args={"step": step})
        with spans("log"):
            if self.log:
                row = {"step": step, "version": step - 1, "wall_s": self.wall}
                row |= self.metrics | report.batch_metrics(self)
                self.log.step(row, self.batch, self.tokenizer)
            self.write_spans()
        last = step == config.steps
        if config.eval_every and (last or step % config.eval_every == 0):
            self.evaluate()
        if last or (config.save_every and step % config.save_every == 0):
            self.save()

    def write_spans(self) -> None:
        """To trace.json: those of trainer rank 0 and its node's workers."""
        mine = spans.take()
        if self.log and self.rollouts:
            self.log.trace.write([mine, *self.rollouts.take_spans()])

    @spans("evaluate")
    def evaluate(self) -> None:
        """Score held-out prompts under the version just published, one sample each."""
        start, cell = time.perf_counter(), self.cell
        count = min(self.config.eval_prompts, len(self.task.test))
        rewards: list[float] = []
        if self.rollouts:
            tasks = [
                RolloutTask(-1, 0, i, derive_seed(self.config.seed, 2**32, i), eval=True)
                for i in range(cell.node, count, cell.nodes)
            ]
            rewards = [s.reward for s in self.rollouts.evaluate(tasks, self.config.batch_timeout)]
            self.rollouts.take_counts()  # not part of the next step's
        scored = cell.sum(float(len(rewards)))  # a prompt whose reward failed twice is left out
        mean = cell.sum(float(sum(rewards))) / scored
        solved = cell.sum(float(sum(r >= 1 for r in rewards))) / scored
        if self.log:
            seconds = time.perf_counter() - start
            self.log.evaluation(self.version, mean, solved, int(scored), seconds)

    @spans("checkpoint")
    def save(self) -> None:
        """Write checkpoint-<step>. Samples in progress are not saved: they are generated again."""
        self.wait_committed()
        mine = self.rollouts and self.rollouts.progress()
        cells = self.cell.gather_cells(mine)
        directory = self.cell.from_rank_zero(self.log and str(self.log.dir))
        batch = self.buffer.batch_size, self.buffer.group_size
        progress = {"version": self.version, "wall": self.wall, "cells": cells, "batch": batch}
        path = Path(directory) / f"checkpoint-{self.version}"
        self.trainer.save(path, self.tokenizer, progress)


def cpu_threads(alone: bool, cell: Cell, rollout: RolloutConfig) -> tuple[int, int]:
    """Threads of a trainer rank and of a worker. Phases that have the machine to themselves use all
    of it; otherwise it is a core a process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not alone:
        return 1, 1
    return max(1, cores // cell.local_world), max(1, cores // rollout.rollout_workers)


def probe_ids(run: Run) -> list[int]:
    """The fixed sequence that trainer and engine both score at every publish: a real prompt, then
    random tokens, so that many rows of the embedding count."""
    prompt = encode_prompt(run.task, run.task.first_text(run.task.train[0]), run.tokenizer)[:32]
    noise = np.random.default_rng(0).integers(len(run.tokenizer), size=32).tolist()
    return (prompt + noise)[: run.max_model_len - 1]


# -- start ---------------------------------------------------------------------------------------


def check(config: RunConfig, buffer: BufferConfig, algo: AlgoConfig) -> None:
    """What no single dataclass can see. Raises ValueError, with one line."""
    if config.mode == "sync":
        buffer.alpha = 0.0
    if buffer.group_size == 1 and algo.advantage != "reinforce_pp":
        raise ValueError(
            f"--advantage {algo.advantage} compares samples of a group: --group_size 2 or more"
        )
    if buffer.group_size == buffer.batch_size == 1:
        raise ValueError("one sample a batch cannot be compared with any other")
    if not config.model:
        config.model = "Qwen/Qwen2.5-0.5B-Instruct" if torch.cuda.is_available() else "tiny"
    report.check_destinations(config.report_to)
    if config.replay_batches:
        replay.check(config.replay_batches, config.steps, buffer.group_size)
        config.eval_every = 0  # nobody is there to answer
    path = Path(config.run_dir)
    if any(part.is_file() for part in (path, *path.parents)):
        raise ValueError(f"--run_dir {config.run_dir}: there is a file of that name")
    metrics = path / "metrics.jsonl"
    failed_early = metrics.exists() and not metrics.stat().st_size  # nothing is lost
    held = config.run_dir and (path / "config.json").exists() and not failed_early
    if held and not config.resume:
        raise ValueError(
            f"{config.run_dir} holds a run already: choose another --run_dir, or --resume it"
        )


def load_tokenizer(model: str) -> tuple:
    """The tokenizer of a model, and how many tokens it takes at most."""
    with one_line_if_missing(model):
        config = AutoConfig.from_pretrained(model)
        return AutoTokenizer.from_pretrained(model), getattr(
            config, "max_position_embeddings", sys.maxsize
        )


def check_prompts(run: Run) -> None:
    """Every prompt has to leave room for a response; data sets are read as far as the run goes. Of
    rows that are made when they are asked for one is enough: that may be slow, and an episode
    checks its own."""
    rows = list(run.task.train[:1])
    if isinstance(run.task.train, list):
        used = min(run.config.steps * run.buffer.batch_size, len(run.task.train))
        places = [prompt_order(len(run.task.train), run.config.seed, i) for i in range(used)]
        rows = [run.task.train[i] for i in places] + list(run.task.test[: run.config.eval_prompts])
    for row in rows:
        text = run.task.first_text(row)
        length = len(encode_prompt(run.task, text, run.tokenizer))
        if length + run.max_tokens > run.max_model_len:
            raise ValueError(
                f"a prompt of {length} tokens and a response of --max_tokens {run.max_tokens} do "
                f"not fit into --max_model_len {run.max_model_len}: {text[:50]!r}..."
            )


def load_checkpoint(directory: str, cells: int, buffer: BufferConfig) -> tuple[dict, str]:
    """State and path of the last checkpoint in a run directory; ({}, "") without one to resume."""
    if not directory:
        return {}, ""
    found = [p for p in Path(directory).glob("checkpoint-*") if (p / STATE_FILE).exists()]
    if not found:
        raise ValueError(f"--resume {directory}: no checkpoint in it")
    path = max(found, key=lambda p: int(p.name.split("-")[1]))
    state = torch.load(path / STATE_FILE, weights_only=False, map_location="cpu")
    if len(state["cells"]) != cells:
        raise ValueError(f"{path} is of a run on {len(state['cells'])} nodes, not on {cells}")
    if state["batch"] != (buffer.batch_size, buffer.group_size):
        raise ValueError(
            f"{path} is of a run with batches of {state['batch'][0]} x {state['batch'][1]}"
        )
    return state, str(path)


def as_flags(settings: dict) -> list[str]:
    """A mapping of names to values as a command line."""
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def parse(argv: list[str]) -> list:
    """Flags as the six dataclasses. Settings of a file (first argument) or of a run that is resumed
    come first, so that flags override them. Exits with code 2 and one line for what is wrong."""
    parser = HfArgumentParser(
        (RunConfig, TrainerConfig, RolloutConfig, BufferConfig, EnvConfig, AlgoConfig),
        usage="train.py [SETTINGS.yaml] [flags]",
        description="Asynchronous RL for language models (ROLL Flash, arXiv 2510.11345).",
        allow_abbrev=False,
    )

    def fail(message: str):
        print(f"train.py: {message}", file=sys.stderr)
        raise SystemExit(2)

    def flags_of(path: Path) -> list[str]:
        try:
            settings = yaml.safe_load(path.read_text())  # JSON is YAML too
        except FileNotFoundError:
            fail(f"no such file: {path}")
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            fail(f"{path}: {' '.join(str(error).split())}")
        if not isinstance(settings, dict):
            fail(f"{path}: a mapping of flags to values is expected")
        settings.pop("trainers", None)  # in a run's config.json, and no flag
        return as_flags({k: v for k, v in settings.items() if v not in (None, "")})

    parser.error = fail
    if argv and not argv[0].startswith("-"):
        argv = flags_of(Path(argv[0])) + argv[1:]
    if directory := parser.parse_known_args(argv)[0].resume:
        argv = flags_of(Path(directory) / "config.json") + argv + ["--run_dir", directory]
    try:
        *configs, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    except ValueError as error:
        fail(str(error))
    if unknown:
        fail(f"unknown flag {unknown[0]} (--help lists all)")
    return configs


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    configs = parse(sys.argv[1:] if argv is None else argv)
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # torchrun ends its ranks with it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    run, code, message = None, 0, ""
    try:
        run = Run(*configs)
        run.start()
        loop = train_sync if run.config.mode == "sync" else train_async
        loop(run)
        if run.log:
            run.log.summary()
    except ValueError as error:
        if run is not None:
            raise  # not bad input, which the constructor finds, but a bug: show where
        code, message = 2, str(error)
    except RolloutError as error:
        code, message = 1, str(error)
        if error.details:
            print(error.details, file=sys.stderr)
    except NonFiniteError as error:
        code, message = 1, f"{error}; the batch is in {run.log and run.log.dump(error.samples)}"
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    finally:
        if run is not None:
            run.close()
    if message:  # after everything that closing may print: the last line says what happened
        print(f"train.py: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
