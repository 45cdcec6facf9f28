"""The sample buffer: which groups may be generated, and which batch is trained on next.

Pure bookkeeping, so that it can be read in one sitting and tested by the thousand: no torch, no
processes, no I/O and no clock. `rollout.py` calls it from one thread under one lock, the tests call
it directly.

Words (all counts are of *groups*, the n samples of one prompt, or of one seed of an environment):

    version v    batches trained on and published so far
    admission    the moment a group may start; its place in that order is its admission index
    staleness    the version the trainer holds minus the lowest version of a sample's tokens

Admission bounds staleness ahead of time, so that nothing finished is thrown away later: at version
v at most (v + 1) * B + ceil(alpha * B) groups have been admitted and not dropped.  In `fifo` a
batch is the B oldest groups that were not dropped, so a group admitted at version v is trained on
at version v + ceil(alpha) at the latest.  At alpha = 0 this is synchronous training.

    >>> buffer = SampleBuffer(BufferConfig(batch_size=2, group_size=1, alpha=0.5), steps=9)
    >>> [group.index for group in buffer.admit()]           # (0 + 1) * 2 + ceil(0.5 * 2) = 3
    [0, 1, 2]
    >>> buffer.commit(1); [group.index for group in buffer.admit()]
    [3, 4]

In `ready` a batch is the first B groups that have finished: nobody waits for a straggler, but one
that would be older than ceil(alpha) when it is trained on is dropped, so what is trained on leans
towards what is quick.  A group leaves in one of two ways, trained on or dropped for one reason
(filtered, failed, stale, redundant), and each drop makes room for the next prompt at once.

Paper: ROLL Flash (arXiv 2510.11345): asynchronous ratio, SampleBuffer, redundant rollouts, dynamic
filtering.  Departures from its code: staleness is measured on the tokens of a sample, not taken
from its start, and the losers of a race are cancelled instead of playing on unseen.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
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
    consume: str = field(
        default="fifo",
        metadata={
            "help": "fifo: batches in order of admission, nothing is too old or passed over; "
            "ready: whatever has finished, what gets too old is dropped",
            "choices": ["fifo", "ready"],
        },
    )
    redundant_samples: int = field(
        default=0, metadata={"help": "more samples a group than needed: the first to finish win"}
    )
    redundant_groups: int = field(
        default=0, metadata={"help": "more groups than needed (with --consume ready)"}
    )
    filter_groups: bool = field(
        default=False,
        metadata={"help": "drop groups whose rewards are all equal, and generate others at once"},
    )
    filter_limit: float = field(
        default=10.0,
        metadata={"help": "the run ends when so many batches' worth is filtered out for one batch"},
    )

    def __post_init__(self):
        if self.batch_size < 0:
            raise ValueError(f"--batch_size must be 0 (preset) or more (got {self.batch_size})")
        if self.group_size < 1:
            raise ValueError(f"--group_size must be at least 1 (got {self.group_size})")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"--alpha must be 0 or more (got {self.alpha}); 0 is synchronous")
        if self.consume not in ("fifo", "ready"):
            raise ValueError(f"--consume is fifo or ready (got {self.consume})")
        if self.redundant_samples < 0 or self.redundant_groups < 0:
            raise ValueError("--redundant_samples and --redundant_groups must be 0 or more")
        if self.redundant_groups and self.consume != "ready":
            raise ValueError("--redundant_groups is a race between groups: add --consume ready")
        if self.filter_groups and self.group_size == 1:
            raise ValueError("--filter_groups compares samples of a group: --group_size 2 or more")
        if not self.filter_limit > 0:
            raise ValueError(f"--filter_limit must be above 0 (got {self.filter_limit})")


def derive_seed(*parts: int) -> int:
    """A sampling seed that depends on all parts and on nothing else (31 bits)."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


class RolloutTask(NamedTuple):
    """The unit of scheduling: one sample of one group. `group` is -1 for evaluation."""

    group: int
    sample: int
    prompt: int  # which row of the task's data (`envs.prompt_order` of the admission index)
    seed: int  # of the first turn; turn t > 0 samples with derive_seed(seed, t)
    eval: bool = False


DTYPES = (np.int32, bool, np.float32, np.int32)  # of a sample's arrays, in their order


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
    turns: tuple[tuple[int, int], ...] = ()  # where each turn's sampled tokens begin and end in ids

    def __reduce__(self):
        """Pickled with its arrays as bytes: NumPy's own form of them takes eight times as long."""
        arrays = (self.ids, self.mask, self.logprobs, self.versions)
        rest = (self.reward, self.truncated, self.turns)
        bytes_of = (np.asarray(a, d).tobytes() for a, d in zip(arrays, DTYPES, strict=True))
        return unpickle, (tuple(self.task), *bytes_of, *rest)

    def staleness(self, version: int) -> int:
        """`version` less the lowest version of any sampled token; 0 if there is none."""
        return version - int(self.versions[self.mask].min(initial=version))


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt, and how often each of them failed."""

    index: int
    samples: dict[int, Sample] = field(default_factory=dict)
    failures: Counter = field(default_factory=Counter)

    def without_signal(self) -> bool:
        """Whether all rewards are equal, so that no sample is better than another."""
        rewards = [sample.reward for sample in self.samples.values()]
        return max(rewards) - min(rewards) <= 1e-8


def unpickle(task: tuple, ids: bytes, mask: bytes, logprobs: bytes, versions: bytes, *rest):
    """The sample that `Sample.__reduce__` took apart; its arrays are read-only."""
    arrays = map(np.frombuffer, (ids, mask, logprobs, versions), DTYPES)
    return Sample(RolloutTask(*task), *arrays, *rest)


class SampleBuffer:
    """Admits groups, collects their samples, and hands them out as batches of exactly B groups.

    `steps` bounds the run: never more than steps * B groups are admitted and kept. A resumed run
    starts at a version above 0 and with the `progress()` of the run that it goes on with.
    """

    def __init__(
        self,
        config: BufferConfig,
        steps: int,
        version: int = 0,
        first_index: int = 0,
        dropped: dict[int, str] | None = None,
        trained: set[int] | None = None,
    ):
        self.config = config
        self.steps = steps
        self.version = version  # committed on every worker
        self.trainer_version = version  # what the trainer holds: ahead while a publish is under way
        self.next_index = first_index
        self.kept = version * config.batch_size  # admitted and not dropped, over the whole run
        self.popped = version  # batches handed out
        self.dropped = dict(dropped or {})  # reason, by admission index
        self.dropped_for = Counter(self.dropped.values())  # how many, by reason
        self.trained = set(trained or ())  # handed out ahead of an older group that is still open
        self.newly_dropped: list[int] = []  # since whoever logs them has emptied it
        self.closed: list[int] = []  # groups that need no more samples but may have tasks running
        self.lost = Counter()  # of finished samples thrown away as stale or redundant: see `_lose`
        self._admitted = self._failed_since_start = 0  # by this run alone
        self._filtered_since_batch = 0
        self._open: dict[int, Group] = {}  # admitted, not yet complete; in order of admission
        self._order: deque[Group] = deque()  # fifo: admitted, not yet in `_complete`, in that order
        self._complete: list[tuple[int, Group]] = []  # heap of what the next batches are taken from

    # -- admission -------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Groups that may have been admitted and kept at this version."""
        size = self.config.batch_size
        ahead = (self.version + 1) * size + math.ceil(self.config.alpha * size)
        if self.config.alpha or self.popped == self.version:  # in sync the race ends with the batch
            ahead += self.config.redundant_groups
        return min(ahead, self.steps * size)

    def admit(self) -> Iterator[Group]:
        """Open groups until the limit is reached."""
        while self.kept < self.limit:
            group = Group(self.next_index)
            self.next_index += 1
            if group.index in self.dropped or group.index in self.trained:
                continue  # by the run that this one goes on with
            self.kept += 1
            self._admitted += 1
            self._open[group.index] = group
            if self.config.consume == "fifo":
                self._order.append(group)
            yield group

    # -- what happens to samples -----------------------------------------------------------------

    def wants(self, task: RolloutTask) -> bool:
        """Whether a result for this task is still of use (its group may have ended)."""
        group = self._open.get(task.group)
        return group is not None and task.sample not in group.samples

    def add(self, sample: Sample) -> bool:
        """Take a finished sample; returns whether it completed its group. Unwanted ones are
        ignored: their group ended while they were on the way."""
        if not self.wants(sample.task):
            return False
        group = self._open[sample.task.group]
        group.samples[sample.task.sample] = sample
        if self._is_stale([sample]):
            self.drop(group.index, "stale")
            return False
        if len(group.samples) < self.config.group_size:
            return False
        if self.config.filter_groups and group.without_signal():
            self._filtered_since_batch += 1
            self.drop(group.index, "filtered")
            return False
        del self._open[group.index]
        if self.config.redundant_samples:
            self.closed.append(group.index)  # the losers are to be stopped
        if self.config.consume == "ready":
            heapq.heappush(self._complete, (group.index, group))
        self._advance()
        return True

    def fail(self, task: RolloutTask) -> bool:
        """Count a failed sample; returns whether it is to be tried again (once, with its seed).
        After a second failure only redundant samples can save the group; otherwise it is dropped,
        and the next prompt takes its place."""
        if not self.wants(task):
            return False
        group = self._open[task.group]
        group.failures[task.sample] += 1
        if group.failures[task.sample] < 2:
            return True
        if sum(count > 1 for count in group.failures.values()) > self.config.redundant_samples:
            self._failed_since_start += 1
            self.drop(task.group, "failed")
        return False

    def drop(self, index: int, reason: str) -> None:
        """Give up an open group. Its place goes to the next prompt, so no credit is lost."""
        self._drop(self._open.pop(index), reason)
        self.closed.append(index)
        self._advance()

    def drop_if_open(self, index: int, reason: str) -> None:
        if index in self._open:
            self.drop(index, reason)

    def _drop(self, group: Group, reason: str) -> None:
        self.kept -= 1
        self.dropped[group.index] = reason
        self.dropped_for[reason] += 1
        self.newly_dropped.append(group.index)
        if reason in ("stale", "redundant"):
            self._lose(group.samples.values())
        group.samples.clear()

    def _lose(self, samples: Iterable[Sample]) -> None:
        """Note what was thrown away, so that the bias of `ready` can be seen."""
        for sample in samples:
            self.lost.update(samples=1, tokens=int(sample.mask.sum()))
            self.lost.update(finished=1, reward=sample.reward)

    def _is_stale(self, samples: Iterable[Sample]) -> bool:
        """Whether one of them would be older than ceil(alpha) if it were trained on now. By
        construction never true in fifo; what has not finished is judged by its worker, which knows
        the versions of its tokens."""
        bound = math.ceil(self.config.alpha)
        return self.config.consume == "ready" and any(
            sample.staleness(self.trainer_version) > bound for sample in samples
        )

    def too_many_failed(self) -> bool:
        """More than four groups failed, and more than half of all that ended: not bad luck."""
        ended = self._admitted - len(self._open)
        return self._failed_since_start > 4 and 2 * self._failed_since_start > ended

    def hopeless(self) -> bool:
        """So many groups were filtered out since the last batch that no end is in sight."""
        return self._filtered_since_batch >= self.config.filter_limit * self.config.batch_size

    def _advance(self) -> None:
        # Oldest first: a finished group waits for every older one, so a long answer is never
        # passed over in favour of short ones.  Each group moves once: O(1) a group over the run.
        while self._order and self._order[0].index not in self._open:
            group = self._order.popleft()
            if group.samples:  # empty: dropped
                heapq.heappush(self._complete, (group.index, group))

    # -- batches ---------------------------------------------------------------------------------

    def batch_ready(self) -> bool:
        return len(self._complete) >= self.config.batch_size

    def pop_batch(self) -> list[Sample]:
        """The B oldest groups (`ready`: of those that have finished), as B * n samples sorted by
        (admission index, sample index)."""
        if not self.batch_ready():
            raise ValueError(f"no batch yet: waiting for {self.pending()}")
        groups = [heapq.heappop(self._complete)[1] for _ in range(self.config.batch_size)]
        self.popped += 1
        self._filtered_since_batch = 0
        if self.config.alpha == 0:  # the batch is full: what is left has lost the race
            self._drop_rest("redundant", lambda group: True)
        self.trained.update(group.index for group in groups)
        cursor = self.cursor()
        self.trained = {index for index in self.trained if index >= cursor}
        return [group.samples[i] for group in groups for i in sorted(group.samples)]

    def expect(self, version: int) -> None:
        """The trainer holds `version` from now on: drop what would be too old for its batches."""
        self.trainer_version = version
        if self.config.consume == "ready":  # in fifo nothing is: no need to look at every group
            self._drop_rest("stale", lambda group: self._is_stale(group.samples.values()))

    def _drop_rest(self, reason: str, condemned: Callable[[Group], bool]) -> None:
        for group in [group for group in self._open.values() if condemned(group)]:
            self.drop(group.index, reason)
        for _, group in [item for item in self._complete if condemned(item[1])]:
            self._drop(group, reason)
        self._complete = [item for item in self._complete if item[1].samples]
        heapq.heapify(self._complete)

    def commit(self, version: int) -> None:
        """Every worker has loaded `version`: decoding may go on under it, and so may admission."""
        if version < self.version:
            raise ValueError(f"version {version} committed after {self.version}")
        self.version = version

    def take_closed(self) -> list[int]:
        """Groups that ended since the last call, for their running tasks to be cancelled."""
        closed, self.closed = self.closed, []
        return closed

    # -- for checkpoints and messages ------------------------------------------------------------

    def cursor(self) -> int:
        """The oldest admission index that has neither been handed out nor dropped."""
        waiting = [self.next_index, *(index for index, _ in self._complete[:1])]
        return min([*waiting, next(iter(self._open), self.next_index)])

    def progress(self) -> dict:
        """Where a resumed run begins. What was in progress is generated again."""
        cursor = self.cursor()
        trained = {index for index in self.trained if index >= cursor}
        return {"first_index": cursor, "dropped": dict(self.dropped), "trained": trained}

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
