"""Tasks: where prompts come from and how a response is scored.

A single-turn task is one class with `train` and `test` rows and a `reward`. To add one, write a
file with a subclass of `Task`, and name it on the command line: `--env my_task.py:MyTask`.

The rewards here are 1.0 or 0.0, but any float is allowed. A reward that cannot be computed raises:
a 0 in its place would teach the model that a right answer is wrong.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import multiprocessing
import operator
import random
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple


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

    env: str = setting("addition", "addition, max3, countdown, gsm8k, math, or FILE.py:CLASS")
    data: str | None = setting(None, "rows for gsm8k and math: JSONL file or hub data set[:config]")
    env_timeout: float = setting(30.0, "seconds that one reward or one env step may take")
    reward_procs: int = setting(1, "processes that check math answers, for each rollout worker")

    def __post_init__(self) -> None:
        if not 0 < self.env_timeout < float("inf"):
            raise ValueError(f"env_timeout must be a time above 0 seconds, got {self.env_timeout}")
        if self.reward_procs < 1:
            raise ValueError(f"reward_procs must be at least 1, got {self.reward_procs}")


class Task:
    """Base of single-turn tasks. A subclass sets `train` and `test`, and defines `reward`."""

    max_tokens: int = 8  # default response budget; --max_tokens overrides it
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

    def warmup(self, rng: random.Random) -> tuple[str, str]:
        """Draw a (prompt, response) for the supervised warm-up of the model `tiny`."""
        raise ValueError(
            f"task {type(self).__name__} has no warm-up for --model tiny: "
            "define warmup(rng) in it, or use another model"
        )

    def close(self) -> None:
        """End the processes that the task has started."""


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

    def warmup(self, rng: random.Random) -> tuple[str, str]:
        # Half the labels are wrong on purpose. The model then starts out like a pretrained one: the
        # right answer is its likeliest, but far from its only one, and RL has this to sharpen.
        row = rng.choice(self.train)
        offset = rng.choice((-20, -10, -2, -1, 1, 2, 10, 20)) if rng.random() < 0.5 else 0
        return row.prompt, str(int(row.answer) + offset)


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


def boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`: `so \boxed{\frac{1}{2}}.` → `\frac{1}{2}`."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for i in range(match.end(), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[match.end() : i].strip()
    return None


def start_checker() -> None:
    """Prepare a process of the reward pool: the slow import comes before any check's clock runs."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns of the None below


def equivalent(gold: str, answer: str, limit: float) -> bool:
    """Whether two LaTeX expressions are equal. Runs in a process of the reward pool.

    An answer that cannot be read is not equal. Raises ValueError if the gold one cannot be read.
    """
    from math_verify import parse, verify

    # The pool ends this process after `limit` seconds. If nobody is left to do so, the alarm does.
    signal.setitimer(signal.ITIMER_REAL, limit + 5)
    try:
        # math-verify's own limits would take the alarm for themselves, and hold less well.
        expected = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
        if not expected:
            raise ValueError(f"math-verify cannot read the gold answer {gold!r}")
        given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        return bool(verify(expected, given, timeout_seconds=None))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class MathTask(Task):
    r"""Problems with one right expression, which the response has to give in `\boxed{}`.

    Rows have a `question` or `problem`, and an `answer` (the part after `####`, where it has one)
    or a `solution` (its last `\boxed{}`). Rows are held out from `test.jsonl` if the data file is
    `train.jsonl` (or other names with these words) and it exists; otherwise see `split`.
    """

    max_tokens = 1024
    check_seconds = 5.0  # a check that takes longer is ended, and the answer counts as wrong

    def __init__(self, config: EnvConfig, seed: int = 0):
        super().__init__(config, seed)
        if not config.data:
            raise ValueError(f"env {config.env} needs --data: a JSONL file or a hub data set")
        if not all(map(importlib.util.find_spec, ("math_verify", "pebble"))):
            raise ValueError(f"env {config.env} needs: pip install math-verify pebble")
        import pebble

        train, test = load_rows(config.data)
        self.train, self.test = split(train, seed) if test is None else (train, test)
        self._pool = pebble.ProcessPool(  # its processes start with the first check
            max_workers=config.reward_procs,
            initializer=start_checker,
            context=multiprocessing.get_context("spawn"),
        )

    def reward(self, row: Row, response: str) -> float:
        answer = boxed(response)
        if answer is None:
            return 0.0
        gold, given = (re.sub(r"[,\s]|\\?\$", "", text) for text in (row.answer, answer))
        if gold == given:
            return 1.0
        if all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in (gold, given)):
            return float(int(gold) == int(given))
        return float(self._check(row.answer, answer))

    def _check(self, gold: str, answer: str) -> bool:
        patience = self.config.env_timeout
        limit = min(self.check_seconds, patience)
        future = self._pool.schedule(equivalent, args=(gold, answer, limit), timeout=limit)
        try:
            return future.result(timeout=patience)
        except FutureTimeout as error:
            if future.done():  # it had its time: \boxed{9^{9^{9^{9}}}}
                return False
            future.cancel()
            raise TimeoutError(
                f"waited {patience:g} s for a free process to check a math answer: "
                "raise --reward_procs or --env_timeout"
            ) from error

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


def load_rows(data: str) -> tuple[list[Row], list[Row] | None]:
    """Read train rows, and test rows where there are some, from a JSONL file or the hub.

    Raises ValueError with the file and line, or the data set and row, that is at fault.
    """
    path = Path(data).expanduser()
    if path.is_file():
        sibling = path.with_name(path.name.replace("train", "test"))
        has_test = sibling != path and sibling.is_file()
        return read_jsonl(path), read_jsonl(sibling) if has_test else None
    if path.suffix in (".json", ".jsonl"):
        raise ValueError(f"no such data file: {path}")
    name, _, config = data.partition(":")
    try:
        import datasets

        parts = datasets.load_dataset(name, config or None)
    except ModuleNotFoundError as error:
        raise ValueError(f"no file {data}; a hub data set needs: pip install datasets") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"no file {data}, and no such data set on the hub: {error}") from error
    if "train" not in parts:
        raise ValueError(f"data set {data} has no split `train`: it has {', '.join(parts)}")
    train, test = (
        [math_row(record, f"{data} {part} row {i}") for i, record in enumerate(parts.get(part, ()))]
        for part in ("train", "test")
    )
    return train, test or None


def read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path} line {number}"
        if line.strip():
            try:
                rows.append(math_row(json.loads(line), where))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
    return rows


def math_row(record: object, where: str) -> Row:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is no JSON object")
    question = record.get("question", record.get("problem"))
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no text in `question` or `problem`")
    if record.get("answer") is not None:
        answer = str(record["answer"]).rpartition("####")[2].strip()
        gold = boxed(answer) or answer
    else:
        gold = boxed(str(record.get("solution")))
    if not gold:
        raise ValueError(f"{where} has no `answer`, and no `solution` with a \\boxed{{}} in it")
    ask = "Reason step by step, and put the final answer in \\boxed{}."
    return Row(f"{question}\n{ask}", gold)


TASKS: dict[str, type[Task]] = {
    "addition": Addition,
    "max3": Max3,
    "countdown": Countdown,
    "gsm8k": MathTask,
    "math": MathTask,
}


def make_task(config: EnvConfig, seed: int = 0) -> Task:
    """Build the task that `config.env` names. Raises ValueError with one line if it cannot."""
    task = (TASKS.get(config.env) or load_class(config.env))(config, seed)
    for part in ("train", "test"):
        if not len(getattr(task, part, ())):
            raise ValueError(f"env {config.env} has no {part} rows in {config.data or 'its class'}")
    return task


def load_class(name: str) -> type[Task]:
    """Import the class of `path/file.py:Class`."""
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py") or not class_name:
        raise ValueError(f"unknown env {name!r}: one of {', '.join(TASKS)}, or FILE.py:CLASS")
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
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = "no subclass of envs.Task" if hasattr(module, class_name) else "not in the file"
        raise ValueError(f"env {name!r}: {class_name} is {what}")
    return found


def encode_prompt(task: Task, row: Row, tokenizer) -> list[int]:
    """Token ids of a prompt, in the chat template if the task wants it and the model has one."""
    if not (task.chat and tokenizer.chat_template):
        return tokenizer(row.prompt)["input_ids"]
    messages = [{"role": "user", "content": row.prompt}]
    # return_dict, since its default differs between versions of transformers.
    out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return out["input_ids"]


def prompt_order(n: int, seed: int, index: int) -> int:
    """Row of the `index`-th prompt of a run out of `n` rows; each epoch has its own permutation."""
    epoch, position = divmod(index, n)
    return _permutation(n, seed, epoch)[position]


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return order
