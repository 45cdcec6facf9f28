"""Several nodes: by which interface they reach each other, and the end of all when one is lost.

A collective across nodes cannot be interrupted, and one whose peer has gone may wait for the
process group's timeout, an hour. So every rank keeps a connection of its own to rank 0, on which
both say every few seconds that they are there. Whoever hears that another ended with a fault, or
hears nothing, says so in one line and ends its process: torchrun ends the rest.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time

import psutil

from plumbing.processes import kill_children_and_exit

BEAT = 2.0  # seconds between two words
SILENCE = 30.0  # after so many seconds without one a rank is lost
BYE = "bye"  # the last word of a rank that ends in order; any other is why it ended


def own_address() -> str:
    """The address by which other nodes reach this one: that of the interface which reaches
    torchrun's MASTER_ADDR, or which GLOO_SOCKET_IFNAME names. The host's own name is not asked: on
    Debian it resolves to 127.0.1.1. Raises ValueError where several interfaces could be meant."""
    addresses = {  # of interfaces that are up
        name: [a.address for a in of if a.family == socket.AF_INET]
        for name, of in psutil.net_if_addrs().items()
        if psutil.net_if_stats()[name].isup
    }
    chosen, master = os.environ.get("GLOO_SOCKET_IFNAME", ""), os.environ["MASTER_ADDR"]
    if chosen:
        if not addresses.get(chosen.split(",")[0]):
            there = ", ".join(name for name, of in addresses.items() if of)
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={chosen}: no interface of that name is up and has an IPv4 "
                f"address here (there are: {there})"
            )
        address = addresses[chosen.split(",")[0]][0]
        if address.startswith("127.") and not socket.gethostbyname(master).startswith("127."):
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={chosen} is {address}: nodes other than this one cannot "
                "reach it"
            )
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing: only the way is looked up
        except OSError as error:
            raise ValueError(f"MASTER_ADDR {master} cannot be reached: {error}") from error
        address = probe.getsockname()[0]
    if not address.startswith("127."):
        return address
    outward = [a for of in addresses.values() for a in of if not a.startswith("127.")]
    if len(outward) != 1:
        raise ValueError(
            f"MASTER_ADDR {master} is {address} on this node, and {len(outward)} other addresses "
            "are here: give its address, or name the interface: GLOO_SOCKET_IFNAME=eth0"
        )
    return outward[0]


def choose_interface() -> str:
    """Have gloo, and NCCL where nothing else is said, use the interface of `own_address`, which is
    returned."""
    own = own_address()
    for name, of in psutil.net_if_addrs().items():
        if own in [address.address for address in of]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": that name, no prefix
    return own


class Watch:
    """A thread on every trainer rank that ends the process when a rank of another node, or of this
    one, is lost. `names`: of all ranks, for messages."""

    def __init__(self, rank: int, names: list[str]):
        self.rank, self.names = rank, names
        self.peers: dict[socket.socket, int] = {}  # rank 0: all others; the others: rank 0
        self.heard: dict[socket.socket, float] = {}
        self._ending = False

    def listen(self, address: str) -> int:
        """On rank 0: the port that the others are to connect to."""
        self._server = socket.create_server((address, 0), backlog=len(self.names))
        return self._server.getsockname()[1]

    def start(self, host: str, port: int, timeout: float = 60.0) -> None:
        """Connect every rank with rank 0, and watch from now on."""
        if self.rank == 0:
            self._server.settimeout(timeout)
            for _ in self.names[1:]:
                peer, _ = self._server.accept()
                self.peers[peer] = int.from_bytes(peer.recv(4, socket.MSG_WAITALL))
            self._server.close()
        else:
            peer = socket.create_connection((host, port), timeout)
            peer.sendall(self.rank.to_bytes(4))
            self.peers[peer] = 0
        self.heard = dict.fromkeys(self.peers, time.monotonic())
        threading.Thread(target=self._serve, name="watch of nodes", daemon=True).start()

    def leave(self, why: str) -> None:
        """This rank ends, for a cause ("": in order); the others are told, and end with it."""
        if why:  # a collective that lost its peer raises; that it is lost is heard a moment later
            time.sleep(BEAT)
        self._ending = True
        self._say(f"{self.names[self.rank]}: {why}" if why else BYE)

    def _say(self, word: str) -> None:
        for peer in list(self.peers):
            with contextlib.suppress(OSError):  # that it is gone is noticed where it is listened to
                peer.sendall(f"{word}\n".encode())

    def _serve(self) -> None:
        texts, spoke = dict.fromkeys(self.peers, b""), 0.0
        with selectors.DefaultSelector() as selector:
            for peer in self.peers:
                peer.settimeout(BEAT)
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map() and not self._ending:
                for key, _ in selector.select(BEAT / 2):
                    peer = key.fileobj
                    data = self._read(peer)
                    self.heard[peer] = time.monotonic()
                    *words, texts[peer] = (texts[peer] + data).split(b"\n")
                    said = [word.decode() for word in words if word]
                    if BYE in said:
                        selector.unregister(peer)
                        del self.heard[peer]
                    elif said:
                        self._end(said[0])
                    elif not data:
                        self._end(f"{self.names[self.peers[peer]]} is lost: its connection closed")
                now = time.monotonic()
                if now - spoke > BEAT:
                    self._say("")
                    spoke = now
                for peer, heard in self.heard.items():
                    if now - heard > SILENCE:
                        who = self.names[self.peers[peer]]
                        self._end(f"{who} is lost: not a word for {now - heard:.0f} s")

    def _read(self, peer: socket.socket) -> bytes:
        try:
            return peer.recv(4096)
        except OSError:
            return b""

    def _end(self, why: str) -> None:
        """Pass it on, say it once a node, and end: the main thread may be in a collective."""
        if self._ending:
            return
        self._say(why)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print(f"train.py: {why}", file=sys.stderr, flush=True)
        # Words of theirs that nobody has read reset the connection when this process ends, and
        # with it what was just said to them.
        time.sleep(BEAT / 4)
        kill_children_and_exit(1)
