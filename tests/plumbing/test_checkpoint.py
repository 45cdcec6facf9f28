"""Checkpoints: which one a run resumes from, and which are refused."""

import pytest
import torch

from plumbing.checkpoint import STATE_FILE, load

BATCH = (4, 2)  # groups, and samples of each


def write_checkpoint(path, **state):
    path.mkdir(parents=True)
    torch.save({"nodes": [{}], "batch": BATCH} | state, path / STATE_FILE)


def test_the_last_finished_checkpoint_is_resumed_from(tmp_path):
    for step in (2, 9, 10):
        write_checkpoint(tmp_path / f"checkpoint-{step}", version=step)
    write_checkpoint(tmp_path / ".checkpoint-11", version=11)  # stopped before it was renamed
    (tmp_path / "checkpoint-12").mkdir()
    state, path = load(str(tmp_path), 1, BATCH)
    assert state["version"] == 10 and path == str(tmp_path / "checkpoint-10")


def test_a_checkpoint_of_another_number_of_nodes_is_refused(tmp_path):
    write_checkpoint(tmp_path / "checkpoint-1", nodes=[{}, {}])
    with pytest.raises(ValueError, match="on 2 nodes, not on 1"):
        load(str(tmp_path), 1, BATCH)


@pytest.mark.parametrize("batch", [(8, 2), (4, 4)])
def test_a_checkpoint_of_other_batches_is_refused(tmp_path, batch):
    write_checkpoint(tmp_path / "checkpoint-1", batch=batch)
    with pytest.raises(ValueError, match=f"batches of {batch[0]} x {batch[1]}"):
        load(str(tmp_path), 1, BATCH)


def test_nothing_to_resume_is_no_error():
    assert load("", 1, BATCH) == ({}, "")
