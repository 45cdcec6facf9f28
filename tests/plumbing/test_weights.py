"""How weights travel: how they are cut into buckets, how the two ends find each other, what comes
out at the other end."""

import doctest
import math
import os
import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plumbing import weights as module
from plumbing.processes import RolloutError
from plumbing.weights import (
    Manifest,
    Proof,
    Sender,
    Wire,
    checksum,
    cut_buckets,
    join_watched,
    open_store,
    receive,
)  # fmt: skip

SHAPES, BUCKET_BYTES = [(300, 7), (5,), (1000,), ()], 6000
CPU = torch.device("cpu")
UNDER_TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # every tcp:// rendezvous becomes a client of this:
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
}


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=20),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 200),
)
def test_buckets_hold_every_parameter_in_order_and_are_as_full_as_they_may_be(
    shapes, itemsize, limit
):
    buckets = list(cut_buckets(shapes, itemsize, limit))
    assert [i for bucket in buckets for i in bucket] == list(range(len(shapes)))
    sizes = [math.prod(shape) * itemsize for shape in shapes]
    for number, bucket in enumerate(buckets):
        used = sum(sizes[i] for i in bucket)
        assert used <= limit or len(bucket) == 1
        if number + 1 < len(buckets):
            assert used + sizes[buckets[number + 1][0]] > limit


def new_sender() -> Sender:
    """The trainer's end, for a model of parameters of these shapes."""
    model = nn.ParameterList(torch.rand(shape) for shape in SHAPES)
    ranks = SimpleNamespace(rank=0, wire="gloo", device=CPU)
    sender = Sender(ranks, model, torch.float32, bucket_mb=1)
    sender.manifest.bucket_bytes = BUCKET_BYTES
    return sender


def wire_to(store, timeout=60.0) -> Wire:
    return Wire("127.0.0.1", store.port, 1, 2, "gloo", timeout)


def receive_weights(conn):
    """The other end, in a process of its own: reports what was broadcast."""
    for environment in ({}, UNDER_TORCHRUN):
        wire, manifest = conn.recv()
        os.environ.update(environment)
        group = Wire(**wire).join(1)
        for bucket in receive(group, Manifest(**manifest), CPU, CPU):
            conn.send([(name, tensor.numpy()) for name, tensor in bucket])


def test_weights_reach_a_receiver_over_gloo_also_under_torchrun(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mine, theirs = mp.Pipe()
    receiver = mp.get_context("spawn").Process(target=receive_weights, args=(theirs,))
    receiver.start()
    theirs.close()
    for environment in ({}, UNDER_TORCHRUN):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        sender, store = new_sender(), open_store(2, 60, "127.0.0.1")
        assert [len(bucket) for bucket in sender.manifest.buckets()] == [1, 3]
        mine.send((asdict(wire_to(store)), asdict(sender.manifest)))
        sender.group = wire_to(store).join(0, store)
        assert sender.broadcast(alive=lambda **_: None)
        for bucket in sender.manifest.buckets():
            assert mine.poll(60)
            for i, (name, received) in zip(bucket, mine.recv(), strict=True):
                assert name == sender.manifest.names[i] and received.shape == SHAPES[i]
                np.testing.assert_array_equal(received, sender.parameters[i].detach().numpy())
        assert sender.checksum == sum(bits(p.detach().numpy()) for p in sender.parameters)
    receiver.join(60)
    assert receiver.exitcode == 0


def bits(weights) -> int:
    """The plain form of `checksum`, for float32."""
    return sum(int.from_bytes(w.tobytes(), sys.byteorder, signed=True) for w in weights.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_checksum_sees_one_bit_and_neither_order_nor_padding(dtype):
    weights = torch.randn(7, 5).to(dtype)
    plain = checksum(weights)
    assert plain == sum(checksum(row) for row in reversed(weights)) == checksum(weights.T)
    assert checksum(torch.cat([weights, torch.zeros(2, 5, dtype=dtype)])) == plain
    for value in (torch.nextafter(weights[3, 2].float(), torch.tensor(9.0)), torch.nan, -torch.inf):
        other = weights.clone()
        other[3, 2] = value
        assert (checksum(other) == plain) == torch.equal(other, weights)  # bf16 may round it away
    big = torch.full((1 << 20,), torch.nan)
    assert checksum(big) == (1 << 20) * checksum(big[:1])  # no overflow, and nan has bits too


SUMS = {0: [(5, 5)], 1: [(5, 5), (5, 5)]}  # worker 1 has two tensor-parallel ranks


def test_what_arrived_is_what_was_sent():
    arrivals = Proof("float32")
    arrivals.check_sums(0, 5, SUMS)
    arrivals.check_sums(1, 5, SUMS)


@pytest.mark.parametrize("version", [0, 1])
def test_weights_that_did_not_arrive_end_the_run_at_that_publish(version):
    arrivals = Proof("float32")
    for earlier in range(version):
        arrivals.check_sums(earlier, 5, SUMS)
    for lost in ([(4, 5), (5, 5)], [(5, 5), (4, 5)], [(4, None), (5, None)]):
        what = f"not all weights of version {version} arrived at rollout process 1"
        with pytest.raises(RolloutError, match=what):
            arrivals.check_sums(version, 5, SUMS | {1: lost})


def test_weights_that_arrived_and_were_not_loaded_end_the_run():
    arrivals = Proof("float32")
    arrivals.check_sums(0, 5, SUMS)
    with pytest.raises(RolloutError, match="version 1 were loaded at rollout process 0"):
        arrivals.check_sums(1, 5, SUMS | {0: [(5, 4)]})


@pytest.mark.parametrize("own", [None, 7])
def test_weights_of_the_engine_that_cannot_be_compared_are_not(own):
    arrivals = Proof("float32")
    for version, sent in enumerate([5, 6]):
        arrivals.check_sums(version, sent, {0: [(sent, own)]})


def test_each_store_has_a_port_of_its_own_that_is_open_at_once():
    stores = [open_store(2, 5, "127.0.0.1") for _ in range(3)]
    assert len({store.port for store in stores}) == 3
    for store in stores:
        client = torch.distributed.TCPStore("127.0.0.1", store.port, 2, False)
        client.set("key", str(store.port))
        assert store.get("key").decode() == str(store.port)


def test_a_receiver_that_never_comes_is_waited_for_no_longer_than_the_timeout(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = open_store(2, 60, "127.0.0.1")
    with pytest.raises(RuntimeError, match="timeout after 1000ms"):  # the limit of the wire
        wire_to(store, timeout=1.0).join(0, store)


def test_a_worker_that_dies_while_all_connect_ends_the_wait(monkeypatch):
    """NCCL makes its communicator within the first broadcast, which blocks."""
    never, asked = threading.Event(), []
    monkeypatch.setattr(Wire, "join", lambda *_: never.wait(60))

    def alive():
        asked.append(None)
        if len(asked) == 3:
            raise RolloutError("rollout process 1 died (killed by SIGKILL)")

    with pytest.raises(RolloutError, match="process 1 died"):
        join_watched(wire_to(SimpleNamespace(port=1)), None, alive)
    never.set()


def test_what_goes_wrong_while_all_connect_is_raised(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = open_store(2, 60, "127.0.0.1")
    with pytest.raises(RuntimeError, match="timeout after 1000ms"):
        join_watched(wire_to(store, timeout=1.0), store, lambda: None)


def test_a_receiver_that_is_lost_in_a_broadcast_is_asked_for_and_the_rest_is_gathered():
    asked = []

    class Work:
        def is_completed(self):
            return len(asked) == 3

        def wait(self):
            raise RuntimeError("connection closed by peer")

    def alive(within=0.0):
        asked.append(within)
        if within:
            raise RolloutError("rollout process 1 died (killed by SIGKILL)")

    sender = new_sender()
    sender.group = SimpleNamespace(broadcast=lambda flat, root: Work())
    assert not sender.broadcast(alive)
    assert asked[:3] == [0.0] * 3 and asked[3] > 0  # it was asked all along; the end is waited for


def test_examples_in_the_docstrings():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
