"""Math word problems with one right expression: `--env gsm8k` and `--env math`.

Rows come from a JSONL file or a hub data set; answers are compared by math-verify in processes of
their own, since a check may take for ever (`\\boxed{9^{9^{9^{9}}}}`).
"""

import importlib.util
import json
import logging
import multiprocessing
import re
import signal
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

from envs import Row, Task, split


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

    def __init__(self, config, seed: int = 0):
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
