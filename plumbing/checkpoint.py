"""Checkpoints: what a resumed run begins with.

checkpoint-<step>/ holds model and tokenizer in Hugging Face format, and beside them the moments of
the optimiser, the schedule of its rate, the random state, and where every node's prompts stood:
tensors and plain values, so that reading one runs no code.
"""

import contextlib
import pickle
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from plumbing.files import WriteError, sync
from plumbing.ranks import whole

STATE_FILE = "trainer.pt"  # beside the model
READ_ERRORS = OSError, EOFError, RuntimeError, pickle.UnpicklingError, SafetensorError
WRITE_ERRORS = OSError, RuntimeError, SafetensorError  # of a full disk: the system's, torch's, ...
BASE = "base"  # beside the checkpoints: what a run began with, if that was made here


# -- when ------------------------------------------------------------------------------------------

SHARE = 0.02  # of a run's time, which its checkpoints may cost
LEAST = 60.0  # seconds from one to the next
SPEED = 3e8  # bytes a second that a disk is expected to take


def interval(cost: float) -> float:
    """Seconds from one checkpoint to the next, if writing one takes `cost` seconds."""
    return max(LEAST, cost / SHARE)


def expected_cost(model) -> float:
    """Seconds that the first one may take: float32 weights, and two moments of each."""
    return 12 * sum(p.numel() for p in model.parameters()) / SPEED


# -- writing ---------------------------------------------------------------------------------------


def gather(trainer, progress: dict) -> tuple[dict, dict]:
    """Weights, and what else a resumed run has to know, of which `progress` is a part. Every rank
    takes part: what is sharded is put together."""
    optimizer = trainer.optimizer
    weights = {name: whole(p).cpu() for name, p in trainer.policy.model.named_parameters()}
    moments = [
        {name: whole(value).cpu() for name, value in optimizer.state[p].items()}
        for p in trainer.policy.parameters()
    ]
    return weights, {"moments": moments, "rng": torch.get_rng_state()} | progress


def write(path: Path, trainer, tokenizer, weights: dict, state: dict, keep: int = 0) -> None:
    """Write what was gathered. It is there whole, also after a loss of power, or not at all. Of the
    checkpoints up to this one only the last `keep` stay; 0: all. Raises WriteError."""
    try:
        _write(path, trainer.policy.model, tokenizer, weights, state)
        until = [old for step, old in _found(path.parent) if keep and step <= state["version"]]
        for old in until[keep:]:
            shutil.rmtree(old.rename(old.with_name(f".{old.name}")))
    except WRITE_ERRORS as error:
        raise WriteError(f"{path} cannot be written: {_line(error)}") from error


def _write(path: Path, model, tokenizer, weights: dict, state: dict) -> None:
    sweep(path.parent)
    temporary = path.with_name(f".{path.name}")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)  # half of one fills a disk
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / STATE_FILE)
        for file in (*temporary.iterdir(), temporary):
            sync(file)
        if path.exists():  # it could not be read, else the run had begun after it
            shutil.rmtree(path)
        temporary.rename(path)
    sync(path.parent)


def sweep(run_dir: Path) -> None:
    """Remove what a run has left that ended while it wrote or removed one."""
    for left in run_dir.glob(".checkpoint-*"):
        shutil.rmtree(left)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# -- reading ---------------------------------------------------------------------------------------


def _found(run_dir: Path) -> list[tuple[int, Path]]:
    """The steps and paths of the checkpoints in a directory, the last first."""
    paths = {p.name.removeprefix("checkpoint-"): p for p in run_dir.glob("checkpoint-*")}
    found = [(int(step), path) for step, path in paths.items() if step.isdecimal()]
    return sorted(found, reverse=True)


def load(directory: str, nodes: int, batch: tuple[int, int]) -> tuple[dict, str, list[str]]:
    """State and path of the last checkpoint in a run directory that can be read, and a line for
    each later one that cannot; ({}, "", lines) if there is none: then a run begins at 0. Raises
    ValueError if none of several can be read, or if it is of another number of nodes, or of batches
    of another shape."""
    if not directory:
        return {}, "", []
    damaged = []
    for _, path in _found(Path(directory)):
        try:
            state = _read(path)
            break
        except READ_ERRORS as error:
            damaged.append(f"{path} cannot be read and is passed over: {_line(error)}")
    else:
        if damaged:
            raise ValueError(f"--resume {directory}: {'; '.join(damaged)}")
        return {}, "", [f"{directory} has no checkpoint yet: the run begins at step 0"]
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
    run is resumed, and its KL penalty would have another reference. Raises WriteError."""
    aside, path = run_dir / f".{BASE}", run_dir / BASE
    try:
        if not path.exists():
            shutil.copytree(base, aside, dirs_exist_ok=True)
            aside.rename(path)
    except OSError as error:  # shutil's own has no message of one line
        shutil.rmtree(aside, ignore_errors=True)
        raise WriteError(f"{path} cannot be written: {_line(error)}") from error


def kept_base(run_dir: str) -> str:
    """The initial model of the run in a directory; empty if it keeps none."""
    path = Path(run_dir) / BASE
    return str(path) if run_dir and path.is_dir() else ""


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
