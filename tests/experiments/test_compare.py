"""Sync against async: what is compared, and the arithmetic of the tables."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from envs import Latency, Row
from experiments import compare
from experiments.compare import CASES, SWEEPS, LongAnswer, arms_of, middle, ratio, reached
from experiments.naive import StaticSplit
from plumbing.settings import Settings
from tasks.find import make_task

ROOT = Path(__file__).resolve().parents[2]


def test_lengths_are_lognormal_and_capped():
    task = LongAnswer(Settings())
    lengths = np.array([task.length(seed, 0) for seed in range(4000)])
    assert lengths.min() == 4 and lengths.max() == 192
    inside = np.log(lengths[(lengths > 4) & (lengths < 192)])
    assert abs(np.median(lengths) - 16) < 1.5
    # Of a normal distribution cut off at -1.39 and +2.48 of its sigmas, the rest has 0.87 of them.
    assert abs(inside.std() - 0.85) < 0.06


def test_an_answer_is_the_digits_that_a_response_begins_with():
    task, row = LongAnswer(Settings()), Row("12+34=", "46")
    for right in ("46", "46....", "46.4"):
        assert task.reward(row, right) == 1.0
    for wrong in ("", "4", "467", ".46", "45...."):
        assert task.reward(row, wrong) == 0.0


def test_every_case_of_a_sweep_is_a_task_of_its_own_length_or_latency():
    lengths, latencies = SWEEPS.values()
    for median, case in lengths:
        task = make_task(Settings(env=case.env))
        drawn = [task.length(seed, 0) for seed in range(2000)]
        assert 0.85 < np.median(drawn) / max(4, median) < 1.3 and max(drawn) <= task.max_tokens
    for mean, case in latencies:
        settings = Settings(env="grid", **case.flags)
        assert Latency.parse(settings.env_latency)[:2] == (mean, mean)


def test_every_arm_may_use_the_whole_machine_and_the_weakest_sync_does_not():
    naive, *arms = arms_of(2, [1.0, 2.0])
    assert naive.dispatcher is StaticSplit and naive.mode == "sync"
    sync = [arm for arm in arms if arm.mode == "sync"]
    used = {(arm.workers * arm.worker_threads, arm.trainer_threads) for arm in sync}
    assert used == {(1, 1), (1, 2), (2, 2)} and len(sync) == 4
    for arm in arms[4:]:
        assert arm.mode == "async" and arm.workers * arm.worker_threads + arm.trainer_threads == 2
    assert len({arm.name for arm in arms_of(8, [1.0])}) == 6


def test_only_steps_in_the_middle_of_a_run_are_timed():
    ends = [0, 10, 20, 30, 31, 32, 33, 34, 134, 234, 334]  # a start, 3 before, 4 timed, 3 after
    assert middle(SimpleNamespace(ends=ends)) == 1.0


def test_ratios_are_of_pairs_and_the_strongest_sync_is_the_quickest_in_the_median():
    seconds = {"naive sync": [1.0, 1.0], "sync 1": [4.0, 6.0], "sync 2": [4.0, 4.0]}
    seconds["async 1"] = [2.0, 1.0]
    assert compare.strongest(seconds) == "sync 2"
    assert ratio(seconds["sync 2"], seconds["async 1"]) == "3.00 (2.00-4.00)"
    text = compare.time_table(CASES["rlvr"], seconds)
    assert "| sync 2 (strongest) | 4.00 (4.00-4.00) | 0.25" in text
    assert text.splitlines()[-1].startswith("| async 1 | 1.50 (1.00-2.00)")


def test_time_to_a_reward_is_read_between_two_points():
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.3), (30.0, 0.8)]
    assert reached(curve, 0.1) == 0 and math.isclose(reached(curve, 0.3), 5)
    assert math.isclose(reached(curve, 0.55), 25) and math.isnan(reached(curve, 0.9))
    slow = [(2 * seconds, rate) for seconds, rate in curve]
    text = compare.reward_table({"sync 1": [slow], "async 1": [curve]}, "sync 1")
    # 90 % of the way from 0.2 to 0.8; twice as long in sync.
    assert "solve rate of 0.74" in text and "| async 1 | 29 | 2.00 (2.00-2.00) | 0.80 |" in text


def test_figures_are_drawn(tmp_path):
    curve = [(0.0, 0.2), (9.0, 0.5)]
    result = {"seconds": {"sync": [2.0, 3.0], "async 1": [1.0, 1.0]}, "curves": {"sync": [curve]}}
    assert compare.draw({"one": result, "other": result}, tmp_path / "a.png").stat().st_size > 5000
    points = {1.0: {"async 1": [1.0, 2.0]}, 3.0: {"async 1": [2.0, 2.0]}}
    assert compare.draw_sweep({"length": points}, tmp_path / "b.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "argv, says",
    [
        (["chess"], "no task chess; there are addition, rlvr, grid"),
        (["--alphas", "1,x"], "--alphas takes numbers"),
        (["--repeats", "0"], "have to be at least 1"),
        (["--out", str(ROOT)], "exists already"),
        (["--speed", "9"], "unknown flag --speed"),
    ],
)
def test_bad_input_is_one_line_and_code_2(argv, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", *argv])
    with pytest.raises(SystemExit) as stop:
        compare.parse_args()
    assert stop.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_on_addition(tmp_path):
    out = tmp_path / "out"
    flags = ["addition", "--alphas", "1", "--repeats", "1", "--steps", "2", "--reward_steps", "4"]
    command = [sys.executable, "-m", "experiments.compare", *flags, "--reward_seeds", "1"]
    command += ["--out", str(out)]
    shown = subprocess.run(
        [*command, "--batch_size", "4"], cwd=ROOT, check=True, text=True, capture_output=True
    ).stdout
    result = json.loads((out / "results.json").read_text())["addition"]
    assert list(result["seconds"])[0] == "naive sync" and "async 1" in result["seconds"]
    assert all(value > 0 for values in result["seconds"].values() for value in values)
    assert len(result["curves"]["async 1"][0]) == 5  # at the start, and after every step
    ((generation, training),) = result["alone"]
    assert generation > 0 < training
    assert "strongest" in shown and (out / "compare.png").exists()
