"""Tasks, environments, and one episode: token in, token out.

    reset ─▶ prompt ids ─▶ engine ─▶ sampled ids ─▶ decode ─▶ step ─▶ its text's ids ─▶ engine ...
             mask 0                  mask 1                           mask 0

Ids are never re-tokenised: what was sampled is kept verbatim, what the environment says is appended
as ids, and a chat template is never rendered over turns that have been sampled. So one that
rewrites history (drops earlier thinking) cannot change what is trained on.

What is played is named on the command line, also from a file of yours:

    --env my_file.py:MyTask   a subclass of `Task`: rows with one response each, and a `reward`
    --env my_file.py:MyGame   a subclass of `Env`: `reset` and `step`, in text, over several turns

    class Echo(Env):               # three turns, a third of a point for each right one
        max_turns = 3

        def reset(self, seed):
            self.letter, self.turn = chr(ord("a") + seed % 26), 0
            return f"repeat {self.letter}", {}

        def step(self, action):
            self.turn += 1
            right = action.strip() == self.letter
            return "again", right / 3, self.turn == 3, False, {}

For the model `tiny` it also defines `warmup`. Rewards may be any finite float, and those of an
episode are added up. A run reports 1.0 and more as solved, or what an environment says in
`info["success"]`. What cannot be judged raises: a 0 in its place would teach the model that a right
answer is wrong.

Paper: ROLL Flash (arXiv 2510.11345): EnvManager, env-level asynchronous rollout, asynchronous
reward. Departures from its code: a weight update keeps the tokens of a turn in progress, and every
turn begins with a check that it is still wanted.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from buffer import Sample, Ticket, derive_seed
from plumbing.calls import attempt, said_by, short
from plumbing.chat import LONG, cut, encode_prompt, encode_reply, stop_ids
from plumbing.spans import spans


async def run_episode(episode: Episode) -> Sample:
    """One sample. *Env-level asynchronous rollout*: it waits for its own turns and steps, and for
    nothing else; while its environment or reward is at work, its place in the engine serves others.
    """
    await episode.reset()
    while not episode.over:
        await episode.generate()
        await episode.step()
    return episode.sample()


# -- what a task is ------------------------------------------------------------------------------


class Row(NamedTuple):
    """One prompt and what its reward needs to know: a gold answer, or a puzzle's numbers."""

    prompt: str
    answer: str


class Task:
    """Base of single-turn tasks. A subclass sets `train` and `test`, and defines `reward`."""

    max_turns: int = 1
    max_tokens: int = 8  # default response budget; --max_tokens overrides it
    warmup_steps: int = 2000  # of the warm-up of the model `tiny`, at most
    chat: bool = True  # render prompts with the model's chat template, where it has one
    stop: str | None = None  # text, one token of the model, that ends a response besides EOS
    # True: the reward runs in a thread, for at most env_timeout seconds.
    # False: it takes microseconds, and is called on the event loop.
    blocking: bool = True
    own_clock: bool = False  # the reward limits its own time: env_timeout does not apply
    notes: Sequence[str] = ()  # what is to be said of the rows, a line each
    train: Sequence[Row]
    test: Sequence[Row]  # held out, never trained on

    def __init__(self, config, seed: int = 0):
        self.config, self.seed = config, seed  # the settings of the run: config.data, ...

    def reward(self, row: Row, response: str) -> float:
        """Score a response: its text without EOS, and with `stop` if that ended it.

        Depends on nothing but its arguments. Raises if the response cannot be judged. May be
        `async def`, for a judge behind an API: see docs/rewards.md.
        """
        raise NotImplementedError(f"task {type(self).__name__} has no reward(row, response)")

    def warmup(self, rng: random.Random) -> list[tuple[str, str]]:
        """Draw an episode for the supervised warm-up of the model `tiny`, one that ends well: what
        was said to the model and what it answers, turn by turn."""
        raise ValueError(
            f"task {type(self).__name__} has no warm-up for --model tiny: "
            "define warmup(rng) in it, or use another model"
        )

    def close(self) -> None:
        """End the processes that the task has started."""

    def length(self, seed: int, turn: int) -> int | None:
        """How many tokens this turn of this sample is to have, EOS or not; None: what the model
        makes of it. For benchmarks that need responses of known lengths."""
        return None

    # How an episode sees a task: as an environment of one step.

    def make_env(self) -> SingleTurn:
        return SingleTurn(self)

    def first_text(self, row: Row) -> str:
        """The prompt of a row."""
        return row.prompt

    def describe(self, row: Row, turn: int) -> str:
        """Where something went wrong, for messages."""
        return "the reward" if turn else "the prompt"

    @property
    def latency(self) -> Latency:
        return Latency.parse(self.config.env_latency)

    @property
    def blocking_reset(self) -> bool:
        return False

    @property
    def must_close(self) -> bool:
        return False


class Env:
    """Base of environments of several turns: text in, text out, Gymnasium's values.

    One object plays one episode. `reset` and `step` may be `async def`. They run apart from
    decoding, so they may take their time; what is not `blocking` should take microseconds.
    """

    max_turns: int = 10  # the episode ends there, as truncated; --max_turns overrides it
    max_tokens: int = 16  # of a turn; --max_tokens overrides it
    chat: bool = True  # render with the model's chat template, where it has one
    stop: str | None = None  # text, one token of the model, that ends a turn besides EOS
    blocking: bool = True  # run it in a thread (what is `async def` runs on a loop of its own)
    warmup_steps: int = 2000

    def __init__(self, config):
        self.config = config

    def reset(self, seed: int) -> tuple[str, dict]:
        """Begin an episode that depends on the seed alone. Returns (observation, info)."""
        raise NotImplementedError(f"environment {type(self).__name__} has no reset(seed)")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Take the text of one turn (without EOS). Returns (observation, reward, terminated,
        truncated, info); rewards of an episode are summed up."""
        raise NotImplementedError(f"environment {type(self).__name__} has no step(action)")

    def close(self) -> None:
        """Give back what the episode has used, if that is anything."""

    @classmethod
    def length(cls, seed: int, turn: int) -> int | None:
        """See `Task.length`."""
        return None

    @classmethod
    def warmup(cls, rng: random.Random) -> list[tuple[str, str]]:
        """Draw an episode as (observation, action) pairs, to warm up the model `tiny` on."""
        raise ValueError(
            f"environment {cls.__name__} has no warm-up for --model tiny: "
            "define warmup(rng) in it, or use another model"
        )


class EnvTask(Task):
    """An environment as a task: its rows are seeds, the n samples of a group play the same one."""

    train, test = range(512, 512 + 8192), range(512)

    def __init__(self, env_class: type[Env], config, seed: int = 0):
        super().__init__(config, seed)
        self.env_class = env_class
        for name in ("max_turns", "max_tokens", "chat", "stop", "blocking", "warmup_steps"):
            setattr(self, name, getattr(env_class, name))
        # What is not installed, or has another name, is said now.
        attempt(self.make_env, f"env {config.env}", None)

    def make_env(self) -> Env:
        return self.env_class(self.config)

    def first_text(self, row: int) -> str:
        """The first observation of a seed. Raises ValueError if there is none in time."""
        said: list = []

        def play() -> None:
            env = self.make_env()
            first = env.reset(row)
            said.append(asyncio.run(first) if inspect.isawaitable(first) else first)
            env.close()

        attempt(play, self.describe(row, 0), self.config.env_timeout)
        if not is_observation(said[0]):
            raise ValueError(f"{self.describe(row, 0)}: {short(said[0])} is not (text, info)")
        return said[0][0]

    def describe(self, row: int, turn: int) -> str:
        return f"{self.config.env}, seed {row}, {f'step {turn}' if turn else 'reset'}"

    def warmup(self, rng: random.Random) -> list[tuple[str, str]]:
        return self.env_class.warmup(rng)

    def length(self, seed: int, turn: int) -> int | None:
        return self.env_class.length(seed, turn)

    @property
    def blocking_reset(self) -> bool:
        return self.blocking

    @property
    def must_close(self) -> bool:
        return self.env_class.close is not Env.close


class SingleTurn:
    """A row of a task, as an environment of one step."""

    def __init__(self, task: Task):
        self.task = task

    def reset(self, row: Row) -> tuple[str, dict]:
        self.row = row
        return row.prompt, {}

    def step(self, response: str):
        score = self.task.reward(self.row, response)
        return self._later(score) if inspect.isawaitable(score) else self._end(score)

    async def _later(self, score) -> tuple:
        return self._end(await score)

    def _end(self, score: float) -> tuple[str, float, bool, bool, dict]:
        return "", score, True, False, {}


def split(rows: Iterable[Row], seed: int, held_out: int | None = None) -> tuple[list, list]:
    """Shuffle rows by the seed and cut them into (train, test); by default a tenth, at most 512."""
    rows = list(dict.fromkeys(rows))  # a row that came twice could be on both sides
    random.Random(f"split {seed}").shuffle(rows)
    n = min(512, max(1, len(rows) // 10)) if held_out is None else held_out
    return rows[n:], rows[:n]


# -- one episode ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Turn:
    """What one call of the engine is asked for, and what it has decoded of it so far."""

    context: list[int]  # ids of all that comes before it
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
    stops: tuple[int, ...] = ()  # tokens that end a turn, besides EOS and the task's own stop


class EnvError(RuntimeError):
    """An environment or a reward raised, hung or returned nonsense; says which, and where."""


class Unwanted(Exception):
    """The episode has become too old to be trained on."""


class Episode:
    """An episode in progress. `engine` is whatever has `version` and `generate(turn)`."""

    lane = 1  # in the timeline; a worker gives each its own

    def __init__(self, ticket: Ticket, task: Task, engine, tokenizer, calls, limits: Limits):
        self.ticket, self.task, self.engine, self.tokenizer = ticket, task, engine, tokenizer
        self.calls, self.limits = calls, limits
        self.row = None  # of the task's data: some are made when they are asked for
        self.stop_ids = stop_ids(task, tokenizer, limits.stops)
        self.ids: list[int] = []  # all tokens up to the turn in progress
        self.turns: list[Turn] = []
        self.reward, self.over, self.truncated = 0.0, False, False
        self.success: bool | None = None
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
        blocking = self.task.blocking_reset
        text, _ = await self._ask(check_reset, self._open, blocking=blocking, what="reset")
        self.ids = list(await self._encode(encode_prompt, text))
        if len(self.ids) >= self.limits.max_model_len:
            raise EnvError(
                f"{self._where()}: a prompt of {len(self.ids)} tokens leaves no room for a "
                f"response (--max_model_len {self.limits.max_model_len})"
            )

    def _open(self):
        rows = self.task.test if self.ticket.eval else self.task.train
        self.row = rows[self.ticket.prompt_id]
        self.env = self.task.make_env()
        return self.env.reset(self.row)

    async def generate(self) -> None:
        """Sample one turn, if this episode is still fresh enough to be trained on."""
        if self.too_old(self.engine.version):
            raise Unwanted
        number = len(self.turns)
        seed = derive_seed(self.ticket.seed, number) if number else self.ticket.seed
        room = self.limits.max_model_len - len(self.ids)
        length = self.task.length(self.ticket.seed, number)
        most = min(length or self.limits.max_tokens, room)
        turn = Turn(self.ids.copy(), most, seed, self.stop_ids if length is None else [])
        self.turns.append(turn)
        whose = {"group": self.ticket.group, "sample": self.ticket.sample}
        with spans("turn", self.lane, **whose) as said:
            await self.engine.generate(turn)
            said |= {"tokens": len(turn.ids), "versions": sorted(set(turn.versions))}
        turn.truncated &= length is None or most < length  # else it is as long as it should be
        self.ids += turn.ids

    async def step(self) -> None:
        """Give the environment what was sampled; append what it says, or end the episode."""
        turn = self.turns[-1]
        text = self.tokenizer.decode(turn.ids, skip_special_tokens=True)
        wait = self.task.latency.draw(self.ticket.seed, len(self.turns))
        what = "env step" if isinstance(self.task, EnvTask) else "reward"
        how = {"blocking": self.task.blocking, "wait": wait, "what": what}
        how["own_clock"] = self.task.own_clock
        said = await self._ask(check_step, self.env.step, text, **how)
        observation, reward, terminated, truncated, info = said
        self.reward += float(reward)
        if isinstance(info, dict) and info.get("success") is not None:
            self.success = bool(info["success"])
        if terminated or truncated or len(self.turns) == self.limits.max_turns:
            cut = any(turn.truncated for turn in self.turns)
            self._end(truncated=cut or not terminated)
            return
        reply = await self._encode(encode_reply, observation, turn.ids[-1])
        if len(self.ids) + len(reply) >= self.limits.max_model_len:
            self._end(truncated=True)
            return
        self.ids += reply

    async def _encode(self, how: Callable, text: str, *last) -> tuple[int, ...]:
        """Ids of what was said; of what is so long that it will not fit, of as much as shows it."""
        if len(text) < LONG:
            return how(self.task, text, self.tokenizer, *last)
        text = cut(text, self.limits.max_model_len, self.tokenizer)
        return await asyncio.to_thread(how, self.task, text, self.tokenizer, *last)

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
            raise EnvError(f"{self._where()}: {said_by(error)}") from error

    def _where(self) -> str:
        return self.task.describe(self.row, len(self.turns))

    def close(self) -> None:
        if self.env is not None and self.task.must_close:
            self.calls.later(self.env.close)

    def sample(self) -> Sample:
        """The finished episode, with one entry a token."""
        size = len(self.ids)
        mask, versions = np.zeros(size, bool), np.full(size, -1, np.int32)
        logprobs, places = np.zeros(size, np.float32), []
        for turn in self.turns:
            first, end = len(turn.context), len(turn.context) + len(turn.ids)
            mask[first:end] = True
            logprobs[first:end], versions[first:end] = turn.logprobs, turn.versions
            places.append((first, end))
        ids = np.array(self.ids, np.int32)
        end = self.reward, self.truncated, tuple(places), self.success
        return Sample(self.ticket, ids, mask, logprobs, versions, *end)


def is_observation(said) -> bool:
    """Whether this is what `reset` has to return: (text, info)."""
    return isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], str)


def check_reset(said) -> None:
    """Raise TypeError unless `reset` returned (observation, info)."""
    if not is_observation(said):
        raise TypeError(f"reset has to return (text, info), got {short(said)}")
    said[0].encode()  # as in check_step


def check_step(said) -> None:
    """Raise TypeError or ValueError unless `step` returned its five values."""
    if not (isinstance(said, tuple) and len(said) == 5):
        raise TypeError(
            f"step has to return (text, reward, terminated, truncated, info), got {short(said)}"
        )
    text, reward, terminated, truncated, _ = said
    if not isinstance(text, str):
        raise TypeError(f"step returned {short(text)} as observation: text is expected")
    text.encode()  # lone surrogates raise here, where the environment can be named
    if isinstance(reward, str) or not math.isfinite(reward):
        raise ValueError(f"step returned {short(reward)} as reward: a finite number is expected")
    if terminated not in (False, True) or truncated not in (False, True):
        ends = f"{short(terminated)}, {short(truncated)}"
        raise TypeError(f"step returned {ends}: bools are expected")


# -- what is drawn: how late an environment is, which row comes next -----------------------------


class Latency(NamedTuple):
    """How much longer an env step takes, in seconds: for teaching and benchmarks."""

    mean: float = 0.0
    std: float = 0.0
    share: float = 0.0  # of the episodes that are slower ...
    factor: float = 1.0  # ... by this factor

    @classmethod
    @lru_cache
    def parse(cls, text: str) -> Latency:
        if not text:
            return cls()
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        # Written so that NaN is refused too.
        fits = len(numbers) in (1, 2, 4) and all(0 <= x < float("inf") for x in numbers)
        if not (fits and cls(*numbers).share <= 1):
            raise ValueError(
                f"--env_latency is MEAN,STD or MEAN,STD,SHARE,FACTOR in seconds (got {text})"
            )
        return cls(*numbers)

    def draw(self, seed: int, turn: int) -> float:
        """The wait before a step; depends on the arguments only."""
        if not (self.mean or self.std):
            return 0.0
        slow = np.random.default_rng(seed).random() < self.share
        wait = max(0.0, np.random.default_rng((seed, turn)).normal(self.mean, self.std))
        return wait * self.factor if slow else wait


def prompt_order(n: int, seed: int, index: int) -> int:
    """Row of the `index`-th prompt of a run out of `n` rows; each epoch has its own permutation."""
    epoch, position = divmod(index, n)
    return _permutation(n, seed, epoch)[position]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return order
