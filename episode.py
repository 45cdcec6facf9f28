"""One episode, from its first prompt to its reward: token in, token out.

    reset ─▶ prompt ids ─▶ engine ─▶ sampled ids ─▶ decode ─▶ step ─▶ its text's ids ─▶ engine ...
             mask 0                  mask 1                           mask 0

Ids are never re-tokenised: what was sampled is kept verbatim, what the environment says is appended
as ids, and a chat template is never rendered over turns that have been sampled. So one that
rewrites history (drops earlier thinking) cannot change what is trained on.

*Env-level asynchronous rollout*: every episode is a coroutine of its own (`run_episode`), and none
ever waits for another; while its environment is at work, its place in the engine serves others.
Beside it stands what this replaces, all environments in step (`run_lockstep`).

Paper: ROLL Flash (arXiv 2510.11345): EnvManager. Departures from its code: a weight update keeps
the tokens of a turn in progress, and every turn begins with a check that it is still wanted.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from buffer import RolloutTask, Sample, derive_seed
from envs import EnvConfig, EnvTask, Task, encode_prompt, encode_reply, is_observation
from report.timeline import spans


@dataclass(eq=False)
class Turn:
    """What one call of the engine is asked for, and what it has decoded of it so far."""

    prompt: list[int]
    max_tokens: int
    seed: int
    stop_ids: list[int]  # any of them ends it
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False  # ended by max_tokens


class Limits(NamedTuple):
    """What bounds an episode."""

    max_tokens: int  # a turn
    max_turns: int
    max_model_len: int  # tokens of the whole episode
    max_staleness: float = math.inf  # versions between its first token and now


class EnvError(RuntimeError):
    """An environment or a reward raised, hung or returned nonsense; says which, and where."""


class Unwanted(Exception):
    """The episode has become too old to be trained on."""


UNTAMED = (SystemExit, KeyboardInterrupt, StopIteration, StopAsyncIteration)


def tame(call: Callable, *args):
    """call(*args), where what would end an event loop or a thread becomes an ordinary error."""
    try:
        return call(*args)
    except UNTAMED as error:
        raise RuntimeError(repr(error)) from error


class EnvCalls:
    """Calls environments and rewards apart from the event loop that steps the engine: on a loop of
    their own, in a thread, so that they go on during an engine step and a weight update. Blocking
    ones run in a pool of threads from there."""

    def __init__(self, config: EnvConfig, threads: int):
        self.timeout = config.env_timeout
        self.pool = ThreadPoolExecutor(threads)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def __call__(
        self, call: Callable, *args, blocking: bool, wait: float = 0.0, what="env", lane=1
    ):
        """The value of call(*args), which may be a coroutine; `wait` seconds late, if asked to.
        Raises TimeoutError after --env_timeout seconds. `what` and `lane`: of the timeline."""
        if not (blocking or wait or inspect.iscoroutinefunction(call)):
            result = tame(call, *args)  # microseconds: a thread would cost more
            if not inspect.isawaitable(result):
                return result
            call, args = (lambda: result), ()
        work = spans.around(self._work(call, args, blocking, wait), what, lane)
        work = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            async with asyncio.timeout(self.timeout) as clock:
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if not clock.expired():
                raise  # its own
            raise TimeoutError(f"took longer than {self.timeout:g} s (--env_timeout)") from None

    async def _work(self, call: Callable, args: tuple, blocking: bool, wait: float):
        if wait:
            await asyncio.sleep(wait)
        if blocking and not inspect.iscoroutinefunction(call):
            result = await self.loop.run_in_executor(self.pool, tame, call, *args)
        else:
            result = tame(call, *args)
        try:
            return await result if inspect.isawaitable(result) else result
        except UNTAMED as error:
            raise RuntimeError(repr(error)) from error

    def later(self, call: Callable) -> None:
        """Have it called in a thread; nobody waits for it."""
        self.pool.submit(call)


@lru_cache(maxsize=4096)
def first_ids(task: Task, text: str, tokenizer) -> tuple[int, ...]:
    """A first prompt's tokens; the samples of a group render the template once between them."""
    return tuple(encode_prompt(task, text, tokenizer))


@lru_cache(maxsize=4096)
def reply_ids(task: Task, text: str, tokenizer, last: int) -> tuple[int, ...]:
    """The tokens between two turns: the end of one, what the environment says, the next opening."""
    return tuple(encode_reply(task, text, tokenizer, last))


@lru_cache(maxsize=16)
def stop_ids(task: Task, tokenizer) -> list[int]:
    stop = [] if task.stop is None else tokenizer.encode(task.stop, add_special_tokens=False)
    return [*stop] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id, *stop]


class Episode:
    """An episode in progress. `engine` is whatever has `version` and `generate(turn)`."""

    lane = 1  # in the timeline; a worker gives each its own

    def __init__(self, task: RolloutTask, games: Task, engine, tokenizer, calls, limits: Limits):
        self.task, self.games, self.engine, self.tokenizer = task, games, engine, tokenizer
        self.calls, self.limits = calls, limits
        self.row = None  # of the task's data: some are made when they are asked for
        self.stop_ids = stop_ids(games, tokenizer)
        self.ids: list[int] = []  # all tokens up to the turn in progress
        self.turns: list[Turn] = []
        self.reward, self.over, self.truncated = 0.0, False, False
        self.env = None

    @property
    def first_version(self) -> int | None:
        """The lowest version of its tokens, None before the first: versions only rise."""
        versions = self.turns[0].versions if self.turns else ()
        return versions[0] if versions else None

    @property
    def tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)

    def too_old(self, version: int) -> bool:
        first = self.first_version
        return first is not None and version - first > self.limits.max_staleness

    async def reset(self) -> None:
        """Open the environment; its first observation is the prompt."""
        blocking = self.games.blocking_reset
        text, _ = await self._ask(check_reset, self._open, blocking=blocking, what="reset")
        self.ids = list(first_ids(self.games, text, self.tokenizer))
        if len(self.ids) >= self.limits.max_model_len:
            raise EnvError(
                f"{self._where()}: a prompt of {len(self.ids)} tokens leaves no room for a "
                f"response (--max_model_len {self.limits.max_model_len})"
            )

    def _open(self):
        self.row = (self.games.test if self.task.eval else self.games.train)[self.task.prompt]
        self.env = self.games.make_env()
        return self.env.reset(self.row)

    async def generate(self) -> None:
        """Sample one turn, if this episode is still fresh enough to be trained on."""
        if self.too_old(self.engine.version):
            raise Unwanted
        number = len(self.turns)
        seed = derive_seed(self.task.seed, number) if number else self.task.seed
        room = self.limits.max_model_len - len(self.ids)
        length = self.games.length(self.task.seed, number)
        most = min(length or self.limits.max_tokens, room)
        turn = Turn(self.ids.copy(), most, seed, self.stop_ids if length is None else [])
        self.turns.append(turn)
        with spans("turn", self.lane, group=self.task.group, sample=self.task.sample):
            await self.engine.generate(turn)
        self.ids += turn.ids

    async def step(self) -> None:
        """Give the environment what was sampled; append what it says, or end the episode."""
        turn = self.turns[-1]
        text = self.tokenizer.decode(turn.ids, skip_special_tokens=True)
        wait = self.games.config.latency.draw(self.task.seed, len(self.turns))
        what = "env step" if isinstance(self.games, EnvTask) else "reward"
        how = {"blocking": self.games.blocking, "wait": wait, "what": what}
        said = await self._ask(check_step, self.env.step, text, **how)
        observation, reward, terminated, truncated, _ = said
        self.reward += float(reward)
        if terminated or truncated or len(self.turns) == self.limits.max_turns:
            cut = any(turn.truncated for turn in self.turns)
            self._end(truncated=cut or not terminated)
            return
        reply = reply_ids(self.games, observation, self.tokenizer, turn.ids[-1])
        if len(self.ids) + len(reply) >= self.limits.max_model_len:
            self._end(truncated=True)
            return
        self.ids += reply

    def _end(self, truncated: bool) -> None:
        self.over, self.truncated = True, truncated

    async def _ask(self, check: Callable, call: Callable, *args, **how):
        """Call the environment, and check what it returns. Errors say where they came from."""
        try:
            said = await self.calls(call, *args, lane=self.lane, **how)
            check(said)
            return said
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():
                raise  # we did it
            raise EnvError(f"{self._where()}: CancelledError") from error
        except Exception as error:  # of whatever kind: it is the user's code
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise EnvError(f"{self._where()}: {why}") from error

    def _where(self) -> str:
        return self.games.describe(self.row, len(self.turns))

    def close(self) -> None:
        if self.env is not None and self.games.must_close:
            self.calls.later(self.env.close)

    def sample(self) -> Sample:
        """The finished episode, with one entry a token."""
        size = len(self.ids)
        mask, versions = np.zeros(size, bool), np.full(size, -1, np.int32)
        logprobs, places = np.zeros(size, np.float32), []
        for turn in self.turns:
            first, end = len(turn.prompt), len(turn.prompt) + len(turn.ids)
            mask[first:end] = True
            logprobs[first:end], versions[first:end] = turn.logprobs, turn.versions
            places.append((first, end))
        ids = np.array(self.ids, np.int32)
        return Sample(
            self.task, ids, mask, logprobs, versions, self.reward, self.truncated, tuple(places)
        )


async def run_episode(episode: Episode) -> Sample:
    """One sample: it waits for its own turns and steps, and for nothing else."""
    await episode.reset()
    while not episode.over:
        await episode.generate()
        await episode.step()
    return episode.sample()


async def run_lockstep(episodes: list[Episode]) -> list[Sample]:
    """The naive form, to compare with: in every turn all wait for the slowest to generate, then all
    for the slowest environment. On single-turn tasks this is reward after everything."""
    await asyncio.gather(*(episode.reset() for episode in episodes))
    while live := [episode for episode in episodes if not episode.over]:
        await asyncio.gather(*(episode.generate() for episode in live))
        await asyncio.gather(*(episode.step() for episode in live))
    return [episode.sample() for episode in episodes]


def check_reset(said) -> None:
    """Raise TypeError unless `reset` returned (observation, info)."""
    if not is_observation(said):
        raise TypeError(f"reset has to return (text, info), got {said!r:.200}")
    said[0].encode()  # as in check_step


def check_step(said) -> None:
    """Raise TypeError or ValueError unless `step` returned its five values."""
    if not (isinstance(said, tuple) and len(said) == 5):
        raise TypeError(
            f"step has to return (text, reward, terminated, truncated, info), got {said!r:.200}"
        )
    text, reward, terminated, truncated, _ = said
    if not isinstance(text, str):
        raise TypeError(f"step returned {text!r:.200} as observation: text is expected")
    text.encode()  # lone surrogates raise here, where the environment can be named
    if isinstance(reward, str) or not math.isfinite(reward):
        raise ValueError(f"step returned {reward!r:.200} as reward: a finite number is expected")
    if terminated not in (False, True) or truncated not in (False, True):
        raise TypeError(f"step returned {terminated!r:.50}, {truncated!r:.50}: bools are expected")
