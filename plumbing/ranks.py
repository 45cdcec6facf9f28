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

from plumbing.devices import default_workers, plan, usable_gpus
from plumbing.nodes import Watch, choose_interface


class Ranks:
    """This process among the trainer ranks, and the devices of its node."""

    def __init__(
        self, rollout_workers: int = 1, tensor_parallel: int = 1, batch_timeout: float = 0.0
    ):
        """`rollout_workers` 0: as many as there is room for. In a collective other ranks wait for
        this node's next batch, so they have more patience than `batch_timeout` (seconds)."""
        patience = timedelta(seconds=max(3600.0, 2 * batch_timeout))
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.nodes, self.node = self.world // self.local_world, self.rank // self.local_world
        gpus = usable_gpus()
        workers = rollout_workers or default_workers(gpus, self.local_world, tensor_parallel)
        self.plan = plan(gpus, self.local_world, workers, tensor_parallel)
        self.wire = self.plan.wire
        self.device = torch.device("cuda", self.local_rank) if gpus else torch.device("cpu")
        if gpus:
            # FSDP2 shards onto the current device, whatever a module is on: without this line
            # all ranks would meet on GPU 0.
            torch.cuda.set_device(self.device)
        if self.nodes == 1 and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
        self.address = choose_interface() if self.nodes > 1 else "127.0.0.1"
        if (self.world > 1 or gpus) and not dist.is_initialized():  # else an earlier run's
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpus else "gloo",
                store=None if self.world > 1 else dist.HashStore(),
                rank=self.rank,
                world_size=self.world,
                timeout=patience,
            )
        # Objects (batches) travel within a node only.
        self.node_group = None
        for node in range(self.nodes if self.world > 1 else 0):
            first = node * self.local_world
            members = list(range(first, first + self.local_world))
            group = dist.new_group(members, backend="gloo", timeout=patience)
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

    def end(self) -> None:
        """After a run that ended well: NCCL warns of groups that are left."""
        if dist.is_initialized():
            dist.destroy_process_group()

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


# -- cores ---------------------------------------------------------------------------------------


def cpu_threads(alone: bool, ranks: int, workers: int) -> tuple[int, int]:
    """Threads of a trainer rank and of a worker. Phases that have the machine to themselves use all
    of it; otherwise it is a core a process."""
    if not alone:
        return 1, 1
    return max(1, cores() // ranks), max(1, cores() // workers)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
