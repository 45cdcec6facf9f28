"""Stand-ins that several tests share."""

import threading

import torch.multiprocessing as mp

from plumbing.processes import Processes, RolloutError


class Pipes(Processes):
    """Workers that are only pipes: the test speaks for them, and takes the turns of the thread."""

    def __init__(self, count: int):
        super().__init__()
        self.processes, self.ends = [None] * count, [None] * count
        self.pipes = [self._spawn(worker)[1] for worker in range(count)]
        self._thread = threading.current_thread()  # it is alive, so `listen` starts no other one

    def _spawn(self, worker: int) -> tuple:
        mine, self.ends[worker] = mp.Pipe()
        return None, mine

    def _kill(self, process: None) -> None:
        pass

    def lose(self, worker: int) -> None:
        """This worker has died; another, which has not said a word yet, takes its place."""
        self.replace(worker, RolloutError(f"rollout process {worker} died"))

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
