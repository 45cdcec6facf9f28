"""The start of a run: what is asked for is completed, checked and loaded, in that order.

`resolve` fills in what was left to the task and the model; `refuse` and `check_prompts` change
nothing, and raise ValueError, with one line, for what cannot work. Nothing is written by then.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from envs import Task, prompt_order
from plumbing import checkpoint, replay
from plumbing.chat import encode_prompt
from plumbing.models import PRESETS, byte_tokenizer, one_line_if_missing, resolve_model
from plumbing.packages import require
from plumbing.ranks import Ranks, cpu_threads
from plumbing.settings import Settings
from tasks.find import make_task


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


def prepare(settings: Settings) -> Start:
    """Everything that a run needs before its processes start. Raises ValueError for bad input."""
    task = make_task(settings, settings.seed)
    settings = resolve(settings, task)
    refuse(settings)
    ranks = Ranks(settings.rollout_workers, settings.tensor_parallel)
    if settings.batch_size % ranks.nodes or settings.redundant_groups % ranks.nodes:
        raise ValueError(
            f"--batch_size and --redundant_groups must divide by the number of nodes "
            f"({ranks.nodes})"
        )
    batch = settings.batch_size, settings.group_size
    state, resumed_from = checkpoint.load(settings.resume, ranks.nodes, batch)
    made_here = settings.model.startswith("tiny")
    if made_here:  # its tokenizer is known before it is made: say early what does not fit
        check_prompts(settings, task, byte_tokenizer())
    if ranks.rank == 0:
        resolve_model(settings.model, task, settings.env)  # makes it, if it has to be made
    ranks.barrier()
    base = resolve_model(settings.model, task, settings.env)
    tokenizer, longest = load_tokenizer(base)
    settings = replace(settings, max_model_len=min(settings.max_model_len, longest))
    if not made_here:
        check_prompts(settings, task, tokenizer)
    workers = settings.rollout_workers
    threads, worker_threads = cpu_threads(settings.alpha == 0, ranks.local_world, workers)
    torch.set_num_threads(threads)
    dtype = preset_of(settings.model).dtype if ranks.device.type == "cuda" else "float32"
    return Start(
        settings, ranks, task, tokenizer, base, dtype, state, resumed_from, worker_threads
    )


def preset_of(model: str):
    return PRESETS.get(model, PRESETS["default"])


def resolve(settings: Settings, task: Task) -> Settings:
    """The settings with every default that depends on mode, model or task filled in."""
    model = settings.model
    if not model:
        model = "Qwen/Qwen2.5-0.5B-Instruct" if torch.cuda.is_available() else "tiny"
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
    path = Path(settings.run_dir)
    if any(part.is_file() for part in (path, *path.parents)):
        raise ValueError(f"--run_dir {settings.run_dir}: there is a file of that name")
    metrics = path / "metrics.jsonl"
    failed_early = metrics.exists() and not metrics.stat().st_size  # nothing is lost
    held = settings.run_dir and (path / "config.json").exists() and not failed_early
    if held and not settings.resume:
        raise ValueError(
            f"{settings.run_dir} holds a run already: choose another --run_dir, or --resume it"
        )


def load_tokenizer(model: str) -> tuple:
    """The tokenizer of a model, and how many tokens it takes at most."""
    with one_line_if_missing(model):
        config = AutoConfig.from_pretrained(model)
        longest = getattr(config, "max_position_embeddings", sys.maxsize)
        return AutoTokenizer.from_pretrained(model), longest


def check_prompts(settings: Settings, task: Task, tokenizer) -> None:
    """Every prompt has to leave room for a response; data sets are read as far as the run goes. If
    rows are made when they are asked for, one is enough: that may be slow, and an episode checks
    its own."""
    rows = list(task.train[:1])
    if isinstance(task.train, list):
        used = min(settings.steps * settings.batch_size, len(task.train))
        places = [prompt_order(len(task.train), settings.seed, i) for i in range(used)]
        rows = [task.train[i] for i in places] + list(task.test[: settings.eval_prompts])
    for row in rows:
        text = task.first_text(row)
        length = len(encode_prompt(task, text, tokenizer))
        if length + settings.max_tokens > settings.max_model_len:
            raise ValueError(
                f"a prompt of {length} tokens and a response of --max_tokens "
                f"{settings.max_tokens} do not fit into --max_model_len "
                f"{settings.max_model_len}: {text[:50]!r}..."
            )


def probe_ids(start: Start) -> list[int]:
    """The fixed sequence that trainer and engine both score at every publish: a real prompt, then
    random tokens, so that many rows of the embedding count."""
    text = start.task.first_text(start.task.train[0])
    prompt = encode_prompt(start.task, text, start.tokenizer)[:32]
    noise = np.random.default_rng(0).integers(len(start.tokenizer), size=32).tolist()
    return [*prompt, *noise][: start.settings.max_model_len - 1]
