"""The rollout process: an event loop that steps vLLM, and one coroutine an episode.

Messages come in over a pipe from the owner (`rollout.Rollouts`), finished samples go back over it.
Between two engine steps the loop lets episodes go on and looks whether a weight update is due:

    tasks ─▶ run_episode: prompt ─▶ engine.generate ─▶ env or reward ─▶ ... ─▶ Sample ─▶ report
    update ─▶ pause ─▶ receive and load ─▶ probe ─▶ wait for the commit ─▶ go on decoding

Environments and rewards run beside all that, in threads, also during an update.
"""

import asyncio
import contextlib
import ctypes
import gc
import heapq
import itertools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch.multiprocessing as mp
from tqdm import tqdm

from buffer import RolloutTask, Sample
from envs import EnvConfig, make_task
from episode import EnvCalls, Episode, Limits, Unwanted, run_episode, run_lockstep
from report.timeline import spans

if TYPE_CHECKING:
    from rollout import RolloutConfig


@dataclass
class WorkerSpec:
    """All that a rollout process is told at its start (it is pickled: plain values only)."""

    rank: int
    model: str
    rollout: "RolloutConfig"
    env: EnvConfig
    seed: int
    limits: Limits
    dtype: str
    prefix_caching: bool
    gpu_share: float  # of a GPU's memory, for this worker's engine

    @property
    def threads(self) -> int:
        """For blocking environments and rewards: as many as there may be episodes, and some for
        those that hang. They are started when they are needed."""
        return 2 * max(self.rollout.tasks_per_worker, 4 * self.rollout.max_num_seqs)

    def limits_of(self, task: RolloutTask) -> Limits:
        return self.limits._replace(max_staleness=math.inf) if task.eval else self.limits


class Worker:
    """The event loop of a rollout process: messages in, engine steps, finished samples out."""

    def __init__(self, conn: Connection, spec: WorkerSpec):
        from transformers import AutoTokenizer

        from plumbing.engine import Engine  # vLLM: ten seconds, and in this process only

        self.conn, self.spec = conn, spec
        self.engine = Engine(spec)
        self.env = make_task(spec.env, spec.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(spec.model)
        self.calls = EnvCalls(spec.env, spec.threads)
        self.episodes: dict[RolloutTask, tuple[Episode, asyncio.Task]] = {}
        self.clear_results()
        self.new_lanes()
        self.update = None  # a weight update that is waiting for its turn
        self.stopping = False
        self.sent_at = time.monotonic()

    def new_lanes(self) -> None:
        """Rows of the timeline, one an episode in progress: the lowest that is free."""
        self.lanes, self.free_lanes = itertools.count(1), []

    def clear_results(self) -> None:
        """What there is to report, from now on."""
        self.finished: list[Sample] = []
        self.failed: list[tuple[RolloutTask, str]] = []
        self.too_old: list[RolloutTask] = []
        self.counts: Counter[str] = Counter()  # seconds by kind, tokens, ..., since the last report

    def on_message(self, kind: str, *args) -> None:
        if kind == "tasks":
            for task in args[0]:
                episode = self.open(task)
                self.start(self.run(episode), [episode])
        elif kind == "lockstep":
            episodes = [self.open(task) for task in args[0]]
            self.start(self.run_naive(episodes), episodes)
        elif kind == "cancel":
            for task in args[0]:
                self.cancel(task)
        elif kind == "join":
            self.engine.core.collective_rpc("init_weight_transfer_engine", args=args)
            self.conn.send(("joined",))
        elif kind == "update":
            self.update = args
            if self.spec.rollout.on_update == "drain":
                self.engine.gate.clear()
        elif kind == "commit":
            self.commit(*args)
        elif kind == "begin":
            self.begin(*args)
        elif kind == "stop":
            self.stopping = True
        self.wake.set()

    def begin(self, spec: WorkerSpec) -> None:
        """Another run with this engine: drop what is in progress, and hold no version."""
        for _, running in self.episodes.values():
            running.cancel()
        if (spec.env, spec.seed) != (self.spec.env, self.spec.seed):
            self.env.close()
            self.env = make_task(spec.env, spec.seed)
            self.calls.timeout = spec.env.env_timeout
        self.spec, self.engine.version = spec, -1
        self.engine.temperature = spec.rollout.temperature
        self.clear_results()
        spans.clear()
        self.conn.send(("begun",))

    def read_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own, so that the owner's sends never wait for an engine step."""
        while True:
            try:
                message = self.conn.recv()
            except (EOFError, ConnectionResetError):
                os.killpg(0, signal.SIGKILL)  # the trainer is gone: leave nothing behind
            loop.call_soon_threadsafe(self.take, *message)

    def take(self, *message) -> None:
        """A message that cannot be dealt with ends the run: the owner would wait for an answer."""
        try:
            self.on_message(*message)
        except Exception:
            self.conn.send(("fatal", traceback.format_exc()))
            os.killpg(0, signal.SIGKILL)

    def open(self, task: RolloutTask) -> Episode:
        limits = self.spec.limits_of(task)
        episode = Episode(task, self.env, self.engine, self.tokenizer, self.calls, limits)
        episode.lane = heapq.heappop(self.free_lanes) if self.free_lanes else next(self.lanes)
        return episode

    async def run(self, episode: Episode) -> None:
        """An episode to its end, whatever that is."""
        try:
            sample = await run_episode(episode)
            self.finished.append(sample)  # a new list by now: looked up after the await
        except Unwanted:
            self.too_old.append(episode.task)
        except Exception:  # of whatever kind: the owner counts it and decides
            self.failed.append((episode.task, traceback.format_exc()))

    async def run_naive(self, episodes: list[Episode]) -> None:
        """All of them in step, for comparison (`mechanisms.py`)."""
        try:
            samples = await run_lockstep(episodes)
            self.finished.extend(samples)
        except Exception:
            details = traceback.format_exc()
            self.failed.extend((episode.task, details) for episode in episodes)

    def start(self, work, episodes: list[Episode]) -> None:
        """Run it, and forget the episodes when it ends: also if it is cancelled before it began."""
        running = asyncio.create_task(work)
        self.episodes |= {episode.task: (episode, running) for episode in episodes}

        def ended(_) -> None:
            for episode in episodes:
                episode.close()
                heapq.heappush(self.free_lanes, episode.lane)
                self.episodes.pop(episode.task, None)
            self.wake.set()

        running.add_done_callback(ended)

    def cancel(self, task: RolloutTask) -> None:
        """Stop an episode at once, in the engine and in its environment; count what it had made."""
        if task in self.episodes:
            episode, running = self.episodes[task]
            running.cancel()
            self.counts.update(lost_samples=1, lost_tokens=episode.tokens)

    def commit(self, version: int) -> None:
        """Decode under these weights from now on; stop what they have made too old."""
        self.engine.version = version
        self.engine.gate.set()
        for task, (episode, _) in self.episodes.items():
            if episode.too_old(version):
                self.cancel(task)
                self.too_old.append(task)

    async def serve(self) -> None:
        """Step the engine while there is something to step, wait while there is not."""
        self.wake = self.engine.wake
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.read_messages, args=(loop,), daemon=True).start()
        self.conn.send(("ready",))
        while not self.stopping:
            with spans("episodes"):
                await asyncio.sleep(0)  # let messages in and episodes go on
                self.report()
            draining = self.spec.rollout.on_update == "drain" and self.engine.turns
            if self.update and not draining:
                await self.load_update(*self.update)
            elif self.engine.turns:
                with spans("decode", steps=1) as args:
                    args["tokens"] = self.engine.step()
            else:
                with spans("idle"):
                    await self.sleep()

    async def sleep(self) -> None:
        """Until a message comes or an episode goes on; now and then to report."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), 2.0)
        self.wake.clear()

    async def load_update(self, version: int, bucket_info: dict, probe_ids: list[int]) -> None:
        """Pause, load, probe; then decode nothing until every worker has the new weights.
        Environments and rewards go on throughout."""
        self.update = None
        if version < self.engine.version:
            raise ValueError(f"asked to load version {version}, holds {self.engine.version}")
        self.conn.send(("paused", version))
        with spans("load"):
            restart = self.spec.rollout.on_update == "restart"
            self.engine.load_weights(bucket_info, restart)
        with spans("probe"):
            self.conn.send(("loaded", version, self.engine.probe(probe_ids)))
        with spans("commit"):
            while self.engine.version != version and not self.stopping:
                await self.sleep()
                self.report()

    def report(self) -> None:
        """Send what has finished since the last engine step, or a sign of life now and then."""
        now = time.monotonic()
        if self.finished or self.failed or self.too_old or now - self.sent_at > 2.0:
            self.counts += self.engine.take_counts() + spans.seconds
            results = self.finished, self.failed, self.too_old, dict(self.counts)
            self.conn.send(("results", *results, spans.take()))
            spans.seconds.clear()
            self.clear_results()
            self.sent_at = now


def worker_main(conn: Connection, spec: WorkerSpec) -> None:
    """Entry point of a rollout process."""
    os.setpgid(0, 0)  # a group of its own, to be killed as one; Ctrl-C is for the trainer alone
    die_with_parent(mp.parent_process().pid)
    tqdm.set_lock(threading.RLock())  # its default, shared between processes, outlives a kill
    try:
        worker = Worker(conn, spec)
        gc.freeze()  # what exists by now stays: the collector need not walk it again and again
        asyncio.run(worker.serve())
    except Exception:  # the process ends here: hand the traceback to the trainer first
        conn.send(("fatal", traceback.format_exc()))
        conn.close()
        os.killpg(0, signal.SIGKILL)
    worker.env.close()
    os._exit(0)  # vLLM's and torch's exit handlers have nothing left to save


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the one that started it dies, however it dies."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before we asked
