"""The rollout process: an event loop that steps vLLM, and one coroutine an episode.

Messages come in over a pipe from the owner (`rollout.Rollouts`), finished samples go back over it.
Between two engine steps the loop lets episodes go on and looks whether a weight update is due:

    tasks ─▶ run_episode: prompt ─▶ engine.generate ─▶ reward ─▶ Sample ─▶ report
    update ─▶ pause ─▶ receive and load ─▶ probe ─▶ wait for the commit ─▶ go on decoding

Rewards run beside all that, in threads, also during an update.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import torch.multiprocessing as mp
from tqdm import tqdm

from buffer import RolloutTask, Sample
from envs import EnvConfig, Row, Task, encode_prompt, make_task

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
    max_tokens: int
    max_model_len: int
    dtype: str
    prefix_caching: bool
    gpu_share: float  # of a GPU's memory, for this worker's engine


async def off_loop(pool: ThreadPoolExecutor, timeout: float, what: str, call, *args):
    """Run a blocking call in a thread, so that decoding goes on meanwhile."""
    try:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(pool, call, *args), timeout)
    except TimeoutError:
        raise TimeoutError(f"{what} took longer than {timeout:g} s (--env_timeout)") from None


@lru_cache(maxsize=4096)
def prompt_ids(env: Task, row: Row, tokenizer) -> tuple[int, ...]:
    """A prompt's tokens; the n samples of a group render the chat template once between them."""
    return tuple(encode_prompt(env, row, tokenizer))


async def run_episode(task: RolloutTask, env: Task, engine, tokenizer, pool, max_tokens):
    """One sample from prompt to reward. Token in, token out: the ids that were sampled are the ids
    that are trained on."""
    row = (env.test if task.eval else env.train)[task.prompt]
    prompt = list(prompt_ids(env, row, tokenizer))
    stop_ids = [] if env.stop is None else tokenizer.encode(env.stop, add_special_tokens=False)
    turn = await engine.generate(prompt, max_tokens, task.seed, stop_ids)
    response = tokenizer.decode(turn.ids, skip_special_tokens=True)
    if env.blocking:
        timeout = env.config.env_timeout
        reward = await off_loop(pool, timeout, "the reward", env.reward, row, response)
    else:
        reward = env.reward(row, response)
    before, after = len(prompt), len(turn.ids)
    return Sample(
        task=task,
        ids=np.array(prompt + turn.ids, np.int32),  # [T]
        mask=np.repeat([False, True], [before, after]),
        logprobs=np.array([0.0] * before + turn.logprobs, np.float32),
        versions=np.array([-1] * before + turn.versions, np.int32),
        reward=float(reward),
        truncated=turn.truncated,
    )


class Worker:
    """The event loop of a rollout process: messages in, engine steps, finished samples out."""

    def __init__(self, conn: Connection, spec: WorkerSpec):
        from transformers import AutoTokenizer

        from engine import Engine  # vLLM: ten seconds, and in this process only

        self.conn, self.spec = conn, spec
        self.engine = Engine(spec)
        self.env = make_task(spec.env, spec.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(spec.model)
        self.pool = ThreadPoolExecutor(2 * spec.rollout.max_num_seqs)
        self.episodes: dict[RolloutTask, asyncio.Task] = {}
        self.finished: list[Sample] = []
        self.failed: list[tuple[RolloutTask, str]] = []
        self.seconds: Counter[str] = Counter()  # what the time went to since the last report
        self.update = None  # a weight update that is waiting for its turn
        self.stopping = False
        self.sent_at = time.monotonic()

    def on_message(self, kind: str, *args) -> None:
        if kind == "tasks":
            for task in args[0]:
                self.episodes[task] = asyncio.create_task(self.run(task))
        elif kind == "cancel":
            for task in args[0]:
                if task in self.episodes:
                    self.episodes[task].cancel()
        elif kind == "join":
            self.engine.llm.collective_rpc("init_weight_transfer_engine", args=args)
            self.conn.send(("joined",))
        elif kind == "update":
            self.update = args
            if self.spec.rollout.on_update == "drain":
                self.engine.gate.clear()
        elif kind == "commit":
            self.engine.version = args[0]
            self.engine.gate.set()
        elif kind == "begin":
            self.begin(*args)
        elif kind == "stop":
            self.stopping = True
        self.wake.set()

    def begin(self, spec: WorkerSpec) -> None:
        """Another run with this engine: drop what is in progress, and hold no version."""
        for episode in self.episodes.values():
            episode.cancel()
        if (spec.env, spec.seed) != (self.spec.env, self.spec.seed):
            self.env.close()
            self.env = make_task(spec.env, spec.seed)
        self.spec, self.engine.version = spec, -1
        self.engine.temperature = spec.rollout.temperature
        self.finished, self.failed, self.seconds = [], [], Counter()
        self.conn.send(("begun",))

    def read_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own, so that the owner's sends never wait for an engine step."""
        while True:
            try:
                message = self.conn.recv()
            except (EOFError, ConnectionResetError):
                os.killpg(0, signal.SIGKILL)  # the trainer is gone: leave nothing behind
            loop.call_soon_threadsafe(self.on_message, *message)

    async def run(self, task: RolloutTask) -> None:
        try:
            max_tokens = self.spec.max_tokens
            args = (self.env, self.engine, self.tokenizer, self.pool, max_tokens)
            sample = await run_episode(task, *args)
            self.finished.append(sample)  # a new list by now: looked up after the await
        except Exception:  # of whatever kind: the owner counts it and decides
            self.failed.append((task, traceback.format_exc()))
        finally:
            del self.episodes[task]
            self.wake.set()

    @contextlib.contextmanager
    def timed(self, what: str):
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start

    async def serve(self) -> None:
        """Step the engine while there is something to step, wait while there is not."""
        self.wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.read_messages, args=(loop,), daemon=True).start()
        self.conn.send(("ready",))
        while not self.stopping:
            with self.timed("episodes"):
                await asyncio.sleep(0)  # let messages in and episodes go on
                self.report()
            draining = self.spec.rollout.on_update == "drain" and self.engine.turns
            if self.update and not draining:
                await self.load_update(*self.update)
            elif self.engine.turns:
                with self.timed("decode"):
                    self.engine.step()
            else:
                with self.timed("idle"):
                    await self.sleep()

    async def sleep(self) -> None:
        """Until a message comes or an episode goes on; now and then to report."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), 2.0)
        self.wake.clear()

    async def load_update(self, version: int, bucket_info: dict, probe_ids: list[int]) -> None:
        """Pause, load, probe; then decode nothing until every worker has the new weights. Rewards
        that are being computed in threads go on throughout."""
        self.update = None
        if version < self.engine.version:
            raise ValueError(f"asked to load version {version}, holds {self.engine.version}")
        self.conn.send(("paused", version))
        with self.timed("load"):
            restart = self.spec.rollout.on_update == "restart"
            self.engine.load_weights(bucket_info, restart)
            self.conn.send(("loaded", version, self.engine.probe(probe_ids)))
        with self.timed("commit"):
            while self.engine.version != version and not self.stopping:
                await self.sleep()
                self.report()

    def report(self) -> None:
        """Send what has finished since the last engine step, or a sign of life now and then."""
        now = time.monotonic()
        if self.finished or self.failed or now - self.sent_at > 2.0:
            self.seconds["tokens"], self.engine.tokens = self.engine.tokens, 0
            self.conn.send(("results", self.finished, self.failed, dict(self.seconds)))
            self.finished, self.failed, self.seconds = [], [], Counter()
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
