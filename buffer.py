"""The sample buffer: which groups may be generated, and which batch is trained on next.

Pure bookkeeping, so that it can be read in one sitting and tested by the thousand: no torch, no
processes, no I/O and no clock. `rollout.py` calls it from one thread under one lock, the tests call
it directly.

Words (all counts are of *groups*, the n samples of one prompt, or of one seed of an environment):

    version v    batches trained on and published so far
    admission    the moment a group may start; its place in that order is its admission index
    staleness    the version the trainer holds minus the lowest version of a sample's tokens

Admission bounds staleness ahead of time: if batches are taken in order (`fifo`), nothing that has
finished is ever too old. A group leaves in one of two ways: it is trained on, or it is dropped for
one reason (filtered, failed, stale, redundant). Each drop makes room for the next prompt at once.

Paper: ROLL Flash (arXiv 2510.11345): asynchronous ratio, SampleBuffer, redundant rollouts, dynamic
filtering.  Departures from its code: staleness is measured on the tokens of a sample, not taken
from its start, and the losers of a race are cancelled instead of playing on unseen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


def admission_limit(version: int, batch_size: int, alpha: float) -> int:
    """How many groups may have been admitted, and not dropped, once every worker holds `version`.

    One batch for the step that comes next, and alpha more that generation may be ahead. If batches
    are taken in order of admission, a group that was admitted at version v is therefore trained on
    at version v + ceil(alpha) at the latest. At alpha = 0 this is synchronous training.

    >>> [admission_limit(version, batch_size=2, alpha=0.5) for version in range(3)]
    [3, 5, 7]
    """
    return (version + 1) * batch_size + math.ceil(alpha * batch_size)


# -- consumption: which finished groups the next batch is made of (--consume) --------------------


class Rule(NamedTuple):
    """`order(buffer)`: the finished groups that may be trained on, in the order in which they are
    taken. `expires`: whether it may pass over a group for so long that it becomes too old; then
    what is older than ceil(alpha) is dropped, and the next prompt takes its place."""

    order: Callable[[SampleBuffer], list[Group]]
    expires: bool


CONSUMPTION: dict[str, Rule] = {}


def consumption(expires: bool) -> Callable:
    """Make a rule known by the name of its function. It needs nothing outside of this file."""

    def add(order: Callable) -> Callable:
        CONSUMPTION[order.__name__] = Rule(order, expires)
        return order

    return add


@consumption(expires=False)
def fifo(buffer: SampleBuffer) -> list[Group]:
    """In order of admission: a finished group waits for every older one. So a long answer is never
    passed over in favour of short ones, and the bound holds by construction."""
    oldest = next(iter(buffer.open), buffer.next_index)
    return [buffer.finished[index] for index in sorted(buffer.finished) if index < oldest]


@consumption(expires=True)
def ready(buffer: SampleBuffer) -> list[Group]:
    """Whatever has finished, the oldest first. Nobody waits for a straggler; but what is trained on
    leans towards what is quick."""
    return [buffer.finished[index] for index in sorted(buffer.finished)]


class SampleBuffer:
    """Admits groups, collects their samples, and hands them out as batches of exactly B groups.

    `steps` bounds the run: never more than steps * B groups are admitted and kept. A resumed run
    starts at a version above 0 and with the `progress()` of the run that it goes on with.

    >>> buffer = SampleBuffer(steps=9, batch_size=2, group_size=1, alpha=0.5)
    >>> [group.index for group in buffer.admit()]
    [0, 1, 2]
    >>> buffer.commit(1); [group.index for group in buffer.admit()]
    [3, 4]
    """

    def __init__(
        self,
        steps: int,
        batch_size: int,
        group_size: int,
        alpha: float = 1.0,
        consume: str = "fifo",
        redundant_samples: int = 0,
        redundant_groups: int = 0,
        filter_groups: bool = False,
        filter_limit: float = 10.0,
        penalty: float = 0.0,
        version: int = 0,
        first_index: int = 0,
        dropped: dict[int, str] | None = None,
        trained: set[int] | None = None,
    ):
        self.steps, self.batch_size, self.group_size = steps, batch_size, group_size
        self.alpha, self.bound, self.rule = alpha, math.ceil(alpha), CONSUMPTION[consume]
        self.redundant_samples, self.redundant_groups = redundant_samples, redundant_groups
        self.filter_groups, self.filter_limit = filter_groups, filter_limit
        self.penalty = penalty  # taken from truncated samples before they are trained on
        self.version = version  # committed on every worker
        self.trainer_version = version  # what the trainer holds: ahead while a publish is under way
        self.next_index = first_index
        self.kept = version * batch_size  # admitted and not dropped, over the whole run
        self.popped = version  # batches handed out
        self.dropped = dict(dropped or {})  # reason, by admission index
        self.dropped_for = Counter(self.dropped.values())  # how many, by reason
        self.trained = set(trained or ())  # handed out ahead of an older group that is still open
        self.newly_dropped: list[int] = []  # since whoever logs them has emptied it
        self.closed: list[int] = []  # groups that need no more samples but may have tickets running
        self.lost = Counter()  # of finished samples thrown away as stale or redundant: see `_lose`
        self.open: dict[int, Group] = {}  # admitted, not yet complete; in order of admission
        self.finished: dict[int, Group] = {}  # complete, not yet handed out
        self._admitted = self._failed_since_start = 0  # by this run alone
        self._filtered_since_batch = 0

    # -- admission -------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Groups that may have been admitted and kept by now: `admission_limit`, some more for a
        race, and never more than the run needs."""
        limit = admission_limit(self.version, self.batch_size, self.alpha)
        if self.alpha or self.popped == self.version:  # in sync the race ends with the batch
            limit += self.redundant_groups
        return min(limit, self.steps * self.batch_size)

    @property
    def max_staleness(self) -> float:
        """How old an episode may become before it is stopped."""
        return self.bound if self.rule.expires else math.inf

    def admit(self) -> Iterator[Group]:
        """Open groups until the limit is reached."""
        while self.kept < self.limit:
            group = Group(self.next_index)
            self.next_index += 1
            if group.index in self.dropped or group.index in self.trained:
                continue  # by the run that this one goes on with
            self.kept += 1
            self._admitted += 1
            self.open[group.index] = group
            yield group

    # -- what happens to samples -----------------------------------------------------------------

    def wants(self, ticket: Ticket) -> bool:
        """Whether a result for this ticket is still of use (its group may have ended)."""
        group = self.open.get(ticket.group)
        return group is not None and ticket.sample not in group.samples

    def add(self, sample: Sample) -> bool:
        """Take a finished sample; returns whether it completed its group. Unwanted ones are
        ignored: their group ended while they were on the way."""
        if not self.wants(sample.ticket):
            return False
        group = self.open[sample.ticket.group]
        group.samples[sample.ticket.sample] = sample
        if self._is_stale([sample]):
            self.drop(group.index, "stale")
            return False
        if len(group.samples) < self.group_size:
            return False
        if self.filter_groups and group.without_signal(self.penalty):
            self._filtered_since_batch += 1
            self.drop(group.index, "filtered")
            return False
        self.finished[group.index] = self.open.pop(group.index)
        if self.redundant_samples:
            self.closed.append(group.index)  # the losers are to be stopped
        return True

    def fail(self, ticket: Ticket) -> bool:
        """Count a failed sample; returns whether it is to be tried again (once, with its seed).
        After a second failure only redundant samples can save the group; otherwise it is dropped,
        and the next prompt takes its place."""
        if not self.wants(ticket):
            return False
        group = self.open[ticket.group]
        group.failures[ticket.sample] += 1
        if group.failures[ticket.sample] < 2:
            return True
        if sum(count > 1 for count in group.failures.values()) > self.redundant_samples:
            self._failed_since_start += 1
            self.drop(ticket.group, "failed")
        return False

    def drop(self, index: int, reason: str) -> None:
        """Give up an open group. Its place goes to the next prompt, so no credit is lost."""
        self._drop(self.open.pop(index), reason)
        self.closed.append(index)

    def drop_if_open(self, index: int, reason: str) -> None:
        if index in self.open:
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
        return self.rule.expires and any(
            sample.staleness(self.trainer_version) > self.bound for sample in samples
        )

    def too_many_failed(self) -> bool:
        """More than four groups failed, and more than half of all that ended: not bad luck."""
        ended = self._admitted - len(self.open)
        return self._failed_since_start > 4 and 2 * self._failed_since_start > ended

    def hopeless(self) -> bool:
        """So many groups were filtered out since the last batch that no end is in sight."""
        return self._filtered_since_batch >= self.filter_limit * self.batch_size

    # -- batches ---------------------------------------------------------------------------------

    def batch_ready(self) -> bool:
        enough = len(self.finished) >= self.batch_size  # else the rule need not look at them
        return enough and len(self.rule.order(self)) >= self.batch_size

    def pop_batch(self) -> list[Sample]:
        """The first B groups of the rule's order, as B * n samples sorted by (admission index,
        sample index)."""
        if not self.batch_ready():
            raise ValueError(f"no batch yet: waiting for {self.pending()}")
        batch = sorted(group.index for group in self.rule.order(self)[: self.batch_size])
        groups = [self.finished.pop(index) for index in batch]
        self.popped += 1
        self._filtered_since_batch = 0
        if self.alpha == 0:  # the batch is full: what is left has lost the race
            self._drop_rest("redundant", lambda group: True)
        self.trained.update(batch)
        cursor = self.cursor()
        self.trained = {index for index in self.trained if index >= cursor}
        return [group.samples[i] for group in groups for i in sorted(group.samples)]

    def expect(self, version: int) -> None:
        """The trainer holds `version` from now on: drop what would be too old for its batches."""
        self.trainer_version = version
        if self.rule.expires:  # else nothing is: no need to look at every group
            self._drop_rest("stale", lambda group: self._is_stale(group.samples.values()))

    def _drop_rest(self, reason: str, condemned: Callable[[Group], bool]) -> None:
        for group in [group for group in self.open.values() if condemned(group)]:
            self.drop(group.index, reason)
        for group in [group for group in self.finished.values() if condemned(group)]:
            self._drop(self.finished.pop(group.index), reason)

    def commit(self, version: int) -> None:
        """Every worker has loaded `version`: decoding may go on under it, and so may admission."""
        if version < self.version:
            raise ValueError(f"version {version} committed after {self.version}")
        self.version = version

    def take_closed(self) -> list[int]:
        """Groups that ended since the last call, for their running tickets to be cancelled."""
        closed, self.closed = self.closed, []
        return closed

    # -- for checkpoints and messages ------------------------------------------------------------

    def cursor(self) -> int:
        """The oldest admission index that has neither been handed out nor dropped."""
        return min([self.next_index, *list(self.open)[:1], *self.finished])

    def progress(self) -> dict:
        """Where a resumed run begins. What was in progress is generated again."""
        cursor = self.cursor()
        trained = {index for index in self.trained if index >= cursor}
        return {"first_index": cursor, "dropped": dict(self.dropped), "trained": trained}

    def pending(self) -> str:
        """What a waiting trainer is waiting for, for error messages and stall reports."""
        missing = [
            f"{g.index}:{self.group_size - len(g.samples)}" for g in self.open.values()
        ]
        head = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        return (
            f"{len(self.rule.order(self))} of {self.batch_size} groups ready, {len(missing)} "
            f"in progress at version {self.version} (group:samples missing: {head or 'none'})"
        )


# -- what is counted -----------------------------------------------------------------------------


def derive_seed(*parts: int) -> int:
    """A sampling seed that depends on all parts and on nothing else (31 bits)."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


class Ticket(NamedTuple):
    """The unit of scheduling: the right to generate one sample of one group. `group` is the
    admission index, -1 for evaluation."""

    group: int
    sample: int
    prompt_id: int  # which row of the task's data: see `envs.prompt_order`
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

    ticket: Ticket
    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T]
    reward: float
    truncated: bool = False  # ended by a limit on tokens or turns, not by itself
    turns: tuple[tuple[int, int], ...] = ()  # where each turn's sampled tokens begin and end in ids
    success: bool | None = None  # what the environment itself says of it, if it does

    def __reduce__(self):
        """Pickled with its arrays as bytes: NumPy's own form of them takes eight times as long."""
        arrays = (self.ids, self.mask, self.logprobs, self.versions)
        rest = (self.reward, self.truncated, self.turns, self.success)
        bytes_of = (np.asarray(a, d).tobytes() for a, d in zip(arrays, DTYPES, strict=True))
        return unpickle, (tuple(self.ticket), *bytes_of, *rest)

    @property
    def solved(self) -> bool:
        """Whether the environment says so, or else the reward is 1.0 or more. Rewards of several
        steps are added up: six times a sixth is a little less than 1."""
        return self.reward >= 1 - 1e-6 if self.success is None else self.success

    def penalised(self, penalty: float) -> float:
        """The reward as it is trained on: less the penalty, if a limit ended the sample."""
        return self.reward - penalty * self.truncated

    def staleness(self, version: int) -> int:
        """`version` less the lowest version of any sampled token; 0 if there is none."""
        return version - int(self.versions[self.mask].min(initial=version))


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt, and how often each of them failed."""

    index: int
    samples: dict[int, Sample] = field(default_factory=dict)
    failures: Counter = field(default_factory=Counter)

    def without_signal(self, penalty: float = 0.0) -> bool:
        """Whether all rewards, as they are trained on, are equal: no sample is better than another.
        """
        rewards = [sample.penalised(penalty) for sample in self.samples.values()]
        return max(rewards) - min(rewards) <= 1e-8


def unpickle(ticket: tuple, ids: bytes, mask: bytes, logprobs: bytes, versions: bytes, *rest):
    """The sample that `Sample.__reduce__` took apart; its arrays are read-only."""
    arrays = map(np.frombuffer, (ids, mask, logprobs, versions), DTYPES)
    return Sample(Ticket(*ticket), *arrays, *rest)
