"""The sample buffer: its rules one by one; at the end, random runs beside a slow plain model of
it, and whole runs on a virtual clock."""

import dataclasses
import doctest
import functools
import heapq
import itertools
import math
import pickle
import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st

import buffer as module
from buffer import CONSUMPTION, Sample, SampleBuffer, Ticket, consumption, derive_seed

ALPHAS = [0, 0.5, 1, 2, 2.5, 4]
CONSUME = ["fifo", "ready"]
ACTIONS = ["generate"] * 4 + ["go_on"] * 4 + ["commit"] * 3 + ["add_one_sample"] * 2
ACTIONS += ["fail", "find_too_old", "stop_tickets", "resume"]
THOROUGH = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],  # others may be computing too
)


def make(batch_size=2, group_size=2, alpha=1.0, consume="fifo", steps=10, **more):
    progress = more.pop("progress", {})
    return SampleBuffer(steps, batch_size, group_size, alpha, consume, **more, **progress)


def ticket(group, sample):
    return Ticket(group, sample, prompt_id=group, seed=0)


def finished(group, sample, *versions, reward=0.0):
    """A sample of one prompt token, and one response token of each version (0 if none is given)."""
    versions = np.array([-1, *(versions or [0])], np.int32)
    return Sample(
        ticket(group, sample),
        ids=np.arange(len(versions), dtype=np.int32),
        mask=versions >= 0,
        logprobs=np.zeros(len(versions), np.float32),
        versions=versions,
        reward=reward,
    )


def admit(buffer):
    return [group.index for group in buffer.admit()]


def complete(buffer, indices, version=0):
    for index in indices:
        for i in range(buffer.group_size):
            buffer.add(finished(index, i, version, reward=i))


def fail_twice(buffer, index, sample=0):
    assert buffer.fail(ticket(index, sample))
    assert not buffer.fail(ticket(index, sample))


def pop(buffer):
    """The groups of the next batch, after a look at its shape: n distinct samples of each of B
    groups, in order of (admission index, sample index)."""
    size, n = buffer.batch_size, buffer.group_size
    names = [(s.ticket.group, s.ticket.sample) for s in buffer.pop_batch()]
    assert names == sorted(set(names)) and len(names) == size * n
    groups = Counter(index for index, _ in names)
    assert list(groups.values()) == [n] * size
    return list(groups)


def publish(buffer, version):
    buffer.expect(version)
    buffer.commit(version)


# -- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize("racing", [0, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_admission_stops_at_the_limit_of_each_version(alpha, racing):
    buffer = make(4, alpha=alpha, consume="ready", steps=50, redundant_groups=racing)
    for version in range(5):
        admit(buffer)
        assert buffer.kept == (version + 1) * 4 + math.ceil(alpha * 4) + racing
        assert admit(buffer) == []
        complete(buffer, range(buffer.next_index), version)
        buffer.pop_batch()
        publish(buffer, version + 1)


@pytest.mark.parametrize("more", [{}, {"consume": "ready", "redundant_groups": 2}])
def test_alpha_zero_admits_nothing_between_a_batch_and_its_commit(more):
    buffer = make(batch_size=3, alpha=0, **more)
    complete(buffer, admit(buffer))
    last = buffer.next_index
    buffer.pop_batch()
    assert admit(buffer) == []
    buffer.expect(1)
    assert admit(buffer) == []
    buffer.commit(1)
    assert admit(buffer) == list(range(last, 2 * last))


def test_a_version_is_committed_again_but_never_a_lower_one():
    buffer = make()
    buffer.commit(2)
    buffer.commit(2)
    with pytest.raises(ValueError, match="version 1 committed after 2"):
        buffer.commit(1)
    assert buffer.version == 2


# -- staleness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("consume", CONSUME)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_slow_trainer_reaches_the_staleness_bound_and_never_passes_it(alpha, consume):
    buffer = make(batch_size=4, alpha=alpha, consume=consume, steps=20)
    seen = []
    for version in range(20):
        complete(buffer, admit(buffer), version)  # generation is done at once, then it waits
        seen += [s.staleness(version) for s in buffer.pop_batch()]
        publish(buffer, version + 1)
    assert max(seen) == math.ceil(alpha) and buffer.dropped == {}


def test_staleness_counts_from_the_lowest_version_of_the_sampled_tokens():
    sample = finished(0, 0, 3, 2, 1, 4)
    sample.mask = np.array([False, True, True, False, True])
    assert sample.staleness(7) == 5
    sample.mask[:] = False
    assert sample.staleness(7) == 0  # nothing of it was sampled


@pytest.mark.parametrize("consume", CONSUME)
def test_age_on_arrival_is_that_at_the_version_the_trainer_holds(consume):
    buffer = make(batch_size=1, group_size=1, alpha=1, consume=consume, version=1)
    assert admit(buffer) == [0, 1]
    buffer.expect(3)
    assert buffer.add(finished(0, 0, 2, 3)) and buffer.version == 1
    assert buffer.add(finished(1, 0, 1, 3)) == (consume == "fifo")
    assert buffer.dropped == ({} if consume == "fifo" else {1: "stale"})


@pytest.mark.parametrize("consume", CONSUME)
def test_a_sample_that_gets_too_old_costs_its_group_in_ready_only(consume):
    buffer = make(batch_size=1, group_size=2, alpha=1, consume=consume)
    assert admit(buffer) == [0, 1]
    buffer.add(finished(0, 1, 0, 0, 0, reward=0.5))  # its other sample is the straggler
    publish(buffer, 1)
    assert admit(buffer) == [2] and buffer.wants(ticket(0, 0))  # of age 1: young enough
    buffer.expect(2)
    if consume == "fifo":
        assert buffer.dropped == {} and not buffer.lost
        return
    assert buffer.dropped == {0: "stale"} and buffer.take_closed() == [0]
    assert buffer.lost == {"samples": 1, "finished": 1, "tokens": 3, "reward": 0.5}
    assert admit(buffer) == [3]  # in its place at once, not only after the commit


def test_a_group_without_a_token_is_never_too_old_unless_its_worker_says_so():
    buffer = make(batch_size=1, group_size=1, alpha=1, consume="ready")
    assert admit(buffer) == [0, 1]
    for version in range(1, 8):
        publish(buffer, version)
    assert buffer.dropped == {}
    buffer.drop_if_open(1, "stale")
    assert buffer.dropped == {1: "stale"} and buffer.take_closed() == [1]
    assert buffer.add(finished(0, 0, 7))  # it began late: its tokens are new
    buffer.drop_if_open(0, "stale")  # said too late
    assert buffer.dropped == {1: "stale"} and pop(buffer) == [0]


# -- fifo ------------------------------------------------------------------------------------------


def test_fifo_waits_for_a_straggler():
    buffer = make(batch_size=2, group_size=1, alpha=2)
    complete(buffer, admit(buffer)[1:])
    assert not buffer.batch_ready()
    with pytest.raises(ValueError, match="waiting for 0 of 2 groups ready, 1 in progress.*0:1"):
        buffer.pop_batch()
    complete(buffer, [0])
    assert pop(buffer) == [0, 1]


# -- ready -----------------------------------------------------------------------------------------


def test_ready_passes_over_a_straggler_and_takes_it_when_it_is_there():
    buffer = make(batch_size=2, group_size=1, alpha=2, consume="ready")
    complete(buffer, admit(buffer)[1:])
    assert pop(buffer) == [1, 2]
    publish(buffer, 1)
    complete(buffer, [0])
    assert pop(buffer) == [0, 3]


@pytest.mark.parametrize(("consume", "most"), [("fifo", math.inf), ("ready", 3), ("newest", 3)])
def test_episodes_are_stopped_for_their_age_only_if_the_rule_expires(consume, most, newest):
    assert make(alpha=2.5, consume=consume).max_staleness == most


# -- redundancy ------------------------------------------------------------------------------------


def test_at_alpha_zero_the_groups_that_lose_the_race_are_dropped_with_the_batch():
    buffer = make(2, 1, alpha=0, consume="ready", redundant_groups=3)
    assert admit(buffer) == [0, 1, 2, 3, 4]
    complete(buffer, [4, 3, 1])
    assert pop(buffer) == [1, 3]  # admission order also among those that are there
    assert buffer.dropped == dict.fromkeys([0, 2, 4], "redundant")
    assert buffer.take_closed() == [0, 2]  # 4 has nothing running any more
    assert buffer.lost["samples"] == 1 and not buffer.wants(ticket(0, 0))
    publish(buffer, 1)
    assert admit(buffer) == [5, 6, 7, 8, 9]
    resumed = make(2, 1, alpha=0, consume="ready", redundant_groups=3, version=1)
    assert len(admit(resumed)) == 5


def test_at_alpha_one_the_groups_that_lose_the_race_are_used_until_they_are_too_old():
    buffer = make(1, 1, alpha=1, consume="ready", redundant_groups=2)
    assert admit(buffer) == [0, 1, 2, 3]
    complete(buffer, [0, 1, 2])
    for version in (0, 1):
        assert pop(buffer) == [version] and buffer.dropped == {}
        publish(buffer, version + 1)
    assert buffer.dropped == {2: "stale"}  # finished, but no batch could take it in time
    assert buffer.wants(ticket(3, 0)) and buffer.lost["samples"] == 1
    assert admit(buffer) == [4, 5, 6]


def test_of_redundant_samples_the_first_to_finish_win():
    buffer = make(batch_size=1, group_size=2, alpha=0, redundant_samples=2)
    admit(buffer)
    assert not buffer.add(finished(0, 3)) and buffer.take_closed() == []
    assert buffer.add(finished(0, 1)) and buffer.take_closed() == [0]  # stop samples 0 and 2
    assert not buffer.wants(ticket(0, 0)) and not buffer.add(finished(0, 0))
    assert [s.ticket.sample for s in buffer.pop_batch()] == [1, 3] and not buffer.lost


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_group_survives_as_many_failed_samples_as_it_has_spare_ones(spare):
    buffer = make(batch_size=2, group_size=2, alpha=0, redundant_samples=spare)
    admit(buffer)
    for index in (0, 1):
        for i in range(spare):
            fail_twice(buffer, index, i)
    assert buffer.dropped == {}
    fail_twice(buffer, 0, spare)
    assert buffer.dropped == {0: "failed"} and buffer.take_closed() == [0] and admit(buffer) == [2]
    buffer.add(finished(1, spare + 1))
    assert buffer.add(finished(1, spare))


# -- what is solved ------------------------------------------------------------------------------


def test_solved_is_what_the_environment_says_or_a_reward_of_1_with_its_rounding():
    sample = finished(0, 0, reward=sum([1 / 6] * 6))
    assert sample.reward < 1 and sample.solved
    assert not dataclasses.replace(sample, reward=0.99).solved
    assert not dataclasses.replace(sample, success=False).solved
    assert dataclasses.replace(sample, reward=0.0, success=True).solved
    assert pickle.loads(pickle.dumps(dataclasses.replace(sample, success=True))).success is True


# -- filtering -------------------------------------------------------------------------------------


@pytest.mark.parametrize("consume", CONSUME)
def test_a_group_of_equal_rewards_is_filtered_out_and_replaced_at_once(consume):
    buffer = make(2, 2, alpha=0, consume=consume, filter_groups=True, redundant_samples=1)
    admit(buffer)
    assert not buffer.add(finished(0, 0, reward=1.0))
    assert not buffer.add(finished(0, 2, reward=1.0 + 1e-9))
    assert buffer.dropped == {0: "filtered"} and not buffer.lost
    assert buffer.take_closed() == [0] and admit(buffer) == [2]
    complete(buffer, [1, 2])  # rewards 0 and 1
    assert pop(buffer) == [1, 2]
    buffer.filter_groups = False
    publish(buffer, 1)
    assert admit(buffer) == [3, 4]
    assert not buffer.add(finished(3, 0, 1)) and buffer.add(finished(3, 1, 1))


def test_the_filter_sees_rewards_as_they_are_trained_on():
    """With a penalty for truncated samples: two equal rewards differ, two other ones are equal."""
    buffer = make(2, 2, alpha=0, filter_groups=True, penalty=0.5)
    admit(buffer)
    for group, sample, reward, truncated in (
        (0, 0, 1.0, False), (0, 1, 1.0, True), (1, 0, 0.5, False), (1, 1, 1.0, True),
    ):  # fmt: skip
        buffer.add(dataclasses.replace(finished(group, sample, reward=reward), truncated=truncated))
    assert list(buffer.finished) == [0] and buffer.dropped == {1: "filtered"}


def test_filtering_is_hopeless_after_so_many_batches_worth_since_the_last_batch():
    buffer = make(2, 2, alpha=1, filter_groups=True, filter_limit=1.5)
    for version in range(2):
        assert not buffer.hopeless()
        for count in range(1, 4):
            admit(buffer)
            newest = buffer.next_index - 1
            assert not buffer.add(finished(newest, 0)) and not buffer.add(finished(newest, 1))
            assert buffer.hopeless() == (count == 3)  # 1.5 batches of 2 groups
        complete(buffer, range(buffer.next_index), version)
        buffer.pop_batch()
        publish(buffer, version + 1)
    assert buffer.dropped_for["filtered"] == 6


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_sample_is_tried_once_more_then_its_group_is_replaced():
    buffer = make(batch_size=2, group_size=2, alpha=0)
    admit(buffer)
    buffer.add(finished(0, 0))
    fail_twice(buffer, 0, sample=1)
    assert buffer.dropped == {0: "failed"} and not buffer.lost
    assert admit(buffer) == [2]  # at once, at the same version
    complete(buffer, [1, 2])
    assert pop(buffer) == [1, 2]


def test_the_first_of_two_results_for_one_sample_counts():
    buffer = make(batch_size=1, group_size=2, alpha=0)
    admit(buffer)
    first, second = finished(0, 0), finished(0, 0)
    buffer.add(first)
    assert not buffer.add(second)
    buffer.add(finished(0, 1))
    assert buffer.pop_batch()[0] is first


def test_a_few_failures_are_bad_luck_but_not_most_of_all_groups():
    buffer = make(batch_size=100, group_size=1, alpha=0)
    indices = admit(buffer)
    for index in indices[:4]:
        fail_twice(buffer, index)
        assert not buffer.too_many_failed()
    fail_twice(buffer, indices[4])
    assert buffer.too_many_failed()  # five of the five that ended
    complete(buffer, indices[5:10])
    assert not buffer.too_many_failed()  # five of ten: no more than half


def test_failures_before_a_resume_are_no_reason_to_stop_after_it():
    known = {"first_index": 105, "dropped": dict.fromkeys([10, 20, 30, 40, 50], "failed")}
    buffer = make(batch_size=5, group_size=1, version=20, steps=40, progress=known)
    fail_twice(buffer, admit(buffer)[0])
    assert buffer.dropped_for["failed"] == 6
    assert not buffer.too_many_failed()  # 6 of the 106 groups that ended, and 1 since the resume


# -- resume ----------------------------------------------------------------------------------------


def test_a_resumed_run_trains_on_each_prompt_exactly_once():
    first = make(batch_size=2, group_size=1, alpha=2, steps=4)
    admit(first)  # 0 to 5
    fail_twice(first, 1)
    complete(first, [0, 2, 4])  # 3 and 5 are in progress, 4 waits for 3
    trained = pop(first)
    publish(first, 1)
    admit(first)
    fail_twice(first, 5)
    failed = {1: "failed", 5: "failed"}
    assert first.progress() == {"first_index": 3, "dropped": failed, "trained": set()}

    second = make(2, 1, alpha=2, steps=4, version=1, progress=first.progress())
    for version in range(1, 4):
        complete(second, admit(second))
        trained += pop(second)
        publish(second, version + 1)
    assert trained == [0, 2, 3, 4, 6, 7, 8, 9] and second.dropped == failed


def test_a_resumed_run_does_not_admit_again_what_was_trained_ahead_of_a_straggler():
    first = make(batch_size=2, group_size=1, alpha=1, steps=9, consume="ready")
    assert admit(first) == [0, 1, 2, 3]
    fail_twice(first, 1)
    complete(first, [2, 3])
    assert pop(first) == [2, 3]
    publish(first, 1)
    assert first.progress() == {"first_index": 0, "dropped": {1: "failed"}, "trained": {2, 3}}

    second = make(2, 1, alpha=1, steps=9, consume="ready", version=1, progress=first.progress())
    assert admit(second) == [0, 4, 5, 6]
    complete(second, [4, 5], version=1)
    assert pop(second) == [4, 5]
    assert second.progress()["trained"] == {2, 3, 4, 5}  # the same straggler, a second time
    publish(second, 2)
    complete(second, [0, 6], version=2)
    assert pop(second) == [0, 6] and second.progress()["trained"] == set()


# -- a rule of one's own ---------------------------------------------------------------------------


@pytest.fixture
def newest():
    """A rule that takes the groups that were admitted last."""

    @consumption(expires=True)
    def newest(buffer):
        return [buffer.finished[index] for index in sorted(buffer.finished, reverse=True)]

    yield
    del CONSUMPTION["newest"]


def test_a_rule_hands_out_batches_in_its_own_order(newest):
    buffer = make(batch_size=2, group_size=2, alpha=2, consume="newest")
    assert admit(buffer) == [0, 1, 2, 3, 4, 5]
    complete(buffer, [5, 0, 4, 1])
    assert pop(buffer) == [4, 5]
    publish(buffer, 1)
    complete(buffer, [3])
    assert pop(buffer) == [1, 3]  # the newest of those that have finished
    publish(buffer, 2)
    assert not buffer.batch_ready() and buffer.dropped == {}
    publish(buffer, 3)
    assert buffer.dropped == {0: "stale"} and buffer.wants(ticket(2, 0))  # a rule that expires


def test_a_rule_that_looks_at_the_version_is_asked_again_after_every_change():
    @consumption(expires=False)
    def alternating(buffer):
        groups = [buffer.finished[index] for index in sorted(buffer.finished)]
        return groups[:: -1 if buffer.version % 2 else 1]

    try:
        buffer = make(batch_size=1, group_size=1, alpha=3, consume="alternating")
        complete(buffer, admit(buffer))
        batches = []
        for version in range(1, 5):
            batches += pop(buffer)
            publish(buffer, version)
        assert batches == [0, 3, 1, 2]
    finally:
        del CONSUMPTION["alternating"]


def train_on(buffer, until, rng, batches):
    """Train up to this version; some groups fail, and each time some have not finished yet."""
    while buffer.version < until:
        admit(buffer)
        for index in rng.sample(list(buffer.open), rng.randint(0, len(buffer.open))):
            if rng.random() < 0.2:
                fail_twice(buffer, index)
            else:
                complete(buffer, [index], buffer.version)
        if buffer.batch_ready():
            newest = sorted(buffer.finished)[-buffer.batch_size :]
            batches.append(pop(buffer))
            assert batches[-1] == newest
            publish(buffer, buffer.version + 1)


@pytest.mark.parametrize("resumed_at", range(0, 41, 5))
def test_a_rule_out_of_order_loses_and_repeats_no_group_whenever_the_run_is_resumed(
    resumed_at, newest
):
    rng, batches, steps = random.Random(resumed_at), [], 40
    run = {"batch_size": 2, "group_size": 2, "alpha": 2, "consume": "newest", "steps": steps}
    first = make(**run)
    train_on(first, resumed_at, rng, batches)
    second = make(**run, version=resumed_at, progress=first.progress())
    train_on(second, steps, rng, batches)
    trained = [index for batch in batches for index in batch]
    assert len(batches) == steps and len(trained) == len(set(trained))
    assert admit(second) == [] and not second.open and not second.finished
    assert sorted([*trained, *second.dropped]) == list(range(second.next_index))
    assert batches != sorted(batches)  # it was not the order of admission


# -- what it costs, how a sample travels, examples -------------------------------------------------


class Watched(dict):
    """Counts how often somebody looks at a group in it."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)

    def get(self, index):
        self.looks += 1
        return super().get(index)

    def pop(self, index):
        self.looks += 1
        return super().pop(index)

    def __iter__(self):
        for index in super().__iter__():
            self.looks += 1
            yield index

    def values(self):
        return (self[index] for index in self)


def looks_per_sample(groups, consume, group_size=4):
    buffer = make(groups // 4, group_size, alpha=3, consume=consume, redundant_samples=1)
    buffer.open, buffer.finished = Watched(), Watched()
    indices = admit(buffer)
    assert len(indices) == groups
    one = np.zeros(1, np.int32)
    blank = {"ids": one, "mask": one == 0, "logprobs": one, "versions": one, "reward": 0.0}
    tickets = [ticket(index, i) for index in reversed(indices) for i in range(group_size)]
    for each in tickets:  # newest first: everything waits for the oldest
        buffer.wants(each)
        buffer.add(Sample(each, **blank))
        buffer.take_closed()
        buffer.hopeless()
    for version in range(1, 5):
        buffer.cursor()
        buffer.pop_batch()
        publish(buffer, version)
    return (buffer.open.looks + buffer.finished.looks) / len(tickets)


@pytest.mark.parametrize("consume", CONSUME)
def test_cost_per_sample_is_flat_from_a_thousand_to_a_hundred_thousand_in_flight(consume):
    few, many = looks_per_sample(252, consume), looks_per_sample(25_000, consume)
    assert 0 < many < 2 * few  # linear growth would make it a hundred times as much


def test_a_sample_is_the_same_after_it_was_sent_to_another_process():
    sent = Sample(
        Ticket(3, 1, 4, 1 << 60, eval=True), np.array([5, 6, 7], np.int32),
        np.array([False, True, True]), np.array([0, -0.1, -0.2], np.float32),
        np.array([-1, 8, 9], np.int32), 0.5, True, ((1, 3),),
    )  # fmt: skip
    received = pickle.loads(pickle.dumps(sent))
    for name in Sample.__slots__:
        was, now = getattr(sent, name), getattr(received, name)
        assert type(was) is type(now)
        if isinstance(was, np.ndarray):
            assert was.dtype == now.dtype
        assert np.array_equal(was, now)
    assert received.staleness(10) == 2


def test_examples_in_the_docstrings():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed

# -- random interleavings against a plain model ----------------------------------------------------


class AgainstModel(stateful.RuleBasedStateMachine):
    """The buffer, and beside it what every admitted group has become, in one dictionary.

    The trainer goes round as in the async loop: take a batch, train, announce the next version
    (`expect`). It may take a batch before the last version is committed, but announces no second
    one before that. A sample's lowest version is anything from that of its group's admission on.
    """

    def __init__(self, consume, alpha):
        super().__init__()
        self.consume, self.expires, self.alpha = consume, consume != "fifo", alpha

    @stateful.initialize(
        size=st.integers(1, 3),
        n=st.integers(1, 3),
        steps=st.integers(1, 6),
        spare=st.integers(0, 2),
        racing=st.integers(0, 2),
        filtering=st.booleans(),
    )
    def begin(self, size, n, steps, spare, racing, filtering):
        self.size, self.n, self.steps, self.spare = size, n, steps, spare
        self.racing, self.filtering = racing if self.expires else 0, filtering and n > 1
        run = steps, size, n, self.alpha, self.consume, spare, self.racing, self.filtering
        self.make = functools.partial(SampleBuffer, *run, filter_limit=2)
        self.state: dict[int, str] = {}  # by admission index: open, done, trained, or a reason
        self.born: dict[int, int] = {}  # the version at admission
        self.have: dict[int, dict[int, tuple]] = {}  # lowest version and reward of what finished
        self.failures = Counter()  # by group and sample
        self.popped = self.holds = self.committed = 0  # batches; versions of trainer and workers
        self.new_buffer({})

    def new_buffer(self, progress):
        self.resumed = self.popped
        self.buffer = self.make(version=self.committed, **progress)
        self.lost, self.filtered, self.to_stop, self.stopped = Counter(), 0, set(), []

    # what the model says

    def of(self, *states):
        return [index for index, state in self.state.items() if state in states]

    def kept(self):
        return len(self.of("open", "done", "trained"))

    def limit(self):
        if self.alpha == 0 and self.popped > self.committed:
            return self.popped * self.size  # sync: between a batch and the commit nothing starts
        ahead = (self.committed + 1) * self.size + math.ceil(self.alpha * self.size) + self.racing
        return min(ahead, self.steps * self.size)

    def next_batch(self):
        among = sorted(self.of("done") if self.expires else self.of("open", "done"))
        first = among[-self.size :] if self.consume == "newest" else among[: self.size]
        whole = len(first) == self.size and all(self.state[i] == "done" for i in first)
        return first if whole else None

    def too_old(self, index):
        ages = [self.holds - lowest for lowest, _ in self.have[index].values()]
        return self.expires and max(ages, default=0) > math.ceil(self.alpha)

    def running(self, index):
        missing = set(self.samples()) - self.have[index].keys()
        return any(self.failures[index, i] < 2 for i in missing)

    def samples(self):
        return range(self.n + self.spare)

    def end(self, index, state):
        """An open group is done, or a group that was not yet trained on is given up, or trained."""
        assert self.state[index] in ("open", "done")
        if self.state[index] == "open" and self.running(index):
            self.to_stop.add(index)
        self.state[index] = state
        if state in ("stale", "redundant"):
            for _, reward in self.have[index].values():
                self.lost.update(samples=1, tokens=2, finished=1, reward=reward)

    def pick(self, rng):
        """Any sample of any group, also of one that has ended or was never admitted."""
        among = self.of("open") if rng.random() < 0.7 else range(len(self.state) + 1)
        return rng.choice(among or [0]), rng.choice(self.samples())

    def wanted(self, index, i):
        wanted = self.state.get(index) == "open" and i not in self.have[index]
        assert self.buffer.wants(ticket(index, i)) == wanted
        return wanted

    # what may happen, in any order

    @stateful.rule(what=st.sampled_from(ACTIONS), seed=st.integers(0, 2**32))
    def act(self, what, seed):
        getattr(self, what)(random.Random(seed))

    def admit(self):
        for index in admit(self.buffer):
            assert index == next(i for i in itertools.count() if i not in self.state), "skipped one"
            self.state[index] = "open"
            self.born[index], self.have[index] = self.committed, {}
        assert self.kept() == self.limit(), "no credit is lost, and none is made"

    def generate(self, rng):
        """Finish a few groups, in any order; of each it is chance which samples come first."""
        self.admit()
        for index in rng.sample(self.of("open"), min(rng.randint(0, 3), len(self.of("open")))):
            for i in rng.sample(self.samples(), len(self.samples())):
                self.add_drawn(index, i, rng)

    def add_one_sample(self, rng):
        self.add_drawn(*self.pick(rng), rng)

    def add_drawn(self, index, i, rng):
        born = self.born.get(index, 0)
        lowest = rng.choice([born, rng.randint(born, self.committed)])
        self.add_one(index, i, lowest, reward=rng.choice([0.0, 0.5, 1.0]))

    def add_one(self, index, i, lowest, reward):
        if self.failures[index, i] > 1:
            return  # given up: nobody works on it any more
        whole = False
        if self.wanted(index, i):
            self.have[index][i] = lowest, reward
            rewards = {reward for _, reward in self.have[index].values()}
            if self.too_old(index):
                self.end(index, "stale")
            elif len(self.have[index]) == self.n:
                whole = not self.filtering or len(rewards) > 1
                self.filtered += not whole
                self.end(index, "done" if whole else "filtered")
        sample = finished(index, i, lowest, self.committed, reward=reward)
        assert self.buffer.add(sample) == whole

    def fail(self, rng):
        """A sample fails, perhaps a second time."""
        index, i = self.pick(rng)
        for _ in range(rng.randint(1, 2)):
            self.fail_one(index, i)

    def fail_one(self, index, i):
        count = self.failures[index, i]
        if count > 1:
            return
        wanted = self.wanted(index, i)
        assert self.buffer.fail(ticket(index, i)) == (wanted and count == 0)
        self.failures[index, i] += wanted
        if wanted and sum(self.failures[index, j] > 1 for j in self.samples()) > self.spare:
            self.end(index, "failed")

    def find_too_old(self, rng):
        """A worker finds the tokens of a sample too old; perhaps its group has ended meanwhile."""
        index, _ = self.pick(rng)
        if self.expires:
            self.buffer.drop_if_open(index, "stale")
            if self.state.get(index) == "open":
                self.end(index, "stale")

    def stop_tickets(self, rng=None):
        named = self.buffer.take_closed()
        self.stopped += named
        assert self.to_stop <= set(named) and len(self.stopped) == len(set(self.stopped))
        assert "open" not in {self.state[index] for index in named}
        self.to_stop = set()

    def go_on(self, rng=None):
        """The trainer takes a batch, or announces the version that it has made of the last one."""
        if self.popped == self.holds:
            self.pop()
        elif self.holds == self.committed:
            self.expect()

    def pop(self):
        expected = self.next_batch()
        assert self.buffer.batch_ready() == (expected is not None)
        if expected is None:
            with pytest.raises(ValueError, match="no batch yet"):
                self.buffer.pop_batch()
        else:
            batch = self.buffer.pop_batch()
            names = [(index, i) for index in expected for i in sorted(self.have[index])]
            assert [(s.ticket.group, s.ticket.sample) for s in batch] == names
            assert len(names) == self.size * self.n
            assert all(0 <= s.staleness(self.holds) <= math.ceil(self.alpha) for s in batch)
            self.popped, self.filtered = self.popped + 1, 0
            for index in expected:
                self.end(index, "trained")
            for index in self.of("open", "done") if self.alpha == 0 else []:
                assert self.racing, "nothing is left of a batch without a race"
                self.end(index, "redundant")

    def expect(self):
        self.holds += 1
        self.buffer.expect(self.holds)
        for index in self.of("open", "done"):
            if self.too_old(index):
                self.end(index, "stale")

    def commit(self, rng=None):
        if self.holds > self.committed:
            self.committed += 1
            self.buffer.commit(self.committed)

    def resume(self, rng):
        """Kill the run after a checkpoint, and build the buffer of the next one from it."""
        if not self.resumed < self.popped == self.committed:
            return
        assert self.buffer.cursor() <= min(self.of("open", "done"), default=len(self.state))
        for index in self.of("open", "done"):
            for known in (self.state, self.born, self.have):
                del known[index]
            for i in self.samples():
                del self.failures[index, i]
        self.new_buffer(self.buffer.progress())

    # what holds at any time

    @stateful.invariant()
    def the_books_agree(self):
        if not hasattr(self, "state"):
            return
        assert self.kept() == self.buffer.kept <= self.limit() <= self.steps * self.size
        reasons = {"filtered": self.filtering, "stale": self.expires, "redundant": self.racing}
        reasons = {"failed"} | {why for why, possible in reasons.items() if possible}
        assert set(self.buffer.dropped.values()) <= reasons
        ended = {i: why for i, why in self.state.items() if why not in ("open", "done", "trained")}
        assert self.buffer.dropped == ended and self.buffer.lost == self.lost
        assert self.expires or not self.buffer.trained, "nothing is ahead of the cursor in fifo"
        assert self.buffer.hopeless() == (self.filtered >= 2 * self.size)
        in_progress = f"{len(self.of('open'))} in progress at version {self.committed}"
        assert in_progress in self.buffer.pending()

    def teardown(self):
        """From wherever the rules stopped, the run comes to its end, and the books balance."""
        if not hasattr(self, "state"):
            return
        while self.committed < self.steps:
            before = self.popped, self.holds, self.committed
            self.admit()
            for index, i in itertools.product(self.of("open"), self.samples()):
                self.add_one(index, i, self.committed, reward=2.0 + i)
            self.go_on()
            if before[0] == self.popped:
                self.commit()
            assert (self.popped, self.holds, self.committed) != before, "deadlock"
        self.stop_tickets()
        self.the_books_agree()
        assert admit(self.buffer) == []
        assert len(self.of("trained")) == self.steps * self.size
        assert not self.of("open", "done")
        assert sorted(self.state) == list(range(len(self.state))), "no prompt is passed over"


@pytest.mark.parametrize("consume", [*CONSUME, "newest"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_random_interleavings_agree_with_the_plain_model(alpha, consume, newest):
    stateful.run_state_machine_as_test(lambda: AgainstModel(consume, alpha), settings=THOROUGH)


# -- stragglers, on a virtual clock ----------------------------------------------------------------


def length(one):
    """How long a sample takes: one in twenty takes twenty times as long as the others."""
    return 1 if derive_seed(one.group, one.sample) % 20 else 20


def simulate(consume, alpha, steps=100, size=8, slots=24):
    """A whole run: `slots` samples at a time, a train step takes 2, a publish 0.5 of the next one.
    Returns the buffer, the lengths of the samples that were trained on, and the time it took."""
    buffer = make(size, 2, alpha, consume, steps=steps)
    clock, numbers, events = 0.0, itertools.count(), []
    queue, running = deque(), {}  # of the running ones the version of the first token
    trained, training = [], False

    def later(delay, kind, what):
        heapq.heappush(events, (clock + delay, next(numbers), kind, what))

    while buffer.version < steps:
        closed = set(buffer.take_closed())
        running = {one: version for one, version in running.items() if one.group not in closed}
        queue.extend(ticket(g.index, i) for g in buffer.admit() for i in range(2))
        while queue and len(running) < slots:
            begun = queue.popleft()
            if buffer.wants(begun):
                running[begun] = buffer.version
                later(length(begun), "finished", begun)
        if buffer.batch_ready() and not training:
            trained += [length(sample.ticket) for sample in buffer.pop_batch()]
            training = True
            later(2.0, "trained", buffer.popped)
            continue
        clock, _, kind, what = heapq.heappop(events)
        if kind == "trained":
            training = False
            buffer.expect(what)
            later(0.5, "loaded", what)
        elif kind == "loaded":
            buffer.commit(what)
            for begun, version in running.items() if consume == "ready" else []:
                if what - version > math.ceil(alpha):
                    buffer.drop_if_open(begun.group, "stale")
        elif what in running:  # it may have been cancelled
            buffer.add(finished(what.group, what.sample, running.pop(what)))
    return buffer, trained, clock


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2])
def test_fifo_trains_on_the_lengths_that_were_sampled(alpha):
    buffer, trained, _ = simulate("fifo", alpha)
    sampled = [length(ticket(index, i)) for index in range(buffer.next_index) for i in range(2)]
    assert Counter(trained) == Counter(sampled) and len(trained) == 100 * 8 * 2
    assert 0.04 < sampled.count(20) / len(sampled) < 0.06
    assert buffer.dropped == {} and not buffer.lost


@pytest.mark.parametrize("alpha", [1, 2])
def test_ready_is_quicker_but_leans_towards_short_samples_and_shows_it(alpha):
    buffer, trained, seconds = simulate("ready", alpha)
    slow = trained.count(20) / len(trained)
    assert len(trained) == 100 * 8 * 2 and slow < 0.02
    stale = [index for index, why in buffer.dropped.items() if why == "stale"]
    assert len(stale) > 30 and len(stale) == len(buffer.dropped)
    assert all(max(length(ticket(index, i)) for i in range(2)) == 20 for index in stale)
    assert 0.5 * len(stale) < buffer.lost["samples"] <= 2 * len(stale)  # the quick one of the two
    assert seconds < 0.8 * simulate("fifo", alpha)[2]
