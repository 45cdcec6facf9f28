"""The start of a run: what is asked for is completed, checked and loaded, in that order.

`resolve` fills in what was left to the task and the model; `refuse` and the checks of
`plumbing/checks.py` change nothing, and raise ValueError, with one line, for what cannot work.
Nothing is written by then.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer

from envs import Task
from plumbing import checkpoint, replay
from plumbing.chat import encode_prompt, stop_ids
from plumbing.checks import (
    declared_stops,
    notes_on_prompts,
    refuse_long_stop,
    refuse_other_models,
    refuse_other_tokenizer,
    usable_rows,
)
from plumbing.devices import plan, usable_gpus
from plumbing.models import PRESETS, one_line_if_broken, resolve_model
from plumbing.packages import require
from plumbing.ranks import Ranks, cores, cpu_threads
from plumbing.settings import Settings, parse
from plumbing.tiny import byte_tokenizer
from tasks.find import make_task

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")  # one of them
MOST_SAMPLES = 10**6  # of a step: more is a slip of the pen


class Start(NamedTuple):
    """What a run begins with."""

    settings: Settings  # complete
    ranks: Ranks
    task: Task
    tokenizer: object
    base: str  # directory or hub name of the initial model
    dtype: str  # of the weights that generate, and of the trainer's forward pass
    state: dict  # of the checkpoint that is resumed from; empty without one
    resumed_from: str  # the directory of that
    worker_threads: int
    stops: tuple[int, ...]  # tokens that end a turn, besides EOS and the task's own
    probe: list[int]  # what trainer and engine both score at every publish
    rows: Sequence[int]  # of task.train: those that can be trained on
    held_out: Sequence[int]  # of task.test: those that are evaluated on
    notes: list[str]  # what a careful colleague would say

    @property
    def turn_ends(self) -> list[int]:
        """All tokens that end a turn."""
        return stop_ids(self.task, self.tokenizer, self.stops)


def prepare(settings: Settings) -> Start:
    """Everything that a run needs before its processes start. Raises ValueError for bad input."""
    task = make_task(settings, settings.seed)
    settings = resolve(settings, task)
    refuse(settings)
    ranks = Ranks(settings.rollout_workers, settings.tensor_parallel, settings.batch_timeout)
    settings = replace(settings, rollout_workers=len(ranks.plan.workers))
    if ranks.nodes > 1:  # rank 0 does not know of the workers of other nodes, to publish again
        settings = replace(settings, max_restarts=0)
    if settings.batch_size % ranks.nodes or settings.redundant_groups % ranks.nodes:
        raise ValueError(
            f"--batch_size and --redundant_groups must divide by the number of nodes "
            f"({ranks.nodes})"
        )
    batch = settings.batch_size, settings.group_size
    state, resumed_from, damaged = checkpoint.load(settings.resume, ranks.nodes, batch)
    base = checkpoint.kept_base(settings.resume)
    if settings.model.startswith("tiny"):
        # Its tokenizer is known before it is made: say early what does not fit.
        check_rows(settings, task, byte_tokenizer(), settings.model)
    if ranks.rank == 0 and not base:
        resolve_model(settings.model, task, settings.env)  # makes it, if it has to be made
    ranks.barrier()
    base = base or resolve_model(settings.model, task, settings.env)
    tokenizer, longest = load_tokenizer(base)
    settings = replace(settings, max_model_len=min(settings.max_model_len, longest))
    refuse_long_stop(settings.env, task, tokenizer)
    rows, held_out, notes = check_rows(settings, task, tokenizer, base)
    workers = settings.rollout_workers
    threads, worker_threads = cpu_threads(settings.alpha == 0, ranks.local_world, workers)
    torch.set_num_threads(threads)
    # On a GPU never float32: kernels would compute in TF32 behind its back, which the probe takes
    # for weights that did not arrive.
    dtype = "bfloat16" if ranks.device.type == "cuda" else "float32"
    stops = declared_stops(base, task, tokenizer)
    probe = probe_ids(settings, task, tokenizer)
    notes = [*ranks.plan.notes(), *task.notes, *notes_on_prompts(task, tokenizer), *notes]
    return Start(
        settings, ranks, task, tokenizer, base, dtype, state, resumed_from, worker_threads,
        stops, probe, rows, held_out, [*damaged, *changes(settings), *notes],
    )  # fmt: skip


def preset_of(model: str):
    return PRESETS.get(model, PRESETS["default"])


def resolve(settings: Settings, task: Task) -> Settings:
    """The settings with every default that depends on mode, model or task filled in."""
    model = settings.model
    if not model:
        model = "Qwen/Qwen2.5-0.5B-Instruct" if usable_gpus() else "tiny"
    preset = preset_of(model)
    max_tokens = settings.max_tokens or task.max_tokens
    max_turns = settings.max_turns or task.max_turns
    whole = max_tokens * max_turns if settings.aggregation == "constant" else 0
    return replace(
        settings,
        model=model,
        alpha=0.0 if settings.mode == "sync" else settings.alpha,
        batch_size=settings.batch_size or preset.batch_size,
        eval_prompts=settings.eval_prompts or preset.eval_prompts,
        eval_every=0 if settings.replay_batches else settings.eval_every,  # nobody would answer
        learning_rate=settings.learning_rate or preset.learning_rate,
        max_tokens=max_tokens,
        max_turns=max_turns,
        max_model_len=settings.max_model_len or preset.max_model_len,
        constant_length=settings.constant_length or whole,
    )


def refuse(settings: Settings) -> None:
    """Raise ValueError for destinations that are not there, and for files in the way."""
    for name in filter(None, settings.report_to.split(",")):
        if name not in ("tensorboard", "wandb"):
            raise ValueError(f"--report_to takes tensorboard and wandb (got {name})")
        require(name, f"--report_to {name}")
    if settings.replay_batches:
        replay.check(settings.replay_batches, settings.steps, settings.group_size)
    if settings.rollout_workers > 4 * cores() and not usable_gpus():
        raise ValueError(
            f"--rollout_workers {settings.rollout_workers}: {cores()} cores and no GPU are here"
        )
    if settings.tensor_parallel > 1 and not usable_gpus():
        raise ValueError(
            f"--tensor_parallel {settings.tensor_parallel}, but this machine has no GPUs"
        )
    for name, was in before(settings).items():
        if name in ("env", "model", "seed") and was != (now := getattr(settings, name)):
            raise ValueError(
                f"--resume {settings.resume} is a run with --{name} {was}, not {now}: its prompts "
                "or weights would be others"
            )
    samples = settings.batch_size * settings.group_size
    if samples > MOST_SAMPLES:
        raise ValueError(
            f"--batch_size {settings.batch_size} x --group_size {settings.group_size}: a step of "
            f"more than {MOST_SAMPLES} samples"
        )
    refuse_directory(settings)


def refuse_directory(settings: Settings) -> None:
    """Raise ValueError for a --run_dir that cannot be written to, or that holds a run already."""
    path = Path(settings.run_dir or "runs")
    try:
        if any(part.is_file() for part in (path, *path.parents)):
            raise ValueError(f"--run_dir {settings.run_dir}: there is a file of that name")
        there = next(part for part in (path, *path.resolve().parents) if part.is_dir())
    except OSError as error:
        raise ValueError(f"--run_dir {settings.run_dir[:80]}: {error.strerror}") from error
    if not os.access(there, os.W_OK):
        raise ValueError(f"--run_dir {path}: {there} cannot be written to")
    metrics = path / "metrics.jsonl"
    failed_early = metrics.exists() and not metrics.stat().st_size  # nothing is lost
    held = settings.run_dir and (path / "config.json").exists() and not failed_early
    if held and not settings.resume:
        raise ValueError(
            f"{settings.run_dir} holds a run already: choose another --run_dir, or --resume it"
        )


def before(settings: Settings) -> dict:
    """The settings of the run that is resumed."""
    config = Path(settings.resume) / "config.json"
    known = settings.resume and config.exists()
    return json.loads(config.read_text()) if known else {}


def changes(settings: Settings) -> list[str]:
    """What is not as it was in the run that is resumed, a line each."""
    was, expected = before(settings), ("resume", "run_dir", "steps")
    return [
        f"--{name} is {now} from now on, and was {was[name]}"
        for name, now in vars(settings).items()
        if name in was and name not in expected and was[name] != now
    ]


def load_tokenizer(model: str) -> tuple:
    """The tokenizer of a model, and how many tokens it takes at most."""
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ValueError(f"model {model}: no tokenizer in it ({', '.join(TOKENIZER_FILES)})")
    with one_line_if_broken(model):
        config = AutoConfig.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    refuse_other_models(model, config)
    text = config.get_text_config()
    refuse_other_tokenizer(model, tokenizer, text.vocab_size)
    return tokenizer, getattr(text, "max_position_embeddings", sys.maxsize)


def check_rows(settings: Settings, task: Task, tokenizer, model: str):
    """See `checks.usable_rows`. Raises ValueError also for a chat template that cannot be
    rendered."""
    try:
        return usable_rows(settings, task, tokenizer)
    except TemplateError as error:
        raise ValueError(f"model {model}: its chat template: {error}") from error


def probe_ids(settings: Settings, task: Task, tokenizer) -> list[int]:
    """The fixed sequence that trainer and engine both score at every publish: a real prompt, then
    random tokens, so that many rows of the embedding count."""
    prompt = encode_prompt(task, task.first_text(task.train[0]), tokenizer)[:32]
    noise = np.random.default_rng(0).integers(len(tokenizer), size=32).tolist()
    return [*prompt, *noise][: settings.max_model_len - 1]


def main() -> int:
    """Refuse in one process and one line what ranks under torchrun would each refuse."""
    settings = parse(sys.argv[1:])
    transformers.utils.logging.disable_progress_bar()
    try:
        ranks = int(os.environ.get("NPROC") or 1)
        plan(usable_gpus(), ranks, settings.rollout_workers or 1, settings.tensor_parallel)
        prepare(settings).task.close()
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())  # launch.sh asks before it starts several ranks
