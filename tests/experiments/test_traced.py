"""A simulated run writes what a real one does, so that it can be looked at in the same way."""

import sys

import numpy as np
import pytest

from experiments import sim
from report.page import run_data
from report.rows import read_rows
from report.tokens import read_samples


@pytest.fixture(params=[2, 0])
def traced(request, tmp_path, monkeypatch, capsys):
    """A directory, and what the command has said of it."""
    flags = ["--gpus", "4", "--alpha", str(request.param), "--median", "100", "--steps", "6"]
    command = ["sim", *flags, "--trace", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", command)
    assert sim.main() == 0
    return tmp_path / "run", capsys.readouterr().out, request.param


def test_all_turns_are_on_the_page_at_virtual_times(traced):
    run, said, alpha = traced
    data, samples = run_data(run), read_samples(run)
    assert len(data["turns"]) == len(samples) == 6 * 32 * 8
    assert {turn[7] for turn in data["turns"]} == {"trained"}
    assert {turn[0] for turn in data["turns"]} == set(range(4 if alpha == 0 else 3))
    rows = read_rows(run / "metrics.jsonl")
    assert max(turn[2] + turn[3] for turn in data["turns"]) <= 1e3 * rows[-1]["wall_s"]
    assert len(data["trainer"]) == 3 * 6  # a wait, an update and a publish a step
    stale = [sample["version"] - min(sample["versions"]) for sample in samples.values()]
    assert max(stale) == alpha
    assert f"staleness mean {np.mean(stale):.2f}" in said


def test_a_directory_with_a_run_is_left_alone(traced, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sim", "--trace", str(traced[0])])
    assert sim.main() == 2
    assert capsys.readouterr().err == f"sim.py: there is a run in {traced[0]} already\n"
