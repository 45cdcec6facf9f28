"""Stand-ins that several tests share."""

import threading

import torch.multiprocessing as mp

from plumbing.processes import Processes


class Pipes(Processes):
    """Workers that are only pipes: the test speaks for them, and takes the turns of the thread."""

    def __init__(self, count: int):
        super().__init__()
        pairs = [mp.Pipe() for _ in range(count)]
        self.pipes = [mine for mine, _ in pairs]
        self.ends = [theirs for _, theirs in pairs]
        self._thread = threading.current_thread()  # it is alive, so `listen` starts no other one

    def say(self, worker: int, *message) -> None:
        """What this worker says, and what comes of it."""
        self.ends[worker].send(message)
        self.receive(worker)

    def told(self, worker: int) -> list[tuple]:
        """What this worker has been sent since the last look."""
        messages = []
        while self.ends[worker].poll():
            messages.append(self.ends[worker].recv())
        return messages
