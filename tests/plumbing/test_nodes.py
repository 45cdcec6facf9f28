"""By which address nodes reach each other, and what ends the others when one is lost."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from plumbing.nodes import choose_interface, own_address

ROOT = Path(__file__).resolve().parent.parent.parent
Address = namedtuple("Address", "family address")
Stats = namedtuple("Stats", "isup")


@pytest.fixture
def interfaces(monkeypatch):
    """Give this machine these interfaces, and a way to the master from one of their addresses."""

    def give(route: str, **addresses: str) -> None:
        found = {name: [Address(socket.AF_INET, a)] for name, a in addresses.items()}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(found, Stats(True)))

        class Probe(socket.socket):
            def connect(self, where):
                pass

            def getsockname(self):
                return route, 1

        monkeypatch.setattr(socket, "socket", Probe)

    monkeypatch.setenv("MASTER_ADDR", "node0")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return give


def test_the_interface_that_reaches_the_master_is_used(interfaces):
    interfaces("10.0.0.2", lo="127.0.0.1", eth0="192.168.1.2", ib0="10.0.0.2")
    assert choose_interface() == "10.0.0.2"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ib0"


def test_an_interface_that_is_named_is_used(interfaces, monkeypatch):
    interfaces("10.0.0.2", lo="127.0.0.1", eth0="192.168.1.2", ib0="10.0.0.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert choose_interface() == "192.168.1.2"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_a_master_whose_own_name_is_a_loopback_address_uses_its_only_other_one(interfaces):
    interfaces("127.0.1.1", lo="127.0.0.1", eth0="192.168.1.2")
    assert choose_interface() == "192.168.1.2"


def test_which_interface_is_meant_is_asked_where_it_is_not_known(interfaces, monkeypatch):
    interfaces("127.0.1.1", lo="127.0.0.1", eth0="192.168.1.2", ib0="10.0.0.2")
    with pytest.raises(ValueError, match="MASTER_ADDR node0 is 127.0.1.1.*GLOO_SOCKET_IFNAME=eth0"):
        own_address()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=eth7: no interface.*lo, eth0, ib0"):
        own_address()


def test_a_loopback_interface_is_refused_where_the_master_is_elsewhere(interfaces, monkeypatch):
    interfaces("10.0.0.2", lo="127.0.0.1", ib0="10.0.0.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.1")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=lo is 127.0.0.1: nodes other"):
        own_address()
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert own_address() == "127.0.0.1"  # all of them are here


RANK = """
import sys, time
from plumbing import nodes
nodes.SILENCE, nodes.BEAT = 3.0, 0.2
rank, port = map(int, sys.argv[1:3])
watch = nodes.Watch(rank, [f"trainer rank {i} (node {i}, here)" for i in range(3)])
if rank == 0:
    port = watch.listen("127.0.0.1")
    print(port, flush=True)
watch.start("127.0.0.1", port)
print("watching", flush=True)
how = sys.stdin.readline().strip()
if how != "wait":
    watch.leave(how)
    if not how:
        time.sleep(1)
else:
    time.sleep(3600)
"""


class Trio:
    """Three processes that watch each other."""

    def __init__(self):
        self.ranks, port = [], 0
        for rank in range(3):
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), str(port)],
                    cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )  # fmt: skip
            )
            port = port or int(self.ranks[0].stdout.readline())
        for rank in self.ranks:
            assert rank.stdout.readline() == "watching\n"

    def tell(self, *how: str) -> None:
        for rank, word in zip(self.ranks, how, strict=True):
            rank.stdin.write(f"{word}\n")
            rank.stdin.flush()

    def end(self, rank: int) -> tuple[int, str]:
        _, said = self.ranks[rank].communicate(timeout=60)
        return self.ranks[rank].returncode, said.strip()


@pytest.fixture
def trio():
    three = Trio()
    yield three
    for rank in three.ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_is_killed_ends_the_others(trio, lost):
    trio.tell("wait", "wait", "wait")
    trio.ranks[lost].kill()
    said = f"train.py: trainer rank {lost} (node {lost}, here) is lost: its connection closed"
    for other in {0, 1, 2} - {lost}:
        assert trio.end(other) == (1, said)


def test_a_rank_that_is_silent_ends_the_others(trio):
    trio.tell("wait", "wait", "wait")
    trio.ranks[1].send_signal(signal.SIGSTOP)
    for other in (0, 2):
        code, said = trio.end(other)
        assert code == 1
        assert said.startswith("train.py: trainer rank 1 (node 1, here) is lost: not a word for 3")


def test_the_cause_of_a_fault_is_said_everywhere(trio):
    trio.tell("wait", "rollout process 0 died", "wait")
    said = "train.py: trainer rank 1 (node 1, here): rollout process 0 died"
    assert trio.end(0) == trio.end(2) == (1, said)


def test_ranks_that_end_in_order_one_after_the_other_end_nobody(trio):
    for rank in (0, 1, 2):
        trio.ranks[rank].stdin.write("\n")
        trio.ranks[rank].stdin.flush()
        time.sleep(0.3)
    assert [trio.end(rank) for rank in range(3)] == [(0, "")] * 3
