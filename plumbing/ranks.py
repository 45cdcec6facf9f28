"""The trainer ranks: where this one stands, and what it says to the others.

The local rank 0 of each node has the rollout processes and the buffer of that node; only the
collectives below cross nodes. With one rank on a CPU none of this does anything.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from plumbing.nodes import Watch, choose_interface


class Ranks:
    """This process among the trainer ranks, and the devices of its node."""

    def __init__(self, rollout_workers: int = 1, tensor_parallel: int = 1):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.nodes, self.node = self.world // self.local_world, self.rank // self.local_world
        gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", self.local_rank % gpus) if gpus else torch.device("cpu")
        self.worker_devices, self.wire, self.gpu_share = place_workers(
            gpus, self.local_world, rollout_workers, tensor_parallel
        )
        if self.nodes == 1 and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
        self.address = choose_interface() if self.nodes > 1 else "127.0.0.1"
        if self.world > 1 or gpus:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpus else "gloo",
                store=None if self.world > 1 else dist.HashStore(),
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(minutes=60),  # other ranks wait in here while a batch is made
            )
        # Objects (batches) travel within a node only.
        self.node_group = None
        for node in range(self.nodes if self.world > 1 else 0):
            first = node * self.local_world
            group = dist.new_group(list(range(first, first + self.local_world)), backend="gloo")
            self.node_group = group if node == self.node else self.node_group
        self.watch = self._watch() if self.nodes > 1 else None

    def _watch(self) -> Watch:
        """Notice when another node is lost, from now on."""
        names = [None] * self.world
        mine = f"trainer rank {self.rank} (node {self.node}, {self.address})"
        dist.all_gather_object(names, mine)
        watch = Watch(self.rank, names)
        port = watch.listen(self.address) if self.rank == 0 else None
        watch.start(*self.from_rank_zero((self.address, port)))
        return watch

    def leave(self, why: str = "") -> None:
        """This process is about to end: the other nodes are told, with the cause of a failure."""
        if self.watch:
            self.watch.leave(why)

    def sum(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: float, op) -> float:
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return float(tensor)

    def from_rank_zero(self, value):
        """The value that rank 0 has, on every rank of every node."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, 0)
        return box[0]

    def from_local_rank_zero(self, value):
        """The value that local rank 0 has, on every rank of this node."""
        box = [value]
        if self.local_world > 1:
            dist.broadcast_object_list(box, self.node * self.local_world, group=self.node_group)
        return box[0]

    def gather_nodes(self, value) -> list:
        """What local rank 0 of each node has, in the order of nodes, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values[:: self.local_world]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def shard(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """On this rank's device; with several ranks, or on a GPU, under FSDP2: masters in float32,
        forward and backward in `dtype`."""
        module = module.to(self.device)
        if self.world > 1 or self.device.type == "cuda":
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for part in module.modules():
                if isinstance(part, nn.ModuleList):  # the decoder layers
                    for layer in part:
                        fully_shard(layer, mp_policy=mixed)
            fully_shard(module, mp_policy=mixed)
        return module


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, in one piece on every rank (a collective, if it is)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- where everything runs ----------------------------------------------------------------------


def place_workers(gpus: int, ranks: int, workers: int, tensor_parallel: int):
    """Where this node's workers run: CUDA_VISIBLE_DEVICES of each (None: no GPU), the backend that
    carries weights to them, and the share of a GPU's memory that an engine may take.

    Trainer rank r has GPU r; workers get the ones after, if there are enough of them. Otherwise
    both share: then weights go over gloo, since NCCL refuses two ranks on one GPU.
    """
    if gpus == 0:
        return [None] * workers, "gloo", 0.0
    if tensor_parallel > gpus:
        raise ValueError(f"--tensor_parallel {tensor_parallel}, but this machine has {gpus} GPUs")
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = names if len(names) == gpus else [str(i) for i in range(gpus)]
    apart = gpus >= ranks + workers * tensor_parallel
    first = ranks if apart else 0
    places = [
        ",".join(names[(first + w * tensor_parallel + i) % gpus] for i in range(tensor_parallel))
        for w in range(workers)
    ]
    share = 0.9 if apart else 0.45 / -(-workers * tensor_parallel // gpus)
    return places, "nccl" if apart else "gloo", share


def cpu_threads(alone: bool, ranks: int, workers: int) -> tuple[int, int]:
    """Threads of a trainer rank and of a worker. Phases that have the machine to themselves use all
    of it; otherwise it is a core a process."""
    if not alone:
        return 1, 1
    return max(1, cores() // ranks), max(1, cores() // workers)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
