"""Where everything runs: which devices workers get, and how many threads."""

import os

import pytest

from plumbing.ranks import cpu_threads, place_workers


@pytest.fixture
def no_device_list(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_gpus_workers_get_weights_over_gloo():
    assert place_workers(gpus=0, ranks=2, workers=3, tensor_parallel=1) == ([None] * 3, "gloo", 0.0)


def test_enough_gpus_keep_trainer_and_workers_apart(no_device_list):
    places, wire, share = place_workers(gpus=8, ranks=2, workers=3, tensor_parallel=2)
    assert places == ["2,3", "4,5", "6,7"] and wire == "nccl" and share == 0.9


@pytest.mark.parametrize(
    ("gpus", "ranks", "workers", "parallel", "places", "share"),
    [
        (1, 1, 1, 1, ["0"], 0.45),
        (1, 1, 3, 1, ["0", "0", "0"], 0.15),
        (2, 2, 1, 2, ["0,1"], 0.45),
        (4, 2, 3, 1, ["0", "1", "2"], 0.45),
        (4, 4, 3, 2, ["0,1", "2,3", "0,1"], 0.225),
    ],
)
def test_too_few_gpus_are_shared_without_nccl(
    no_device_list, gpus, ranks, workers, parallel, places, share
):
    found = place_workers(gpus, ranks, workers, parallel)
    assert found == (places, "gloo", pytest.approx(share))


def test_places_are_named_as_in_the_callers_device_list(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc,7")
    assert place_workers(3, 1, 2, 1)[0] == ["GPU-abc", "7"]


def test_more_tensor_parallel_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match="--tensor_parallel 4, but this machine has 2 GPUs"):
        place_workers(gpus=2, ranks=1, workers=1, tensor_parallel=4)


def test_whoever_has_the_machine_alone_uses_all_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpu_threads(alone=True, ranks=2, workers=3) == (4, 2)
    assert cpu_threads(alone=True, ranks=16, workers=16) == (1, 1)
    assert cpu_threads(alone=False, ranks=1, workers=1) == (1, 1)
