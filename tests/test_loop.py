"""The training loops on real vLLM: what every run promises, read off the files that it wrote.

async at alpha 0 is sync, bit for bit: samples, metrics and weights
no sample is older than ceil(alpha) versions, and some are when training is slow
training and decoding overlap if alpha is above 0, and only then
every prompt is trained on exactly once, in the order of admission
trainer and engine agree on log-probabilities at every publish
importance ratios are 1 on fresh samples, at any temperature
a resumed sync run has the metrics and weights of one that was never stopped
a resumed async run leaves no prompt out, trains on none twice, and keeps the bound
dumped batches replay to the same losses and weights, without an engine
equal rewards leave the weights alone
a data set shorter than a batch is gone through again and again, evenly
a group that failed is counted, and the next prompt takes its place
the time of the trainer is all in trace.json
"""

import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import (
    nested_or_apart,
    record_batches,
    rows_of,
    same,
    spans_of,
    weights_of,
)
from safetensors.torch import load_file

import train
from plumbing import checkpoint
from plumbing.settings import parse
from report.timeline import read_trace

STATE = {  # of a run that has taken one step, on one node
    "version": 1, "wall": 1.0, "batch": (4, 4),
    "nodes": [{"first_index": 4, "dropped": {}, "trained": set()}],
}  # fmt: skip


def train_slowly(run) -> None:
    """Train on no batch before generation has got as far ahead as it may."""
    step = run.trainer.step

    def slow(samples, version):
        def far_ahead():
            return run.buffer.version == version and not run.buffer.open

        run.workers.wait(far_ahead, run.buffer.pending, 200)
        return step(samples, version)

    run.trainer.step = slow


def overlap(some: list[tuple], others: list[tuple]) -> int:
    """Microseconds in which both go on."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


GAMES = ["Odd", "Talk", "Threaded"]  # one turn; several, as coroutines and in threads


@pytest.mark.parametrize("name", GAMES)
def test_async_at_alpha_0_is_sync_bit_for_bit(worker, tasks, name):
    """With the threads that a run takes by default, and turns that come back in any order."""
    batches = []
    runs = [
        worker.train(
            *flags, steps=10, batch_size=8, eval_every=5, eval_prompts=16,
            env=f"{tasks}:{name}", env_latency="" if name == "Odd" else "0.02,0.01",
            prepare=lambda run: batches.append(record_batches(run)),
        )
        for flags in (["--mode", "sync"], ["--mode", "async", "--alpha", "0"])
    ]  # fmt: skip
    sync, asynchronous = (rows_of(run) for run in runs)
    assert [same(row) for row in sync] == [same(row) for row in asynchronous]
    for one, other in zip(*batches, strict=True):
        assert [s.ticket for s in one] == [s.ticket for s in other]
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs)
    first, second = (weights_of(run) for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2, 4])
def test_staleness_never_passes_alpha_and_reaches_it_when_training_is_slow(worker, alpha):
    run = worker.train("--alpha", str(alpha), steps=8, prepare=train_slowly)
    stale = [row["staleness_max"] for row in rows_of(run)]
    assert stale == [min(version, math.ceil(alpha)) for version in range(8)]
    train, decode = spans_of(run, "train", 1), spans_of(run, "decode", 2)
    assert len(train) == 8 and decode
    if alpha != 0.5:  # then the batch that is waited for and the half beyond it may end as one
        assert (overlap(train, decode) > 0) == (alpha > 0)  # one clock in both processes


def test_every_prompt_is_trained_on_exactly_once_in_admission_order(worker):
    batches = []
    run = worker.train(
        "--alpha", "2", steps=6, prepare=lambda run: batches.extend([record_batches(run)])
    )
    tickets = [s.ticket for batch in batches[0] for s in batch]
    assert [(t.group, t.sample) for t in tickets] == [(g, i) for g in range(24) for i in range(4)]
    assert len({t.prompt_id for t in tickets}) == 24 and len({t.seed for t in tickets}) == 96
    assert [row["samples"] for row in rows_of(run)] == [16] * 6


def test_trainer_and_engine_agree_at_each_of_50_publishes(worker):
    run = worker.train("--alpha", "1", steps=50, batch_size=2)
    mismatches = list(run.scheduler.publisher.proof.mismatches.values())
    assert len(mismatches) == 51  # version 0 too
    assert max(mean for _, mean in mismatches) < 1e-5
    assert max(worst for worst, _ in mismatches) < 1e-3
    stale = [row["ratio_mean"] != 1 for row in rows_of(run)]
    assert sum(stale) > 25  # the weights did change (not by every batch: some have equal rewards)


def test_on_policy_ratios_are_1(worker):
    """Trainer and engine compute the same log-probabilities, also at a temperature other than 1."""
    for temperature in ("1.0", "0.7"):
        run = worker.train("--mode", "sync", "--temperature", temperature, steps=3)
        assert overlap(spans_of(run, "train", 1), spans_of(run, "decode", 2)) == 0
        for row in rows_of(run):
            assert abs(row["ratio_mean"] - 1) < 1e-4 and row["clip_frac"] == 0


@pytest.mark.parametrize("name", GAMES)
def test_resume_goes_on_as_if_nothing_had_happened(worker, tasks, name):
    env = f"{tasks}:{name}"
    whole = worker.train("--mode", "sync", steps=6, env=env)
    half = worker.train("--mode", "sync", steps=3, env=env)
    (half.log.dir / "metrics.jsonl").open("a").write('{"step": 4, "version": 3}\n{"cut o')
    flags = ["--resume", str(half.log.dir)]
    resumed = worker.train(*flags, steps=6, env=env, run_dir=half.log.dir)
    assert [same(row) for row in rows_of(resumed)] == [same(row) for row in rows_of(whole)]
    first, second = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_run_keeps_the_model_that_it_began_with(worker, tasks, tmp_path, monkeypatch):
    """Also if the cache has another one by now, or none: the KL penalty goes on from there."""
    monkeypatch.setattr("plumbing.models.CACHE", tmp_path)
    flags = ["--mode", "sync", "--model", "tiny", "--kl_coef", "0.1"]
    flags += ["--env", f"{tasks}:Untaught", "--run_dir", str(tmp_path / "run"), "--eval_every", "0"]
    flags += ["--batch_size", "4", "--group_size", "4", "--max_model_len", "128"]
    begun = train.Run(parse([*flags, "--steps", "1"]))
    reference = {name: value.clone() for name, value in begun.trainer.reference.named_parameters()}
    gathered = checkpoint.gather(begun.trainer, STATE)
    path = tmp_path / "run/checkpoint-1"
    checkpoint.write(path, begun.trainer, begun.tokenizer, *gathered)
    begun.close()
    for model in tmp_path.glob("tiny-*"):
        shutil.rmtree(model)
    resumed = train.Run(parse([*flags, "--steps", "2", "--resume", str(tmp_path / "run")]))
    resumed.close()
    assert not list(tmp_path.glob("tiny-*"))  # none was made
    for name, value in resumed.trainer.reference.named_parameters():
        assert torch.equal(value, reference[name])


def test_resume_in_async_mode_loses_no_prompt_and_keeps_the_bound(worker):
    half = worker.train("--alpha", "2", steps=5, save_every=3, batch_size=2)
    for path in (half.log.dir / "checkpoint-5").iterdir():
        path.unlink()  # as if killed after step 3's checkpoint
    with pytest.raises(ValueError, match="batches of 2 x 4"):
        worker.train(
            "--resume", str(half.log.dir), steps=6, batch_size=3, run_dir=half.log.dir
        )
    run = worker.train("--resume", str(half.log.dir), steps=6, batch_size=2, run_dir=half.log.dir)
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    prompts = [prompt for row in rows for prompt in row["prompt_ids"]]
    assert len(set(prompts)) == 12
    assert max(row["staleness_max"] for row in rows) <= 2


def test_dumped_batches_replay_to_the_same_weights_without_an_engine(worker, tmp_path):
    run = worker.train("--alpha", "1", steps=3, dump_batches=True)
    flags = ["--model", worker.model, "--batch_size", "4", "--group_size", "4", "--steps", "3"]
    flags += ["--replay_batches", str(run.log.dir / "batches"), "--learning_rate", "0.0003"]
    again = train.Run(parse([*flags, "--alpha", "1", "--run_dir", str(tmp_path / "again")]))
    again.start()
    train.train_async(again)
    again.close()
    keys = ("loss", "grad_norm", "reward_mean", "ratio_mean", "prompt_ids")
    for row, other in zip(rows_of(run), rows_of(again), strict=True):
        assert {key: row[key] for key in keys} == {key: other[key] for key in keys}
    first, second = weights_of(run), weights_of(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match=r"no .*000004.npz \(--steps 4"):
        train.Run(parse([*flags, "--steps", "4", "--run_dir", str(tmp_path / "more")]))
    with pytest.raises(ValueError, match="groups of 4 samples, and --group_size 8"):
        train.Run(parse([*flags, "--group_size", "8"]))


def test_a_task_may_fix_the_length_of_every_turn(worker, tasks):
    run = worker.train("--mode", "sync", env=f"{tasks}:Exact", steps=1)
    assert [int(s.mask.sum()) for s in run.batch] == [8 + s.ticket.seed % 4 for s in run.batch]


# -- data that has nothing to teach --------------------------------------------------------------


def test_equal_rewards_change_nothing(worker, tasks):
    run = worker.train("--mode", "sync", env=f"{tasks}:Hopeless", steps=2)
    for row in rows_of(run):
        assert row["loss"] == 0 and row["grad_norm"] == 0 and row["reward_mean"] == 0
    before, after = load_file(f"{worker.model}/model.safetensors"), weights_of(run)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_responses_of_one_token_all_truncated_train_without_fault(worker):
    run = worker.train("--max_tokens", "1", "--alpha", "1", steps=3)
    for row in rows_of(run):
        assert row["tokens"] == row["samples"] == 16 and math.isfinite(row["loss"])
        assert row["truncated"] > 0.9  # unless that token is EOS


def test_a_data_set_shorter_than_a_batch_rolls_over(worker, tasks):
    run = worker.train("--alpha", "1", env=f"{tasks}:Short", steps=3, eval_every=3)
    prompts = [prompt for row in rows_of(run) for prompt in row["prompt_ids"]]
    assert Counter(prompts) == {0: 4, 1: 4, 2: 4}
    assert all(sorted(prompts[i : i + 3]) == [0, 1, 2] for i in range(0, 12, 3))


def test_a_reward_that_raises_now_and_then_costs_groups_and_is_counted(worker, tasks):
    batches = []
    run = worker.train(
        "--alpha", "1", env=f"{tasks}:Flaky", steps=4,
        prepare=lambda run: batches.extend([record_batches(run)]),
    )  # fmt: skip
    dropped = run.buffer.dropped
    assert dropped and set(dropped.values()) == {"failed"}
    assert rows_of(run)[-1]["dropped_failed"] <= len(dropped)
    trained = [s.ticket.group for batch in batches[0] for s in batch[::4]]
    assert len(trained) == 16 and trained == sorted(set(trained))  # replaced by the next prompts
    assert not set(trained) & set(dropped)
    assert set(trained) | set(dropped) >= set(range(max(trained)))


def test_a_run_writes_what_the_readme_says(worker):
    run = worker.train("--alpha", "1", steps=2, eval_every=1, eval_prompts=8)
    run.log.summary()
    files = {path.name for path in run.log.dir.iterdir()}
    assert files == {
        "config.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "trace.json", "reward.png",
        "checkpoint-2",
    }  # fmt: skip
    keys = (
        "step version wall_s reward_mean solve_rate loss grad_norm entropy ratio_mean ratio_max "
        "clip_frac mismatch_max mismatch_mean staleness_mean staleness_max tokens samples "
        "dropped_filtered dropped_stale dropped_failed dropped_redundant t_wait t_train t_publish "
        "trainer_idle rollout_idle prompt_ids"
    )
    assert all(set(keys.split()) <= set(row) for row in rows_of(run))
    lines = (run.log.dir / "metrics.jsonl").read_text().splitlines()
    evals = [row for row in map(json.loads, lines) if "eval/solve_rate" in row]
    assert [row["version"] for row in evals] == [0, 1, 2]
    sample = json.loads((run.log.dir / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"] and set(sample["versions"]) == {0}
    config = json.loads((run.log.dir / "config.json").read_text())
    assert config["alpha"] == 1 and config["steps"] == 2
    check_timeline(run)


def check_timeline(run) -> None:
    """What trace.json of a run with evaluations holds; no time of the trainer is missing in it."""
    events = [e for e in read_trace(run.log.dir / "trace.json") if e["ph"] == "X"]
    kinds = {pid: {e["name"] for e in events if e["pid"] == pid} for pid in (1, 2)}
    assert kinds[1] - {"start"} == {
        "step", "wait", "train", "pack", "forward", "backward", "optimiser", "diagnostics",
        "publish", "acknowledge", "probe", "pause", "broadcast", "log", "evaluate", "checkpoint",
        "admit",
    }  # fmt: skip
    assert {"decode", "load", "probe", "commit", "idle", "turn"} <= kinds[2]
    turns = [e for e in events if e["name"] == "turn"]
    trained = [(e["args"]["group"], e["args"]["sample"]) for e in turns if e["args"]["group"] >= 0]
    assert sorted(trained) == [(g, i) for g in range(8) for i in range(4)]
    assert nested_or_apart(events)
    verbs = ("wait", "train", "publish", "log", "evaluate", "checkpoint")
    mine = sorted(span for name in verbs for span in spans_of(run, name, 1))
    covered, until = 0, mine[0][0]
    for start, end in mine:
        covered += max(0, end - max(start, until))
        until = max(until, end)
    assert covered >= 0.95 * (until - mine[0][0])
