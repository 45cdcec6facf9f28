"""Whole runs, as docs/first_run.md shows them: slow, and they have to learn."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import same
from safetensors.torch import load_file
from transformers import AutoTokenizer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent


def launch(run_dir: Path, *flags: str, ranks: int = 1) -> list[dict]:
    """Run train.py, through torchrun with several ranks; returns the rows of metrics.jsonl."""
    program = ["-m", "plumbing.torchrun", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *program, "train.py", "--run_dir", str(run_dir), *flags]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"TQDM_DISABLE": "1"})
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def solve_rates(rows: list[dict]) -> list[float]:
    return [row["eval/solve_rate"] for row in rows if "eval/solve_rate" in row]


@pytest.mark.timeout(900)
def test_the_quick_run_learns_addition(tmp_path):
    rows = launch(tmp_path / "run")
    rates = solve_rates(rows)
    assert 0.15 < rates[0] < 0.35 and rates[-1] >= rates[0] + 0.25
    steps = [row for row in rows if "step" in row]
    assert max(row["staleness_max"] for row in steps) == 1
    assert max(row["mismatch_mean"] for row in steps) < 1e-5
    assert max(row["mismatch_max"] for row in steps) < 1e-3


@pytest.mark.timeout(600)
def test_two_ranks_replay_batches_as_one_rank_does(tmp_path, tiny):
    flags = ["--model", tiny, "--steps", "3", "--batch_size", "4", "--eval_every", "0"]
    flags += ["--max_model_len", "128"]
    made = launch(tmp_path / "made", *flags, "--dump_batches", "true")
    flags += ["--replay_batches", str(tmp_path / "made" / "batches")]
    one = launch(tmp_path / "one", *flags)
    two = launch(tmp_path / "two", *flags, ranks=2)
    assert [row["loss"] for row in one] == [row["loss"] for row in made]
    for a, b in zip(one, two, strict=True):
        assert a["prompt_ids"] == b["prompt_ids"]
        for key in ("loss", "grad_norm", "entropy"):  # in float32: sums have another order
            assert abs(a[key] - b[key]) < 1e-6 * max(1, abs(a[key])), (key, a[key], b[key])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("declared", [[2, 1], None])
def test_turns_end_also_if_the_tokenizer_names_another_end_than_the_model_writes(
    tmp_path, tiny, declared
):
    """The model ends with <|im_end|> (2), as it has learnt; its tokenizer says that EOS is 0."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").unlink()
    if declared:  # else the chat template alone tells
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    flags = ["--model", str(model), "--steps", "1", "--batch_size", "8", "--max_model_len", "128"]
    (row,) = launch(tmp_path / "run", *flags, "--eval_every", "0", "--max_tokens", "8")
    assert row["truncated"] < 0.5


@pytest.mark.timeout(1200)
def test_async_training_learns_the_grid_game(tmp_path):
    flags = ["--model", "tiny", "--env", "grid", "--steps", "80", "--batch_size", "16"]
    rows = launch(tmp_path / "run", *flags, "--eval_every", "40", "--eval_prompts", "256")
    rates = solve_rates(rows)
    assert 0.15 < rates[0] < 0.35 and rates[-1] >= 0.45
    steps = [row for row in rows if "step" in row]
    assert max(row["staleness_max"] for row in steps) == 1
    assert max(row["mismatch_max"] for row in steps) < 1e-3


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "env"), [("gem", "gem:game:GuessTheNumber-v0-easy"), ("textworld", "textworld")]
)
def test_a_game_of_another_package_trains_without_fault(tmp_path, tiny, package, env):
    pytest.importorskip(package)
    flags = ["--model", tiny, "--env", env, "--steps", "5", "--batch_size", "2"]
    flags += ["--group_size", "4", "--max_model_len", "2048", "--max_tokens", "8"]
    flags += ["--max_turns", "4", "--eval_every", "0", "--env_timeout", "120"]
    rows = launch(tmp_path / "run", *flags)
    assert [row["samples"] for row in rows] == [8] * 5
    assert rows[-1]["dropped_failed"] == 0
    if package == "textworld":  # in GEM a turn without \\boxed{} ends the game at once
        assert max(row["turns_mean"] for row in rows) > 1


@pytest.mark.timeout(1800)
def test_smollm2_learns_the_largest_of_three_numbers(tmp_path):
    rows = launch(tmp_path / "run", "--model", "smollm2", "--env", "max3", "--steps", "15")
    rates = solve_rates(rows)
    assert rates[-1] >= rates[0] + 0.2


@pytest.mark.timeout(400)
def test_two_trainer_ranks_give_the_losses_of_one(tmp_path, tiny, tasks):
    flags = ["--mode", "sync", "--model", tiny, "--env", f"{tasks}:Odd", "--steps", "5"]
    flags += ["--batch_size", "8", "--eval_every", "0", "--learning_rate", "3e-4"]
    one, two = (launch(tmp_path / f"{ranks}", *flags, ranks=ranks) for ranks in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a["prompt_ids"] == b["prompt_ids"] and abs(a["loss"] - b["loss"]) < 1e-5


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("env", ["addition", "grid", "Threaded"])
def test_async_at_alpha_0_is_sync_bit_for_bit_whoever_decodes(tmp_path, tiny, tasks, env, workers):
    flags = ["--model", tiny, "--steps", "6", "--batch_size", "8", "--group_size", "4"]
    flags += ["--env", env if env.islower() else f"{tasks}:{env}", "--eval_every", "0"]
    flags += ["--env_latency", "0.02,0.01"] if env != "addition" else []
    flags += ["--rollout_workers", str(workers), "--learning_rate", "3e-4"]
    modes = {"sync": ["--mode", "sync"], "async": ["--alpha", "0"]}
    rows = [launch(tmp_path / name, *flags, *mode) for name, mode in modes.items()]
    one, other = ([same(row) for row in run if "step" in row] for run in rows)
    assert one == other
    files = [tmp_path / name / "checkpoint-6" / "model.safetensors" for name in modes]
    first, second = map(load_file, files)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("on_update", ["resume", "drain"])
def test_several_workers_share_the_tasks(tmp_path, tiny, tasks, workers, on_update):
    flags = ["--model", tiny, "--env", f"{tasks}:Odd", "--steps", "8", "--batch_size", "4"]
    flags += ["--rollout_workers", str(workers), "--on_update", on_update, "--alpha", "2"]
    rows = launch(tmp_path / "run", *flags, "--eval_every", "0", "--max_num_seqs", "8")
    prompts = [prompt for row in rows for prompt in row["prompt_ids"]]
    assert len(prompts) == len(set(prompts)) == 32
    assert max(row["staleness_max"] for row in rows) <= 2
