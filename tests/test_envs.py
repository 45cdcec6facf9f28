"""Tasks: rewards, the pool's time limit, rows, the order of prompts, and every bad input."""

import json
import multiprocessing
import random
import re
import signal
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction  # noqa: F401 (for eval)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import EnvConfig, Row, Task, arithmetic, make_task, prompt_order
from tasks.math import MathTask, boxed, equivalent

HUGE = r"\boxed{9^{9^{9^{9}}}}"  # takes longer to compute than anyone waits


@pytest.fixture(scope="module")
def math(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"problem": str(i), "answer": i}) + "\n" for i in range(30)))
    task = make_task(EnvConfig(env="math", data=str(path)))
    task.check_seconds = 2.0
    yield task
    task.close()


@pytest.fixture(scope="module")
def countdown():
    return make_task(EnvConfig(env="countdown"))


# --- generated tasks


@pytest.mark.parametrize("env", ["addition", "max3", "countdown"])
def test_rows_are_held_out_and_depend_on_the_seed_only(env):
    a, b, c = (make_task(EnvConfig(env=env), seed) for seed in (0, 0, 1))
    assert (a.train, a.test) == (b.train, b.test)
    assert a.train != c.train and a.test != c.test
    assert len(a.test) >= 512
    assert not {r.prompt for r in a.test} & {r.prompt for r in a.train}
    assert len({r.prompt for r in a.train}) == len(a.train)


def test_addition():
    task = make_task(EnvConfig())
    assert len(task.train) + len(task.test) == 8100
    row = Row("12+34=", "46")
    assert task.reward(row, "46") == 1.0
    for wrong in ("47", "046", " 46", "46 ", "46\n", "46.", "", "4"):
        assert task.reward(row, wrong) == 0.0


@pytest.mark.parametrize("env", ["addition", "grid"])
def test_data_for_an_env_that_makes_its_own_is_refused(env):
    with pytest.raises(ValueError, match=f"--data rows.jsonl: env {env} makes its own rows"):
        make_task(EnvConfig(env=env, data="rows.jsonl"))


def test_max3():
    task = make_task(EnvConfig(env="max3"))
    for row in task.test[:50]:
        question = row.prompt.splitlines()[-1]
        numbers = [int(n) for n in re.fullmatch(r"max\((.*)\) =", question)[1].split(", ")]
        assert row.answer == str(max(numbers)) and len(set(numbers)) == 3
    row = task.test[0]
    assert task.reward(row, f" {row.answer}\n") == task.reward(row, f" {row.answer}") == 1.0
    for wrong in (f" {row.answer}.", f" {row.answer}0", f" {row.answer}\nQ", "", f"  {row.answer}"):
        assert task.reward(row, wrong) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>3 * 25 + 7</answer>", 1.0),
        ("<answer>(25 + 7 / 7) * 3</answer>", 0.0),  # 7 twice
        ("<answer>50 + 25 + 7</answer>", 1.0),  # 3 unused is allowed
        ("<answer>82</answer>", 0.0),
        ("<answer>81</answer> no: <answer>\n 7+3*25 \n</answer>", 1.0),  # the last one counts
        ("3 * 25 + 7", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>3 * 25 + 7 = 82</answer>", 0.0),
        ("<answer>3 / (7 - 7)</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>" + "(" * 190 + "</answer>", 0.0),
        ("<answer>25 ** 7</answer>", 0.0),
        ("<answer>25 3</answer>", 0.0),
    ],
)
def test_countdown(response, reward, countdown):
    assert countdown.reward(Row("", "3 7 25 50 = 82"), response) == reward


def test_countdown_twins_may_both_be_used(countdown):
    assert countdown.reward(Row("", "5 5 9 9 = 10"), "<answer>5+5</answer>") == 1.0
    assert countdown.reward(Row("", "5 6 9 9 = 10"), "<answer>5+5</answer>") == 0.0


@given(st.text(alphabet="0123456789+-*/() ", max_size=60))
def test_arithmetic_never_fails_in_another_way(text):
    try:
        total, numbers = arithmetic(text)
    except (ValueError, ZeroDivisionError):
        return
    assert total == eval(re.sub(r"[0-9]+", r"Fraction(\g<0>)", text.strip()))
    assert numbers == [int(n) for n in re.findall(r"[0-9]+", text)]


def test_a_task_without_a_reward_or_warm_up_says_so():
    with pytest.raises(NotImplementedError, match="task Task has no reward"):
        Task(EnvConfig()).reward(Row("", ""), "")
    with pytest.raises(ValueError, match="task Task has no warm-up for --model tiny"):
        Task(EnvConfig()).warmup(None)


# --- math


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
def test_boxed(text, inside):
    assert boxed(text) == inside


def test_plain_answers_need_no_process(math):
    row, before = Row("", "1,080"), set(multiprocessing.active_children())
    assert math.reward(row, r"\boxed{1080}") == math.reward(row, r"\boxed{\$ 1,080}") == 1.0
    assert math.reward(row, r"\boxed{01080}") == 1.0
    assert math.reward(row, r"\boxed{1081}") == math.reward(row, "1080") == 0.0
    assert set(multiprocessing.active_children()) <= before


def test_equal_expressions(math):
    for gold, given_, reward in [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("x+1", "1 + x", 1.0),
        (r"\frac{3}{4}", r"junk \asd{ }", 0.0),
        ("12", "x = 12", 1.0),
        (r"\sqrt{2}", "1.5", 0.0),
    ]:
        assert math.reward(Row("", gold), rf"\boxed{{{given_}}}") == reward, gold


def test_time_limit_holds_and_the_next_check_works(math):
    assert math.reward(Row("", "x+1"), r"\boxed{1+x}") == 1.0  # the process is up
    start = time.monotonic()
    assert math.reward(Row("", "5"), HUGE) == 0.0
    assert time.monotonic() - start < math.check_seconds + 2
    assert math.reward(Row("", "x+1"), r"\boxed{1+x}") == 1.0


def test_rewards_from_threads(math):
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
    busy = threading.Thread(target=math.reward, args=(Row("", "5"), HUGE))
    task = MathTask(EnvConfig(env="math", data=math.config.data, env_timeout=0.5))
    task.close()
    task._pool, task.check_seconds = math._pool, math.check_seconds
    busy.start()
    time.sleep(0.2)
    with pytest.raises(TimeoutError, match="--reward_procs"):
        task.reward(Row("", "x+1"), r"\boxed{1+x}")
    busy.join()


def test_close_ends_the_processes_and_may_come_twice(math):
    task = MathTask(math.config)
    task.close()  # nothing has started
    task = MathTask(EnvConfig(env="math", data=math.config.data, reward_procs=2))
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


def test_rows_of_each_form(tmp_path):
    data = write_rows(
        tmp_path / "train.jsonl",
        {"question": "q1", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"},
        {"problem": "q2", "solution": r"a \boxed{1}, so \boxed{\frac{1}{2}}"},
        "",
        {"problem": "q3", "answer": 7, "solution": "long"},
    )
    write_rows(tmp_path / "test.jsonl", {"question": "q4", "answer": "8"})
    task = make_task(EnvConfig(env="gsm8k", data=data))
    assert [row.answer for row in task.train] == ["42", r"\frac{1}{2}", "7"]
    assert [row.answer for row in task.test] == ["8"]
    assert task.train[0].prompt.startswith("q1\n") and "\\boxed{}" in task.train[0].prompt


def test_without_a_test_file_a_tenth_is_held_out(tmp_path):
    rows = [{"question": str(i), "answer": str(i)} for i in range(100)]
    task = make_task(EnvConfig(env="math", data=write_rows(tmp_path / "all.jsonl", *rows)))
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
        make_task(EnvConfig(env="math", data=data))
    assert str(error.value).startswith(data) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env": "adition"}, "unknown env 'adition': one of addition, max3"),
        ({"env": "gsm8k"}, "env gsm8k needs --data"),
        ({"env": "math", "data": "none.jsonl"}, "no such data file: none.jsonl"),
        ({"env": "nowhere.py:MyTask"}, "no such file: nowhere.py"),
        ({"env": "mine.py"}, "unknown env 'mine.py': one of addition"),
        ({"env": "mine.py:"}, "unknown env 'mine.py:'"),
        ({"env": "mine.py:Missing"}, "Missing is not in the file"),
        ({"env": "mine.py:NoTask"}, "NoTask is no subclass of envs.Task"),
        ({"env": "mine.py:Empty"}, "env mine.py:Empty has no train rows"),
        ({"env": "math", "data": "empty.jsonl"}, "env math has no train rows in empty.jsonl"),
        ({"env": "math", "data": "one.jsonl"}, "env math has no train rows in one.jsonl"),
        ({"env": ""}, "unknown env ''"),
        ({"env_timeout": 0.0}, "--env_timeout must be above 0 seconds"),
        ({"env_timeout": float("nan")}, "env_timeout must be"),
        ({"reward_procs": 0}, "--reward_procs must be at least 1"),
    ],
)
def test_bad_settings(config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from envs import Task\nNoTask = 3\nclass Empty(Task):\n    pass\n"
    )
    write_rows(tmp_path / "empty.jsonl")
    write_rows(tmp_path / "one.jsonl", {"question": "q", "answer": "1"})
    with pytest.raises(ValueError, match=message) as error:
        make_task(EnvConfig(**config))
    assert "\n" not in str(error.value)


def test_hub_data_set(monkeypatch):
    parts = {
        "train": [{"problem": "a", "answer": "1"}],
        "test": [{"problem": "b", "solution": r"\boxed{2}"}],
    }
    asked = []
    hub = types.SimpleNamespace(load_dataset=lambda *args: asked.append(args) or parts)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = make_task(EnvConfig(env="gsm8k", data="someone/rows:main"))
    assert asked == [("someone/rows", "main")]
    assert (task.train[0].answer, task.test[0].answer) == ("1", "2")
    parts["test"] = [{"problem": "b"}]
    with pytest.raises(ValueError, match="someone/rows test row 0 has no `answer`"):
        make_task(EnvConfig(env="math", data="someone/rows"))
    del parts["train"]
    with pytest.raises(ValueError, match="someone/rows has no split `train`: it has test"):
        make_task(EnvConfig(env="math", data="someone/rows"))


def test_hub_without_a_connection_or_the_package(monkeypatch):
    def load_dataset(*args):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="no such data set on the hub: no route"):
        make_task(EnvConfig(env="math", data="someone/rows"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        make_task(EnvConfig(env="math", data="someone/rows"))


# --- tasks of one's own, and the order of prompts


def test_my_task(tmp_path):
    (tmp_path / "random.py").write_text(  # the name of a module that envs.py uses
        "from envs import Row, Task\n"
        "class MyTask(Task):\n"
        "    blocking = False\n"
        "    train = [Row('a', 'b')]\n"
        "    test = [Row('c', 'd')]\n"
        "    def reward(self, row, response):\n"
        "        return float(response == row.answer)\n"
    )
    task = make_task(EnvConfig(env=f"{tmp_path}/random.py:MyTask"), seed=3)
    assert sys.modules["random"] is random
    assert isinstance(task, Task) and task.seed == 3 and not task.blocking
    assert task.reward(task.train[0], "b") == 1.0
    assert task.max_tokens == 8 and task.chat and task.stop is None


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_each_epoch_is_a_permutation_of_its_own(n):
    epochs = [[prompt_order(n, 0, n * e + i) for i in range(n)] for e in range(6)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n >= 7:
        assert len({tuple(epoch) for epoch in epochs}) == 6
        assert epochs[0] != [prompt_order(n, 1, i) for i in range(n)]
    # A function of its arguments alone: asked backwards, the same.
    backwards = [prompt_order(n, 0, i) for i in reversed(range(6 * n))]
    assert backwards[::-1] == [row for epoch in epochs for row in epoch]
