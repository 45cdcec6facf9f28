"""Checkpoints: what is written, which one a run resumes from, and which are refused."""

import os
import pickle
import resource

import pytest
import torch
from safetensors.torch import save_file

from plumbing.checkpoint import STATE_FILE, gather, interval, load, sweep, write
from plumbing.files import WriteError
from plumbing.ranks import Ranks
from plumbing.settings import Settings
from plumbing.tiny import byte_tokenizer
from train import Trainer

BATCH = (4, 2)  # groups, and samples of each


def write_checkpoint(path, **state):
    path.mkdir(parents=True)
    torch.save({"nodes": [{}], "batch": BATCH} | state, path / STATE_FILE)
    save_file({"w": torch.zeros(100)}, path / "model.safetensors")
    return path


def test_the_last_finished_checkpoint_is_resumed_from(tmp_path):
    for step in (2, 9, 10):
        write_checkpoint(tmp_path / f"checkpoint-{step}", version=step)
    write_checkpoint(tmp_path / ".checkpoint-11", version=11)  # stopped before it was renamed
    (tmp_path / "checkpoint-12").mkdir()
    write_checkpoint(tmp_path / "checkpoint-best", version=13)  # a name that its user gave
    state, path, damaged = load(str(tmp_path), 1, BATCH)
    assert state["version"] == 10 and path == str(tmp_path / "checkpoint-10")
    assert len(damaged) == 1 and "checkpoint-12 cannot be read and is passed over" in damaged[0]


def cut(file):
    file.write_bytes(file.read_bytes()[:-50])


class Code:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


DAMAGE = {
    "state cut": lambda path: cut(path / STATE_FILE),
    "state empty": lambda path: (path / STATE_FILE).write_bytes(b""),
    "state lost": lambda path: (path / STATE_FILE).unlink(),
    "state with code": lambda path: torch.save({"nodes": Code()}, path / STATE_FILE),
    "a pickle": lambda path: (path / STATE_FILE).write_bytes(pickle.dumps(Code())),
    "weights cut": lambda path: cut(path / "model.safetensors"),
    "weights empty": lambda path: (path / "model.safetensors").write_bytes(b""),
    "weights lost": lambda path: (path / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "checkpoint-1", version=1)
    DAMAGE[damage](write_checkpoint(tmp_path / "checkpoint-2", version=2))
    state, path, (line,) = load(str(tmp_path), 1, BATCH)
    assert state["version"] == 1 and path.endswith("checkpoint-1")
    assert "checkpoint-2 cannot be read and is passed over: " in line and "\n" not in line
    assert not (tmp_path / "ran").exists()


def test_without_one_that_can_be_read_each_is_named(tmp_path):
    for step in (1, 2):
        cut(write_checkpoint(tmp_path / f"checkpoint-{step}") / STATE_FILE)
    with pytest.raises(ValueError, match="--resume .*point-2 cannot .*point-1 cannot"):
        load(str(tmp_path), 1, BATCH)


def test_a_run_that_has_none_yet_begins_at_0(tmp_path):
    (tmp_path / ".checkpoint-2").mkdir()  # it was not finished
    state, path, (line,) = load(str(tmp_path), 1, BATCH)
    assert (state, path) == ({}, "") and "begins at step 0" in line


@pytest.fixture
def trainer(tiny):
    return Trainer(Ranks(), Settings(learning_rate=1e-3, group_size=2), tiny, tiny, "float32")


PROGRESS = {
    "version": 3,
    "wall": 1.5,
    "nodes": [{"first_index": 4, "dropped": {2: "stale"}, "trained": {7, 9}}],
    "batch": BATCH,
}


def save(path, trainer, progress, keep=0):
    write(path, trainer, byte_tokenizer(), *gather(trainer, progress), keep)


def test_what_is_saved_is_read_as_plain_values(trainer, tmp_path):
    save(tmp_path / "checkpoint-3", trainer, PROGRESS)
    state, _, damaged = load(str(tmp_path), 1, BATCH)
    assert {key: state[key] for key in PROGRESS} == PROGRESS and not damaged


def test_what_an_earlier_run_left_is_removed_and_what_cannot_be_read_is_replaced(trainer, tmp_path):
    (tmp_path / ".checkpoint-2").mkdir()  # it ended while it wrote
    (tmp_path / ".checkpoint-3").mkdir()
    path = write_checkpoint(tmp_path / "checkpoint-3")
    (path / STATE_FILE).unlink()
    save(path, trainer, PROGRESS)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]
    assert load(str(tmp_path), 1, BATCH)[0]["version"] == 3


@pytest.mark.parametrize("megabytes", [1, 3], ids=["in the weights", "in the state"])
def test_where_there_is_no_room_nothing_half_written_is_left(trainer, tmp_path, megabytes):
    for p in trainer.policy.parameters():
        p.grad = torch.zeros_like(p)
    trainer.optimizer.step()  # the moments take twice what the weights do
    save(tmp_path / "checkpoint-2", trainer, PROGRESS | {"version": 2})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes * 2**20, before[1]))
    try:
        with pytest.raises(WriteError, match="checkpoint-3 cannot be written: "):
            save(tmp_path / "checkpoint-3", trainer, PROGRESS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]
    assert load(str(tmp_path), 1, BATCH)[0]["version"] == 2


def test_the_last_ones_stay(trainer, tmp_path):
    write_checkpoint(tmp_path / "checkpoint-9", version=9)  # of a run that went on before this step
    write_checkpoint(tmp_path / "checkpoint-best", version=1)
    for step in range(1, 6):
        save(tmp_path / f"checkpoint-{step}", trainer, PROGRESS | {"version": step}, keep=2)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"checkpoint-4", "checkpoint-5", "checkpoint-9", "checkpoint-best"}, left


def test_what_was_left_half_written_is_swept_away(tmp_path):
    (tmp_path / ".checkpoint-2").mkdir()
    write_checkpoint(tmp_path / "checkpoint-1", version=1)
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("cost", [0.0, 0.1, 3.0, 60.0, 1000.0])
def test_checkpoints_by_time_cost_a_fiftieth_and_are_a_minute_apart(cost):
    assert cost <= interval(cost) / 50 and interval(cost) >= 60
    assert interval(cost) == 60 or cost == pytest.approx(interval(cost) / 50)  # and not rarer


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
    assert load("", 1, BATCH) == ({}, "", [])
