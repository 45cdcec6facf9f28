"""The owner of the rollout processes: starts them, feeds them, publishes weights to them.

    owner (a thread of local rank 0)                     worker (a process, worker.py)
    ────────────────────────────────                     ─────────────────────────────────
    buffer.admit() ─▶ queue ─ next task to a free slot ─▶ episode coroutine ⇄ engine.step()
    buffer.add()   ◀──────────── finished samples ─────── reward, as each sample ends
    publish: "update" ─▶ "paused" ─▶ broadcast ─▶ load, probe ─▶ "loaded" ─▶ "commit"

*Queue scheduling*: tasks wait in one deque at the owner, and a worker is sent the next one when it
has a free slot; every one of the n samples of a group is its own task (*prompt replication*). Each
worker has its own pipe, so no lock is shared and a killed worker leaves nothing locked.

*Pause-update-resume*: a weight update happens between two engine steps. Running sequences keep
their tokens; their KV cache is recomputed under the new weights and decoding goes on, so a sample
may span versions, and each token carries the version and the log-probability that made it.

Paper: ROLL Flash (arXiv 2510.11345): LLMProxy, queue scheduling, prompt replication. Departure: the
paper aborts and re-submits running requests at an update, here the engine keeps them.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from buffer import RolloutTask, Sample, SampleBuffer
from report.timeline import STEP_LIMIT, Span, spans
from worker import WorkerSpec, worker_main


@dataclass
class RolloutConfig:
    rollout_workers: int = field(default=1, metadata={"help": "vLLM processes a node"})
    tensor_parallel: int = field(default=1, metadata={"help": "GPUs a rollout process"})
    max_num_seqs: int = field(default=256, metadata={"help": "sequences a worker decodes at once"})
    tasks_per_worker: int = field(
        default=0,
        metadata={
            "help": "episodes a worker has in hand; 0: an eighth more than max_num_seqs, and up to "
            "four times as many as long as its engine has free places while tasks are waiting"
        },
    )
    max_tokens: int = field(
        default=0, metadata={"help": "tokens of a response or turn; 0: the task's default"}
    )
    max_turns: int = field(
        default=0, metadata={"help": "turns of an episode; 0: the environment's default"}
    )
    temperature: float = field(default=1.0, metadata={"help": "sampling temperature in training"})
    on_update: str = field(
        default="resume",
        metadata={
            "help": "what a weight update does to running sequences: resume (keep the tokens, "
            "recompute the KV cache), restart (that turn again), drain (finish them first)",
            "choices": ["resume", "restart", "drain"],
        },
    )
    worker_timeout: float = field(
        default=45.0, metadata={"help": "seconds without a word from a worker before the run ends"}
    )
    start_timeout: float = field(
        default=600.0, metadata={"help": "seconds that the start of a worker may take"}
    )

    def __post_init__(self):
        if self.rollout_workers < 1 or self.tensor_parallel < 1 or self.max_num_seqs < 1:
            raise ValueError("--rollout_workers, --tensor_parallel, --max_num_seqs: at least 1")
        for name in ("max_tokens", "max_turns", "tasks_per_worker"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be 0 or more (got {getattr(self, name)})")
        for name in ("temperature", "worker_timeout", "start_timeout"):
            if not 0 < getattr(self, name) < math.inf:  # also true of NaN
                raise ValueError(f"--{name} must be above 0 (got {getattr(self, name)})")
        if self.on_update not in ("resume", "restart", "drain"):
            raise ValueError(f"--on_update is resume, restart or drain (got {self.on_update})")


class RolloutError(RuntimeError):
    """The rollout side failed. `details` is the child's traceback, if there is one."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


def cause(details: str) -> str:
    """The exception of a traceback, in one line."""
    return [line for line in details.splitlines() if line[:1].strip()][-1]


# -- weights: what both halves of a publish agree on ---------------------------------------------


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


def open_store(world_size: int, timeout: timedelta, host: str) -> dist.TCPStore:
    """The trainer's end of the rendezvous, on a port that the system has already bound for us (a
    port that is probed first and bound later can be taken by another run in between)."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, world_size, True, timeout, False, master_listen_fd=listener.detach()
    )


def join_weight_group(
    host: str, port: int, rank: int, world_size: int, backend: str, timeout: timedelta, store=None
):
    """A process group apart from the trainer's own: rank 0 is trainer rank 0, the others are the
    tensor-parallel workers of all engines. Plain torch parts: under torchrun every `tcp://`
    rendezvous would make rank 0 a client of torchrun's store."""
    store = store or dist.TCPStore(host, port, world_size, False, timeout)
    store = dist.PrefixStore("weights", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


# -- queue scheduling (pure) ---------------------------------------------------------------------


class Dispatcher:
    """Which worker runs which task: one queue, and the emptiest worker takes the next task."""

    message = "tasks"  # what a worker is told to do with them

    def __init__(self, workers: int, places: int, fixed: int = 0):
        """`places`: sequences that a worker's engine decodes at once; `fixed`: tasks that it has
        at a time, if their number is not to be found here."""
        self.queue: deque[RolloutTask] = deque()
        self.held: list[set[RolloutTask]] = [set() for _ in range(workers)]
        self.slots = fixed or places + max(1, places // 8)  # when one ends, the next is there
        self._widest = fixed or 4 * places
        self._ended: set[int] = set()  # groups whose queued tasks are skipped

    def assign(self) -> dict[int, list[RolloutTask]]:
        """Hand queued tasks to free slots; returns the new tasks of each worker."""
        given: dict[int, list[RolloutTask]] = {}
        if not self.queue:
            return given
        taken = [len(held) for held in self.held]
        while self.queue and min(taken) < self.slots:
            worker = taken.index(min(taken))
            task = self.queue.popleft()
            if task.group not in self._ended:
                self.held[worker].add(task)
                taken[worker] += 1
                given.setdefault(worker, []).append(task)
        return given

    def widen(self) -> None:
        """An engine had places to fill while tasks were waiting here: its episodes end too fast, or
        are at their environments. Few tasks at a time balance workers better, so not before."""
        self.slots = min(self._widest, self.slots + max(1, self.slots // 4))

    def cancel(self, group: int) -> dict[int, list[RolloutTask]]:
        """Forget the tasks of a group; returns those that workers still have to stop."""
        self._ended.add(group)  # whoever takes them from the queue looks: no search through it here
        stop = {}
        for worker, held in enumerate(self.held):
            if mine := [task for task in held if task.group == group]:
                held.difference_update(mine)
                stop[worker] = mine
        return stop


# -- where workers go, and their owner -----------------------------------------------------------

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "LOCAL_WORLD", "TORCHELASTIC_")


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


@contextlib.contextmanager
def child_environment(devices: str | None, threads: int):
    """The environment that children start with; this process's own is put back afterwards."""
    saved = dict(os.environ)
    for name in saved:
        if name in TORCHRUN_VARIABLES or name.startswith(TORCHRUN_PREFIXES):
            del os.environ[name]
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    else:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # one helper of vLLM is compiled: 2-20 s a start
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: the step loop is ours
        OMP_NUM_THREADS=str(threads),
        OMP_WAIT_POLICY="PASSIVE",  # spinning threads beside a busy process cost a factor of ten
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL=saved.get("VLLM_LOGGING_LEVEL", "ERROR"),
        VLLM_CPU_KVCACHE_SPACE=saved.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        TOKENIZERS_PARALLELISM="false",
        TQDM_DISABLE="1",  # the engine's own bars and warnings; errors do come through
        PYTHONWARNINGS="ignore",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


@dataclass(eq=False)
class Update:
    """A publish in progress: which workers have paused, and what their probes scored."""

    version: int
    reference: np.ndarray  # the trainer's score of the probe, float [P - 1]
    paused: set[int] = field(default_factory=set)
    loaded: dict[int, np.ndarray] = field(default_factory=dict)


class Rollouts:
    """Starts this node's workers, feeds them from the buffer, and stops them.

    One thread moves results into the buffer and tasks out of it, also during a train step. All
    state is behind one lock; `_changed` tells waiting callers that there is something new.
    """

    def __init__(
        self, spec: WorkerSpec, buffer: SampleBuffer, make_rollout_task, dispatcher=Dispatcher
    ):
        self.spec, self.config, self.buffer = spec, spec.rollout, buffer
        self.make_rollout_task = make_rollout_task  # (admission index, sample) -> RolloutTask
        workers = self.config.rollout_workers
        self.dispatcher = dispatcher(workers, *self._places())
        self.processes: list[mp.Process] = []
        self.pipes: list[Connection] = []
        self.error: RolloutError | None = None
        self.version = -1  # committed on every worker of this node
        self.mismatches: dict[int, tuple[float, float]] = {}  # of each version's probe: max, mean
        self.weight_group = None  # trainer rank 0 keeps its end of it here
        self.counts: Counter[str] = Counter()  # the workers': seconds by kind, tokens, ...
        self.spans: list[deque[Span]] = [deque(maxlen=STEP_LIMIT) for _ in range(workers)]
        self._said: list[set[str]] = [set() for _ in range(workers)]
        self._heard = [time.monotonic()] * workers
        self._update: Update | None = None
        self._evaluating: dict[RolloutTask, Sample | None] = {}
        self._eval_failures: Counter[RolloutTask] = Counter()
        self._changed = threading.Condition()
        self._wake_reader, self._wake_writer = mp.Pipe(duplex=False)
        self._closing = False
        self._thread = threading.Thread(target=self._own, name="rollout owner", daemon=True)
        self._limit = self.config.start_timeout

    def _places(self) -> tuple[int, int]:
        return self.config.max_num_seqs, self.config.tasks_per_worker

    def begin(
        self, spec: WorkerSpec, buffer: SampleBuffer, make_rollout_task, dispatcher=Dispatcher
    ) -> None:
        """Serve another run with the same engines (the model's shape and limits stay): whatever is
        in progress is cancelled, and no version is held until the next publish."""
        self.wait_committed()
        with self._changed:
            self.version, self.mismatches = -1, {}
            self._said = [set() for _ in self.pipes]
            for worker in range(len(self.pipes)):
                self._send(worker, "begin", replace(spec, rank=worker))
        self._await_word("begun", self.config.start_timeout)
        with self._changed:
            self.spec, self.buffer, self.make_rollout_task = spec, buffer, make_rollout_task
            self.config = spec.rollout
            self.dispatcher = dispatcher(len(self.pipes), *self._places())
            self.counts, self._evaluating = Counter(), {}
        self.take_spans()

    def start(self, devices: list[str | None], threads: int) -> None:
        """Spawn the workers and wait until each has its engine."""
        context = mp.get_context("spawn")
        for rank, visible in enumerate(devices):
            mine, theirs = context.Pipe()
            spec = replace(self.spec, rank=rank)
            process = context.Process(
                target=worker_main, args=(theirs, spec), name=f"rollout-{rank}", daemon=False
            )
            # Ctrl-C reaches the whole terminal group; what it means is for this process to say.
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
            with child_environment(visible, threads):
                process.start()
            signal.signal(signal.SIGINT, interrupt)
            theirs.close()  # so that the worker's death reads as the end of the pipe
            self.processes.append(process)
            self.pipes.append(mine)
        self._thread.start()
        self._await_word("ready", self.config.start_timeout)

    def join(self, host: str, port: int, first_rank: int, world_size: int, backend: str, timeout):
        """Have the workers join the weight group; the trainer joins meanwhile, then calls
        `joined`."""
        for worker in range(len(self.pipes)):
            info = {
                "host": host,
                "port": port,
                "first_rank": first_rank + worker * self.config.tensor_parallel,
                "world_size": world_size,
                "backend": backend,
                "timeout": timeout,
            }
            self._send(worker, "join", info)

    def joined(self) -> None:
        self._await_word("joined", self.config.start_timeout)
        self._limit = self.config.worker_timeout

    # -- for the training loops ------------------------------------------------------------------

    def get_batch(self, timeout: float) -> list[Sample]:
        """The next batch; waits for it while workers generate."""
        self._await(self.buffer.batch_ready, self.buffer.pending, timeout)
        with self._changed:
            batch = self.buffer.pop_batch()
            self._stop_closed()
            return batch

    def publish(self, version: int, bucket_info: dict, probe_ids: list[int], reference, send):
        """Pause all workers, call `send` (which broadcasts the buckets), and return. Loading, the
        probe and the commit happen on the owner's thread: see `wait_committed`."""
        with spans("acknowledge"):
            self.wait_committed()
        with self._changed:
            update = self._update = Update(version, np.asarray(reference))
            self.buffer.expect(version)
            self._stop_closed()
        for worker in range(len(self.pipes)):
            self._send(worker, "update", version, bucket_info, probe_ids)
        everyone = len(self.pipes)
        with spans("pause"):
            self._await(
                lambda: len(update.paused) == everyone,
                lambda: f"workers {sorted(set(range(everyone)) - update.paused)} to pause",
                self.config.start_timeout,
            )
        with spans("broadcast"):
            send()

    def wait_committed(self) -> None:
        """Wait until the publish in progress, if there is one, is committed on every worker."""
        self._await(
            lambda: self._update is None,
            lambda: f"workers to load version {self._update.version}",
            self.config.start_timeout,
        )

    def evaluate(self, tasks: Iterable[RolloutTask], timeout: float) -> list[Sample]:
        """Run evaluation tasks past admission and ahead of training tasks, under one version.
        Returns their samples, without those that failed twice."""
        self.wait_committed()
        with self._changed:
            self._evaluating, self._eval_failures = dict.fromkeys(tasks), Counter()
            self.dispatcher.queue.extendleft(reversed(self._evaluating))
            self._feed()
        self._await(
            lambda: None not in self._evaluating.values(),
            lambda: f"{list(self._evaluating.values()).count(None)} evaluation samples",
            timeout,
        )
        return list(self._evaluating.values())

    def raise_error(self, within: float = 0.0) -> None:
        """Raise what the owner's thread found wrong; wait so many seconds for it to find it."""
        deadline = time.monotonic() + within
        with self._changed:
            while self.error is None and time.monotonic() < deadline:
                self._changed.wait(0.1)
            if self.error:
                raise self.error

    def take_counts(self) -> Counter:
        """What the workers have counted since the last call, and what the buffer threw away."""
        with self._changed:
            counts, self.counts = self.counts, Counter()
            lost, self.buffer.lost = self.buffer.lost, Counter()
        counts.update({f"lost_{what}": value for what, value in lost.items()})
        return counts

    def take_spans(self) -> list[list[Span]]:
        """What each worker has done since the last call."""
        with self._changed:
            taken = [list(recorded) for recorded in self.spans]
            for recorded in self.spans:
                recorded.clear()
        return taken

    def progress(self) -> dict:
        """Where a resumed run begins (`SampleBuffer.progress`)."""
        with self._changed:
            return self.buffer.progress()

    def dropped(self) -> Counter[str]:
        """Groups dropped so far, by reason."""
        with self._changed:
            return Counter(self.buffer.dropped_for)

    def take_dropped(self) -> list[tuple[str, int]]:
        """Reason and prompt of each group dropped since the last call."""
        with self._changed:
            new, self.buffer.newly_dropped = self.buffer.newly_dropped, []
            reasons = [self.buffer.dropped[index] for index in new]
        prompts = [self.make_rollout_task(index, 0).prompt for index in new]
        return list(zip(reasons, prompts, strict=True))

    def close(self) -> None:
        """End every worker and its children; also when one no longer answers."""
        self._closing = True
        self._wake_writer.send_bytes(b"x")
        for worker in range(len(self.pipes)):
            self._send(worker, "stop")
        deadline = time.monotonic() + (0.0 if self.error else 3.0)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the worker and all that it started
            process.kill()  # one that was only starting has no group of its own yet
            process.join()

    # -- the owner's thread ----------------------------------------------------------------------

    def _own(self) -> None:
        try:
            while not self._closing:
                for pipe in wait([*self.pipes, self._wake_reader], timeout=1.0):
                    if pipe is self._wake_reader:
                        pipe.recv_bytes()
                    else:
                        self._receive(self.pipes.index(pipe))
                self._check_alive()
        except RolloutError as error:
            self._fail(error)
        except Exception as error:  # a bug in here must reach the trainer, not die in a thread
            self._fail(RolloutError(f"owner thread: {error!r}", traceback.format_exc()))

    def _fail(self, error: RolloutError) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def _receive(self, worker: int) -> None:
        try:
            kind, *args = self.pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            self.processes[worker].join(5)
            code = self.processes[worker].exitcode
            how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit {code}"
            raise RolloutError(f"rollout process {worker} died ({how})") from None
        with self._changed:
            self._heard[worker] = time.monotonic()
            self._said[worker].add(kind)
            if kind == "fatal":
                raise RolloutError(f"rollout process {worker} failed: {cause(args[0])}", args[0])
            if kind == "results":
                self._take_results(worker, *args)
            elif kind == "paused":
                self._update.paused.add(worker)
            elif kind == "loaded":
                self._update.loaded[worker] = np.asarray(args[1])
                if len(self._update.loaded) == len(self.pipes):
                    self._commit()
            self._changed.notify_all()

    def _take_results(
        self, worker: int, samples: list, failures: list, too_old: list, counts, done
    ):
        self.counts.update(counts)
        self.spans[worker].extend(done)
        if counts.get("steps_below_cap") and self.dispatcher.queue:
            self.counts["steps_starved"] += counts["steps_below_cap"]
            self.dispatcher.widen()
        held = self.dispatcher.held[worker]
        for sample in samples:
            held.discard(sample.task)
            if sample.task in self._evaluating:
                self._evaluating[sample.task] = sample
            else:
                self.buffer.add(sample)
        for task, details in failures:
            held.discard(task)
            self._take_failure(task, details)
        for task in too_old:
            held.discard(task)
            self.buffer.drop_if_open(task.group, "stale")
        if self.buffer.hopeless():
            count = self.buffer.dropped_for["filtered"]
            raise RolloutError(
                f"filtering found no signal: {count} groups dropped, --filter_limit "
                f"{self.buffer.config.filter_limit:g} batches' worth of them since the last batch "
                "(the task is too easy or too hard for the model)"
            )
        self._stop_closed()
        self._feed()

    def _stop_closed(self) -> None:
        """Cancel what is still running for groups that have ended: losers of a race, and the rest
        of dropped groups. Under the lock."""
        for group in self.buffer.take_closed():
            for worker, tasks in self.dispatcher.cancel(group).items():
                self._send(worker, "cancel", tasks)

    def _take_failure(self, task: RolloutTask, details: str) -> None:
        last, before = cause(details), self.buffer.dropped_for["failed"]
        self.counts["failed_samples"] += 1
        if task.eval:
            self._take_eval_failure(task, last, details)
            return
        if self.buffer.fail(task):
            self.dispatcher.queue.appendleft(task)
        dropped = self.buffer.dropped_for["failed"]
        if dropped > before and dropped <= 5:  # the first few say enough; metrics have the count
            with tqdm.external_write_mode(file=sys.stderr):
                print(f"dropped prompt {task.prompt}, which failed twice: {last}", file=sys.stderr)
        if dropped > before and self.buffer.too_many_failed():
            raise RolloutError(
                f"{dropped} groups failed, more than half of those that ended; the last, "
                f"prompt {task.prompt}: {last}",
                details,
            )

    def _take_eval_failure(self, task: RolloutTask, last: str, details: str) -> None:
        """Try a held-out prompt once more, then leave it out; too many of those end the run."""
        self._eval_failures[task] += 1
        if self._eval_failures[task] < 2:
            self.dispatcher.queue.appendleft(task)
            return
        self._evaluating.pop(task, None)
        left_out = sum(count > 1 for count in self._eval_failures.values())
        if left_out > len(self._evaluating):
            raise RolloutError(
                f"evaluation: {left_out} held-out prompts failed, more than half; the last, "
                f"prompt {task.prompt}: {last}",
                details,
            )

    def _feed(self) -> None:
        """Admit what the buffer allows, and hand tasks to free slots. Under the lock."""
        if self.version < 0:
            return
        size = self.buffer.config.group_size + self.buffer.config.redundant_samples
        for group in self.buffer.admit():
            self.dispatcher.queue.extend(
                self.make_rollout_task(group.index, i) for i in range(size)
            )
        for worker, tasks in self.dispatcher.assign().items():
            self._send(worker, self.dispatcher.message, tasks)

    def _commit(self) -> None:
        """Every worker has loaded: compare the probes, then let decoding and admission go on."""
        update = self._update
        gaps = np.abs(np.stack([p - update.reference for p in update.loaded.values()]))
        worst = float(gaps.max())
        self.mismatches[update.version] = worst, float(gaps.mean())
        first, _ = next(iter(self.mismatches.values()))
        limit = 1e-3 if self.spec.dtype == "float32" else min(1.0, 10 * max(first, 1e-6))
        if not worst <= limit:  # also true of NaN
            raise RolloutError(
                f"trainer and engine disagree after the publish of version {update.version}: "
                f"|logprob difference| up to {worst:.2g}, allowed {limit:.2g}"
            )
        for worker in range(len(self.pipes)):
            self._send(worker, "commit", update.version)
        self.buffer.commit(update.version)
        self.version, self._update = update.version, None
        self._feed()

    def _check_alive(self) -> None:
        update = self._update
        for worker, heard in enumerate(self._heard):
            if update and worker in update.paused and len(update.paused) < len(self.pipes):
                self._heard[worker] = time.monotonic()  # it waits for the others: let it be silent
                continue
            silent = time.monotonic() - heard
            if silent > self._limit:
                held = len(self.dispatcher.held[worker])
                raise RolloutError(
                    f"rollout process {worker} has not answered for {silent:.0f} s "
                    f"(it holds {held} tasks; --worker_timeout {self.config.worker_timeout:g})"
                )

    # -- helpers ---------------------------------------------------------------------------------

    def _send(self, worker: int, *message) -> None:
        with self._changed, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipes[worker].send(message)  # a dead worker is reported by the owner's thread

    def _await_word(self, word: str, timeout: float) -> None:
        self._await(
            lambda: all(word in said for said in self._said),
            lambda: f"{sum(word not in said for said in self._said)} workers to be {word}",
            timeout,
        )

    def _await(self, condition, what, timeout: float) -> None:
        """Wait for `condition`; raise the rollout side's error, or say `what` did not come."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition():
                if self.error:
                    raise self.error
                if time.monotonic() > deadline:
                    raise RolloutError(f"waited {timeout:.0f} s for {what()}")
                self._changed.wait(1.0)
            if self.error:
                raise self.error
