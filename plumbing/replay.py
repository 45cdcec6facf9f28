"""Batches of an earlier run in the place of rollout processes: training without an engine.

    python train.py --dump_batches True --run_dir runs/one        writes runs/one/batches/<step>.pkl
    python train.py --replay_batches runs/one/batches             the same steps, from those files

For debugging and profiling the trainer: the same batches give the same losses and weights. It has
the methods of `rollout.Scheduler` that the training loops call.
"""

import pickle
from collections import Counter
from pathlib import Path

from buffer import Sample


def batch_path(directory: Path, step: int) -> Path:
    return directory / f"{step:06}.pkl"


def dump(directory: Path, step: int, batch: list[Sample]) -> None:
    directory.mkdir(exist_ok=True)
    batch_path(directory, step).write_bytes(pickle.dumps(batch))


def read(directory: Path, step: int) -> list[Sample]:
    return pickle.loads(batch_path(directory, step).read_bytes())


def check(directory: str, steps: int, group_size: int) -> None:
    """Raise ValueError unless there is a batch for every step, of groups of that size."""
    missing = [n for n in range(1, steps + 1) if not batch_path(Path(directory), n).exists()]
    if missing:
        raise ValueError(
            f"--replay_batches {directory}: no {batch_path(Path(directory), missing[0])} "
            f"(--steps {steps}; a run with --dump_batches True writes them)"
        )
    groups = Counter(sample.ticket.group for sample in read(Path(directory), 1))
    if set(groups.values()) != {group_size}:
        raise ValueError(
            f"--replay_batches {directory}: groups of {max(groups.values())} samples, and "
            f"--group_size {group_size}"
        )


class Replay:
    """Serves the batches of a directory, one a step."""

    publisher = None  # nobody is sent weights

    def __init__(self, directory: str, version: int):
        self.directory, self.version = Path(directory), version

    def get_batch(self, timeout: float) -> list[Sample]:
        return read(self.directory, self.version + 1)

    def pause(self, version: int, *_) -> list[int]:
        self.version = version
        return []

    def wait_committed(self) -> None: ...

    def news(self) -> dict:
        none = {"dropped_prompts": [], "dropped_groups": []}
        return {"counts": Counter(), "dropped": Counter()} | none

    def mismatch(self, version: int) -> tuple[float, float]:
        return 0.0, 0.0

    def take_spans(self) -> list:
        return []

    def progress(self) -> dict:
        return {}
