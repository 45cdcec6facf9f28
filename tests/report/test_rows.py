"""A finished run, read back and summed up."""

import json

import pytest

from report.rows import TRAINER_TIMES, WORKER_TIMES, idle_shares, read_rows, summarize


def step(number, **values):
    row = {"step": number, "wall_s": 2.0 * number, "samples": 10, "reward_mean": number / 10}
    times = {f"t_{what}": 0.0 for what in TRAINER_TIMES}
    times |= {f"t_worker_{what}": 0.0 for what in WORKER_TIMES}
    return row | times | {"staleness_mean": 0.5, "staleness_max": 1} | values


def test_rows_are_read_without_a_last_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    rows = [step(1), step(2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for end in ("", '{"step": 3, "samp', "{"):
        path.write_text(text + end)
        assert read_rows(path) == rows


def test_idle_shares_are_of_all_seconds_and_not_the_mean_of_the_steps():
    short = step(1, t_wait=0.0, t_train=1.0, t_worker_idle=1.0, t_worker_decode=0.0)
    long = step(2, t_wait=6.0, t_train=2.0, t_worker_idle=1.0, t_worker_decode=6.0)
    assert idle_shares([short, long]) == pytest.approx({"trainer": 6 / 9, "rollout": 2 / 8})
    assert idle_shares([step(1)]) == {"trainer": 0.0, "rollout": 0.0}


def test_a_summary_has_reward_solve_rate_times_and_staleness():
    rates = [{"version": v, "eval/solve_rate": v / 8, "eval/samples": 64} for v in (0, 4)]
    steps = [step(n, t_train=0.25, t_wait=0.1, staleness_max=n % 3) for n in range(1, 9)]
    said = summarize([rates[0], *steps, rates[1]])
    assert "training reward 0.100 → 0.600 (mean of the last 5 steps)" in said
    assert "0.000 (version 0) → 0.500 (version 4, 64 prompts)" in said
    assert "8 steps in 16.0 s, 5 samples/s" in said and "train 0.250 s" in said
    assert "staleness mean 0.50, max 2" in said and "idle: trainer 29%" in said
