"""Math problems: answers, the time limit of a check, rows of files and of the hub."""

import json
import multiprocessing
import signal
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs import Row
from plumbing.settings import Settings
from tasks.find import make_task
from tasks.math import MathTask, boxed, equivalent

HUGE = "9^{9^{9^{9}}}"  # takes longer to compute than anyone waits


@pytest.fixture(scope="module")
def math(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": str(i), "answer": i}) + "\n" for i in range(30)))
    task = make_task(Settings(env="math", data=str(path)))
    yield task
    task.close()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{7} and \boxed{8", "7"),  # cut off by the budget
        (r"\boxed {3}", "3"),
        ("42", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, inside):
    assert boxed(text) == inside


def test_plain_answers_need_no_process(math):
    row, before = Row("", "1,080"), set(multiprocessing.active_children())
    assert math.reward(row, r"\boxed{1080}") == math.reward(row, r"\boxed{\$ 1,080}") == 1.0
    assert math.reward(row, r"\boxed{01080}") == 1.0
    assert math.reward(row, r"\boxed{1081}") == math.reward(row, "1080") == 0.0
    assert set(multiprocessing.active_children()) <= before


def test_equal_expressions_are_right_however_they_are_written(math):
    for gold, given_, reward in [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("x+1", "1 + x", 1.0),
        (r"\frac{3}{4}", r"junk \asd{ }", 0.0),
        ("12", "x = 12", 1.0),
        (r"\sqrt{2}", "1.5", 0.0),
    ]:
        assert math.reward(Row("", gold), rf"\boxed{{{given_}}}") == reward, gold


def test_a_check_that_takes_too_long_is_ended_and_the_next_one_works(math, monkeypatch):
    assert math.reward(Row("", "x+1"), r"\boxed{1+x}") == 1.0  # the process is up
    with monkeypatch.context() as short:
        short.setattr(math, "check_seconds", 1.0)
        assert math.reward(Row("", "5"), rf"\boxed{{{HUGE}}}") == 0.0  # after env_timeout it raises
    assert math.reward(Row("", "x+1"), r"\boxed{1+x}") == 1.0


def test_rewards_may_be_asked_for_in_threads(math):
    def check(i):
        assert threading.current_thread() is not threading.main_thread()
        return math.reward(Row("", r"\frac{1}{2}"), rf"\boxed{{{i}/4}}")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(check, range(4))) == [0.0, 0.0, 1.0, 0.0]


def test_a_fault_of_the_checker_is_raised(math):
    with pytest.raises(ValueError, match="cannot read the gold answer"):
        math.reward(Row("", "$"), r"\boxed{5}")
    assert math.reward(Row("", "x+1"), r"\boxed{1+x}") == 1.0


def test_no_alarm_outlives_its_check():
    with pytest.raises(ValueError):
        equivalent("$", "5", 30)
    assert equivalent("1/2", "0.5", 30)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # it would end a process at rest


def test_a_full_pool_is_a_fault_and_not_a_wrong_answer(math):
    task = MathTask(Settings(env="math", data=math.config.data, env_timeout=0.5))
    task.close()
    task._pool = math._pool
    busy = math._pool.schedule(equivalent, args=("5", HUGE, 300), timeout=300)
    with pytest.raises(TimeoutError, match="--reward_procs"):
        task.reward(Row("", "x+1"), r"\boxed{1+x}")
    busy.cancel()


def test_close_ends_the_processes_and_may_come_twice(math):
    task = MathTask(math.config)
    task.close()  # nothing has started
    task = MathTask(Settings(env="math", data=math.config.data, reward_procs=2))
    math.reward(Row("", "x+1"), r"\boxed{1+x}")  # its process is up again after earlier tests
    before = set(multiprocessing.active_children())
    task.reward(Row("", "x+1"), r"\boxed{1+x}")
    mine = set(multiprocessing.active_children()) - before
    assert len(mine) == 2
    task.close()
    task.close()
    assert not any(process.is_alive() for process in mine)


def write_rows(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_rows_of_each_form_are_read_and_a_test_file_beside_is_held_out(tmp_path):
    data = write_rows(
        tmp_path / "train.jsonl",
        {"question": "q1", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
        {"problem": "q2", "solution": r"a \boxed{1}, so \boxed{\frac{1}{2}}"},
        "",
        {"problem": "q3", "answer": 7, "solution": "long"},
    )
    write_rows(tmp_path / "test.jsonl", {"question": "q4", "answer": "8"})
    task = make_task(Settings(env="gsm8k", data=data))
    assert [row.answer for row in task.train] == ["42", r"\frac{1}{2}", "7"]
    assert [row.answer for row in task.test] == ["8"]
    assert task.train[0].prompt.startswith("q1\n") and "\\boxed{}" in task.train[0].prompt


def test_without_a_test_file_a_tenth_is_held_out(tmp_path):
    rows = [{"question": str(i), "answer": str(i)} for i in range(100)]
    task = make_task(Settings(env="math", data=write_rows(tmp_path / "all.jsonl", *rows)))
    assert len(task.train) == 90 and len(task.test) == 10
    assert not set(task.train) & set(task.test)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2 is not JSON"),
        ("[1, 2]", "line 2 is no JSON object"),
        ('{"answer": "1"}', "line 2 has no text in `question` or `problem`"),
        ('{"question": "", "answer": "1"}', "line 2 has no text in `question` or `problem`"),
        ('{"question": "q"}', "line 2 has no `answer`, and no `solution`"),
        ('{"question": "q", "answer": "steps\\n#### "}', "line 2 has no `answer`"),
        ('{"problem": "q", "solution": "just 5"}', "line 2 has no `answer`, and no `solution`"),
        ('{"problem": "q", "answer": null}', "line 2 has no `answer`"),
    ],
)
def test_bad_rows_name_file_and_line(line, message, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"question": "q", "answer": "1"}, line)
    with pytest.raises(ValueError, match=message) as error:
        make_task(Settings(env="math", data=data))
    assert str(error.value).startswith(data) and "\n" not in str(error.value)


def test_a_data_set_of_the_hub_is_read_and_its_bad_rows_are_named(monkeypatch):
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
    del parts["train"]
    with pytest.raises(ValueError, match="someone/rows has no split `train`: it has test"):
        make_task(Settings(env="math", data="someone/rows"))


def test_without_a_connection_or_the_package_the_hub_is_refused_in_one_line(monkeypatch):
    def load_dataset(*args):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="no such data set on the hub: no route"):
        make_task(Settings(env="math", data="someone/rows"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        make_task(Settings(env="math", data="someone/rows"))
