r"""What a record of a math data set asks, and what its right answer is.

Known without flags, columns in any case, the first that is not empty counts:

    GSM8K              question, answer: `6 * 7 = 42 #### 42`
    MATH               problem, solution: `so it is \boxed{42}`
    DeepScaleR, AIME   problem, answer, solution
    OpenR1-Math        problem, answer, solution, messages
    DAPO, verl         prompt: messages, reward_model.ground_truth
    DAPO, processed    prompt, solution: `42`
    slime              prompt: text or messages, label
    ROLL               messages: JSON in a text, ground_truth
    SkyRL              prompt: messages, reward_spec.ground_truth
    OpenRLHF           input or context_messages, label

Others are named by `--question_key` and `--answer_key`, with dots for what lies in a column:
`extra_info.answer`. A prompt is one text here: the system message of a list of messages stands
before the user's, with an empty line between them.
"""

import json
import math
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache

from tasks.answers import boxed

QUESTIONS = ("question", "problem", "prompt", "messages", "context_messages", "input")
ANSWERS = (
    "answer", "label", "ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth",
    "solution",
)  # fmt: skip
LONGEST_SOLUTION = 80  # characters of a solution that is only an answer


class MathShape:
    """Takes a record apart. `question_key` and `answer_key` name columns, empty: those known."""

    def __init__(self, question_key: str = "", answer_key: str = ""):
        self.questions = (question_key,) if question_key else QUESTIONS
        self.answers = (answer_key,) if answer_key else ANSWERS
        self.keys = question_key, answer_key

    def __call__(self, record: object, where: str) -> tuple[str, str]:
        """(question, gold answer), texts without blanks around them and not empty.

        Raises ValueError, in one line that begins with `where`, for a record that has none.
        """
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no JSON object")
        for name, path in places(tuple(record), self.questions):
            if question := question_of(look(record, path), f"{where}: `{name}`"):
                break
        else:
            raise ValueError(f"{where} has no text in {self._missing(0, record)}")
        for name, path in places(tuple(record), self.answers):
            if gold := gold_of(look(record, path), name, f"{where}: `{name}`"):
                return question, gold
        raise ValueError(f"{where} has no {self._missing(1, record)}")

    def _missing(self, which: int, record: dict) -> str:
        has = ", ".join(map(str, record)) or "no columns"
        if self.keys[which]:
            flag = ("--question_key", "--answer_key")[which]
            return f"`{self.keys[which]}` ({flag}); it has {has:.200}"
        if which == 0:
            return f"`question` or `problem`, and none that --question_key names; it has {has:.200}"
        return (
            "`answer`, and no `solution` with a \\boxed{} in it, and none that --answer_key names; "
            f"it has {has:.200}"
        )

    def columns(self, names: Iterable[str]) -> list[str]:
        """Those of a table's columns that are looked at; all, where something would be missing."""
        names = tuple(names)
        found = [[p[0] for _, p in places(names, keys)] for keys in (self.questions, self.answers)]
        return list(dict.fromkeys(sum(found, []))) if all(found) else list(names)


@lru_cache(maxsize=1024)
def places(names: tuple[str, ...], keys: tuple[str, ...]) -> tuple[tuple[str, list[str]], ...]:
    """Which of the keys are columns: (key, path to it). What lies in a column is not looked at."""
    names = [name for name in names if isinstance(name, str)]
    lower = {name.lower(): name for name in reversed(names)} | {name: name for name in names}
    found = []
    for key in keys:
        first, *rest = [key] if key in lower or key.lower() in lower else key.split(".")
        name = lower.get(first) or lower.get(first.lower())
        if name is not None:
            found.append((key, [name, *rest]))
    return tuple(found)


def look(record: object, path: list[str]) -> object:
    """What lies at a path, None if nothing does."""
    for name in path:
        record = opened(record) if isinstance(record, str) else record
        if not isinstance(record, dict):
            return None
        record = record.get(name)
    return record


def opened(text: str) -> object:
    """The list or object that a text spells in JSON, else the text itself."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a text that begins with a bracket
        return text


def question_of(value: object, where: str) -> str:
    """The text of a prompt: a text, a list of messages, or that as JSON in a text. Empty if it is.

    Raises ValueError for what is neither, and for a conversation of several turns.
    """
    if value is None:
        return ""
    messages = opened(value) if isinstance(value, str) else value
    if isinstance(value, str) and not is_messages(messages):
        return value.strip()
    if messages == []:
        return ""
    if not is_messages(messages):
        raise ValueError(f"{where} is no text and no list of messages: {value!r:.80}")
    while len(messages) > 1 and messages[-1]["role"] == "assistant":  # the answer, to learn from
        messages = messages[:-1]
    roles = [message["role"] for message in messages]
    if [role for role in roles if role not in ("system", "developer")] != ["user"]:
        raise ValueError(f"{where} has {', '.join(map(str, roles))}: one user message is expected")
    return "\n\n".join(filter(None, (content(message, where) for message in messages)))


def is_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(part, dict) and {"role", "content"} <= part.keys() for part in value)
    )


def content(message: dict, where: str) -> str:
    """The text of a message, which may be given in parts."""
    parts = message["content"]
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        parts = "\n".join(p["text"] if isinstance(p.get("text"), str) else "\0" for p in parts)
    if not isinstance(parts, str) or "\0" in parts:
        raise ValueError(f"{where} has a message that is no text: {message['content']!r:.80}")
    return parts.strip()


def gold_of(value: object, column: str, where: str) -> str:
    """The gold answer in a column; empty if there is none in it.

    Raises ValueError for what no answer can be: a truth value, a list of several, NaN.
    """
    if isinstance(value, str) and value.lstrip()[:2] in ('["', "['"):
        value = opened(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"{where} is {value!r:.80}: a text or a number is expected")
    if not isinstance(value, str):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: a finite number is expected")
        return str(value)
    gold = value.rpartition("####")[2].strip()
    inside = boxed(gold)
    if column.rpartition(".")[2] == "solution":
        return inside or (gold if is_bare(gold) else "")
    return inside or gold


def is_bare(solution: str) -> bool:
    """Whether a solution is only an answer, without a way to it."""
    words = [word for word in solution.split() if word.strip(".,;:").isalpha() and len(word) > 2]
    return len(solution) <= LONGEST_SOLUTION and (not words or len(solution.split()) == 1)
