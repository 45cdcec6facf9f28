"""Which task `--env` names and what is refused; which prompt comes next, and with which seed."""

import random
import sys

import pytest

from buffer import derive_seed
from envs import Row, Task, prompt_order
from plumbing.settings import Settings
from tasks.find import make_task


@pytest.mark.parametrize("env", ["addition", "grid"])
def test_data_for_an_env_that_makes_its_own_is_refused(env):
    with pytest.raises(ValueError, match=f"--data rows.jsonl: env {env} makes its own rows"):
        make_task(Settings(env=env, data="rows.jsonl"))


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
        ({"env": ""}, "unknown env ''"),
        ({"env_timeout": 0.0}, "--env_timeout must be above 0"),
        ({"env_timeout": float("nan")}, "env_timeout must be"),
        ({"reward_procs": 0}, "--reward_procs must be 1 or more"),
    ],
)
def test_an_env_that_cannot_be_made_is_refused_in_one_line(config, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from envs import Task\nNoTask = 3\nclass Empty(Task):\n    pass\n"
    )
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=message) as error:
        make_task(Settings(**config))
    assert "\n" not in str(error.value)


def test_a_task_without_a_reward_or_warm_up_says_so():
    with pytest.raises(NotImplementedError, match="task Task has no reward"):
        Task(Settings()).reward(Row("", ""), "")
    with pytest.raises(ValueError, match="task Task has no warm-up for --model tiny"):
        Task(Settings()).warmup(None)


def test_a_task_of_a_users_file_is_found_whatever_the_file_is_called(tmp_path):
    (tmp_path / "random.py").write_text(  # the name of a module that envs.py uses
        "from envs import Row, Task\n"
        "class MyTask(Task):\n"
        "    blocking = False\n"
        "    train = [Row('a', 'b')]\n"
        "    test = [Row('c', 'd')]\n"
        "    def reward(self, row, response):\n"
        "        return float(response == row.answer)\n"
    )
    task = make_task(Settings(env=f"{tmp_path}/random.py:MyTask"), seed=3)
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


def test_seeds_depend_on_every_part_and_on_nothing_else():
    seeds = {
        derive_seed(run, place, i) for run in range(3) for place in range(40) for i in range(9)
    }
    assert len(seeds) == 3 * 40 * 9 and all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3) != derive_seed(3, 2, 1)
