"""The plan of devices, over a grid of machines that nobody has here."""

import itertools
import re
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plumbing import devices, ranks, start
from plumbing.devices import default_workers, plan


@pytest.fixture
def no_device_list(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


GRID = [
    (gpus, ranks, workers, parallel)
    for gpus, ranks, workers, parallel in itertools.product((1, 2, 4, 8), repeat=4)
    if ranks <= gpus and parallel <= gpus
]


@pytest.mark.parametrize(("gpus", "ranks", "workers", "parallel"), GRID)
def test_no_gpu_is_given_more_than_it_holds_and_none_is_shared_while_another_is_free(
    gpus, ranks, workers, parallel
):
    found = plan(gpus, ranks, workers, parallel)
    assert found.trainers == tuple(range(ranks))
    assert len(found.workers) == len(found.shares) == workers
    held, processes = Counter(), Counter(found.trainers)
    for mine, share in zip(found.workers, found.shares, strict=True):
        assert len(set(mine)) == len(mine) == parallel and share > 0
        for gpu in mine:
            held[gpu] += share
            processes[gpu] += 1
    for gpu in range(gpus):
        assert held[gpu] <= (0.45 if gpu < ranks else 0.9) + 1e-9
    if ranks + workers * parallel >= gpus:
        assert len(processes) == gpus  # all are used
    apart = ranks + workers * parallel <= gpus
    assert (max(processes.values()) == 1) == apart == (found.wire == "nccl")
    if apart:
        assert set(found.shares) == {0.9}


def test_without_gpus_workers_get_weights_over_gloo():
    found = plan(gpus=0, ranks=2, workers=3, tensor_parallel=1)
    assert found.visible() == [None] * 3 and found.wire == "gloo" and found.shares == (0.0,) * 3
    assert str(found) == "no GPU; weights over gloo" and found.notes() == []


@pytest.mark.parametrize(
    ("gpus", "ranks", "workers", "parallel", "places", "shares"),
    [
        (8, 2, 3, 2, ["2,3", "4,5", "6,7"], [0.9, 0.9, 0.9]),
        (1, 1, 1, 1, ["0"], [0.45]),
        (1, 1, 3, 1, ["0", "0", "0"], [0.15, 0.15, 0.15]),
        (2, 1, 2, 1, ["1", "0"], [0.9, 0.45]),
        (2, 2, 1, 2, ["0,1"], [0.45]),
        (4, 2, 3, 1, ["2", "3", "0"], [0.9, 0.9, 0.45]),
    ],
)
def test_where_workers_go(no_device_list, gpus, ranks, workers, parallel, places, shares):
    found = plan(gpus, ranks, workers, parallel)
    assert found.visible() == places and list(found.shares) == pytest.approx(shares)


def test_places_are_named_as_in_the_callers_device_list(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc,7")
    assert plan(3, 1, 2, 1).visible() == ["GPU-abc", "7"]


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match="--tensor_parallel 4, but this machine has 2 GPUs"):
        plan(gpus=2, ranks=1, workers=1, tensor_parallel=4)
    with pytest.raises(ValueError, match=r"2 trainer ranks \(NPROC\), but this machine has 1 GPUs"):
        plan(gpus=1, ranks=2, workers=1, tensor_parallel=1)


def test_gpus_that_nothing_uses_are_named():
    (note,) = plan(gpus=4, ranks=1, workers=1, tensor_parallel=1).notes()
    assert note.startswith("GPU 2, 3: not used; --rollout_workers 0")
    assert [default_workers(gpus, 1, 1) for gpus in (0, 1, 2, 4, 8)] == [1, 1, 1, 3, 7]
    assert default_workers(8, 2, 2) == 3 and default_workers(8, 8, 1) == 1


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs as far as `Ranks` can tell; what is done to them is recorded."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    begin = dist.init_process_group

    def init_process_group(backend, **rest):
        done.append("group")
        begin("gloo", **rest)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    yield done
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_rank_takes_its_gpu_before_any_group_is_made(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = ranks.Ranks()
    assert two_gpus == ["cuda:1", "group"] and str(found.device) == "cuda:1"


def test_a_second_run_in_one_process_has_the_group_of_the_first(two_gpus):
    ranks.Ranks()
    again = ranks.Ranks(rollout_workers=0)
    assert two_gpus.count("group") == 1 and again.plan.visible() == ["1"]
    again.end()
    assert not dist.is_initialized()


def test_a_gpu_that_the_runtime_cannot_use_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # what the driver says
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.usable_gpus() == 0 and ranks.Ranks().device.type == "cpu"


def test_ranks_wait_longer_for_a_batch_than_it_may_take(two_gpus, monkeypatch):
    waits = []
    begin = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda *a, **k: (waits.append(k["timeout"]), begin(*a, **k))
    )
    ranks.Ranks(batch_timeout=9000.0)
    assert waits == [timedelta(seconds=18000)]


def test_the_table_in_the_docs_is_that_of_the_plan():
    text = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    shown = {}
    for row in rows:
        if row[0].isdigit():
            ranks_of = re.search(r"NPROC=(\d)", row[1])
            shown[int(row[0]), int(ranks_of[1]) if ranks_of else 1] = row[2:]
    assert len(shown) == 5
    for (gpus, count), (trainers, workers, wire) in shown.items():
        found = plan(gpus, count, default_workers(gpus, count, 1), 1)
        assert trainers == ", ".join(map(str, found.trainers))
        places = ", ".join(str(gpu) for mine in found.workers for gpu in mine)
        assert workers.split(", with")[0] == places and wire.lower() == found.wire


def test_more_ranks_than_gpus_are_one_line_before_any_starts(two_gpus, monkeypatch, capsys):
    monkeypatch.setenv("NPROC", "3")
    monkeypatch.setattr("sys.argv", ["start", "--steps", "1"])
    assert start.main() == 2
    why = "train.py: 3 trainer ranks (NPROC), but this machine has 2 GPUs: each needs its own\n"
    assert capsys.readouterr().err == why
