"""Checkpoints: what a resumed run begins with.

checkpoint-<step>/ holds model and tokenizer in Hugging Face format, and beside them the moments of
the optimiser, the schedule of its rate, the random state, and where every node's prompts stood.
"""

import shutil
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from plumbing.ranks import whole

STATE_FILE = "trainer.pt"  # beside the model
BASE = "base"  # beside the checkpoints: what a run began with, if that was made here


def save(path: Path, trainer, tokenizer, progress: dict) -> None:
    """Every rank takes part (shards are gathered); rank 0 writes, to a temporary name first.
    `progress` is what else the resumed run has to know."""
    model, optimizer = trainer.policy.model, trainer.optimizer
    weights = {name: whole(p).cpu() for name, p in model.named_parameters()}
    moments = [
        {name: whole(value).cpu() for name, value in optimizer.state[p].items()}
        for p in trainer.policy.parameters()
    ]
    if trainer.ranks.rank == 0:
        temporary = path.with_name(f".{path.name}")
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        state = {"moments": moments, "rng": torch.get_rng_state()}
        torch.save(state | progress, temporary / STATE_FILE)
        temporary.rename(path)


def load(directory: str, nodes: int, batch: tuple[int, int]) -> tuple[dict, str]:
    """State and path of the last checkpoint in a run directory; ({}, "") without one to resume.
    Raises ValueError if it is of another number of nodes, or of batches of another shape."""
    if not directory:
        return {}, ""
    found = [p for p in Path(directory).glob("checkpoint-*") if (p / STATE_FILE).exists()]
    if not found:
        raise ValueError(f"--resume {directory}: no checkpoint in it")
    path = max(found, key=lambda p: int(p.name.split("-")[1]))
    state = torch.load(path / STATE_FILE, weights_only=False, map_location="cpu")
    if len(state["nodes"]) != nodes:
        raise ValueError(f"{path} is of a run on {len(state['nodes'])} nodes, not on {nodes}")
    if state["batch"] != batch:
        raise ValueError(
            f"{path} is of a run with batches of {state['batch'][0]} x {state['batch'][1]}"
        )
    return state, str(path)


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
