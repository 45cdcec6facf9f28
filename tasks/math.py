r"""Math problems with one right answer: `--env gsm8k` and `--env math`.

What a file or data set may look like stands in `tasks/shapes.py`, when an answer is right in
`tasks/answers.py`. What only algebra can decide is asked of math-verify, in processes of their
own, since a check may take for ever. The time of a check is counted from its start: an honest
answer that waits behind slow ones gets its right reward, however long it waits.
"""

import importlib.util
import logging
import multiprocessing
import random
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

from envs import Row, Task
from tasks.answers import boxed, legible, verdict
from tasks.rows import Rows, load
from tasks.shapes import MathShape

ASK = "Reason step by step, and put the final answer in \\boxed{}."
REMEMBERED = 4096  # verdicts: the samples of a group give the same answers
STUCK = 120.0  # seconds without any check coming to an end: the processes are at fault


class Undecided(Exception):
    """Only algebra can tell."""


def undecided(*texts: str) -> bool:
    raise Undecided


def quick(rule: Callable, *texts: str) -> bool | None:
    """What a rule of `tasks/answers.py` says without algebra, None if it needs that."""
    try:
        return rule(*texts, undecided)
    except Undecided:
        return None


# -- in a process of the reward pool -------------------------------------------------------------


def start_checker() -> None:
    """Prepare a process of the reward pool: what is slow once, before the clock of a check runs."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns of the None below
    algebra("x^2-1", "(x-1)(x+1)")


def check(rule: Callable, texts: tuple[str, ...], limit: float) -> bool:
    """What a rule of `tasks/answers.py` says with math-verify for its algebra.

    An answer that cannot be read is wrong. Raises ValueError if the gold answer cannot be read.
    """
    # The pool ends this process after `limit` seconds. If nobody is left to do so, the alarm does.
    signal.setitimer(signal.ITIMER_REAL, limit + 5)
    try:
        return rule(*texts, reads if rule is legible else algebra)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def algebra(gold: str, answer: str) -> bool:
    """Whether two expressions in LaTeX are equal, in the words of math-verify."""
    from math_verify import verify

    expected = parsed(gold)
    if not expected:
        raise ValueError(f"math-verify cannot read the gold answer {gold!r}")
    given = parsed(answer)
    # Its own limits would take the alarm for themselves, and hold less well.
    how = {"timeout_seconds": None, "allow_set_relation_comp": True}
    return bool(given) and verify(expected, given, **how) and not far(expected[0], given[0])


def reads(text: str) -> bool:
    """Whether math-verify can read an expression, and finds it equal to itself."""
    from math_verify import verify

    found = parsed(text)
    return bool(found) and verify(found, found, timeout_seconds=None)


def parsed(text: str) -> list:
    """The expression that LaTeX says, empty if it says none. Units are not dropped, nor is a number
    picked out of a sentence: `tasks/answers.py` knows better."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    fixes = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
    )
    how = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig(normalization_config=fixes)], **how)


def far(one, two) -> bool:
    """Whether two numbers differ in their first six digits, or without decimals in twelve:
    math-verify counts decimals, and in these π / 10^8 is 0."""
    import sympy

    if not all(isinstance(x, sympy.Expr) and x.is_number for x in (one, two)):
        return False
    a, b = (complex(x.evalf(30)) for x in (one, two))
    digits = 6 if one.has(sympy.Float) or two.has(sympy.Float) else 12
    return abs(a - b) > max(abs(a), abs(b)) * 5 * 10.0**-digits


# -- the task ------------------------------------------------------------------------------------


class BadGold(NamedTuple):
    """A gold answer that no answer can match, or none but the same letters."""

    row: int
    why: str  # in one line, with the file and line


class MathTask(Task):
    r"""Problems with one right answer, which the response has to give in `\boxed{}`.

    Rows are held out from `test.jsonl` if the data file is `train.jsonl` (or other names with
    these words) and it exists; otherwise a tenth of the questions is.
    """

    max_tokens = 1024
    own_clock = True  # a reward ends by itself: each check is limited, the wait for one is not
    check_seconds = 5.0  # a check that takes longer is ended, and the answer counts as wrong
    train: Rows
    test: Rows

    def __init__(self, config, seed: int = 0):
        super().__init__(config, seed)
        if not config.data:
            raise ValueError(f"env {config.env} needs --data: a JSONL file or a hub data set")
        if not all(map(importlib.util.find_spec, ("math_verify", "pebble"))):
            raise ValueError(f"env {config.env} needs: pip install math-verify pebble")
        import pebble

        self.shape = MathShape(config.question_key, config.answer_key)
        self.train, self.test, self.notes = load(config.data, seed, self.row, self.shape.columns)
        self._pool = pebble.ProcessPool(  # its processes start with the first check
            max_workers=config.reward_procs,
            initializer=start_checker,
            context=multiprocessing.get_context("spawn"),
        )
        self._checks: OrderedDict = OrderedDict()  # (rule, texts) -> future; oldest first
        self._lock, self._moved = threading.Lock(), time.monotonic()

    def row(self, record: object, where: str) -> Row:
        question, gold = self.shape(record, where)
        # Data sets that ask for it have their own words for that.
        return Row(question if "\\boxed" in question else f"{question}\n{ASK}", gold)

    def reward(self, row: Row, response: str) -> float:
        answer = boxed(response)
        if answer is None:
            return 0.0
        known = quick(verdict, row.answer, answer)
        return float(self._check(verdict, row.answer, answer) if known is None else known)

    def _check(self, rule: Callable, *texts: str) -> bool:
        from pebble import ProcessExpired

        for _ in range(2):
            try:
                return self._wait(self._ask(rule, texts))
            except ProcessExpired:
                with self._lock:
                    self._checks.pop((rule, texts), None)
        return False  # it kills what reads it

    def _ask(self, rule: Callable, texts: tuple[str, ...]):
        """The future of a check: of one that is under way or known, where there is one."""
        limit = min(self.check_seconds, self.config.env_timeout)
        with self._lock:
            if (rule, texts) not in self._checks:
                future = self._pool.schedule(check, args=(rule, texts, limit), timeout=limit)
                future.add_done_callback(self._has_moved)
                self._checks[rule, texts] = future
            self._checks.move_to_end((rule, texts))
            if len(self._checks) > REMEMBERED:
                self._checks.popitem(last=False)
            return self._checks[rule, texts]

    def _has_moved(self, _) -> None:
        self._moved = time.monotonic()

    def _wait(self, future) -> bool:
        """The result of a check. Raises TimeoutError if no check comes to an end any more."""
        start = time.monotonic()
        while True:
            try:
                return future.result(timeout=STUCK / 10)
            except FutureTimeout as error:
                if future.done():  # it had its time: \boxed{9^{9^{9^{9}}}}
                    return False
                if time.monotonic() - max(start, self._moved) > STUCK:
                    raise TimeoutError(
                        f"no math answer has been checked for {STUCK:g} s: --reward_procs "
                        f"{self.config.reward_procs} processes, none of which answers"
                    ) from error

    def check_golds(
        self, rows: Rows, most: int = 2000, seed: int = 0
    ) -> tuple[list[BadGold], int]:
        """Gold answers that can never be met (unreadable, prose, too long, or not equal to
        themselves), and how many rows were looked at.

        Those that need algebra are a sample of at most `most`, drawn by the seed; of more than
        50 times as many rows, all are a sample. Each different answer is looked at once.
        """
        rng = random.Random(f"golds {seed}")
        chosen = range(len(rows))
        if len(rows) > 50 * most:
            chosen = sorted(rng.sample(chosen, 50 * most))
        places: dict[str, list[int]] = {}
        for i in chosen:
            places.setdefault(rows[i].answer, []).append(i)
        known = {gold: quick(legible, gold) for gold in places}
        open_ = [gold for gold, fine in known.items() if fine is None]
        for gold in rng.sample(open_, min(most, len(open_))):
            known[gold] = self._ask(legible, (gold,))
        bad, looked = [], 0
        for gold, fine in known.items():
            looked += len(places[gold]) if fine is not None else 0
            if fine is not None and not (fine if isinstance(fine, bool) else self._wait(fine)):
                bad += places[gold]
        why = "no other way of writing it can be recognised"
        return [
            BadGold(i, f"{rows.where(i)}: gold answer {rows[i].answer!r:.80}: {why}")
            for i in sorted(bad)
        ], looked

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()
