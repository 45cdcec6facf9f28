"""Checkpoints: what a resumed run begins with.

checkpoint-<step>/ holds model and tokenizer in Hugging Face format, and beside them the moments of
the optimiser, the schedule of its rate, the random state, and where every node's prompts stood:
tensors and plain values, so that reading one runs no code.
"""

import contextlib
import os
import pickle
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from plumbing.ranks import whole

STATE_FILE = "trainer.pt"  # beside the model
READ_ERRORS = OSError, EOFError, RuntimeError, pickle.UnpicklingError, SafetensorError
WRITE_ERRORS = OSError, RuntimeError, SafetensorError  # of a full disk: the system's, torch's, ...
BASE = "base"  # beside the checkpoints: what a run began with, if that was made here


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


def save(path: Path, trainer, tokenizer, progress: dict) -> None:
    """Every rank takes part (shards are gathered); rank 0 writes. It is there whole, also after a
    loss of power, or not at all. `progress` is what else the resumed run has to know. Raises
    SaveError."""
    model, optimizer = trainer.policy.model, trainer.optimizer
    weights = {name: whole(p).cpu() for name, p in model.named_parameters()}
    moments = [
        {name: whole(value).cpu() for name, value in optimizer.state[p].items()}
        for p in trainer.policy.parameters()
    ]
    state = {"moments": moments, "rng": torch.get_rng_state()} | progress
    if trainer.ranks.rank == 0:
        try:
            _write(path, model, weights, tokenizer, state)
        except WRITE_ERRORS as error:
            raise SaveError(f"{path} cannot be written: {_line(error)}") from error


def _write(path: Path, model, weights: dict, tokenizer, state: dict) -> None:
    for left in path.parent.glob(".checkpoint-*"):  # of a run that ended while it wrote
        shutil.rmtree(left)
    temporary = path.with_name(f".{path.name}")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)  # half of one fills a disk
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / STATE_FILE)
        for file in (*temporary.iterdir(), temporary):
            _sync(file)
        if path.exists():  # it could not be read, else the run had begun after it
            shutil.rmtree(path)
        temporary.rename(path)
    _sync(path.parent)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(directory: str, nodes: int, batch: tuple[int, int]) -> tuple[dict, str, list[str]]:
    """State and path of the last checkpoint in a run directory that can be read, and a line for
    each later one that cannot; ({}, "", []) without one to resume. Raises ValueError if none can be
    read, or if it is of another number of nodes, or of batches of another shape."""
    if not directory:
        return {}, "", []
    steps = [p.name.removeprefix("checkpoint-") for p in Path(directory).glob("checkpoint-*")]
    damaged = []
    for step in sorted(map(int, filter(str.isdecimal, steps)), reverse=True):
        path = Path(directory) / f"checkpoint-{step}"
        try:
            state = _read(path)
            break
        except READ_ERRORS as error:
            damaged.append(f"{path} cannot be read and is passed over: {_line(error)}")
    else:
        raise ValueError("; ".join([f"--resume {directory}: no checkpoint in it", *damaged]))
    if len(state["nodes"]) != nodes:
        raise ValueError(f"{path} is of a run on {len(state['nodes'])} nodes, not on {nodes}")
    if state["batch"] != batch:
        raise ValueError(
            f"{path} is of a run with batches of {state['batch'][0]} x {state['batch'][1]}"
        )
    return state, str(path), damaged


def _read(path: Path) -> dict:
    """The state of a checkpoint whose weights are all there. Raises what reading them raises."""
    state = torch.load(path / STATE_FILE, weights_only=True, map_location="cpu")
    weights = list(path.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError("no weights in it")
    for file in weights:
        safe_open(file, "pt")  # compares its length with what its head says
    return state


def keep_base(base: str, run_dir: Path) -> None:
    """Copy the initial model into a run's directory: the cache may have another one by the time the
    run is resumed, and its KL penalty would have another reference."""
    if Path(base).resolve() != (run_dir / BASE).resolve():
        shutil.copytree(base, run_dir / BASE, dirs_exist_ok=True)


def kept_base(resumed_from: str) -> str:
    """The initial model of the run that a checkpoint is of; empty if it keeps none."""
    path = Path(resumed_from).parent / BASE
    return str(path) if resumed_from and path.is_dir() else ""


def restore(trainer, state: dict) -> None:
    """Put back what `save` wrote beside the model."""
    for p, moments in zip(trainer.policy.parameters(), state["moments"], strict=True):
        trainer.optimizer.state[p] = {
            name: distribute_tensor(value.to(p.device), p.device_mesh, p.placements)
            if isinstance(p, DTensor) and value.shape == p.shape
            else value.to(p.device if value.dim() else "cpu")
            for name, value in moments.items()
        }
    torch.set_rng_state(state["rng"])
