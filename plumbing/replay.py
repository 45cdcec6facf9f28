"""Batches of an earlier run in the place of rollout processes: training without an engine.

    python train.py --dump_batches True --run_dir runs/one        writes runs/one/batches/<step>.npz
    python train.py --replay_batches runs/one/batches             the same steps, from those files

For debugging and profiling the trainer: the same batches give the same losses and weights. It has
the methods of `rollout.Scheduler` that the training loops call.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np

from buffer import Sample, Ticket


class NonFiniteError(RuntimeError):
    """Loss or gradient is NaN or infinite; carries the batch, so that it can be looked at."""

    def __init__(self, what: str, samples: list[Sample] = ()):
        at_fault = [
            f"{s.ticket.group}:{s.ticket.sample}"
            for s in samples
            if not (np.isfinite(s.logprobs).all() and math.isfinite(s.reward))
        ]
        of = ", ".join(at_fault[:8]) or "none (all their log-probabilities and rewards are finite)"
        super().__init__(f"{what}; samples at fault: {of}" if samples else what)
        self.samples = samples


# -- a batch as a file: plain arrays, so that reading one runs no code -----------------------------

ARRAYS = ("ids", "mask", "logprobs", "versions")  # of all samples one after the other, [sum of T]


def write(path: Path, batch: list[Sample]) -> None:
    """Write samples to a file for `read`."""
    arrays = {name: np.concatenate([getattr(s, name) for s in batch]) for name in ARRAYS}
    bounds = [(i, *turn) for i, s in enumerate(batch) for turn in s.turns]
    success = [-1 if s.success is None else int(s.success) for s in batch]
    np.savez(
        path,
        **arrays,
        tickets=np.array([tuple(s.ticket) for s in batch]),  # [S, 5]
        lengths=np.array([len(s.ids) for s in batch]),
        rewards=np.array([s.reward for s in batch]),
        truncated=np.array([s.truncated for s in batch]),
        success=np.array(success),
        turns=np.array(bounds, int).reshape(-1, 3),  # sample, begin, end
    )


def read(path: Path) -> list[Sample]:
    """The samples of a file that `write` has written."""
    with np.load(path, allow_pickle=False) as file:
        data = dict(file)
    ends = np.cumsum(data["lengths"])[:-1]
    columns = [np.split(data[name], ends) for name in ARRAYS]
    samples = []
    for i, (*ticket, is_eval) in enumerate(data["tickets"].tolist()):
        turns = tuple(map(tuple, data["turns"][data["turns"][:, 0] == i, 1:].tolist()))
        truncated, success = bool(data["truncated"][i]), int(data["success"][i])
        samples.append(
            Sample(
                Ticket(*ticket, bool(is_eval)),
                *(column[i] for column in columns),
                reward=float(data["rewards"][i]),
                truncated=truncated,
                turns=turns,
                success=None if success < 0 else bool(success),
            )
        )
    return samples


def batch_path(directory: Path, step: int) -> Path:
    return directory / f"{step:06}.npz"


def dump(directory: Path, step: int, batch: list[Sample]) -> None:
    directory.mkdir(exist_ok=True)
    write(batch_path(directory, step), batch)


def check(directory: str, steps: int, group_size: int) -> None:
    """Raise ValueError unless there is a batch for every step, of groups of that size."""
    missing = [n for n in range(1, steps + 1) if not batch_path(Path(directory), n).exists()]
    if missing:
        raise ValueError(
            f"--replay_batches {directory}: no {batch_path(Path(directory), missing[0])} "
            f"(--steps {steps}; a run with --dump_batches True writes them)"
        )
    groups = Counter(sample.ticket.group for sample in read(batch_path(Path(directory), 1)))
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
        self.progress: dict = {}  # nothing is admitted

    def get_batch(self, timeout: float) -> list[Sample]:
        return read(batch_path(self.directory, self.version + 1))

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
