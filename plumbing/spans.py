"""Spans of time: what this process did when. `report/timeline.py` makes a file of them.

    with spans("forward"):          in any process: one recorder each, like a logger
        ...

Who records: trainer rank 0, and the rollout processes of its node (those of other nodes do the same
at the same time). On a GPU a span is what the host does: kernels are only launched in it.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterator

# name, lane, start and end (seconds), what is to be known besides
Span = tuple[str, int, float, float, dict]

MAIN = 0  # the lane of a process's own loop; in a worker, episodes have the lanes from 1 on
STEP_LIMIT = 20_000  # spans of a process between two writes: the newest are kept


class Spans:
    """Records spans of time. `seconds` has the sums, by name, of those outside of episodes."""

    def __init__(self):
        self.clock = time.perf_counter  # on Linux one clock for all processes of a machine
        self.seconds: Counter[str] = Counter()
        self._spans: deque[Span] = deque(maxlen=STEP_LIMIT)

    @contextlib.contextmanager
    def __call__(self, name: str, lane: int = MAIN, **args) -> Iterator[dict]:
        """Record the time that the block takes, however it ends. Yields the args, to add to."""
        start = self.clock()
        try:
            yield args
        finally:
            self.add(name, start, self.clock(), lane, args)

    async def around(self, work: Awaitable, name: str, lane: int):
        """The value of a coroutine; records the time that it takes."""
        with self(name, lane):
            return await work

    def add(self, name: str, start: float, end: float, lane: int = MAIN, args=None) -> None:
        if lane == MAIN:  # of one thread; environments record in others
            self.seconds[name] += end - start
        self._spans.append((name, lane, start, end, args or {}))

    def take(self) -> list[Span]:
        """What was recorded since the last call."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def clear(self) -> None:
        self.take()
        self.seconds.clear()


spans = Spans()  # of this process
