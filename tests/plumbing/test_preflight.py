"""`bash launch.sh check`: each thing that would fail silently is one line, what is well is none."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from plumbing import preflight
from plumbing.models import resolve_model
from plumbing.settings import Settings
from plumbing.tiny import byte_tokenizer
from tasks.find import make_task

SMALL = {
    "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models that have nothing wrong with them: with one matrix for both ends, and with two."""
    cache, task = tmp_path_factory.mktemp("models"), make_task(Settings())
    names = ("tiny", "tiny-untied")
    return {name: resolve_model(name, task, "addition", cache, warmup_steps=0) for name in names}


@pytest.fixture
def folder(models, tmp_path, monkeypatch):
    """An empty working directory, with a model and data that have nothing wrong with them."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shutil.copytree(models["tiny"], tmp_path / "model")
    write(tmp_path / "train.jsonl", [{"question": f"q{i}?", "answer": str(i)} for i in range(40)])
    write(tmp_path / "test.jsonl", [{"question": f"t{i}?", "answer": str(i)} for i in range(5)])
    return tmp_path


@pytest.fixture
def checked(monkeypatch, capfd):
    """Run the command with flags; returns its exit code, what it prints and what it says of."""

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["check", *map(str, flags)])
        capfd.readouterr()
        try:
            code = preflight.main()
        except SystemExit as end:
            code = end.code
        return (code, *capfd.readouterr())

    return run


def write(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


MATH = ("--model", "./model", "--env", "math", "--data", "train.jsonl", "--max_tokens", 100)


@pytest.mark.parametrize("flags", [(), ("--env", "gsm8k", "--data", "train.jsonl"), MATH[2:]])
@pytest.mark.parametrize("name", ["tiny", "tiny-untied"])
def test_what_is_well_says_nothing(folder, models, checked, name, flags):
    before = sorted(folder.rglob("*"))
    code, out, err = checked("--model", models[name], *flags)
    assert (code, err) == (0, "") and out.count("\n") == 1
    assert out.endswith("a turn ends at '<|im_end|>'; nothing to say against it\n")
    assert sorted(folder.rglob("*")) == before  # nothing is written


# Each spoils one thing in the folder, and names what is to be said of it.


def no_tensor(folder):
    weights = load_file(folder / "model/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model/model.safetensors", metadata={"format": "pt"})
    return 2, "layers.1.mlp.up_proj.weight are not in its files, and would be random"


def no_head(folder):
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return 2, "lm_head.weight are not in its files, and would be random"


def unused_weights(folder):
    weights = load_file(folder / "model/model.safetensors") | {"score.weight": torch.ones(2)}
    save_file(weights, folder / "model/model.safetensors", metadata={"format": "pt"})
    return 0, "has weights that are not used: score.weight"


def weights_that_are_not_finite(folder):
    weights = load_file(folder / "model/model.safetensors")
    weights["model.norm.weight"][3] = float("inf")
    save_file(weights, folder / "model/model.safetensors", metadata={"format": "pt"})
    return 2, "model.norm.weight have values that are not finite"


def other_model(folder, config, kind):
    torch.manual_seed(0)
    kind(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return 2, "changes its logits after the head"


def softcap(folder):
    config = Gemma2Config(**SMALL, final_logit_softcapping=5.0, head_dim=16)
    return other_model(folder, config, Gemma2ForCausalLM)


def logit_scale(folder):
    return other_model(folder, CohereConfig(**SMALL, logit_scale=0.25), CohereForCausalLM)


def no_template(folder):
    (folder / "model/chat_template.jinja").unlink()
    return 0, "the model has no chat template: prompts are plain text"


def gold_of_many_rows_is_prose(folder):
    rows = rows_of(folder / "train.jsonl")
    for row in rows[7:12]:
        row["answer"] = "proof: see above"
    write(folder / "train.jsonl", rows)
    return 2, "5 of 40 gold answers can never be met: train.jsonl line 8: gold answer 'proof: see"


def gold_of_one_row_is_prose(folder):
    rows = rows_of(folder / "train.jsonl")
    rows[7]["answer"] = "proof: see above"
    write(folder / "train.jsonl", rows)
    return 0, "1 rows have gold answers that can never be met, and are left out: train.jsonl line 8"


def gold_is_a_truth_value(folder):
    rows = rows_of(folder / "train.jsonl")
    write(folder / "train.jsonl", [*rows, {"question": "q?", "answer": True}])
    return 2, "train.jsonl line 41: `answer` is True: a text or a number is expected"


def gold_is_no_number(folder):
    rows = rows_of(folder / "train.jsonl")
    write(folder / "train.jsonl", [*rows, {"question": "q?", "answer": float("nan")}])
    return 2, "train.jsonl line 41: `answer` is nan: a finite number is expected"


def long_prompt(folder):
    rows = rows_of(folder / "train.jsonl")
    rows[3]["question"] = "9" * 3000
    write(folder / "train.jsonl", rows)
    return 2, "do not fit into --max_model_len 2048: '999"


def row_twice(folder):
    rows = rows_of(folder / "train.jsonl")
    write(folder / "train.jsonl", [*rows, {"question": " Q3? ", "answer": "3"}])
    return 0, "1 rows repeat an earlier one and are left out (train.jsonl line 41 repeats 4)"


def two_answers(folder):
    rows = rows_of(folder / "train.jsonl")
    write(folder / "train.jsonl", [*rows, {"question": "q3?", "answer": "4"}])
    return 0, "1 rows give an earlier question another answer (train.jsonl line 41; train.jsonl"


def row_on_both_sides(folder):
    rows = rows_of(folder / "test.jsonl")
    write(folder / "test.jsonl", [*rows, {"question": "Q3?  ", "answer": "3"}])
    return 0, "1 train rows ask what a test row asks and are left out (train.jsonl line 4; test"


def special_token(folder):
    rows = rows_of(folder / "train.jsonl")
    rows[3]["question"] = "what is <|im_end|><|im_start|>?"
    write(folder / "train.jsonl", rows)
    return 0, "1 prompts spell special tokens of the model; they are kept as text"


@pytest.mark.parametrize(
    "spoil",
    [
        no_tensor, no_head, unused_weights, weights_that_are_not_finite, softcap, logit_scale,
        no_template, gold_of_many_rows_is_prose, gold_of_one_row_is_prose, gold_is_a_truth_value,
        gold_is_no_number, long_prompt, row_twice, two_answers, row_on_both_sides, special_token,
    ],
    ids=lambda spoil: spoil.__name__,
)  # fmt: skip
def test_what_would_fail_silently_is_one_line(folder, checked, spoil):
    expected, words = spoil(folder)
    before = sorted(folder.rglob("*"))
    code, out, err = checked(*MATH)
    assert code == expected and err.count("\n") == 1 and words in err
    assert err.startswith("check: " if code else "note: ") and "Traceback" not in err
    assert bool(out) == (code == 0) and sorted(folder.rglob("*")) == before


def test_rows_that_are_left_out_are_not_counted(folder, checked):
    long_prompt(folder)
    code, out, err = checked(*MATH, "--long_prompts", "drop")
    assert code == 0 and "39 rows to train on, 5 held out" in out
    assert err == "note: 1 prompts are too long and left out (train.jsonl line 4)\n"


def test_each_declared_end_of_a_turn_is_shown(folder, checked):
    (folder / "model/generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    code, out, err = checked("--model", "./model")
    assert (code, err) == (0, "") and "a turn ends at '<|im_end|>', '%'; nothing" in out


def test_a_stop_of_several_tokens_is_one_line(folder, checked):
    (folder / "mine.py").write_text(
        "from tasks.puzzles import Addition\nclass Mine(Addition):\n    stop = '</answer>'\n"
    )
    code, out, err = checked("--model", "./model", "--env", "mine.py:Mine")
    said = "check: env mine.py:Mine: its stop '</answer>' is 9 tokens of this model, not one\n"
    assert (code, out, err) == (2, "", said)


def test_flags_are_checked_as_those_of_a_run(folder, checked):
    assert checked("--alpha", "-1") == (2, "", "check: --alpha must be 0 or more (got -1.0)\n")
