"""Single-turn tasks that make their own rows: what is right, what is wrong, what is held out."""

import re
from fractions import Fraction  # noqa: F401 (for eval)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import Row
from plumbing.settings import Settings
from tasks.find import make_task
from tasks.puzzles import arithmetic


@pytest.fixture(scope="module")
def countdown():
    return make_task(Settings(env="countdown"))


@pytest.mark.parametrize("env", ["addition", "max3", "countdown"])
def test_rows_are_held_out_and_depend_on_the_seed_only(env):
    a, b, c = (make_task(Settings(env=env), seed) for seed in (0, 0, 1))
    assert (a.train, a.test) == (b.train, b.test)
    assert a.train != c.train and a.test != c.test
    assert len(a.test) >= 512
    assert not {r.prompt for r in a.test} & {r.prompt for r in a.train}
    assert len({r.prompt for r in a.train}) == len(a.train)


def test_a_sum_is_right_as_its_digits_and_as_nothing_else():
    task = make_task(Settings())
    assert len(task.train) + len(task.test) == 8100
    row = Row("12+34=", "46")
    assert task.reward(row, "46") == 1.0
    for wrong in ("47", "046", " 46", "46 ", "46\n", "46.", "", "4"):
        assert task.reward(row, wrong) == 0.0


def test_the_largest_of_three_is_right_after_a_space_with_or_without_a_line_break():
    task = make_task(Settings(env="max3"))
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
def test_the_last_answer_in_countdown_counts_if_it_keeps_to_the_rules(response, reward, countdown):
    assert countdown.reward(Row("", "3 7 25 50 = 82"), response) == reward


def test_a_number_that_comes_twice_in_countdown_may_be_used_twice(countdown):
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
