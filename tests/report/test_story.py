"""tokens.jsonl holds what was trained on, and the story of a sample says what happened to it."""

import json

import numpy as np
import pytest

from report.story import main
from report.tokens import TOKENS_A_STEP, read_samples, show_until
from tests.conftest import record_batches


@pytest.fixture(scope="module")
def run(worker):
    """A run, and the batches that it was trained on."""
    batches = []
    run = worker.train(
        "--alpha", "1", prepare=lambda run: batches.append(record_batches(run)), steps=3
    )
    return run, batches[0]


def test_every_sample_that_was_trained_on_is_written_as_the_engine_made_it(run):
    run, batches = run
    samples = read_samples(run.log.dir)
    assert len(samples) == sum(map(len, batches)) > 0
    for step, batch in enumerate(batches, 1):
        for sample in batch:
            told = samples[sample.ticket.group, sample.ticket.sample]
            assert (told["step"], told["version"]) == (step, step - 1)
            assert told["ids"] == sample.ids.tolist()
            assert told["versions"] == sample.versions[sample.mask].tolist()
            assert np.allclose(told["logprobs"], sample.logprobs[sample.mask], atol=1e-4)
            assert len(told["ratios"]) == len(told["clipped"]) == sample.mask.sum()


def test_ratios_are_of_their_own_token(run):
    """The mean that the metrics have is a mean over all tokens; at version 0 engine and trainer
    hold the same weights, so every ratio is 1, and later not."""
    run, _ = run
    rows = [json.loads(line) for line in (run.log.dir / "tokens.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (run.log.dir / "metrics.jsonl").open()]
    metrics = {row["step"]: row for row in metrics if "step" in row}
    for row in rows:
        ratios = sum(row["ratios"], [])
        assert np.mean(ratios) == pytest.approx(metrics[row["step"]]["ratio_mean"], abs=1e-3)
        fresh = [
            ratio
            for versions, of in zip(row["versions"], row["ratios"], strict=True)
            for version, ratio in zip(versions, of, strict=True)
            if version == row["version"]
        ]
        assert np.allclose(fresh, 1, atol=2e-3)


def test_the_story_tells_admission_versions_and_training(run, monkeypatch, capsys):
    run, batches = run
    sample = batches[-1][5]
    name = f"{sample.ticket.group}:{sample.ticket.sample}"
    monkeypatch.setattr("sys.argv", ["report.story", str(run.log.dir), name])
    assert main() == 0
    text = capsys.readouterr().out
    assert "is admitted at version" in text and "turn 1 begins on rollout process 0" in text
    stale = sample.staleness(2)
    assert f"trained on in step 3, at version 2: staleness {stale}" in text
    lines = text.splitlines()
    assert len(lines) - lines.index(next(x for x in lines if "logprob" in x)) - 1 == sum(
        sample.mask
    )


@pytest.mark.parametrize(
    ("name", "why"), [("99999", "no sample 99999"), ("x:1", "GROUP or GROUP:SAMPLE")]
)
def test_a_sample_that_is_not_there_is_one_line(run, monkeypatch, capsys, name, why):
    monkeypatch.setattr("sys.argv", ["report.story", str(run[0].log.dir), name])
    assert main() == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_long_samples_are_cut_off_after_a_number_of_tokens():
    assert show_until(TOKENS_A_STEP, [3000, 3000, 3000]) == 2
    assert show_until(TOKENS_A_STEP, [9000, 1]) == 1
