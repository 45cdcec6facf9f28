"""The engine under weight updates: which weights made which token, against transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from plumbing.models import resolve_model
from plumbing.processes import child_environment
from plumbing.settings import Settings
from tasks.find import make_task

SCRIPT = Path(__file__).with_name("engine_script.py")
ROOT = SCRIPT.parent.parent.parent


def drive(name: str, tmp: Path, ranks: int, small: int) -> dict:
    """Two random models of one shape, and what an engine did while it changed between them.
    `small`: the hidden size up to which torch multiplies."""
    paths = []
    for seed in (0, 1):
        task = make_task(Settings(), seed)
        paths.append(resolve_model(name, task, "addition", tmp, 0))  # no warm-up: long responses
    with child_environment(None, 1):
        subprocess.run(
            [sys.executable, SCRIPT, *paths, str(ranks), tmp / "seen.json", str(small)],
            check=True, timeout=250, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    seen = json.loads((tmp / "seen.json").read_text())
    models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in paths]
    return seen | {"models": models}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("tiny", 1, 0), id="tied, oneDNN"),
        pytest.param(("tiny-untied", 1, 256), id="untied, torch"),
        pytest.param(("tiny", 1, 256), id="tied, torch", marks=pytest.mark.slow),
        pytest.param(("tiny", 2, 256), id="tensor parallel", marks=pytest.mark.slow),
    ],
)
def seen(request, tmp_path_factory):
    name, ranks, small = request.param
    seen = drive(name, tmp_path_factory.mktemp("engine"), ranks, small)
    torchs = seen["linear"]["functions"] == ["invariant_linear"]
    assert torchs == (ranks == 1 and small > 0)  # each kind of matmul is tested
    return seen


@torch.no_grad()
def score(model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of ids[1:]."""
    logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)  # [T - 1, V]
    return logp.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def test_a_publish_reaches_every_weight(seen):
    for which in (0, 1):
        expected = score(seen["models"][which], list(range(3, 40)))
        assert (torch.tensor(seen[f"probe_{which}"]) - expected).abs().max() < 1e-4


def test_the_sums_of_what_arrived_and_of_what_was_loaded_are_those_of_what_was_sent(seen):
    assert len(seen["sums"]) == 8
    for sent, ranks in seen["sums"]:
        assert all(came == sent and own in (sent, None) for came, own in ranks)


def test_a_tensor_that_is_lost_on_the_way_or_not_loaded_shows_in_the_sums(seen):
    if not seen["lost"]:
        pytest.skip("the ranks are processes of their own")
    in_place = seen["sums"][0][1][0][1] is not None
    (sent, [(came, _)]), (all_sent, [(all_came, own)]), (last, [whole]) = seen["lost"]
    assert came != sent and all_came == all_sent
    assert own not in (all_sent, None) if in_place else own is None
    assert tuple(whole) == (last, last if in_place else None)


def test_identical_weights_in_the_middle_change_nothing(seen):
    for whole, cut in zip(seen["greedy"], seen["greedy_cut"], strict=True):
        assert whole["ids"] == cut["ids"]
    assert any(set(turn["versions"]) == {1, 2} for turn in seen["greedy_cut"])


def test_tokens_before_and_after_an_update_match_the_old_and_the_new_weights(seen):
    spanning = [turn for turn in seen["spanning"] if set(turn["versions"]) == {2, 3}]
    assert len(spanning) >= 4
    for turn in spanning:
        first = len(turn["prompt"]) - 1
        scores = [score(m, turn["prompt"] + turn["ids"])[first:] for m in seen["models"]]
        recorded, new = torch.tensor(turn["logprobs"]), torch.tensor(turn["versions"]) == 3
        assert new.sum() > 5 and (~new).sum() > 5
        expected = torch.where(new, scores[1], scores[0])
        assert (recorded - expected).abs().max() < 1e-4
        assert (recorded - scores[0])[new].abs().max() > 1e-2  # the models do differ


def test_restart_makes_the_whole_turn_again_under_the_new_weights(seen):
    for turn in seen["restarted"]:
        assert len(set(turn["versions"])) == 1
    assert any(set(turn["versions"]) == {5} for turn in seen["restarted"])


def test_no_turn_is_lost_between_two_updates_in_a_row(seen):
    assert seen["two_updates"] == 3


def test_a_cancelled_turn_leaves_nothing_in_the_engine(seen):
    assert seen["after_abort"] == [0, False]


def test_an_empty_prompt_or_one_with_unknown_tokens_is_refused(seen):
    vocabulary = seen["models"][0].config.vocab_size
    unknown = f"the prompt has tokens outside the model's {vocabulary}"
    assert seen["refused"] == ["the prompt has no tokens", unknown, unknown]


def test_a_matmul_does_not_depend_on_what_else_is_in_the_batch(seen):
    """Else sync and async would sample different tokens from the same weights and seeds."""
    assert seen["linear"]["layers"] >= 9
    assert seen["linear"]["differ"] == []
