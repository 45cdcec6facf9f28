"""Data sets as people have them: shapes, files, bad rows, repeats, and what is held out."""

import json
import sys
import types

import numpy as np
import pytest
from huggingface_hub import constants

from envs import Row
from plumbing.settings import Settings
from tasks.find import make_task
from tasks.puzzles import Countdown
from tasks.rows import Rows, countdown_row, duplicates, hold_out, load, read_file, without
from tasks.shapes import MathShape


def write_rows(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def row_of(record, where):
    return Row(*MathShape()(record, where))


def rows(*pairs):
    made = Rows("mine line")
    for place, (prompt, answer) in enumerate(pairs, start=1):
        made.add(Row(prompt, answer), place)
    return made.close()


# --- shapes

USER = [{"role": "user", "content": "What is 6 * 7?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
THINKING = [*USER, {"role": "assistant", "content": "It is 42."}]
ASKED = "What is 6 * 7?"
SHAPES = {
    "GSM8K": {"question": ASKED, "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
    "MATH": {"problem": ASKED, "level": "Level 1", "solution": r"It is \boxed{41}, no, \boxed{42}"},
    "DeepScaleR": {"problem": ASKED, "answer": "42", "solution": "long"},
    "OpenR1-Math": {
        "problem": ASKED, "solution": "long", "answer": "42", "generations": ["a", "b"],
        "messages": THINKING, "correctness_count": 2,
    },
    "DAPO": {
        "data_source": "math_dapo", "prompt": USER, "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule"}, "extra_info": {"index": "a"},
    },
    "DAPO, processed": {"prompt": ASKED, "solution": "42", "source_prompt": USER},
    "verl": {
        "prompt": USER, "reward_model": {"ground_truth": "42"},
        "extra_info": {"question": "raw", "answer": "raw"},
    },
    "slime": {"prompt": USER, "label": "42", "metadata": {}},
    "slime, text": {"prompt": ASKED, "label": 42},
    "ROLL": {"id": "0", "messages": json.dumps(USER), "ground_truth": "42", "tag": "math"},
    "SkyRL": {
        "prompt": USER, "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "42"},
    },
    "OpenRLHF": {"input": ASKED, "label": "42"},
    "OpenRLHF, messages": {"context_messages": USER, "label": "42"},
    "AIME": {"ID": "2024-I-1", "Problem": ASKED, "Solution": "long", "Answer": 42},
    "AIME, lower case": {"id": 1, "problem": ASKED, "solution": "long", "answer": "42"},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_each_shape_is_known_in_each_kind_of_file(shape, form, tmp_path):
    path = tmp_path / {"lines": "r.jsonl", "array": "r.json", "parquet": "r.parquet"}[form]
    if form == "lines":
        write_rows(path, SHAPES[shape])
    elif form == "array":
        path.write_text(json.dumps([SHAPES[shape]], indent=2))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist([{k: v for k, v in SHAPES[shape].items() if v != {}}]), path
        )
    task = make_task(Settings(env="math", data=str(path)))
    assert task.train[0].answer == "42" and task.train[0].prompt.startswith(ASKED + "\n")


@pytest.mark.parametrize(
    ("record", "question", "gold"),
    [
        ({"question": None, "problem": "p", "answer": "1"}, "p", "1"),
        ({"question": " ", "problem": "p", "answer": "1"}, "p", "1"),
        ({"prompt": [], "messages": USER, "answer": "1"}, ASKED, "1"),
        ({"question": "q", "answer": "", "solution": r"so \boxed{2}"}, "q", "2"),
        ({"question": "q", "answer": None, "ground_truth": "3"}, "q", "3"),
        ({"question": "q", "answer": "a\n#### ", "label": "4"}, "q", "4"),
        ({"question": "q", "reward_model": None, "solution": "5"}, "q", "5"),
        ({"question": "q", "reward_model": '{"ground_truth": "6"}'}, "q", "6"),
        ({"question": "q", "answer": r"\boxed{\frac{1}{2}}"}, "q", r"\frac{1}{2}"),
        ({"question": "q", "answer": ["18"]}, "q", "18"),
        ({"question": "q", "answer": '["18"]'}, "q", "18"),
        ({"question": "q", "answer": 7.5}, "q", "7.5"),
        ({"question": "q", "answer": 0}, "q", "0"),
        ({"question": "q", "solution": r"\frac{1}{2}"}, "q", r"\frac{1}{2}"),
        ({"question": "q", "solution": "Tuesday"}, "q", "Tuesday"),
        ({"prompt": SYSTEM, "answer": "1"}, "Be brief.\n\n" + ASKED, "1"),
        ({"messages": json.dumps(SYSTEM), "answer": "1"}, "Be brief.\n\n" + ASKED, "1"),
        ({"messages": THINKING, "answer": "1"}, ASKED, "1"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "label": 1},
         "q", "1"),
        ({"prompt": "[1, 2] has which sum?", "answer": "3"}, "[1, 2] has which sum?", "3"),
        ({"QUESTION": "q", "Ground_Truth": "8"}, "q", "8"),
        ({"answer": "1", "Answer": "2", "question": "q"}, "q", "1"),
    ],
)  # fmt: skip
def test_what_a_record_says(record, question, gold):
    assert MathShape()(record, "f line 1") == (question, gold)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1, 2], "is no JSON object"),
        ({"answer": "1"}, "has no text in `question` or `problem`.*it has answer"),
        ({"question": "", "answer": "1"}, "has no text in `question` or `problem`"),
        ({"question": "q"}, "has no `answer`, and no `solution` with a .*it has question"),
        ({"question": "q", "answer": "steps\n#### "}, "has no `answer`"),
        ({"problem": "q", "solution": "just 5"}, "has no `answer`, and no `solution`"),
        ({"problem": "q", "solution": "5 " * 50}, "has no `answer`"),
        ({"question": "q", "answer": True}, "`answer` is True: a text or a number is expected"),
        ({"question": "q", "answer": ["1", "2"]}, r"`answer` is \['1', '2'\]"),
        ({"question": "q", "answer": [18]}, r"`answer` is \[18\]"),
        ({"question": "q", "answer": '["1", "2"]'}, r"`answer` is \['1', '2'\]"),
        ({"question": "q", "answer": {"a": 1}}, "`answer` is {'a': 1}"),
        ({"question": "q", "answer": float("nan")}, "`answer` is nan: a finite number"),
        ({"question": "q", "label": float("inf")}, "`label` is inf: a finite number"),
        ({"question": 3, "answer": "1"}, "`question` is no text and no list of messages: 3"),
        ({"prompt": [*USER, *THINKING], "answer": "1"}, "`prompt` has user, user: one user"),
        ({"prompt": [*THINKING, *USER], "answer": "1"}, "has user, assistant, user: one user"),
        ({"prompt": SYSTEM[:1], "answer": "1"}, "`prompt` has system: one user message"),
        ({"prompt": [{"role": "user", "content": [{"image": "x"}]}], "answer": "1"}, "is no text"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "is no text"),
    ],
)
def test_a_record_that_says_nothing_usable_is_refused_with_its_place(record, message):
    with pytest.raises(ValueError, match=f"^f line 7.*{message}") as error:
        MathShape()(record, "f line 7")
    assert "\n" not in str(error.value)


def test_keys_name_columns_and_what_lies_in_them():
    record = {"question": "no", "Q": "q", "extra": {"deep": {"gold": "1"}}, "a.b": "2"}
    assert MathShape("q", "extra.deep.gold")(record, "f line 1") == ("q", "1")
    assert MathShape("Q", "a.b")(record, "f line 1") == ("q", "2")
    assert MathShape("QUESTION", "A.B")(record, "f line 1") == ("no", "2")
    with pytest.raises(ValueError, match=r"no text in `x` \(--question_key\); it has question, Q"):
        MathShape("x")(record, "f line 1")
    with pytest.raises(ValueError, match=r"f line 1 has no `extra.gold` \(--answer_key\); it has"):
        MathShape("q", "extra.gold")(record, "f line 1")


def test_only_the_columns_that_are_needed_are_read():
    names = ["problem", "Answer", "generations", "uuid", "messages"]
    assert MathShape().columns(names) == ["problem", "messages", "Answer"]
    assert MathShape("uuid", "x.y").columns(names) == names  # all, to say what there is
    assert MathShape("uuid", "generations.0").columns(names) == ["uuid", "generations"]


# --- files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 3 is not JSON: Expecting"),
        ('{"question": "q\\ud800", "answer": "1"}', "line 3 holds '.ud800', half a surrogate"),
        ('{"question": "q", "answer": "\\udfff"}', "line 3 holds '.udfff', half a surrogate"),
        ("[" * 3000 + "]" * 3000, "line 3 is not JSON that can be read: nested too deep"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "line 3 is not JSON that can be read: nested too"),
        ('{"question": "q", "answer": ' + "9" * 5000 + "}", "line 3 holds a number of too many"),
        ('{"question": "q", "answer": NaN}', "line 3: `answer` is nan"),
    ],
)
def test_bad_lines_are_refused_in_one_line_that_names_them(line, message, tmp_path):
    good = {"question": "q", "answer": "1"}
    for name, text in (
        ("rows.jsonl", f"{json.dumps(good)}\n\n{line}\n"),
        ("rows.json", f"[{json.dumps(good)},\n\n{line}\n]"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            read_file(tmp_path / name, row_of)
        assert str(error.value).startswith(f"{tmp_path / name} line 3") and "\n" not in str(error)
        assert len(str(error.value)) < 500


def test_bytes_that_are_no_text_are_refused(tmp_path):
    for name in ("rows.jsonl", "rows.json"):
        (tmp_path / name).write_bytes(b'[{"question": "\xff\xfe"}]\n')
        with pytest.raises(ValueError, match=f"^{tmp_path / name}.* is not JSON: 'utf-8'"):
            read_file(tmp_path / name, row_of)


def test_items_of_an_array_are_named_by_the_line_they_begin_on(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(
        '\ufeff [\n{"question": "a",\n"answer": 1}\n,\n\n{"question": "b", "answer": 2}]'
    )
    found = read_file(path, row_of)
    assert [found.where(i) for i in range(2)] == [f"{path} line 2", f"{path} line 6"]
    assert list(found) == [Row("a", "1"), Row("b", "2")]
    path.write_text("[ ]")
    assert len(read_file(path, row_of)) == 0


@pytest.mark.parametrize("text", ["[{}", "[1 2]", "[", "[,]"])
def test_a_broken_array_is_refused(text, tmp_path):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_file(tmp_path / "rows.json", lambda record, where: Row("q", "a"))


def test_a_json_file_of_lines_is_read_as_such(tmp_path):
    path = tmp_path / "rows.json"
    write_rows(path, {"question": "a", "answer": 1}, {"question": "b", "answer": 2})
    assert len(read_file(path, row_of)) == 2


def test_parquet_of_several_batches_keeps_order_and_place(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": [f"p{i}" for i in range(25_000)], "label": range(25_000)})
    parquet.write_table(table, path)
    found = read_file(path, row_of, MathShape().columns)
    assert len(found) == 25_000 and found[24_999] == Row("p24999", "24999")
    assert found.where(12_345) == f"{path} row 12345"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "label": ["1", None]}), path)
    with pytest.raises(ValueError, match=f"^{path} row 1 has no `answer`.*it has prompt, label"):
        read_file(path, row_of, MathShape().columns)
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(ValueError, match=f"^{path} is not parquet: [^\n]*$"):
        read_file(path, row_of)


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="rows.parquet needs: pip install pyarrow .*data.txt"):
        read_file(tmp_path / "rows.parquet", row_of)


def test_a_file_that_may_not_be_read_is_refused_in_one_line(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", {"question": "q", "answer": "1"})
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr("pathlib.Path.open", lambda *a, **k: (_ for _ in ()).throw(denied))
    with pytest.raises(ValueError, match="rows.jsonl cannot be read: .*Permission denied$"):
        read_file(tmp_path / "rows.jsonl", row_of)


# --- the hub


@pytest.fixture
def offline(monkeypatch):
    """Nobody asks whether the hub can be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_hub_data_set(monkeypatch, offline):
    parts = {
        "train": [{"problem": "a", "answer": "1"}],
        "test": [{"problem": "b", "solution": r"\boxed{2}"}],
    }
    asked = []
    hub = types.SimpleNamespace(load_dataset=lambda *args: asked.append(args) or parts)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = make_task(Settings(env="gsm8k", data="someone/rows:main"))
    assert asked == [("someone/rows", "main")]
    assert (task.train[0].answer, task.test[0].answer) == ("1", "2")
    parts["test"] = [{"problem": "b"}]
    with pytest.raises(ValueError, match="someone/rows test row 0 has no `answer`"):
        make_task(Settings(env="math", data="someone/rows"))
    parts["train"], parts["test"] = [{"problem": str(i), "answer": "1"} for i in range(20)], []
    assert len(make_task(Settings(env="math", data="someone/rows")).test) == 2
    del parts["train"]
    with pytest.raises(ValueError, match="someone/rows has no split `train`: it has test"):
        make_task(Settings(env="math", data="someone/rows"))


def test_hub_without_a_connection_or_the_package(monkeypatch, offline):
    def load_dataset(*args):
        raise ConnectionError("no\nroute")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="no such data set on the hub: no route"):
        make_task(Settings(env="math", data="someone/rows"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        make_task(Settings(env="math", data="someone/rows"))


def test_an_unknown_hub_data_set_without_a_network_is_one_line_and_soon(monkeypatch, capfd):
    pytest.importorskip("datasets")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no such data set on the hub: [^\n]*$"):
        make_task(Settings(env="math", data="nobody/nothing"))
    assert constants.HF_HUB_OFFLINE  # so that the library does not try again and again
    assert capfd.readouterr() == ("", "")


def test_a_directory_is_read_by_the_real_package(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine").mkdir()
    write_rows(tmp_path / "mine" / "train.jsonl", *(SHAPES["DAPO"] | {"n": i} for i in range(3)))
    write_rows(tmp_path / "mine" / "test.jsonl", {**SHAPES["DAPO"], "prompt": SYSTEM, "n": 9})
    task = make_task(Settings(env="math", data=f"{tmp_path}/mine"))
    assert (len(task.train), len(task.test)) == (1, 1) and task.train[0].answer == "42"
    assert task.train.where(0) == f"{tmp_path}/mine train row 0"


# --- compact rows


def test_rows_are_a_sequence():
    made = rows(("é a", "1"), ("", "2"), ("c", ""))
    assert list(made) == made[:] == [Row("é a", "1"), Row("", "2"), Row("c", "")]
    assert made[-1] == Row("c", "") and made[1:] == [Row("", "2"), Row("c", "")]
    assert Row("", "2") in made and len(made) == 3
    with pytest.raises(IndexError):
        made[3]
    picked = made.pick(np.array([2, 0])).pick(np.array([1, 0]))
    assert list(picked) == [Row("é a", "1"), Row("c", "")] and picked.where(1) == "mine line 3"


def test_many_rows_take_little_more_than_their_letters():
    made = rows(*((f"what is {i}?", str(i)) for i in range(20_000)))
    letters = sum(len(row.prompt) + len(row.answer) for row in made)
    kept = (made.prompts, made.answers)
    held = sum(sys.getsizeof(part) for texts in kept for part in (texts.bytes, texts.ends))
    held += sum(sys.getsizeof(part) for part in (made.places, made.keys, made.order, made._seen))
    assert held < 1.5 * letters + 60 * len(made)  # a Row of two texts takes some 170 beside them


# --- repeats, and what is held out


def test_rows_that_say_the_same_are_left_out_and_told_about(tmp_path):
    record = {"question": "What is  1+1?", "answer": "2"}
    same, other = record | {"question": "what is 1+1? "}, record | {"answer": "3"}
    many = ({"question": f"q{i}", "answer": "1"} for i in range(20))
    data = write_rows(tmp_path / "rows.jsonl", record, "", same, other, *many)
    train, test, notes = load(data, 0, row_of)
    assert len(train) + len(test) == 22
    assert notes == [
        f"1 rows repeat an earlier one and are left out ({data} line 3 repeats 1)",
        f"1 rows give an earlier question another answer ({data} line 4; {data} line 1)",
    ]


def test_rows_that_differ_are_not_told_about(tmp_path):
    many = [{"question": f"q{i}", "answer": "1"} for i in range(30)]
    assert load(write_rows(tmp_path / "rows.jsonl", *many), 0, row_of)[2] == []
    write_rows(tmp_path / "train.jsonl", *many[:20])
    write_rows(tmp_path / "test.jsonl", *many[20:])
    assert load(str(tmp_path / "train.jsonl"), 0, row_of)[2] == []


def test_duplicates():
    one, two = np.array([5, 6, 5, 7, 6, 5], np.uint64), np.array([9, 7, 6], np.uint64)
    assert duplicates(one) == (3, (2, 0))
    assert duplicates(one, two) == (3, (1, 2))
    assert duplicates(two) == duplicates(two[:1], one) == (0, None)
    assert duplicates(one[:0]) == duplicates(one[:0], two) == duplicates(two, one[:0]) == (0, None)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_one_question_stay_on_one_side(seed):
    pairs = [(f"{' ' * (i // 7)}Question {i % 7}", str(i)) for i in range(40)]
    train, test, notes = hold_out(rows(*pairs), seed)
    sides = [{row.prompt.strip() for row in part} for part in (train, test)]
    assert not sides[0] & sides[1] and len(sides[1]) == 1 and len(train) + len(test) == 40
    assert {*train, *test} == {Row(*pair) for pair in pairs} and notes == []


def test_what_is_held_out_depends_on_the_seed_only_and_is_a_tenth_or_512():
    few, many = (
        rows(*((f"q{i}", "1") for i in range(100))),
        rows(*((str(i), "") for i in range(6000))),
    )
    (train, test, _), again, other = hold_out(few, 0), hold_out(few, 0), hold_out(few, 1)
    assert (len(train), len(test)) == (90, 10) and not {*train} & {*test}
    assert [*again[0]] == [*train] != [*other[0]] and [*again[1]] == [*test]
    assert len(hold_out(many, 0)[1]) == 512


def test_one_question_is_trained_and_evaluated_on_and_told_about(tmp_path):
    task = make_task(
        Settings(
            env="math", data=write_rows(tmp_path / "one.jsonl", {"question": "q", "answer": "1"})
        )
    )
    assert list(task.train) == list(task.test) and len(task.train) == 1
    assert task.notes == [
        f"{tmp_path}/one.jsonl line 1 is the only question: trained and evaluated on"
    ]


def test_train_rows_that_ask_what_a_test_row_asks_are_left_out_and_told_about(tmp_path):
    asked = ({"question": q, "answer": "5"} for q in ("t", "B "))
    write_rows(tmp_path / "test.jsonl", *asked)
    questions = ({"question": q, "answer": "2"} for q in ("a", "b", "c"))
    data = write_rows(tmp_path / "train.jsonl", *questions)
    train, test, notes = load(data, 0, row_of)
    assert [row.prompt for row in train] == ["a", "c"] and len(test) == 2
    assert notes == [
        "1 train rows ask what a test row asks and are left out "
        f"({data} line 2; {tmp_path}/test.jsonl line 2)"
    ]


def test_a_train_file_that_is_all_test_is_refused():
    with pytest.raises(ValueError, match="^every question of mine line is in mine line, too$"):
        without(rows(("a", "1")), rows(("A", "2"), ("b", "1")))


# --- countdown


def test_a_countdown_record_is_a_puzzle():
    assert countdown_row({"target": 93, "nums": [50, 3, 25, 7]}, "f row 0") == "3 7 25 50 = 93"
    assert countdown_row({"Target": 0, "numbers": [1]}, "f row 0") == "1 = 0"


@pytest.mark.parametrize(
    "record",
    [
        [1],
        {},
        {"target": 5},
        {"nums": [1, 2]},
        {"target": True, "nums": [1]},
        {"target": 5, "nums": []},
        {"target": 5, "nums": "1 2"},
        {"target": 5, "nums": [1, 2.5]},
        {"target": -5, "nums": [1, 2]},
        {"target": "5", "nums": [1, 2]},
    ],
)
def test_a_countdown_record_without_its_numbers_is_refused(record):
    with pytest.raises(ValueError, match="^f row 7 has no [^\n]*$"):
        countdown_row(record, "f row 7")


def test_countdown_rows_from_a_file_can_be_played(tmp_path):
    puzzles = ({"target": 10 + i, "nums": [i, 10]} for i in range(20))
    data = write_rows(tmp_path / "rows.jsonl", *puzzles)
    game = Countdown(Settings())
    train, test, _ = load(data, 0, lambda record, where: game.row(countdown_row(record, where)))
    assert (len(train), len(test)) == (18, 2)
    numbers = train[0].answer.split(" = ")[0].replace(" ", " + ")
    assert game.reward(train[0], f"<answer>{numbers}</answer>") == 1.0


def test_countdown_takes_its_puzzles_from_a_file(tmp_path):
    lines = [{"target": 10 + i, "nums": [i, 1, 9, 1]} for i in range(1, 40)]
    data = tmp_path / "puzzles.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = make_task(Settings(env="countdown", data=str(data)))
    assert len(task.train) + len(task.test) == 39 and len(task.test) == 3
    row = next(row for row in task.train[:] if row.answer == "1 1 5 9 = 15")
    assert task.reward(row, "<answer>5 + 9 + 1</answer>") == 1.0
    data.write_text('{"target": 3}\n')
    with pytest.raises(ValueError, match="line 1 has no `target` and `nums`"):
        make_task(Settings(env="countdown", data=str(data)))
