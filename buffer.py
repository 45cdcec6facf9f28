"""The sample buffer: which groups may be generated, and which batch is trained on next.

Pure bookkeeping, so that it can be read in one sitting and tested by the thousand: no torch, no
processes, no I/O and no clock. `rollout.py` calls it from one thread under one lock, the tests call
it directly.

Words (all counts are of *groups*, the n samples of one prompt):

    version v    batches trained on and published so far
    admission    the moment a group may start; its place in that order is its admission index
    staleness    the version the trainer holds minus the lowest version of a sample's tokens

Admission bounds staleness ahead of time, so that nothing finished is thrown away later: at version
v at most (v + 1) * B + ceil(alpha * B) groups have been admitted and not dropped.  A batch is the B
oldest groups that were not dropped, so a group admitted at version v is trained on at version
v + ceil(alpha) at the latest.  At alpha = 0 this is synchronous training.

    >>> buffer = SampleBuffer(BufferConfig(batch_size=2, group_size=1, alpha=0.5), steps=9)
    >>> [group.index for group in buffer.admit()]           # (0 + 1) * 2 + ceil(0.5 * 2) = 3
    [0, 1, 2]
    >>> buffer.commit(1); [group.index for group in buffer.admit()]
    [3, 4]

Paper: ROLL Flash (arXiv 2510.11345), asynchronous ratio and SampleBuffer.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass
class BufferConfig:
    batch_size: int = field(
        default=0, metadata={"help": "groups (prompts) a training batch; 0: the model's preset"}
    )
    group_size: int = field(default=8, metadata={"help": "samples a group, all of one prompt"})
    alpha: float = field(
        default=1.0,
        metadata={"help": "asynchronous ratio: batches that generation may be ahead; 0 is sync"},
    )

    def __post_init__(self):
        if self.batch_size < 0:
            raise ValueError(f"--batch_size must be 0 (preset) or more (got {self.batch_size})")
        if self.group_size < 1:
            raise ValueError(f"--group_size must be at least 1 (got {self.group_size})")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"--alpha must be 0 or more (got {self.alpha}); 0 is synchronous")


class RolloutTask(NamedTuple):
    """The unit of scheduling: one sample of one group. `group` is -1 for evaluation."""

    group: int
    sample: int
    prompt: int  # which row of the task's data (`envs.prompt_order` of the admission index)
    seed: int  # of this sample; turn t samples with a seed derived from (seed, t)
    eval: bool = False


@dataclass(slots=True, eq=False)
class Sample:
    """One finished episode, as the engine saw it: nothing in it was ever re-tokenised.

    ids, mask, logprobs and versions have one entry a token, [T]: prompt and environment tokens
    have mask 0, logprob 0 and version -1; sampled tokens have mask 1, the behaviour policy's
    log-probability (natural log, at the sampling temperature) and the weight version that made
    them.
    """

    task: RolloutTask
    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]
    reward: float
    truncated: bool = False  # ended by a limit on tokens or turns, not by itself

    def staleness(self, version: int) -> int:
        """`version` less the lowest version of any sampled token; 0 if there is none."""
        return version - int(self.versions[self.mask].min(initial=version))


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt, and how often each of them failed."""

    index: int
    samples: dict[int, Sample] = field(default_factory=dict)
    failures: Counter = field(default_factory=Counter)


class SampleBuffer:
    """Admits groups, collects their samples, and hands them out as batches of exactly B groups.

    `steps` bounds the run: never more than steps * B groups are admitted and kept. A resumed run
    starts at a version above 0, at the admission index `first_index` (the `cursor` of the run that
    it goes on with), and with what was dropped before that.
    """

    def __init__(
        self,
        config: BufferConfig,
        steps: int,
        version: int = 0,
        first_index: int = 0,
        dropped: dict[int, str] | None = None,
    ):
        self.config = config
        self.steps = steps
        self.version = version
        self.first_index = self.next_index = first_index
        self.kept = version * config.batch_size  # admitted and not dropped, over the whole run
        self.dropped = dict(dropped or {})  # reason, by admission index
        self._open: dict[int, Group] = {}  # admitted, not yet complete
        self._order: deque[Group] = deque()  # admitted, not yet handed out, in admission order
        self._complete: deque[Group] = deque()  # the finished head of that order

    # -- admission -------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Groups that may have been admitted and kept at this version."""
        size = self.config.batch_size
        ahead = (self.version + 1) * size + math.ceil(self.config.alpha * size)
        return min(ahead, self.steps * size)

    def admit(self) -> Iterator[Group]:
        """Open groups until the limit is reached."""
        while self.kept < self.limit:
            group = Group(self.next_index)
            self.next_index += 1
            self.kept += 1
            self._open[group.index] = group
            self._order.append(group)
            yield group

    # -- what happens to samples -----------------------------------------------------------------

    def wants(self, task: RolloutTask) -> bool:
        """Whether a result for this task is still of use (its group may have been dropped)."""
        group = self._open.get(task.group)
        return group is not None and task.sample not in group.samples

    def add(self, sample: Sample) -> bool:
        """Take a finished sample; returns whether it completed its group. Unwanted ones are
        ignored: their group was dropped while they were on the way."""
        if not self.wants(sample.task):
            return False
        group = self._open[sample.task.group]
        group.samples[sample.task.sample] = sample
        if len(group.samples) < self.config.group_size:
            return False
        del self._open[group.index]
        self._advance()
        return True

    def fail(self, task: RolloutTask) -> bool:
        """Count a failed sample; returns whether it is to be tried again (once, with its seed).
        The second failure drops the whole group, and the next prompt takes its place."""
        if not self.wants(task):
            return False
        group = self._open[task.group]
        group.failures[task.sample] += 1
        if group.failures[task.sample] < 2:
            return True
        self.drop(task.group, "failed")
        return False

    def drop(self, index: int, reason: str) -> None:
        """Give up an open group. Its place goes to the next prompt, so no credit is lost."""
        self._open.pop(index).samples.clear()
        self.kept -= 1
        self.dropped[index] = reason
        self._advance()

    def count_dropped(self, reason: str) -> int:
        return sum(why == reason for why in self.dropped.values())

    def too_many_failed(self) -> bool:
        """More than four groups failed, and more than half of all that ended: not bad luck."""
        failed = sum(why == "failed" for i, why in self.dropped.items() if i >= self.first_index)
        return failed > 4 and 2 * failed > self.next_index - self.first_index - len(self._open)

    def _advance(self) -> None:
        # Oldest first: a finished group waits for every older one, so a long answer is never
        # passed over in favour of short ones.  Each group moves once: O(1) a group over the run.
        while self._order and self._order[0].index not in self._open:
            group = self._order.popleft()
            if group.samples:  # empty: dropped
                self._complete.append(group)

    # -- batches ---------------------------------------------------------------------------------

    def batch_ready(self) -> bool:
        return len(self._complete) >= self.config.batch_size

    def pop_batch(self) -> list[Sample]:
        """The B oldest groups, as B * n samples sorted by (admission index, sample index)."""
        if not self.batch_ready():
            raise ValueError(f"no batch yet: waiting for {self.pending()}")
        groups = [self._complete.popleft() for _ in range(self.config.batch_size)]
        return [group.samples[i] for group in groups for i in sorted(group.samples)]

    def commit(self, version: int) -> None:
        """Every worker has loaded `version`: decoding may go on under it, and so may admission."""
        if version < self.version:
            raise ValueError(f"version {version} committed after {self.version}")
        self.version = version

    def cursor(self) -> int:
        """The oldest admission index that has not been handed out: where a resumed run begins.
        What was in progress is generated again; indices below are trained on or dropped."""
        waiting = itertools.chain(self._complete, (g for g in self._order if g.index in self._open))
        return next((group.index for group in waiting), self.next_index)

    def dropped_before(self, index: int) -> dict[int, str]:
        return {i: reason for i, reason in self.dropped.items() if i < index}

    def pending(self) -> str:
        """What a waiting trainer is waiting for, for error messages and stall reports."""
        missing = [
            f"{g.index}:{self.config.group_size - len(g.samples)}" for g in self._open.values()
        ]
        head = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        return (
            f"{len(self._complete)} of {self.config.batch_size} groups ready, {len(missing)} "
            f"in progress at version {self.version} (group:samples missing: {head or 'none'})"
        )
