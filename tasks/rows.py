"""Rows from the files and data sets that people have, kept compact, and what is held out of them.

    train, test, notes = load("train.jsonl", seed, row_of)

JSON lines, a JSON array, parquet (with `pyarrow`), and data sets of the hub or a local directory
(with `datasets`). A file `train...` brings its `test...` along, where there is one; without, a
tenth is held out. `row_of(record, where)` makes a Row of a record or raises ValueError; `where` is
"FILE line 7". Nothing is ever trained on and evaluated on: questions are compared without regard
to blanks and case.
"""

import importlib.util
import json
import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from huggingface_hub import constants

from envs import Row
from plumbing.packages import silence_of_hub

RowOf = Callable[[object, str], Row]
Columns = Callable[[Sequence[str]], list[str]]  # the columns of a table that are needed
PARQUET = (".parquet", ".pq")
BATCH = 10_000  # records of a table at once
INSTALL = "pip install --no-deps -r requirements/data.txt"


class Texts:
    """Many texts as one run of UTF-8: 8 bytes a text beside its letters, where a str takes 49."""

    def __init__(self):
        self.bytes, self.ends = bytearray(), array("Q")

    def append(self, text: str) -> None:
        self.bytes += text.encode()
        self.ends.append(len(self.bytes))

    def __getitem__(self, i: int) -> str:
        return self.bytes[self.ends[i - 1] if i else 0 : self.ends[i]].decode()


class Rows(Sequence):
    """Rows that are made when they are asked for, and where each of them came from.

    `source` names the file or data set and what is counted: "train.jsonl line". A row that says
    exactly what an earlier one says is left out, and counted in `repeats`.
    """

    def __init__(self, source: str):
        self.source, self.order = source, np.zeros(0, np.int64)
        self.prompts, self.answers = Texts(), Texts()
        self.places, self.keys = array("Q"), array("Q")  # line; fingerprint of the question
        self.repeats, self.repeated = 0, ()  # how many; places of the first and what it repeats
        self._seen: dict[int, int] = {}  # fingerprint of a row -> its place

    def add(self, row: Row, place: int) -> None:
        """Raises UnicodeEncodeError for half a surrogate pair."""
        question = fingerprint(" ".join(row.prompt.lower().split()))
        first = self._seen.setdefault(fingerprint(f"{question} {row.answer}"), place)
        if first != place:
            self.repeats += 1
            self.repeated = self.repeated or (place, first)
            return
        self.prompts.append(row.prompt)
        self.answers.append(row.answer)
        self.places.append(place)
        self.keys.append(question)

    def close(self) -> "Rows":
        """No more rows are added."""
        self._seen.clear()
        self.order = np.arange(len(self.places))
        return self

    def pick(self, order: np.ndarray) -> "Rows":
        """These rows in this order; the texts are shared."""
        rows = Rows(self.source)
        rows.prompts, rows.answers = self.prompts, self.answers
        rows.places, rows.keys, rows.order = self.places, self.keys, self.order[order]
        return rows

    def questions(self) -> np.ndarray:
        """A fingerprint of each row's question, uint64 [rows]: equal for equal questions."""
        return np.frombuffer(self.keys, np.uint64)[self.order] if self.keys else np.zeros(0, "u8")

    def where(self, i: int) -> str:
        """Where row i came from: `train.jsonl line 7`."""
        return f"{self.source} {self.places[self.order[i]]}"

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int | slice) -> Row | list[Row]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        at = self.order[i]
        return Row(self.prompts[at], self.answers[at])


def fingerprint(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


# -- what is held out ----------------------------------------------------------------------------


def load(data: str, seed: int, row_of: RowOf, columns: Columns = list) -> tuple[Rows, Rows, list]:
    """Train rows, test rows, and notes: one line each about what was left out or is odd.

    Raises ValueError with the file and line, or the data set and row, that is at fault.
    """
    train, test = read(data, row_of, columns)
    notes = [note for rows in (train, test) if rows is not None for note in remarks(rows)]
    if test is None:
        train, test, more = hold_out(train, seed)
    else:
        train, more = without(train, test)
    return train, test, notes + more


class Duplicates(NamedTuple):
    """Questions that are asked again: how many rows do, and (row, earlier row) of the first."""

    count: int
    example: tuple[int, int] | None


def duplicates(questions: np.ndarray, others: np.ndarray | None = None) -> Duplicates:
    """Rows whose question an earlier row asks; with `others`: whose question is one of those.

    Both hold a fingerprint a question (`Rows.questions`).
    """
    if others is None:
        _, first, group = np.unique(questions, return_index=True, return_inverse=True)
        earlier = first[group]
        again = np.flatnonzero(earlier != np.arange(len(questions)))
    else:
        known, first = np.unique(others, return_index=True)
        again = np.flatnonzero(np.isin(questions, known))
        earlier = np.zeros(len(questions), np.int64)
        earlier[again] = first[np.searchsorted(known, questions[again])]
    example = (int(again[0]), int(earlier[again[0]])) if len(again) else None
    return Duplicates(len(again), example)


def remarks(rows: Rows) -> list[str]:
    """Notes about rows that say the same, or answer the same question differently."""
    notes = []
    if rows.repeats:
        place, first = rows.repeated
        notes.append(
            f"{rows.repeats} rows repeat an earlier one and are left out "
            f"({rows.source} {place} repeats {first})"
        )
    found = duplicates(rows.questions())
    if found.example:
        one, two = map(rows.where, found.example)
        notes.append(f"{found.count} rows give an earlier question another answer ({one}; {two})")
    return notes


def without(train: Rows, test: Rows) -> tuple[Rows, list[str]]:
    """Train rows whose question is not in test. Raises ValueError if none is left."""
    found = duplicates(train.questions(), test.questions())
    if not found.example:
        return train, []
    if found.count == len(train):
        raise ValueError(f"every question of {train.source} is in {test.source}, too")
    kept = np.flatnonzero(~np.isin(train.questions(), test.questions()))
    one, two = train.where(found.example[0]), test.where(found.example[1])
    note = f"{found.count} train rows ask what a test row asks and are left out ({one}; {two})"
    return train.pick(kept), [note]


def hold_out(rows: Rows, seed: int) -> tuple[Rows, Rows, list[str]]:
    """Shuffle questions by the seed and hold out a tenth, at most 512; rows of one question stay
    together. A single question is in both parts, so that a first try of one row runs."""
    _, first, group = np.unique(rows.questions(), return_index=True, return_inverse=True)
    if len(first) == 1:
        return rows, rows, [f"{rows.where(0)} is the only question: trained and evaluated on"]
    by_row = np.argsort(np.argsort(first))[group]  # of each row, which question it asks
    shuffled = list(range(len(first)))
    random.Random(f"split {seed}").shuffle(shuffled)
    place = np.empty(len(first), np.int64)
    place[shuffled] = np.arange(len(first))
    held = min(512, max(1, len(first) // 10))
    order = np.argsort(place[by_row], kind="stable")
    test = int((place < held)[by_row].sum())
    return rows.pick(order[test:]), rows.pick(order[:test]), []


# -- files and data sets -------------------------------------------------------------------------


def read(data: str, row_of: RowOf, columns: Columns = list) -> tuple[Rows, Rows | None]:
    """Train rows, and test rows where there are some. Raises ValueError as `load` does."""
    path = Path(data).expanduser()
    if path.is_file():
        sibling = path.with_name(path.name.replace("train", "test"))
        has_test = sibling != path and sibling.is_file()
        train = read_file(path, row_of, columns)
        return train, read_file(sibling, row_of, columns) if has_test else None
    if path.suffix in (".json", ".jsonl", *PARQUET):
        raise ValueError(f"no such data file: {path}")
    return read_hub(data, row_of, columns)


def read_file(path: Path, row_of: RowOf, columns: Columns = list) -> Rows:
    """The rows of one file. Raises ValueError with the line or row at fault."""
    try:
        if path.suffix in PARQUET:
            return collect(f"{path} row", parquet_records(path, columns), row_of)
        with path.open("rb") as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \r\n\t")[:1]
        is_array = path.suffix == ".json" and start == b"["
        records = array_records(path) if is_array else line_records(path)
        return collect(f"{path} line", records, row_of)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from error


def collect(source: str, records: Iterable[tuple[int, object]], row_of: RowOf) -> Rows:
    """Rows of (place, record) pairs."""
    rows = Rows(source)
    for place, record in records:
        try:
            rows.add(row_of(record, f"{source} {place}"), place)
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise ValueError(
                f"{source} {place} holds {half}, half a surrogate pair and no text"
            ) from error
    return rows.close()


def line_records(path: Path) -> Iterator[tuple[int, object]]:
    """(line, record) of a file with one JSON value a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parsed(json.loads, line, f"{path} line {number}")


def array_records(path: Path) -> Iterator[tuple[int, object]]:
    """(line it begins on, record) of a file that is one JSON array, one after the other."""
    text = parsed(lambda raw: raw.decode("utf-8-sig"), path.read_bytes(), str(path))
    decoder, blank = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")
    at = blank.match(text, text.index("[") + 1).end()
    line = 1 + text.count("\n", 0, at)
    while text[at : at + 1] != "]":
        record, end = parsed(partial(decoder.raw_decode, text), at, f"{path} line {line}")
        yield line, record
        end = blank.match(text, end).end()
        line += text.count("\n", at, end)
        if text[end : end + 1] not in (",", "]"):
            raise ValueError(f"{path} line {line} is not JSON: a comma or ] is expected")
        at = end if text[end] == "]" else blank.match(text, end + 1).end()
        line += text.count("\n", end, at)


def parsed(parse: Callable, raw, where: str):
    """parse(raw); raises ValueError in one line if that is no JSON."""
    try:
        return parse(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is not JSON: {one_line(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{where} is not JSON that can be read: nested too deep") from error
    except ValueError as error:  # Python's limit on the digits of a number
        raise ValueError(f"{where} holds a number of too many digits") from error


def parquet_records(path: Path, columns: Columns) -> Iterator[tuple[int, object]]:
    """(row, record) of a parquet file; only the columns that are needed are read."""
    need("pyarrow", str(path))
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path, memory_map=True)
        names = columns(file.schema_arrow.names)
        row = 0
        for batch in file.iter_batches(BATCH, columns=names):
            for record in batch.to_pylist():
                yield row, record
                row += 1
    except ArrowException as error:
        raise ValueError(f"{path} is not parquet: {one_line(error)}") from error


def read_hub(data: str, row_of: RowOf, columns: Columns) -> tuple[Rows, Rows | None]:
    """Rows of a data set of the hub, `NAME` or `NAME:CONFIG`, or of a directory of files."""
    name, _, config = data.partition(":")
    if not (Path(name).exists() or constants.HF_HUB_OFFLINE) and silence_of_hub():
        constants.HF_HUB_OFFLINE = True  # what is in the cache is found, the rest is refused soon
    try:
        import datasets

        parts = datasets.load_dataset(name, config or None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no file {data}; a hub data set needs: pip install datasets ({INSTALL})"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no file {data}, and no such data set on the hub: {one_line(error)}"
        ) from error
    if "train" not in parts:
        raise ValueError(f"data set {data} has no split `train`: it has {', '.join(parts)}")
    records = {part: table_records(parts.get(part, ()), columns) for part in ("train", "test")}
    train, test = (
        collect(f"{data} {part} row", enumerate(records[part]), row_of) for part in records
    )
    return train, test if len(test) else None


def table_records(table, columns: Columns) -> Iterator[object]:
    """The records of a split of a data set; a batch of columns at once where it has them."""
    if not hasattr(table, "with_format"):
        yield from table
        return
    for batch in table.with_format("arrow").iter(BATCH):
        yield from batch.select(columns(batch.column_names)).to_pylist()


def need(package: str, what: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs: pip install {package} ({INSTALL})")


def one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}"


# -- puzzles -------------------------------------------------------------------------------------


def countdown_row(record: object, where: str) -> str:
    """The puzzle of a record with a target and numbers: `3 7 25 50 = 93`.

    Columns `target` and `nums` or `numbers`, in any case. Raises ValueError that begins with
    `where` for others.
    """
    fields = record if isinstance(record, dict) else {}
    fields = {str(name).lower(): value for name, value in fields.items()}
    target, numbers = fields.get("target"), fields.get("nums") or fields.get("numbers")
    if not whole(target) or not isinstance(numbers, list) or not all(map(whole, numbers)):
        raise ValueError(f"{where} has no `target` and `nums` that are whole numbers, 0 or more")
    if not numbers:
        raise ValueError(f"{where} has no numbers in `nums`")
    return f"{' '.join(map(str, sorted(numbers)))} = {target}"


def whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
