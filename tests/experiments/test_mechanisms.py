"""What the comparisons are made of: the naive dispatchers, their tasks, and the statistics."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from buffer import Ticket
from experiments import mechanisms, parity
from experiments.mechanisms import PAIRS, FourTurns, Hard, HeavyTail
from experiments.naive import InRounds, StaticSplit, Unreplicated
from experiments.parity import Arm
from plumbing.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def tickets(*groups, n=2):
    return [Ticket(group, i, prompt_id=group, seed=0) for group in groups for i in range(n)]


def finish(dispatcher, done):
    for held in dispatcher.held:
        held.difference_update(done)


# -- the naive forms -------------------------------------------------------------------------------


def test_a_static_split_hands_out_all_at_once_and_nothing_before_the_last_is_in():
    dispatcher = StaticSplit(2, 1, fixed=1)  # it knows nothing of places
    first = tickets(0, 1, 2)
    dispatcher.queue.extend(first)
    assert dispatcher.assign() == {0: first[:3], 1: first[3:]}
    dispatcher.queue.extend(tickets(3))
    finish(dispatcher, first[:5])
    assert dispatcher.assign() == {}
    finish(dispatcher, first[5:])
    assert dispatcher.assign() == {0: tickets(3)[:1], 1: tickets(3)[1:]}
    assert dispatcher.message == "lockstep"


def test_a_static_split_leaves_out_what_was_cancelled():
    dispatcher = StaticSplit(2, 1)
    dispatcher.queue.extend(tickets(0, 1))
    dispatcher.cancel(0)
    assert dispatcher.assign() == {0: tickets(1)[:1], 1: tickets(1)[1:]}


def test_in_rounds_what_comes_later_waits_for_the_next_round():
    dispatcher = InRounds(2, 1, fixed=1)
    first, later = tickets(0, 1), tickets(2)
    dispatcher.queue.extend(first)
    given = dispatcher.assign()
    assert sorted(t for part in given.values() for t in part) == first[:2]
    dispatcher.queue.extend(later)  # a dropped group is replaced
    finish(dispatcher, first[:1])
    assert dispatcher.assign() == {0: [first[2]]}
    finish(dispatcher, first[1:2])
    assert dispatcher.assign() == {1: [first[3]]}
    finish(dispatcher, first[2:3])
    assert dispatcher.assign() == {} and list(dispatcher.queue) == later
    finish(dispatcher, first[3:])
    assert sorted(t for part in dispatcher.assign().values() for t in part) == later


def test_without_replication_a_prompt_stays_on_one_worker_until_its_last_sample():
    dispatcher = Unreplicated(2, 2, fixed=2)
    dispatcher.queue.extend(tickets(0, 1, 2))
    assert dispatcher.assign() == {0: tickets(0), 1: tickets(1)}
    finish(dispatcher, tickets(0)[:1] + tickets(1)[:1])
    assert dispatcher.assign() == {}  # two places are free, but not of one prompt
    finish(dispatcher, tickets(1))
    assert dispatcher.assign() == {1: tickets(2)}


# -- what is generated -----------------------------------------------------------------------------


def test_lengths_are_heavy_tailed_as_stated():
    task = HeavyTail(Settings())
    lengths = np.array([task.length(seed, 0) for seed in range(4000)])
    assert abs(np.median(lengths) - 16) < 1.5 and lengths.min() >= 1 and lengths.max() == 192
    assert abs(np.log(lengths[lengths < 192]).std() - 1.0) < 0.1


@pytest.mark.parametrize(("kind", "share"), [(HeavyTail, 0.5), (Hard, 0.08)])
def test_so_many_are_solved_as_stated_and_it_depends_on_the_response_alone(kind, share):
    task = kind(Settings())
    rewards = [task.reward(task.train[i], f"r{i}") for i in range(4000)]
    assert abs(np.mean(rewards) - share) < 0.03
    assert rewards[:50] == [task.reward(task.train[i], f"r{i}") for i in range(50)]


def test_the_environment_ends_after_four_turns_of_four_tokens():
    env = FourTurns(Settings())
    env.reset(3)
    assert [env.step("x")[2] for _ in range(4)] == [False, False, False, True]
    assert {FourTurns.length(seed, turn) for seed in range(9) for turn in range(4)} == {4}


@pytest.mark.parametrize("pair", [pair for pairs in PAIRS.values() for pair in pairs])
def test_the_arms_of_a_pair_are_valid_settings_and_differ(pair):
    assert hasattr(mechanisms, pair.env)
    for arm in (pair.naive, pair.ours):
        Settings(**arm.settings)  # raises if one is wrong
    assert pair.naive[1:] != pair.ours[1:]


def test_a_table_has_the_median_of_the_ratios_and_their_range():
    row = {"what": "x", "paper": "2.0", "naive": ["a", 4.0, 6.0, 5.0], "ours": ["b", 2.0, 2.0, 5.0]}
    text = mechanisms.table([row | {"ratios": [2.0, 3.0, 1.0]}])
    assert text.endswith("| x | a: 5.00 s | b: 2.00 s | 2.00 (1.00-3.00) | 2.0 |")


# -- parity ----------------------------------------------------------------------------------------


def test_the_interval_is_students():
    mean, half = parity.interval([0.1, 0.2, 0.3])
    assert mean == pytest.approx(0.2) and half == pytest.approx(4.303 * 0.1 / np.sqrt(3))
    mean, half = parity.interval([0.5])
    assert mean == 0.5 and np.isnan(half)
    assert [round(parity.t_975(n), 2) for n in (9, 10, 20, 60)] == [2.26, 2.23, 2.09, 2.00]


def write_run(out, arm, seed, end, steps=80):
    directory = parity.run_dir(out, "grid", arm, seed)
    directory.mkdir(parents=True)
    evals = {0: 0.25, steps: end}
    rows = [{"version": v, "eval/solve_rate": rate} for v, rate in evals.items()]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_differences_are_of_the_same_seed_and_unfinished_runs_do_not_count(tmp_path):
    args = SimpleNamespace(
        out=tmp_path, env="grid", losses="ppo", alphas=[0.0, 1.0], seeds=3, steps=80, keep=False
    )
    sync, fast = Arm("ppo", 0.0), Arm("ppo", 1.0)
    for seed, (slow_end, fast_end) in enumerate([(0.5, 0.6), (0.4, 0.4)]):
        write_run(tmp_path, sync, seed, slow_end)
        write_run(tmp_path, fast, seed, fast_end)
    write_run(tmp_path, fast, 2, 0.9, steps=40)
    trials = parity.Trials(args, [])
    assert list(trials.combinations())[:2] == [(0, sync), (0, fast)]
    first, second = parity.results(args, trials)
    assert first["ends"] == [0.5, 0.4] and "difference" not in first
    assert second["ends"] == [0.6, 0.4] and second["difference"] == pytest.approx(0.05)
    assert "| ppo | 1 | 2 | 0.500 (0.400-0.600) | +0.050 ± 0.635 |" in parity.table([first, second])
    assert parity.draw(args, trials, [first, second], tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--losses", "ppo,foo"], "--loss is one of"),
        (["--alphas", "0,x"], "--alphas takes numbers"),
        (["--seeds", "0"], "--seeds and --steps have to be at least 1"),
        (["--seed", "7"], "--seed: of every run"),
        (["--mode", "sync"], "--mode: of every run"),
        (["--batch", "8"], "--batch"),
    ],
    ids=str,
)
def test_parity_refuses_what_is_wrong_before_the_first_run(flags, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["parity.py", *flags])
    with pytest.raises(SystemExit):
        parity.main()
    assert said in capsys.readouterr().err


def test_parity_refuses_runs_that_were_made_with_other_flags(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, Arm("ppo", 0.0), 0, 0.5)
    made = parity.run_dir(tmp_path, "grid", Arm("ppo", 0.0), 0) / parity.FLAGS
    made.write_text('["--steps", "40"]')
    monkeypatch.setattr("sys.argv", ["parity.py", "--env", "grid", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        parity.main()
    assert "was made with other flags" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_parity_can_be_interrupted_at_any_time_and_goes_on(tmp_path, tiny):
    """While vLLM starts, where nothing is whole, and between two runs."""
    command = [sys.executable, "-m", "experiments.parity", "--model", tiny, "--alphas", "0,1"]
    command += ["--seeds", "1", "--steps", "8", "--batch_size", "2", "--eval_prompts", "8"]
    command += ["--out", str(tmp_path)]
    first = parity.run_dir(tmp_path, "addition", Arm("ppo", 0.0), 0) / parity.FLAGS

    def interrupted(when) -> str:
        with subprocess.Popen(
            command, cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            while not when(process):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        return said

    interrupted(lambda process: "to start takes" in process.stderr.readline())
    assert not first.exists()
    assert "| ppo | 0 | 1 |" in interrupted(lambda process: first.exists())
    made = first.stat().st_mtime_ns
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, timeout=200)
    assert done.returncode == 0 and "| ppo | 1 | 1 |" in done.stdout
    assert first.stat().st_mtime_ns == made
