"""Several turns and every scheduling mechanism, on real vLLM: read off batches and metrics."""

import math
import time

import numpy as np
import pytest
from conftest import record_batches, rows_of, same, spans_of, weights_of

from plumbing.chat import encode_prompt, encode_reply
from plumbing.processes import RolloutError
from plumbing.settings import Settings
from tasks.find import make_task


def train(worker, tasks, name, *flags, prepare=lambda run: None, **settings):
    """A run, and the batches that it trained on."""
    batches = []

    def prepare_all(run):
        batches.append(record_batches(run))
        prepare(run)

    settings = {"env": f"{tasks}:{name}", "steps": 4} | settings
    run = worker.train(*flags, prepare=prepare_all, **settings)
    return run, batches[0]


def slow_down(run, seconds: float) -> None:
    """Have updates come later, so that they find turns in progress."""
    step = run.trainer.step

    def slow(samples, version):
        time.sleep(seconds)
        return step(samples, version)

    run.trainer.step = slow


@pytest.mark.parametrize("name", ["Talk", "Threaded"])
def test_a_sample_is_the_whole_episode_with_a_version_for_every_sampled_token(worker, tasks, name):
    latency = "1,0.1"  # an episode takes far longer than a train step: updates come in between
    run, batches = train(worker, tasks, name, "--alpha", "1", env_latency=latency)
    games = make_task(Settings(env=f"{tasks}:{name}"))
    eos, spans = run.tokenizer.eos_token_id, 0
    for version, batch in enumerate(batches):
        for sample in batch:
            assert len(sample.turns) == 3 and sample.staleness(version) in (0, 1)
            ids, seed = sample.ids.tolist(), games.train[sample.ticket.prompt_id]
            expected = list(encode_prompt(games, f"{seed}:0", run.tokenizer))
            for turn, (first, end) in enumerate(sample.turns, 1):
                expected += ids[first:end]  # verbatim, whatever it was
                if turn < 3:
                    reply = encode_reply(games, f"{seed}:{turn}", run.tokenizer)
                    expected += reply[1:] if ids[end - 1] == eos else reply
                assert 1 <= end - first <= 4
            assert ids == expected
            inside = np.zeros(len(ids), bool)
            for first, end in sample.turns:
                inside[first:end] = True
            assert (sample.mask == inside).all() and (sample.versions[~inside] == -1).all()
            made = sample.versions[inside]
            assert (np.diff(made) >= 0).all() and made.min() >= 0
            assert (sample.logprobs[inside] <= 0).all() and not sample.logprobs[~inside].any()
            spans += made.min() != made.max()
    assert spans > 0  # some episodes lived through a weight update
    row = rows_of(run)[-1]
    assert row["turns_mean"] == 3 and row["mismatch_mean"] < 1e-5
    # An episode has a lane of the timeline to itself, in which turns and steps take turns.
    at_work = [len(spans_of(run, name, 2)) for name in ("turn", "env step")]
    assert at_work[0] >= at_work[1] >= 3 * sum(map(len, batches))


def test_episodes_are_the_same_in_sync_and_in_async_at_alpha_0(worker, tasks):
    runs = [
        train(worker, tasks, "Talk", *flags, steps=4)[0]
        for flags in (["--mode", "sync"], ["--mode", "async", "--alpha", "0"])
    ]
    rows = [[same(row) for row in rows_of(run)] for run in runs]
    assert rows[0] == rows[1]
    first, second = (weights_of(run) for run in runs)
    assert all((first[name] == second[name]).all() for name in first)


def test_on_policy_ratios_are_1_over_several_turns(worker, tasks):
    run, _ = train(worker, tasks, "Talk", "--mode", "sync", steps=2)
    assert all(abs(row["ratio_mean"] - 1) < 1e-4 for row in rows_of(run))


@pytest.mark.parametrize("how", ["restart", "drain"])
def test_other_ways_to_update_finish_whole_turns_under_one_version(worker, tasks, how):
    settings = {"on_update": how, "alpha": 1, "batch_size": 8}
    _, batches = train(worker, tasks, "Talk", prepare=lambda run: slow_down(run, 0.1), **settings)
    turns = [s.versions[a:b] for batch in batches for s in batch for a, b in s.turns]
    assert turns and all((versions == versions[0]).all() for versions in turns)


def test_truncated_samples_are_trained_on_or_not_as_told(worker, tasks):
    changed = []
    for how in ("train", "mask"):
        run, batches = train(
            worker, tasks, "Talk", "--mode", "sync", "--max_turns", "2", steps=1, truncated=how
        )
        assert all(sample.truncated and len(sample.turns) == 2 for sample in batches[0])
        changed.append(rows_of(run)[0]["grad_norm"] > 0)
    assert changed == [True, False]


# -- ready, redundancy, filtering ------------------------------------------------------------------

SLOW = "0.005,0.002,0.03,400"  # a few episodes take some 6 seconds instead of 15 ms
ENDLESS = {"env_latency": "0.005,0.002,0.03,1e7", "env_timeout": 36_000}  # or half a day each


@pytest.mark.parametrize("alpha", ["1", "2"])
def test_ready_passes_stragglers_over_and_drops_them_when_they_are_too_old(worker, tasks, alpha):
    run, batches = train(
        worker, tasks, "Stuck", "--consume", "ready", "--alpha", alpha, steps=8, batch_size=8,
        env_timeout=36_000,
    )  # fmt: skip
    bound = math.ceil(float(alpha))
    for version, batch in enumerate(batches):
        assert len(batch) == 32 and max(s.staleness(version) for s in batch) <= bound
        assert [s.ticket[:2] for s in batch] == sorted(s.ticket[:2] for s in batch)
    groups = [s.ticket.group for batch in batches for s in batch[::4]]
    dropped = run.buffer.dropped
    assert len(set(groups)) == 64 and not set(groups) & set(dropped)
    assert dropped[1] == "stale" and set(dropped.values()) == {"stale"}
    rows = rows_of(run)
    assert rows[-1]["dropped_stale"] > 0
    lost = [row for row in rows if row["lost_samples"]]
    assert lost and all(row["lost_length_mean"] > 0 for row in lost)


def test_redundant_episodes_race_and_the_losers_are_not_waited_for(worker, tasks):
    run, batches = train(  # it would never end if it waited for them
        worker, tasks, "Talk", "--mode", "sync", "--consume", "ready", redundant_groups=8,
        redundant_samples=2, **ENDLESS,
    )  # fmt: skip
    assert [len(batch) for batch in batches] == [16] * 4
    for version, batch in enumerate(batches):
        assert {int(s.versions.max()) for s in batch} == {version}  # sync: all of this version
        for group in range(4):
            samples = [s.ticket.sample for s in batch[4 * group : 4 * group + 4]]
            assert samples == sorted(set(samples)) and set(samples) <= set(range(6))
    assert rows_of(run)[-1]["dropped_redundant"] > 0
    assert sum(row["lost_samples"] for row in rows_of(run)) > 0


def test_filtered_groups_are_replaced_and_no_group_without_signal_is_trained_on(worker, tasks):
    run, batches = train(worker, tasks, "Odd", "--alpha", "1", steps=6, filter_groups=True)
    for batch in batches:
        rewards = np.array([s.reward for s in batch]).reshape(4, 4)
        assert (np.ptp(rewards, 1) > 0).all()
    dropped = run.buffer.dropped
    assert dropped and set(dropped.values()) == {"filtered"}
    groups = [s.ticket.group for batch in batches for s in batch[::4]]
    assert groups == sorted(set(groups)) and not set(groups) & set(dropped)
    assert rows_of(run)[-1]["dropped_filtered"] > 0


def test_a_task_without_any_signal_ends_the_run_with_a_clear_message(worker, tasks):
    with pytest.raises(RolloutError, match="filtering found no signal: [0-9]+ groups .*too hard"):
        train(worker, tasks, "Hopeless", "--alpha", "1", filter_groups=True, filter_limit=3)
    worker.workers.close()
    worker.workers = None  # after an error they serve nobody else


def test_an_environment_that_raises_costs_groups_and_is_counted(worker, tasks):
    run, batches = train(worker, tasks, "Trips", "--alpha", "1", steps=6)
    dropped = run.buffer.dropped
    assert dropped and set(dropped.values()) == {"failed"}
    assert all(len(batch) == 16 for batch in batches)
    trained = {s.ticket.group for batch in batches for s in batch}
    assert not trained & set(dropped)
    assert sum(row["failed_samples"] for row in rows_of(run)) >= 2 * len(dropped)


def test_with_tasks_in_the_queue_no_place_in_the_engine_stays_free(worker, tasks):
    run, _ = train(worker, tasks, "Slow", "--mode", "sync", steps=1, batch_size=1024, max_tokens=4)
    (row,) = rows_of(run)
    print({k: row[k] for k in row if k.startswith(("slots", "steps_b", "t_"))})
    # Start and end are in it. Batches of 64, one after the other, would be below it half the time.
    assert row["steps_starved"] <= row["steps_below_cap"] < 0.2
    assert row["slots_used"] > 0.9 * 64


def test_resume_in_ready_mode_trains_on_no_prompt_twice(worker, tasks):
    half, first = train(
        worker, tasks, "Talk", "--consume", "ready", "--alpha", "1", steps=3, env_latency=SLOW
    )
    whole, second = train(
        worker, tasks, "Talk", "--resume", str(half.log.dir), steps=6, run_dir=half.log.dir
    )
    groups = [s.ticket.group for batch in first + second for s in batch[::4]]
    assert len(groups) == len(set(groups)) == 24
    assert not set(groups) & set(whole.buffer.dropped)
