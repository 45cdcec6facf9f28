"""Math rewards: boxes, what needs a process and what does not, bombs, and gold answers."""

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest

import tasks.math
from envs import Row
from plumbing.settings import Settings
from tasks.answers import boxed, legible, verdict
from tasks.find import make_task
from tasks.math import MathTask, check, quick

HUGE = r"9^{9^{9^{9}}}"  # takes longer to compute than anyone waits, and is seen to
SLOW = r"(x+y+z+w)^{999}"  # so does this, and is not


def write_rows(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


@pytest.fixture(scope="module")
def math(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = ({"problem": str(i), "answer": i} for i in range(30))
    task = make_task(Settings(env="math", data=write_rows(path, *rows), env_timeout=4))
    assert task.reward(Row("", "x+1"), r"\boxed{1+x}") == 1.0  # its process is up
    yield task
    task.close()


def give(task, gold, answer):
    return task.reward(Row("", gold), rf"\boxed{{{answer}}}")


# --- boxes


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\boxed{7} and \boxed{8", "7"),  # cut off by the budget
        (r"\boxed{7 and \boxed{8", None),
        (r"\boxed{\boxed{7}} } {", "7"),
        (r"} \boxed{7}", "7"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\\boxed{3}", "3"),  # escaped once too often
        (r"\boxed{}", ""),
        ("42", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_complete_box_counts(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize("unit", [r"\boxed{", r"\boxed{\boxed ", "{", r"\boxed{7}"])
def test_the_work_for_boxes_grows_with_the_text_only(unit):
    def seconds(size):
        text, times = unit * (size // len(unit)), []
        for _ in range(3):
            start = time.process_time()
            boxed(text)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(640_000) < 64 * seconds(40_000)  # 16 times as much; 256 with a second loop


# --- with and without a process


def test_plain_answers_need_no_process(math, monkeypatch):
    monkeypatch.setattr(math, "_ask", lambda *args: pytest.fail("a process was asked"))
    assert give(math, "1,080", "1080") == give(math, "1,080", r"\$ 1,080") == 1.0
    assert give(math, "1,080", "01080") == give(math, "(1,2)", "(1, 2.0)") == 1.0
    assert give(math, "1,080", "1081") == give(math, "1,2", "12") == 0.0
    assert give(math, "5", r"\text{Tuesday}") == give(math, "5", HUGE) == 0.0
    assert math.reward(Row("", "1080"), "1080") == 0.0  # no box


def test_equal_expressions(math):
    assert give(math, "x+1", "1 + x") == give(math, "x^2-1", "(x-1)(x+1)") == 1.0
    assert give(math, "x+1", "x") == give(math, r"\sqrt{2}", r"\asd{ }") == 0.0


def test_rewards_from_threads(math):
    def reward(i):
        assert threading.current_thread() is not threading.main_thread()
        return give(math, r"\sqrt{8}", rf"{i}\sqrt{{2}}")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reward, range(4))) == [0.0, 0.0, 1.0, 0.0]


def test_a_gold_answer_that_cannot_be_read_is_a_fault(math):
    for gold, why in (("x^", "cannot read the gold answer"), (" ", "the gold answer is empty")):
        with pytest.raises(ValueError, match=why):
            give(math, gold, "5")
    assert give(math, "x^", "x^") == 1.0  # nothing has to be read
    assert give(math, "x+1", "1+x") == 1.0


def test_no_alarm_outlives_its_check():
    with pytest.raises(ValueError):
        check(verdict, ("x^", "5"), 30)
    assert check(verdict, ("x/2", "0.5x"), 30)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # it would end a process at rest


# --- bombs


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_check_works(math):
    assert give(math, "x+1", SLOW) == 0.0  # to judge it would never end
    assert give(math, "x+1", "1+x") == 1.0


def test_sixteen_bombs_and_sixteen_right_answers_at_once(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"problem": "p", "answer": "1"})
    task = MathTask(Settings(env="math", data=data))
    bombs = [("5", f"{i}^{{9^{{9^{{9}}}}}}") for i in range(2, 18)]
    right = [(f"x+{i}", f"{i}+x") for i in range(16)]
    with ThreadPoolExecutor(32) as pool:
        rewards = list(pool.map(lambda pair: give(task, *pair), bombs + right))
    task.close()
    assert rewards == [0.0] * 16 + [1.0] * 16


def test_a_right_answer_behind_slow_ones_waits_for_its_turn(math):
    # Each of the slow ones takes all of --env_timeout; the last honest one waits for both.
    pairs = [pair for i in range(2) for pair in (("x+1", f"{SLOW}+{i}"), (f"y+{i}", f"{i}+y"))]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: give(math, *pair), pairs)) == [0.0, 1.0] * 2


def test_the_same_answer_is_checked_once(math, monkeypatch):
    asked = []
    schedule = math._pool.schedule
    monkeypatch.setattr(
        math._pool, "schedule", lambda *a, **how: asked.append(how) or schedule(*a, **how)
    )
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda _: give(math, "a+b+c", "c+b+a"), range(8)))
    assert rewards == [1.0] * 8 and len(asked) == 1


def test_verdicts_are_remembered_up_to_a_limit(math, monkeypatch):
    monkeypatch.setattr(tasks.math, "REMEMBERED", 3)
    monkeypatch.setattr(math._pool, "schedule", lambda *args, **how: Done())
    monkeypatch.setattr(math, "_checks", OrderedDict())
    for gold in "012314":  # 1 is asked for again, so 2 is the oldest
        math._ask(verdict, (gold, "x"))
    assert [texts[0] for _, texts in math._checks] == ["3", "1", "4"]


class Done:
    def add_done_callback(self, call):
        call(self)


def die(*texts):
    os._exit(1)


def die_once(path, *rest):
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)
    return True


def test_an_answer_that_kills_its_checker_is_wrong(math):
    assert math._check(die, "x", "y") is False
    assert give(math, "x+1", "1+x") == 1.0


def test_a_checker_that_is_killed_once_is_asked_again(math, tmp_path):
    assert math._check(die_once, str(tmp_path / "died")) is True


def test_processes_that_never_answer_are_a_fault(math, monkeypatch):
    monkeypatch.setattr(tasks.math, "STUCK", 0.2)
    monkeypatch.setattr(math, "_moved", 0.0)
    never = type("Never", (), {"done": lambda self: False})()
    never.result = lambda timeout: (_ for _ in ()).throw(TimeoutError)
    with pytest.raises(TimeoutError, match="no math answer has been checked for .*--reward_procs"):
        math._wait(never)


def test_close_ends_the_processes_and_may_come_twice(math):
    task = MathTask(math.config)
    task.close()  # nothing has started
    task = MathTask(Settings(env="math", data=math.config.data, reward_procs=2))
    give(math, "x+2", "2+x")  # its process is up again after earlier tests
    before = set(multiprocessing.active_children())
    give(task, "x+1", "1+x")
    mine = set(multiprocessing.active_children()) - before
    assert len(mine) == 2
    task.close()
    task.close()
    assert not any(process.is_alive() for process in mine)


# --- gold answers


FINE = ["18", "1,000", r"\frac{1}{2}", r"\text{Tuesday}", "(A)", "(1,2)", "x=5", r"50\%", "3:30"]
FINE += [r"\{1, x+1\}", r"[0, \infty)", r"2\sqrt{3} \text{ cm}", "1011_2", "x^2+1", r"1 \pm \pi"]
NEVER = ["proof: see above", "proof", "not found", "x^", r"\frac{1}{", HUGE, "1" * 2000, "$$"]
NEVER += ["It follows that the two of them are equal", "5 if x is even", "f(x) = x^"]


@pytest.mark.parametrize("gold", FINE + NEVER)
def test_whether_a_gold_answer_can_be_met(gold):
    known = quick(legible, gold)
    assert (check(legible, (gold,), 30) if known is None else known) == (gold in FINE)


def test_golds_that_can_never_be_met_are_named_by_file_and_line(math, tmp_path):
    golds = ["18", "proof", "x+1", "x^", "18"]
    rows = [{"problem": f"p{i}", "answer": gold} for i, gold in enumerate(golds)]
    data = write_rows(tmp_path / "train.jsonl", *rows)
    write_rows(tmp_path / "test.jsonl", {"problem": "q", "answer": "1"})
    task = MathTask(Settings(env="math", data=data))
    bad, looked = task.check_golds(task.train)
    assert looked == 5 and [row for row, _ in bad] == [1, 3]
    assert re.fullmatch(rf"{re.escape(data)} line 2: gold answer 'proof': [^\n]+", bad[0].why)
    assert task.check_golds(task.test) == ([], 1)
    task.close()


def test_plain_golds_are_all_looked_at_without_a_process(tmp_path, monkeypatch):
    rows = [{"problem": f"p{i}", "answer": str(i)} for i in range(3000)]
    task = MathTask(Settings(env="math", data=write_rows(tmp_path / "rows.jsonl", *rows)))
    monkeypatch.setattr(task, "_ask", lambda *args: pytest.fail("a process was asked"))
    assert task.check_golds(task.train, most=100) == ([], 2700)


def test_golds_that_need_algebra_are_a_sample_drawn_by_the_seed(tmp_path, monkeypatch):
    rows = [{"problem": f"p{i}", "answer": f"x+{i}"} for i in range(40)]
    task = MathTask(Settings(env="math", data=write_rows(tmp_path / "rows.jsonl", *rows)))
    asked = []
    monkeypatch.setattr(task, "_ask", lambda rule, texts: asked.append(texts[0]) or "a future")
    monkeypatch.setattr(task, "_wait", lambda future: True)
    for seed in (0, 0, 1):
        assert task.check_golds(task.train, most=5, seed=seed) == ([], 5)
    first, again, other = asked[:5], asked[5:10], asked[10:]
    assert first == again != other and len(set(other)) == 5


# --- what the model is asked


def test_the_prompt_asks_for_a_box_unless_it_does_already(tmp_path):
    rows = [{"problem": "p?", "answer": "1"}, {"problem": r"q? Use \boxed{}.", "answer": "1"}]
    task = MathTask(Settings(env="math", data=write_rows(tmp_path / "rows.jsonl", *rows)))
    prompts = sorted(row.prompt for row in [*task.train, *task.test])
    assert prompts[0].startswith("p?\n") and prompts[0].count("\\boxed{}") == 1
    assert prompts[1] == r"q? Use \boxed{}."


def test_the_settings_name_the_columns(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", {"problem": "p", "x": {"gt": 7}, "answer": "1"})
    config = Settings(env="math", data=data)
    config.question_key, config.answer_key = "problem", "x.gt"
    assert MathTask(config).train[0].answer == "7"
