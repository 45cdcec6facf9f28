"""The naive forms that this project replaces, for experiments to compare with.

What is handed to which worker, each instead of `rollout.Dispatcher`:

    StaticSplit     a batch is cut into one piece a worker, each piece runs in lockstep
    InRounds        what was dropped is replaced after the round
    Unreplicated    the n samples of a prompt are one request

How a piece of a batch is played, instead of `envs.run_episode`: `run_lockstep`.

A run that uses them has `worker_main` of this file: its rollout processes know both forms.
"""

import asyncio
from collections import deque
from multiprocessing.connection import Connection

import numpy as np

import rollout
from buffer import Sample, Ticket
from envs import Episode
from plumbing.calls import history
from plumbing.settings import WorkerSpec
from rollout import Dispatcher, Worker

# -- in the trainer: which ticket goes to which worker -------------------------------------------


class StaticSplit(Dispatcher):
    """Batch scheduling: all that is queued is cut into one piece a worker, each piece runs in
    lockstep, and nothing more is handed out before the last sample is in.

    Replaced by `rollout.Dispatcher`: the emptiest worker takes the next ticket."""

    message = "lockstep"

    def assign(self) -> dict[int, list[Ticket]]:
        if any(self.held):
            return {}
        tickets, self.queue = list(self.queue), deque()
        pieces = np.array_split(np.arange(len(tickets)), len(self.held))
        given = {w: [tickets[i] for i in piece] for w, piece in enumerate(pieces) if len(piece)}
        for worker, piece in given.items():
            self.held[worker].update(piece)
        return given

    def cancel(self, group: int) -> dict[int, list[Ticket]]:
        self.queue = deque(ticket for ticket in self.queue if ticket.group != group)
        return super().cancel(group)


class InRounds(Dispatcher):
    """Queue scheduling within a round; what was dropped is replaced after the round only.

    Replaced by `buffer.SampleBuffer.drop` and `rollout.Scheduler.feed`: a drop admits the next
    prompt at once."""

    def assign(self) -> dict[int, list[Ticket]]:
        if not any(self.held):
            self.round = len(self.queue)
        later = deque()
        while len(self.queue) > self.round:
            later.appendleft(self.queue.pop())
        before = len(self.queue)
        given = super().assign()
        self.round -= before - len(self.queue)
        self.queue.extend(later)
        return given


class Unreplicated(Dispatcher):
    """The n samples of a prompt as one request: one worker has them all, and gives their places
    free when the last has ended.

    Replaced by `rollout.Scheduler.feed`: every sample has a ticket of its own."""

    def assign(self) -> dict[int, list[Ticket]]:
        given: dict[int, list[Ticket]] = {}
        while self.queue:
            group = [ticket for ticket in self.queue if ticket.group == self.queue[0].group]
            taken = [len({ticket.group for ticket in held}) * len(group) for held in self.held]
            worker = int(np.argmin(taken))
            if taken[worker] + len(group) > self.in_hand:
                break
            self.queue = deque(t for t in self.queue if t.group != group[0].group)
            self.held[worker].update(group)
            given.setdefault(worker, []).extend(group)
        return given


# -- in a rollout process: all episodes in step --------------------------------------------------


async def run_lockstep(episodes: list[Episode]) -> list[Sample]:
    """In every turn all wait for the slowest to generate, then all for the slowest environment. On
    single-turn tasks this is reward after everything.

    Replaced by `envs.run_episode`: each waits for its own turns and steps alone."""
    await asyncio.gather(*(episode.reset() for episode in episodes))
    while live := [episode for episode in episodes if not episode.over]:
        await asyncio.gather(*(episode.generate() for episode in live))
        await asyncio.gather(*(episode.step() for episode in live))
    return [episode.sample() for episode in episodes]


class LockstepWorker(Worker):
    """A worker that also takes what `StaticSplit` hands out."""

    def on_lockstep(self, tickets: list[Ticket]) -> None:
        episodes = [self.open(ticket) for ticket in tickets]
        self.start(self.run_in_step(episodes), episodes)

    async def run_in_step(self, episodes: list[Episode]) -> None:
        """Replaced by `rollout.Worker.run`: what fails is one episode, not the piece."""
        try:
            samples = await run_lockstep(episodes)
            self.finished.extend(samples)
        except BaseException as error:  # of whatever kind: the scheduler counts it and decides
            if asyncio.current_task().cancelling():
                raise  # we did it
            details = history(error)
            self.failed.extend((episode.ticket, details) for episode in episodes)


def worker_main(conn: Connection, spec: WorkerSpec) -> None:
    """Entry point of a rollout process that knows both forms."""
    rollout.worker_main(conn, spec, LockstepWorker)
