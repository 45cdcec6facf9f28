"""Tasks and environments: where prompts come from, what answers a response, how it is scored.

There are two kinds, and both are named on the command line, also from a file of yours:

    --env my_file.py:MyTask   a subclass of `Task`: rows with one response each, and a `reward`
    --env my_file.py:MyGame   a subclass of `Env`: `reset` and `step`, in text, over several turns

    class Echo(Env):                                 # repeat a letter three times
        max_turns = 3

        def reset(self, seed):
            self.letter = chr(ord("a") + seed % 26)
            return f"repeat {self.letter}", {}

        def step(self, action):
            right = action.strip() == self.letter
            return "again", right / 3, not right, False, {}

Rewards may be any finite float; a run reports those of 1.0 and more as solved. What cannot be
judged raises: a 0 in its place would teach the model that a right answer is wrong.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import operator
import random
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One prompt and what its reward needs to know: a gold answer, or a puzzle's numbers."""

    prompt: str
    answer: str


def setting(default, text: str):
    """A dataclass field with one line of help for its flag."""
    return field(default=default, metadata={"help": text})


@dataclass
class EnvConfig:
    """Settings of the task."""

    env: str = setting(
        "addition",
        "addition, max3, countdown, gsm8k, math, rg:TASK; of several turns: grid, frozenlake, "
        "guess, gem:ID, textarena:ID, textworld; or FILE.py:CLASS",
    )
    data: str | None = setting(None, "rows for gsm8k and math: JSONL file or hub data set[:config]")
    env_timeout: float = setting(30.0, "seconds that one reward or one env step may take")
    reward_procs: int = setting(1, "processes that check math answers, for each rollout worker")
    env_latency: str = setting(
        "",
        "MEAN,STD: every env step takes max(0, N(mean, std)) seconds longer; with two more numbers "
        "SHARE,FACTOR that share of the episodes is slower by that factor",
    )

    def __post_init__(self) -> None:
        if not 0 < self.env_timeout < float("inf"):
            raise ValueError(f"--env_timeout must be above 0 seconds (got {self.env_timeout})")
        if self.latency.mean >= self.env_timeout:
            raise ValueError(
                f"--env_latency {self.env_latency}: most steps would take longer than "
                f"--env_timeout {self.env_timeout:g} allows"
            )
        if self.reward_procs < 1:
            raise ValueError(f"--reward_procs must be at least 1 (got {self.reward_procs})")

    @property
    def latency(self) -> Latency:
        return Latency.parse(self.env_latency)


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


# -- what a task is ------------------------------------------------------------------------------


class Task:
    """Base of single-turn tasks. A subclass sets `train` and `test`, and defines `reward`."""

    max_turns: int = 1
    max_tokens: int = 8  # default response budget; --max_tokens overrides it
    warmup_steps: int = 600  # of the supervised warm-up of the model `tiny`
    chat: bool = True  # render prompts with the model's chat template, where it has one
    stop: str | None = None  # text, one token of the model, that ends a response besides EOS
    # True: the reward runs in a thread, for at most env_timeout seconds.
    # False: it takes microseconds, and is called on the event loop.
    blocking: bool = True
    train: Sequence[Row]
    test: Sequence[Row]  # held out, never trained on

    def __init__(self, config: EnvConfig, seed: int = 0):
        self.config, self.seed = config, seed

    def reward(self, row: Row, response: str) -> float:
        """Score a response: its text without EOS, and with `stop` if that ended it.

        Depends on nothing but its arguments. Raises if the response cannot be judged.
        """
        raise NotImplementedError(f"task {type(self).__name__} has no reward(row, response)")

    def warmup(self, rng: random.Random) -> list[tuple[str, str]]:
        """Draw an episode for the supervised warm-up of the model `tiny`: what was said to the
        model and what it answers, turn by turn."""
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
    def blocking_reset(self) -> bool:
        return False

    @property
    def must_close(self) -> bool:
        return False

    @property
    def source(self) -> str:
        """The code that decides what the model `tiny` is warmed up on."""
        return sources(type(self), Task)


def attempt(call, what: str, seconds: float | None) -> None:
    """Call the user's code, for so many seconds at most. Raises ValueError, in one line, for
    whatever it raises; an own ValueError stays as it is."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # it is the user's code: an exit, too, is to be told
            errors.append(error)

    if seconds is None:
        run()
    else:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise ValueError(f"{what}: took longer than {seconds:g} s (--env_timeout)")
    for error in errors:
        if isinstance(error, ValueError | KeyboardInterrupt):
            raise error
        raise ValueError(" ".join(f"{what}: {type(error).__name__}: {error}".split())) from error


def is_observation(said) -> bool:
    """Whether this is what `reset` has to return: (text, info)."""
    return isinstance(said, tuple) and len(said) == 2 and isinstance(said[0], str)


def sources(cls: type, base: type) -> str:
    """The code of a class and of what it inherits from, up to `base`."""
    return "".join(inspect.getsource(c) for c in cls.__mro__ if c not in (base, *base.__mro__))


class SingleTurn:
    """A row of a task, as an environment of one step."""

    def __init__(self, task: Task):
        self.task = task

    def reset(self, row: Row) -> tuple[str, dict]:
        self.row = row
        return row.prompt, {}

    def step(self, response: str) -> tuple[str, float, bool, bool, dict]:
        return "", self.task.reward(self.row, response), True, False, {}


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
    warmup_steps: int = 600

    def __init__(self, config: EnvConfig):
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

    def __init__(self, env_class: type[Env], config: EnvConfig, seed: int = 0):
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
            raise ValueError(f"{self.describe(row, 0)}: {said[0]!r:.200} is not (text, info)")
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

    @property
    def source(self) -> str:
        return sources(self.env_class, Env)


# -- single-turn tasks ---------------------------------------------------------------------------


def split(rows: Iterable[Row], seed: int, held_out: int | None = None) -> tuple[list, list]:
    """Shuffle rows by the seed and cut them into (train, test); by default a tenth, at most 512."""
    rows = list(dict.fromkeys(rows))  # a row that came twice could be on both sides
    random.Random(f"split {seed}").shuffle(rows)
    n = min(512, max(1, len(rows) // 10)) if held_out is None else held_out
    return rows[n:], rows[:n]


class Addition(Task):
    """Sum of two 2-digit numbers, all 8,100 of them: `12+34=` → `46`. Made for the model `tiny`."""

    blocking = False

    def __init__(self, config: EnvConfig, seed: int = 0):
        super().__init__(config, seed)
        pairs = ((a, b) for a in range(10, 100) for b in range(10, 100))
        self.train, self.test = split((Row(f"{a}+{b}=", str(a + b)) for a, b in pairs), seed, 512)

    def reward(self, row: Row, response: str) -> float:
        return float(response == row.answer)

    def warmup(self, rng: random.Random) -> list[tuple[str, str]]:
        # Half the labels are wrong on purpose. The model then starts out like a pretrained one: the
        # right answer is its likeliest, but far from its only one, and RL has this to sharpen.
        row = rng.choice(self.train)
        offset = rng.choice((-20, -10, -2, -1, 1, 2, 10, 20)) if rng.random() < 0.5 else 0
        return [(row.prompt, str(int(row.answer) + offset))]


class Max3(Task):
    """Largest of three 2-digit numbers, after two examples. Made for SmolLM2-135M."""

    blocking = False
    chat = False  # a 135M model continues a pattern better than it follows an instruction
    stop = "\n"
    max_tokens = 4  # a space, two digits, the line break
    shots = "max(24, 71, 53) = 71\nmax(17, 35, 64) = 64\n"

    def __init__(self, config: EnvConfig, seed: int = 0):
        super().__init__(config, seed)
        rng = random.Random(f"max3 {seed}")
        # Distinct as sets, so that no order of a held-out triple is trained on.
        triples = rng.sample(list(combinations(range(10, 100), 3)), 8704)
        self.train, self.test = split((self.row(*rng.sample(t, 3)) for t in triples), seed, 512)

    def row(self, a: int, b: int, c: int) -> Row:
        return Row(f"{self.shots}max({a}, {b}, {c}) =", str(max(a, b, c)))

    def reward(self, row: Row, response: str) -> float:
        return float(response.removesuffix(self.stop) == f" {row.answer}")


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression of whole numbers, + - * / and brackets, and the numbers in it.

    Raises ValueError if the text is anything else, and ZeroDivisionError.
    """
    # These characters leave nothing to call, and the length no deep nesting.
    if not re.fullmatch(r"[0-9 +*/()-]{1,200}", text):
        raise ValueError(f"not an arithmetic expression: {text[:80]!r}")
    numbers = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant):
            numbers.append(node.value)
            return Fraction(node.value)
        raise ValueError(f"only whole numbers and + - * / are allowed: {text!r}")

    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError) as error:  # MemoryError: too many brackets for the parser
        raise ValueError(f"not an arithmetic expression: {text!r}") from error
    return value(tree.body), numbers


class Countdown(Task):
    """Reach a target from four numbers with + - * /, each number used at most once.

    The answer of a row holds the puzzle: `3 7 25 50 = 93`.
    """

    blocking = False
    max_tokens = 512

    def __init__(self, config: EnvConfig, seed: int = 0):
        super().__init__(config, seed)
        rng = random.Random(f"countdown {seed}")
        puzzles: dict[str, None] = {}  # in the order made: a set of texts has another in each run
        while len(puzzles) < 4608:
            total, *rest = numbers = rng.choices(range(1, 100), k=4)
            for n in rest:  # combined in this order they make the target, so there is a solution
                exact = [total + n, total - n, total * n] + [total // n] * (total % n == 0)
                total = rng.choice(exact)
            if 10 <= total <= 99:
                puzzles[f"{' '.join(map(str, sorted(numbers)))} = {total}"] = None
        self.train, self.test = split(map(self.row, puzzles), seed, 512)

    @staticmethod
    def row(puzzle: str) -> Row:
        numbers, target = puzzle.split(" = ")
        prompt = (
            f"Make {target} from the numbers {numbers.replace(' ', ', ')}. Use + - * / and "
            "brackets, and each number at most once. Think first, then write the expression, "
            "without the result, like this: <answer>(1 + 2) * 3</answer>"
        )
        return Row(prompt, puzzle)

    def reward(self, row: Row, response: str) -> float:
        numbers, target = row.answer.split(" = ")
        given = [int(n) for n in numbers.split()]
        answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        try:
            total, used = arithmetic(answers[-1].strip() if answers else "")
        except (ValueError, ZeroDivisionError):  # no fault: the response is just not a solution
            return 0.0
        return float(total == int(target) and all(used.count(n) <= given.count(n) for n in used))


# -- by name -------------------------------------------------------------------------------------

BUILT_IN: dict[str, type[Task]] = {
    "addition": Addition,
    "max3": Max3,
    "countdown": Countdown,
}
# Name or prefix -> the module (and class) that has it; imported only when asked for.
ELSEWHERE = {
    "grid": "tasks.games:Grid",
    "frozenlake": "tasks.games:FrozenLake",
    "guess": "tasks.games:Guess",
    "gsm8k": "tasks.math:MathTask",
    "math": "tasks.math:MathTask",
    "textworld": "tasks.adapters:TextWorld",
    "gem:": "tasks.adapters:Gem",
    "textarena:": "tasks.adapters:TextArena",
    "rg:": "tasks.adapters:ReasoningGym",
}


def require(package: str, env: str, install: str = "") -> None:
    """Raise ValueError with what to install, unless the package is there."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"env {env} needs: pip install {install or package}")


def make_task(config: EnvConfig, seed: int = 0) -> Task:
    """Build the task that `config.env` names. Raises ValueError with one line if it cannot."""
    name = config.env
    found = BUILT_IN.get(name)
    for key, place in ELSEWHERE.items():
        if name == key or (key.endswith(":") and name.startswith(key) and name != key):
            module, _, class_name = place.partition(":")
            found = getattr(importlib.import_module(module), class_name)
    found = found or load_class(name)
    if config.data and (name in BUILT_IN or issubclass(found, Env)):
        raise ValueError(f"--data {config.data}: env {name} makes its own rows")
    task = EnvTask(found, config, seed) if issubclass(found, Env) else found(config, seed)
    for part in ("train", "test"):
        if not len(getattr(task, part, ())):
            raise ValueError(f"env {name} has no {part} rows in {config.data or 'its class'}")
    return task


def load_class(name: str) -> type[Task] | type[Env]:
    """Import the class of `path/file.py:Class`."""
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py") or not class_name:
        known = ", ".join([*BUILT_IN, *(f"{k}NAME" if k[-1] == ":" else k for k in ELSEWHERE)])
        raise ValueError(f"unknown env {name!r}: one of {known}, or FILE.py:CLASS")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"env {name!r}: no such file: {path}")
    module_name = f"custom_env_{path.stem}"  # so that a file random.py takes no module's place
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's file: whatever it raises, say where
        raise ValueError(f"env file {path}: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task | Env)):
        what = "no subclass of envs.Task or envs.Env" if found else "not in the file"
        raise ValueError(f"env {name!r}: {class_name} is {what}")
    return found


# -- text to ids ---------------------------------------------------------------------------------

SAID = "@what-the-model-said@"  # stands for a turn while a chat template is rendered around it


def templated(task: Task, tokenizer) -> bool:
    return bool(task.chat and tokenizer.chat_template)


def encode_prompt(task: Task, text: str, tokenizer) -> list[int]:
    """Token ids of a prompt, in the chat template if the task wants it and the model has one."""
    if not templated(task, tokenizer):
        return tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    # return_dict, since its default differs between versions of transformers.
    out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return out["input_ids"]


def encode_reply(task: Task, text: str, tokenizer, last: int | None = None) -> list[int]:
    """Token ids of what follows a sampled turn: its end (unless that is `last`, the last token
    sampled), what the environment says, and the opening of the next turn. They do not depend on
    what else was sampled, so no template can rewrite that."""
    if not templated(task, tokenizer):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    roles = [("user", "-"), ("assistant", SAID), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in roles]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if SAID not in rendered:
        raise ValueError("the chat template changes what the model said: use a task without chat")
    ids = tokenizer(rendered.partition(SAID)[2], add_special_tokens=False)["input_ids"]
    return ids[1:] if ids[:1] == [last] else ids


def prompt_order(n: int, seed: int, index: int) -> int:
    """Row of the `index`-th prompt of a run out of `n` rows; each epoch has its own permutation."""
    epoch, position = divmod(index, n)
    return _permutation(n, seed, epoch)[position]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return order
