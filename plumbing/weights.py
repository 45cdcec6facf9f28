"""The way of the weights, from the trainer ranks to the rollout workers: both ends of a publish.

    trainer ranks                              every tensor-parallel worker of every engine
    ─────────────                              ────────────────────────────────────────────
    Sender.send: gather a bucket on all ranks,
    rank 0 broadcasts it                  ───▶ receive: names and tensors, bucket by bucket

Both ends cut the same `Manifest` into the same buckets. The process group is apart from the
trainer's own, and made of plain torch parts: under torchrun every `tcp://` rendezvous would make
rank 0 a client of torchrun's store.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plumbing.processes import Patience, RolloutError
from plumbing.ranks import Ranks, whole


@dataclass
class Manifest:
    """Names and shapes of all parameters, in the order in which their bytes travel."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    bucket_bytes: int

    def buckets(self) -> Iterator[list[int]]:
        return cut_buckets(self.shapes, getattr(torch, self.dtype).itemsize, self.bucket_bytes)


@dataclass
class Wire:
    """Where trainer rank 0 waits, and which ranks of the group an engine's workers are."""

    host: str
    port: int
    first_rank: int  # the rank of tensor-parallel worker 0; rank 0 of the group is the trainer
    world_size: int
    backend: str  # "nccl" or "gloo"
    timeout: float  # seconds

    def join(self, rank: int, store: dist.TCPStore | None = None):
        """Take a place in the group; rank 0 brings the store that the others find it by. Returns
        when all have: a first broadcast connects them (NCCL's constructor connects nothing)."""
        limit = timedelta(seconds=self.timeout)
        store = store or dist.TCPStore(self.host, self.port, self.world_size, False, limit)
        store = dist.PrefixStore("weights", store)
        if self.backend == "gloo":
            group, device = dist.ProcessGroupGloo(store, rank, self.world_size, limit), "cpu"
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            group = dist.ProcessGroupNCCL(store, rank, self.world_size, options)
            device = torch.device("cuda", torch.cuda.current_device())
        group.broadcast(torch.zeros(1, device=device), 0).wait()
        return group


def cut_buckets(shapes: list, itemsize: int, bucket_bytes: int) -> Iterator[list[int]]:
    """Cut parameters, in order, into buckets of at most `bucket_bytes` (a larger one goes alone).

    >>> list(cut_buckets([(4,), (2, 2), (9,), (1,)], itemsize=1, bucket_bytes=8))
    [[0, 1], [2], [3]]
    """
    bucket, used = [], 0
    for i, shape in enumerate(shapes):
        size = torch.Size(shape).numel() * itemsize
        if bucket and used + size > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(i)
        used += size
    if bucket:
        yield bucket


def open_store(world_size: int, timeout: float, host: str) -> dist.TCPStore:
    """The trainer's end of the rendezvous, on a port that the system has already bound for us (a
    port that is probed first and bound later can be taken by another run in between)."""
    listener = socket.create_server((host, 0))
    port, limit = listener.getsockname()[1], timedelta(seconds=timeout)
    return dist.TCPStore(
        host, port, world_size, True, limit, False, master_listen_fd=listener.detach()
    )


def checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits, as whole numbers: the same in any order, however it is cut or
    fused with others, and zeros that pad it add nothing."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(bits).sum(dtype=torch.int64))


class Broken(Exception):
    """A receiver was lost while weights were on the way to it."""


class Proof:
    """Holds every publish against what was sent, before anything is decoded under it.

    *Sums of bits*, at any learning rate and precision: a worker reports two for each of its
    tensor-parallel ranks: of the weights that came, and of those that its engine holds once they
    are loaded (None where it keeps them in a form of its own). The second also sees a tensor that
    came and was not loaded. It counts only if it fits at the first publish: some models have
    parameters that are not published.

    *The probe*, for what a sum cannot see (two tensors swapped, a stale copy): trainer and engine
    score the same tokens. In float32 they agree to 1e-3; in less precision the first publish says
    what to expect.
    """

    def __init__(self, dtype: str):
        self.dtype = dtype  # of the weights that workers are sent
        self.own: bool | None = None  # whether the engines' own sums can be held to
        self.mismatches: dict[int, tuple[float, float]] = {}  # of each version's probe: max, mean

    def check(self, update) -> None:
        """Raise RolloutError for a `rollout.Update` that is not what the trainer holds."""
        self.check_sums(update.version, update.sent, update.arrived)
        gaps = np.abs(np.stack([p - update.reference for p in update.loaded.values()]))
        worst = float(gaps.max())
        self.mismatches[update.version] = worst, float(gaps.mean())
        first, _ = next(iter(self.mismatches.values()))
        limit = 1e-3 if self.dtype == "float32" else min(1.0, 10 * max(first, 1e-6))
        if not worst <= limit:  # also true of NaN
            raise RolloutError(
                f"trainer and engine disagree after the publish of version {update.version}: "
                f"|logprob difference| up to {worst:.2g}, allowed {limit:.2g}"
            )

    def check_sums(self, version: int, sent: int, arrived: dict[int, list[tuple]]) -> None:
        """Raise RolloutError, with the worker's number, for weights that are not what was sent."""
        sums = [(worker, *pair) for worker, ranks in arrived.items() for pair in ranks]
        if self.own is None:
            self.own = all(loaded == sent for _, _, loaded in sums)
        for worker, came, loaded in sums:
            if came != sent or (self.own and loaded != sent):
                what = "arrived" if came != sent else "were loaded"
                raise RolloutError(
                    f"not all weights of version {version} {what} at rollout process {worker}"
                )


def join_watched(wire: Wire, store: dist.TCPStore, alive: Callable[[], None]):
    """Join as rank 0. What connects blocks where nothing else is heard, so it has a thread of its
    own: Ctrl-C and a worker that is gone, which `alive()` raises, end the wait."""
    joined, failed = [], []

    def join() -> None:
        try:
            joined.append(wire.join(0, store))
        except RuntimeError as error:  # torch's own, of many kinds: given to the caller
            failed.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    patience = Patience()
    while thread.is_alive():
        alive()
        patience.say(lambda: f"for {wire.world_size - 1} receivers of weights to join")
        thread.join(0.05)
    if failed:
        raise failed[0]
    return joined[0]


def receive(group, manifest: Manifest, wire: torch.device, device: torch.device) -> Iterator[list]:
    """The other end of `Sender.send`: (name, tensor) of the parameters of each bucket. They come
    in on `wire`, and are given out on `device`."""
    dtype = getattr(torch, manifest.dtype)
    for bucket in manifest.buckets():
        sizes = [torch.Size(manifest.shapes[i]).numel() for i in bucket]
        flat = torch.empty(sum(sizes), dtype=dtype, device=wire)
        group.broadcast(flat, 0).wait()
        parts = zip(bucket, flat.to(device).split(sizes), strict=True)
        yield [(manifest.names[i], part.view(manifest.shapes[i])) for i, part in parts]


class Sender:
    """The trainer's end. Every rank has one, since sharded parameters are gathered on all."""

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        dtype: torch.dtype,
        bucket_mb: int,
        ranks_a_worker: int = 1,
        timeout: float = 600.0,
    ):
        self.ranks, self.dtype, self.group = ranks, dtype, None
        self.ranks_a_worker, self.timeout = ranks_a_worker, timeout
        self.checksum = 0  # of what was sent last, on trainer rank 0
        # Tied embeddings are one parameter and appear once; the engine ties its own.
        named = dict(model.named_parameters())
        self.parameters = list(named.values())
        shapes = [list(p.shape) for p in self.parameters]
        wire_dtype = str(dtype).removeprefix("torch.")
        self.manifest = Manifest(list(named), shapes, wire_dtype, bucket_mb * 2**20)

    def connect(self, publisher, members: list[int]) -> None:
        """Have trainer rank 0 and every rollout rank of the `members`, on every node, in one
        process group: the one that there is, or a new one if a worker was replaced. `publisher`:
        this node's (`publish.Publisher`); None, except on local rank 0. Raises Broken if a member
        is lost meanwhile."""
        ranks, each = self.ranks, self.ranks_a_worker
        store = wire = workers = None
        if publisher:
            workers = publisher.workers
            lives = [(worker, workers.lives[worker]) for worker in members]
            known, group = workers.weight_group
            self.group = group if members else None
        world = 1 + ranks.nodes * len(members) * each
        if ranks.rank == 0 and members and known != lives:
            store = open_store(world, self.timeout, ranks.address)
            wire = Wire(ranks.address, store.port, 1, world, ranks.wire, self.timeout)
        wire = ranks.from_rank_zero(wire)
        if wire and workers:
            first = 1 + ranks.node * len(members) * each
            places = range(first, first + len(members) * each, each)
            publisher.join([replace(wire, first_rank=place) for place in places])
            if store:
                self.group = join_watched(wire, store, publisher.alive)
            publisher.wait_joined()
            workers.weight_group = lives, self.group

    def send(self, publisher, members: list[int]) -> bool:
        """Broadcast all parameters to the members. False, on every rank, if one of them was lost
        meanwhile, or if the run is about to end: whoever asks the publisher next learns why."""
        arrived = True
        try:
            self.connect(publisher, members)
            if publisher:
                publisher.receive()
        except Broken:
            self.group, arrived = None, False
        except RolloutError as error:
            publisher.workers.fail(error)
            self.group, arrived = None, False
        arrived &= self.broadcast(publisher and publisher.alive)
        return self.ranks.from_rank_zero(arrived)

    def broadcast(self, alive: Callable[..., None] | None) -> bool:
        """Gather a bucket on all trainer ranks, then broadcast it, then the next: two communicators
        are never in flight together. `alive()` raises Broken when a receiver is lost; the rest is
        gathered all the same, since other ranks do not know. Returns whether all of it was sent."""
        self.checksum, sent = 0, True
        for bucket in self.manifest.buckets():
            parts = []
            for i in bucket:
                part = whole(self.parameters[i])
                if self.ranks.rank == 0:
                    parts.append(part.to(self.dtype).flatten())
            if self.group:
                wire = "cpu" if self.ranks.wire == "gloo" else self.ranks.device
                flat = torch.cat(parts).to(wire)
                try:
                    self._broadcast(flat, alive)
                except (Broken, RolloutError):
                    if self.ranks.wire == "nccl":
                        self.group.abort()  # else its kernel waits on the GPU for the one that died
                    self.group, sent = None, False
                self.checksum += checksum(flat)
        return sent

    def _broadcast(self, flat: Tensor, alive: Callable[..., None]) -> None:
        """Send one bucket; polled, so that Ctrl-C and a worker that is gone are noticed in time."""
        work, patience = self.group.broadcast(flat, 0), Patience()
        while not work.is_completed():
            alive()
            patience.say(lambda: "for a bucket of weights to arrive")
            time.sleep(1e-4)
        try:
            work.wait()
        except RuntimeError:  # a receiver is gone: `alive` is about to know which, and why
            alive(within=6.0)
            raise
