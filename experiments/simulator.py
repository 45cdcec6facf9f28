"""The real scheduler on a virtual clock: what `sim.py` makes its tables with.

`SampleBuffer`, `Dispatcher`, `Scheduler` (feeding, retries, cancelling, commits), `Worker` (its
episodes and reports), `Episode` and `run_episode` are the program's own, unchanged. What is
simulated: the engine (`SimEngine`), waiting for environments (`SimCalls`), processes and pipes
(`SimProcesses`: calls) and the trainer (a sleep). All of it is on an event loop whose time jumps
from one event to the next. There is an event a turn, never one a token.

A token list holds *counts*: one entry stands for a prompt, a turn or a reply, and its "id" is the
number of tokens that it stands for. So 32,768 tokens take as much memory here as one.
"""

import asyncio
import gc
import heapq
import itertools
import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace

import numpy as np

from buffer import SampleBuffer, Ticket
from envs import Limits, Task, Turn
from experiments.naive import LockstepWorker
from plumbing.settings import Settings, WorkerSpec
from plumbing.spans import spans
from plumbing.weights import Manifest
from rollout import Dispatcher, Scheduler

LANES = 2**20  # of a process in the timeline: worker w has those from (w + 1) * LANES on

# -- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """What one GPU (one rollout worker, one trainer rank) does, and what a step costs besides."""

    decode_s: float  # seconds of a decode step, whatever it decodes (the weights are read once)
    decode_seq_s: float = 0.0  # seconds more for each running sequence
    decode_kv_s: float = 0.0  # seconds more for each token in their KV caches, which are read
    prefill: float = math.inf  # tokens/s of prompts, and of KV caches recomputed at an update
    slots: int = 128  # sequences that decode at once
    train: float = math.inf  # tokens/s of a train step on one GPU
    train_s: float = 0.0  # seconds of a train step that more GPUs do not shorten
    publish_s: float = 0.0  # seconds of a broadcast: trainer and workers wait
    load_s: float = 0.0  # seconds until the workers have loaded it: only they wait
    switch_s: float = 0.0  # sync, GPUs shared: seconds a step to unload one phase and load another


class Load(Task):
    """What is generated: lengths, turns, and how long environments and rewards take."""

    blocking = False

    def __init__(
        self,
        median: float,
        sigma: float,
        longest: int,
        turns: int = 1,
        latency: str = "",
        prompt: int = 512,
        reply: int = 64,
        no_signal: float = 0.0,
        seed: int = 0,
    ):
        """`median`, `longest` [tokens] and `sigma` of a turn's lognormal length; `latency` of a
        step as in --env_latency [s]; tokens of a first `prompt` and of a `reply`; the share of
        groups whose rewards are all equal."""
        # No step takes too long here, so none is refused.
        super().__init__(Settings(env_latency=latency, env_timeout=1e9), seed)
        self.median, self.sigma, self.longest = median, sigma, longest
        self.max_turns, self.prompt, self.reply = turns, prompt, reply
        self.no_signal = no_signal
        self.train = self.test = range(2**31)  # a row is an admission index

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of turns, drawn in advance."""
        rng = np.random.default_rng(self.seed)
        drawn = rng.lognormal(math.log(self.median), self.sigma, 2**17 - 1)
        return np.clip(drawn, 1, self.longest).astype(int).tolist()

    def length(self, seed: int, turn: int) -> int:
        """Tokens of one turn."""
        return self.lengths[(seed * self.max_turns + turn) % len(self.lengths)]

    def make_env(self) -> "SimEnv":
        return SimEnv(self, self.max_turns)


class SimEnv:
    """An environment that plays its number of turns; its texts are numbers of tokens."""

    def __init__(self, load: Load, turns: int):
        self.load, self.turns, self.turn = load, turns, 0

    def reset(self, row: int) -> tuple[str, dict]:
        draw = np.random.default_rng((self.load.seed, row)).random() if self.load.no_signal else 1.0
        self.signal = draw >= self.load.no_signal
        return str(self.load.prompt), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        reward = float(self.signal and int(action) % 2)
        return str(self.load.reply), reward, self.turn == self.turns, False, {}


class CountTokenizer:
    """Texts are numbers of tokens here: `64` is one entry that stands for 64 tokens."""

    chat_template = eos_token_id = None

    def __call__(self, text: str, **_) -> dict:
        return {"input_ids": [int(text)]}

    def decode(self, ids: list[int], **_) -> str:
        return str(ids[0])


# -- the virtual clock, and what is simulated on it ----------------------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer instead of waiting for it. Deterministic: it has
    no files, threads or signals to listen to. Raises RuntimeError if nothing is left to happen."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self._selector.select = self._jump

    def time(self) -> float:
        return self.now

    def _jump(self, timeout: float | None) -> list:
        if timeout is None:
            raise RuntimeError(f"deadlock at {self.now:.3f} virtual seconds")
        self.now += timeout
        return []


@dataclass(eq=False)
class Sequence:
    """A turn in the engine: it ends when the engine's step counter reaches `end`."""

    turn: Turn
    done: asyncio.Future
    start: float = 0.0
    end: float = math.inf


class SimEngine:
    """Continuous batching: all running sequences advance together, a token a decode step.

    So one counter of decode steps serves them all: a sequence of n tokens that begins at step s
    ends at step s + n, and the next to end is at the top of a heap. While r sequences run, a step
    takes `decode_s + r decode_seq_s + kv decode_kv_s` seconds, and kv grows by r a step: the time
    of m steps is quadratic in m, so both ways between time and steps are closed forms. Prefill has
    the engine to itself, and so has the recomputation of KV caches. (Of what is running: an episode
    that is in its environment during an update finds its history in the prefix cache all the same.)
    """

    def __init__(self, rates: Rates, wake: asyncio.Event):
        self.rates, self.wake = rates, wake
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()
        self.version, self.paused = -1, True
        self.steps, self.counted_at = 0.0, self.loop.time()
        self.prefilled_at = 0.0  # no decode step before that time
        self.running: set[Sequence] = set()
        self.waiting: deque[Sequence] = deque()
        self._kv_base = 0.0  # of what is running: its prompts less the steps that it began at
        self.recomputed = 0.0  # tokens of KV caches recomputed at updates
        self._ends: list[tuple[float, int, Sequence]] = []  # heap; cancelled ones are skipped
        self._ids = itertools.count()
        self._timer = self._soon = None

    async def generate(self, turn: Turn) -> None:
        """Decode `turn.max_tokens` tokens; returns one stand-in for them."""
        sequence = Sequence(turn, self.loop.create_future())
        self.waiting.append(sequence)
        self._poke()
        try:
            await sequence.done
        except asyncio.CancelledError:
            self._count()
            if sequence in self.running:
                self._leave(sequence)
            elif sequence in self.waiting:
                self.waiting.remove(sequence)
            self._poke()
            raise

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._kv_base -= sum(sequence.turn.context) - sequence.start

    def pause(self) -> None:
        """Stop between two steps. What has no token yet has no version yet."""
        self._count()
        self.paused = True
        for sequence in self.running:
            if self.steps - sequence.start < 1:
                sequence.turn.versions.clear()

    def resume(self) -> None:
        """Go on under new weights: the KV cache of every running sequence is recomputed."""
        self._count()
        self.paused = False
        self.recomputed += self.kv_tokens()
        self._prefill(self.kv_tokens())
        for sequence in self.running:
            sequence.turn.versions = sequence.turn.versions or [self.version]
        self._poke()

    def take_counts(self) -> Counter:
        """Whether places are free, for the scheduler to widen what a worker has in hand."""
        free = len(self.running) + len(self.waiting) < self.rates.slots
        return Counter(steps_below_cap=int(free))

    def kv_tokens(self) -> float:
        """Tokens in the KV caches of what is running."""
        return max(0.0, self._kv_base + len(self.running) * self.steps)

    def step_seconds(self) -> float:
        """Seconds of the next decode step."""
        rates = self.rates
        each = len(self.running) * rates.decode_seq_s + self.kv_tokens() * rates.decode_kv_s
        return rates.decode_s + each

    def steps_in(self, seconds: float) -> float:
        """Decode steps that so many seconds are enough for."""
        first, growth = self.step_seconds(), len(self.running) * self.rates.decode_kv_s
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))

    def seconds_of(self, steps: float) -> float:
        growth = len(self.running) * self.rates.decode_kv_s
        return steps * self.step_seconds() + growth * steps**2 / 2

    def _count(self) -> None:
        """Bring the step counter up to now; to be called before anything changes its speed."""
        now = self.loop.time()
        begin = max(self.counted_at, self.prefilled_at)
        if now > begin and self.running and not self.paused:
            self.steps += self.steps_in(now - begin)
        self.counted_at = now

    def _prefill(self, tokens: float) -> None:
        start = max(self.loop.time(), self.prefilled_at)
        self.prefilled_at = start + tokens / self.rates.prefill

    def _poke(self) -> None:
        if not self._soon:  # what happens at one moment is dealt with in one go
            self._soon = self.loop.call_soon(self._advance)

    def _advance(self) -> None:
        """End what has ended, begin what has come, and set the alarm for the next end."""
        self._soon = None
        self._count()
        if self._timer:
            self._timer.cancel()
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            sequence = heapq.heappop(self._ends)[2]
            if sequence in self.running:
                self._leave(sequence)
                sequence.done.set_result(None)
        if self.paused:
            return
        while self.waiting and len(self.running) < self.rates.slots:
            self._begin(self.waiting.popleft())
        while self._ends and self._ends[0][2] not in self.running:
            heapq.heappop(self._ends)
        if self._ends:
            begin = max(self.loop.time(), self.prefilled_at)
            left = max(0.0, self._ends[0][0] - self.steps)
            self._timer = self.loop.call_at(begin + self.seconds_of(left), self._advance)

    def _begin(self, sequence: Sequence) -> None:
        turn = sequence.turn
        self._prefill(turn.context[-1])  # what comes before is in the prefix cache
        turn.ids, turn.logprobs, turn.versions = [turn.max_tokens], [0.0], [self.version]
        sequence.start, sequence.end = self.steps, self.steps + turn.max_tokens
        self.running.add(sequence)
        self._kv_base += sum(turn.context) - sequence.start
        heapq.heappush(self._ends, (sequence.end, next(self._ids), sequence))


class SimCalls:
    """Environments and rewards: they take the time that was drawn for them, beside decoding."""

    async def __call__(self, call, *args, wait: float = 0.0, **_):
        if wait:
            await asyncio.sleep(wait)
        return call(*args)

    def take_cpu(self) -> float:
        return 0.0


class SimWorker(LockstepWorker):
    """A rollout process without the process: the program's worker around a simulated engine."""

    tokenizer = CountTokenizer()

    def __init__(self, conn, spec: WorkerSpec, rates: Rates, load: Load, lane: int = 1):
        self.conn, self.spec, self.task = conn, spec, load
        self.wake = asyncio.Event()
        self.engine, self.calls = SimEngine(rates, self.wake), SimCalls()
        self.episodes = {}
        self.clear_results()
        self.lanes, self.free_lanes = itertools.count(lane), []  # in one process: all apart

    async def serve(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self.sent_at = math.inf  # signs of life would depend on the real clock
            self.report()

    def on_update(self, version: int, *_) -> None:
        self.engine.pause()
        self.conn.send(("paused", version))

    def on_commit(self, version: int) -> None:
        super().on_commit(version)
        self.engine.resume()


class SimProcesses:
    """What a scheduler needs of `processes.Processes`: here a message is a call, and what is
    waited for is there at once."""

    def __init__(self, workers: list[SimWorker]):
        self.workers, self.count = workers, len(workers)
        self.changed, self.slack = threading.Condition(), {}

    def send(self, worker: int, *message) -> None:
        self.workers[worker].on_message(*message)

    def wait(self, condition: Callable[[], bool], what: Callable[[], str], timeout: float) -> None:
        if not condition():
            raise RuntimeError(f"nobody would bring {what()}")


# -- a run ---------------------------------------------------------------------------------------


@dataclass
class Setting:
    """One simulated run. In sync all GPUs do both phases; in async they are split."""

    rates: Rates
    load: Load
    buffer: dict  # what `SampleBuffer` is made with, but the steps
    rollout_gpus: int
    train_gpus: int
    sync: bool = False
    steps: int = 50
    tasks_per_worker: int = 0  # as --tasks_per_worker
    dispatcher: type[Dispatcher] = Dispatcher


@dataclass
class Result:
    """What a simulated run took, in virtual seconds."""

    seconds: float = 0.0  # from the first weights to the last publish
    wait: float = 0.0  # of that, the trainer waited for batches
    batches: list[float] = field(default_factory=list)  # when each step ended
    staleness: list[int] = field(default_factory=list)  # of every sample trained on
    samples: int = 0
    tokens: int = 0  # of what was trained on, prompts and replies too
    recomputed: float = 0.0  # tokens of KV caches

    def step_seconds(self, ahead: float = 0) -> float:
        """Seconds a step in the middle of a run whose generation is `ahead` batches ahead: without
        the steps that fill this pipeline, and those that are left when nothing is admitted."""
        first, last = math.ceil(ahead), len(self.batches) - 1 - math.ceil(ahead)
        return (self.batches[last] - self.batches[first]) / (last - first)


class SimRun:
    """`train.Run` on the virtual clock: its parts, and those of its verbs that take time."""

    def __init__(self, setting: Setting, on_step: Callable | None = None):
        """After each step `on_step` is called with the version, the batch, the seconds since the
        start and those of waiting, and the spans of all processes since the last call."""
        self.setting, rates, load = setting, setting.rates, setting.load
        self.on_step, self.recorded = on_step, []
        self.news, self.committed = asyncio.Event(), asyncio.Event()
        settings = Settings(
            rollout_workers=setting.rollout_gpus,
            max_num_seqs=rates.slots,
            tasks_per_worker=setting.tasks_per_worker,
        )
        self.buffer = SampleBuffer(**setting.buffer | {"steps": setting.steps})
        limits = Limits(load.longest, load.max_turns, 2**31, self.buffer.max_staleness)
        spec = WorkerSpec("", settings, limits, "float32", True, 0.0)
        pipes = [SimpleNamespace(send=partial(self.hear, w)) for w in range(setting.rollout_gpus)]
        lanes = itertools.count(LANES + 1, LANES)
        made = zip(pipes, lanes, strict=False)
        self.workers = [SimWorker(pipe, spec, rates, load, lane) for pipe, lane in made]
        rest = settings, self.buffer, self.ticket, setting.dispatcher
        self.scheduler = Scheduler(SimProcesses(self.workers), *rest)
        for worker in range(setting.rollout_gpus):
            self.hear(worker, ("ready",))

    def ticket(self, index: int, sample: int) -> Ticket:
        return Ticket(index, sample, prompt_id=index, seed=64 * index + sample)

    def hear(self, worker: int, message: tuple) -> None:
        if message[0] == "results":
            if self.on_step:  # of all processes: they share one recorder
                self.recorded += message[-1]
            message = *message[:-1], []
        self.scheduler.hear(worker, *message)
        self.news.set()

    async def get_batch(self) -> list:
        while not self.buffer.batch_ready():
            self.news.clear()
            await self.news.wait()
        return self.scheduler.get_batch(timeout=0)

    async def publish(self, version: int) -> None:
        """Returns when the weights have left; `committed` is set when they are loaded."""
        self.scheduler.pause(version, Manifest([], [], "float32", 0), [], np.zeros(1))
        self.committed.clear()
        await asyncio.sleep(self.setting.rates.publish_s)
        self.scheduler.publisher.sent(0)
        loop = asyncio.get_running_loop()
        loop.call_later(self.setting.rates.load_s, self._loaded, version)

    def _loaded(self, version: int) -> None:
        now = spans.clock()
        for worker in range(len(self.workers)):
            spans.add("load", now - self.setting.rates.load_s, now, (worker + 1) * LANES)
            self.hear(worker, ("loaded", version, np.zeros(1), [(0, 0)]))
        self.committed.set()

    async def train(self) -> Result:
        """`train.train_sync` or `train.train_async`, with the clock in place of the work."""
        setting, rates = self.setting, self.setting.rates
        result, loop = Result(), asyncio.get_running_loop()
        await self.publish(0)
        await self.committed.wait()
        start = loop.time()
        for version in range(setting.steps):
            asked = loop.time()
            with spans("wait"):
                batch = await self.get_batch()
            waited = loop.time() - asked
            result.wait += waited
            tokens = sum(int(sample.ids.sum()) for sample in batch)
            result.staleness += [sample.staleness(version) for sample in batch]
            result.samples, result.tokens = result.samples + len(batch), result.tokens + tokens
            work = tokens / rates.train / setting.train_gpus + rates.train_s
            with spans("train"):
                await asyncio.sleep(work + setting.sync * rates.switch_s)
            with spans("publish"):
                await self.committed.wait()
                await self.publish(version + 1)
                if setting.sync:
                    await self.committed.wait()
            result.batches.append(loop.time() - start)
            spans.add("step", asked, loop.time(), args={"step": version + 1})
            if self.on_step:
                recorded, self.recorded = self.recorded + spans.take(), []
                self.on_step(version, batch, loop.time() - start, waited, recorded)
        await self.committed.wait()
        result.seconds = loop.time() - start
        result.recomputed = sum(worker.engine.recomputed for worker in self.workers)
        return result


async def _run(setting: Setting, on_step: Callable | None) -> Result:
    spans.clock = asyncio.get_running_loop().time
    run = SimRun(setting, on_step)
    async with asyncio.TaskGroup() as group:  # so that a bug in a worker ends the run
        serving = [group.create_task(worker.serve()) for worker in run.workers]
        result = await run.train()
        for task in serving:
            task.cancel()
    return result


def simulate(setting: Setting, on_step: Callable | None = None) -> Result:
    """Run it on a clock of its own. The same setting gives the same result."""
    clock = spans.clock
    gc.freeze()  # torch's modules stay: the collector need not walk them again and again
    often = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)  # what an episode leaves is small, and rarely a cycle
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(_run(setting, on_step))
    finally:
        spans.clock = clock
        gc.set_threshold(*often)
