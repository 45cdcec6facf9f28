"""Who sits where on a node: a plan of devices, and of cores where there are none.

    plan(gpus=4, ranks=1, workers=3, tensor_parallel=1)     trainer on GPU 0, engines on 1, 2 and 3
"""

import os
from collections import Counter
from dataclasses import dataclass

import torch

ENGINE_SHARE = 0.9  # of a GPU's memory, for an engine that has it alone; with a trainer, half


def usable_gpus() -> int:
    """How many GPUs this process can use. The driver may know of some that the runtime cannot use:
    both are asked, here and nowhere else."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Plan:
    """The devices of one node."""

    gpus: int
    trainers: tuple[int, ...]  # the GPU of each trainer rank; empty without GPUs
    workers: tuple[tuple[int, ...], ...]  # of each worker, a GPU for each tensor-parallel rank
    shares: tuple[float, ...]  # of a GPU's memory, for each worker's engine
    wire: str  # what carries weights to the workers: "nccl" or "gloo"

    def visible(self) -> list[str | None]:
        """CUDA_VISIBLE_DEVICES of each worker, in the caller's own names; None: no GPU."""
        if not self.gpus:
            return [None] * len(self.workers)
        names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = names if len(names) == self.gpus else [str(i) for i in range(self.gpus)]
        return [",".join(names[gpu] for gpu in mine) for mine in self.workers]

    def __str__(self) -> str:
        if not self.gpus:
            return f"no GPU; weights over {self.wire}"
        engines = ", ".join(
            f"worker {worker} on {'+'.join(map(str, mine))} ({share:.0%} of its memory)"
            for worker, (mine, share) in enumerate(zip(self.workers, self.shares, strict=True))
        )
        trainers = ", ".join(map(str, self.trainers))
        return f"{self.gpus} GPUs: trainer on {trainers}; {engines}; weights over {self.wire}"

    def notes(self) -> list[str]:
        """What a careful colleague would say of it."""
        taken = Counter(self.trainers) + Counter(gpu for mine in self.workers for gpu in mine)
        free = [gpu for gpu in range(self.gpus) if not taken[gpu]]
        if not free:
            return []
        names = ", ".join(map(str, free))
        return [f"GPU {names}: not used; --rollout_workers 0 starts a worker on each that is free"]


def default_workers(gpus: int, ranks: int, tensor_parallel: int) -> int:
    """As many workers as there is room for on the GPUs that have no trainer; at least one."""
    return max(1, (gpus - ranks) // tensor_parallel)


def plan(gpus: int, ranks: int, workers: int, tensor_parallel: int) -> Plan:
    """Trainer rank r has GPU r. Each worker takes the GPUs that have the fewest processes so far,
    so that free ones come first. Where an engine is not alone on its GPU, weights go over gloo:
    NCCL refuses two ranks on one GPU. Raises ValueError for more ranks than GPUs, of either kind.
    """
    if not gpus:
        return Plan(0, (), ((),) * workers, (0.0,) * workers, "gloo")
    if ranks > gpus:
        raise ValueError(
            f"{ranks} trainer ranks (NPROC), but this machine has {gpus} GPUs: each needs its own"
        )
    if tensor_parallel > gpus:
        raise ValueError(f"--tensor_parallel {tensor_parallel}, but this machine has {gpus} GPUs")
    load = Counter(range(ranks))
    engines: Counter[int] = Counter()
    places = []
    for _ in range(workers):
        mine = sorted(sorted(range(gpus), key=lambda gpu: (load[gpu], gpu))[:tensor_parallel])
        load.update(mine)
        engines.update(mine)
        places.append(tuple(mine))

    def share(gpu: int) -> float:
        return (ENGINE_SHARE / 2 if gpu < ranks else ENGINE_SHARE) / engines[gpu]

    shares = tuple(min(map(share, mine)) for mine in places)
    alone = max(load.values()) == 1
    return Plan(gpus, tuple(range(ranks)), tuple(places), shares, "nccl" if alone else "gloo")
