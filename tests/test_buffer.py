"""The sample buffer against a slow plain model: admission, staleness, batches, failures, resume."""

import doctest
import math
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import buffer as module
from buffer import BufferConfig, RolloutTask, Sample, SampleBuffer

ALPHAS = [0, 0.5, 1, 2, 2.5, 4]


def make(batch_size=2, group_size=2, alpha=1.0, steps=10, **resumed):
    return SampleBuffer(BufferConfig(batch_size, group_size, alpha), steps, **resumed)


def task(group, sample):
    return RolloutTask(group, sample, prompt=group, seed=0)


def finished(group, sample, version=0):
    """A sample of one prompt token and one response token."""
    return Sample(
        task(group, sample),
        ids=np.array([1, 2], np.int32),
        mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        versions=np.array([-1, version], np.int32),
        reward=0.0,
    )


def admit(buffer):
    return [group.index for group in buffer.admit()]


def complete(buffer, indices, version=0):
    for index in indices:
        for i in range(buffer.config.group_size):
            buffer.add(finished(index, i, version))


def fail_twice(buffer, index, sample=0):
    assert buffer.fail(task(index, sample))
    assert not buffer.fail(task(index, sample))


def indices_of(batch, group_size):
    """The groups of a batch, after a look at its shape: whole groups, samples in order."""
    groups = [s.task.group for s in batch][::group_size]
    expected = [(index, i) for index in groups for i in range(group_size)]
    assert [(s.task.group, s.task.sample) for s in batch] == expected
    return groups


# -- random interleavings against a plain model ----------------------------------------------------


class AgainstModel(RuleBasedStateMachine):
    """The buffer, and beside it what every admitted group has become, in one dictionary.

    As in the async loop the trainer may take the next batch before the last publish is committed,
    but publishes no second one before that: it is at most two batches ahead of the version.
    """

    @initialize(
        alpha=st.sampled_from(ALPHAS),
        batch_size=st.integers(1, 3),
        group_size=st.integers(1, 3),
        steps=st.integers(1, 6),
    )
    def begin(self, alpha, batch_size, group_size, steps):
        self.alpha, self.size, self.n, self.steps = alpha, batch_size, group_size, steps
        self.buffer = make(batch_size, group_size, alpha, steps)
        self.state: dict[int, str] = {}  # by admission index: open, done, trained, or a reason
        self.born: dict[int, int] = {}  # the version at admission
        self.have: dict[int, set[int]] = {}
        self.failures: dict[tuple[int, int], int] = {}
        self.popped = 0  # also the version that the trainer holds when it takes the next batch

    # what the model says

    def of(self, *states):
        return [index for index, state in self.state.items() if state in states]

    def kept(self):
        return len(self.of("open", "done", "trained"))

    def limit(self):
        ahead = (self.buffer.version + 1) * self.size + math.ceil(self.alpha * self.size)
        return min(ahead, self.steps * self.size)

    def next_batch(self):
        oldest = sorted(self.of("open", "done"))[: self.size]
        whole = len(oldest) == self.size and all(self.state[i] == "done" for i in oldest)
        return oldest if whole else None

    def pick(self, data):
        """Any sample of any group, also of one that was dropped, finished or never admitted."""
        group = data.draw(st.integers(0, len(self.state)))
        return group, data.draw(st.integers(0, self.n - 1))

    # what may happen, in any order

    @rule()
    def admit(self):
        for index in admit(self.buffer):
            assert index == len(self.state), "admission indices are consecutive"
            self.state[index] = "open"
            self.born[index], self.have[index] = self.buffer.version, set()
        assert self.kept() == self.limit(), "no credit is lost, and none is made"

    @rule(data=st.data())
    def add(self, data):
        self.add_one(*self.pick(data))

    @rule(data=st.data())
    def finish_a_group(self, data):
        if self.of("open"):
            index = data.draw(st.sampled_from(self.of("open")))
            for i in range(self.n):
                self.add_one(index, i)

    def add_one(self, index, i):
        wanted = self.state.get(index) == "open" and i not in self.have[index]
        assert self.buffer.wants(task(index, i)) == wanted
        whole = wanted and len(self.have[index]) == self.n - 1
        assert self.buffer.add(finished(index, i, self.born.get(index, 0))) == whole
        if wanted:
            self.have[index].add(i)
        if whole:
            self.state[index] = "done"

    @rule(data=st.data())
    def fail(self, data):
        index, i = self.pick(data)
        wanted = self.state.get(index) == "open" and i not in self.have[index]
        count = self.failures.get((index, i), 0)
        assert self.buffer.fail(task(index, i)) == (wanted and count == 0)
        if wanted:
            self.failures[index, i] = count + 1
            if count:
                self.state[index] = "failed"

    @rule(data=st.data())
    def drop(self, data):
        if self.of("open"):
            index = data.draw(st.sampled_from(self.of("open")))
            self.buffer.drop(index, "filtered")
            self.state[index] = "filtered"

    @rule()
    def pop(self):
        expected = self.next_batch()
        assert self.buffer.batch_ready() == (expected is not None)
        if expected is None:
            with pytest.raises(ValueError, match="no batch yet"):
                self.buffer.pop_batch()
        elif self.popped < self.buffer.version + 2:
            batch = self.buffer.pop_batch()
            assert indices_of(batch, self.n) == expected
            for sample in batch:
                staleness = sample.staleness(self.popped)
                assert 0 <= staleness <= math.ceil(self.alpha)
            self.state.update(dict.fromkeys(expected, "trained"))
            self.popped += 1

    @precondition(lambda self: self.popped > self.buffer.version)
    @rule()
    def commit(self):
        self.buffer.commit(self.buffer.version + 1)

    @precondition(lambda self: self.popped == self.buffer.version)
    @rule()
    def resume(self):
        """Kill the run after a checkpoint, and build the buffer of the next one from it."""
        cursor = self.buffer.cursor()
        for index, state in self.state.items():
            assert (state in ("open", "done")) <= (index >= cursor)
            assert (state == "trained") <= (index < cursor)
        dropped = self.buffer.dropped_before(cursor)
        version = self.buffer.version
        self.buffer = make(
            self.size, self.n, self.alpha, self.steps,
            version=version, first_index=cursor, dropped=dropped,
        )  # fmt: skip
        for known in (self.state, self.born, self.have):
            for index in [i for i in known if i >= cursor]:
                del known[index]
        self.failures = {k: v for k, v in self.failures.items() if k[0] < cursor}

    # what holds at any time

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "state"):
            return
        assert self.kept() <= self.limit()
        reasons = {i: why for i, why in self.state.items() if why in ("failed", "filtered")}
        assert self.buffer.dropped == reasons
        assert self.buffer.count_dropped("failed") == len(self.of("failed"))
        in_progress = f"{len(self.of('open'))} in progress at version {self.buffer.version}"
        assert in_progress in self.buffer.pending()

    def teardown(self):
        """From wherever the rules stopped, the run comes to its end, and the books balance."""
        if not hasattr(self, "state"):
            return
        while self.popped < self.steps or self.buffer.version < self.steps:
            before = self.popped, self.buffer.version
            self.admit()
            for index in self.of("open"):
                for i in range(self.n):
                    self.add_one(index, i)
            self.pop()
            if self.popped > self.buffer.version:
                self.commit()
            assert (self.popped, self.buffer.version) != before, "deadlock"
        assert admit(self.buffer) == []
        assert len(self.of("trained")) == self.steps * self.size
        assert not self.of("open", "done")
        assert self.buffer.cursor() == len(self.state) == self.buffer.next_index


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy
)


# -- admission and staleness -----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_slow_trainer_reaches_the_staleness_bound_and_never_passes_it(alpha):
    buffer = make(batch_size=4, alpha=alpha, steps=20)
    seen = []
    for version in range(20):
        complete(buffer, admit(buffer), version)  # generation is done at once, then it waits
        seen += [s.staleness(version) for s in buffer.pop_batch()]
        buffer.commit(version + 1)
    assert max(seen) == math.ceil(alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_admission_stops_at_the_limit_of_each_version(alpha):
    buffer = make(batch_size=4, alpha=alpha, steps=50)
    admitted = 0
    for version in range(5):
        admitted += len(admit(buffer))
        assert admitted == (version + 1) * 4 + math.ceil(alpha * 4)
        assert admit(buffer) == []
        buffer.commit(version + 1)


def test_alpha_zero_admits_nothing_between_a_batch_and_its_commit():
    buffer = make(batch_size=3, alpha=0)
    first = admit(buffer)
    complete(buffer, first)
    buffer.pop_batch()
    assert admit(buffer) == []
    buffer.commit(1)
    assert admit(buffer) == [3, 4, 5]


def test_a_fraction_of_a_group_rounds_up():
    assert admit(make(batch_size=3, alpha=0.5)) == [0, 1, 2, 3, 4]  # 3 + ceil(1.5)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_more_than_steps_times_batch_size_in_all(alpha):
    buffer = make(batch_size=2, alpha=alpha, steps=3)
    trained = []
    for version in range(3):
        complete(buffer, admit(buffer))
        trained += indices_of(buffer.pop_batch(), 2)
        buffer.commit(version + 1)
    assert trained == list(range(6)) and admit(buffer) == []


def test_a_version_is_committed_again_but_never_a_lower_one():
    buffer = make()
    buffer.commit(2)
    buffer.commit(2)
    assert buffer.version == 2
    with pytest.raises(ValueError, match="version 1 committed after 2"):
        buffer.commit(1)
    assert buffer.version == 2


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_is_in_admission_order_whatever_the_order_of_arrival():
    buffer = make(batch_size=3, group_size=2, alpha=1)
    arrivals = [(index, i) for index in admit(buffer) for i in range(2)]
    random.Random(0).shuffle(arrivals)
    for index, i in arrivals:
        buffer.add(finished(index, i))
    assert indices_of(buffer.pop_batch(), 2) == [0, 1, 2]
    assert indices_of(buffer.pop_batch(), 2) == [3, 4, 5]


def test_a_straggler_is_waited_for_and_not_passed_over():
    buffer = make(batch_size=2, group_size=1, alpha=2)
    complete(buffer, admit(buffer)[1:])
    assert not buffer.batch_ready()
    with pytest.raises(ValueError, match="waiting for 0 of 2 groups ready, 1 in progress.*0:1"):
        buffer.pop_batch()
    complete(buffer, [0])
    assert indices_of(buffer.pop_batch(), 1) == [0, 1]


def test_staleness_counts_from_the_lowest_version_of_the_sampled_tokens():
    sample = finished(0, 0)
    sample.mask = np.array([False, True, True, False, True])
    sample.versions = np.array([-1, 3, 2, -1, 4], np.int32)
    assert sample.staleness(7) == 5


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_sample_is_tried_once_more_then_its_group_is_replaced():
    buffer = make(batch_size=2, group_size=2, alpha=0)
    admit(buffer)
    buffer.add(finished(0, 0))
    fail_twice(buffer, 0, sample=1)
    assert buffer.dropped == {0: "failed"}
    assert admit(buffer) == [2]  # at once, at the same version
    complete(buffer, [1, 2])
    assert indices_of(buffer.pop_batch(), 2) == [1, 2]


def test_each_sample_has_a_retry_of_its_own():
    buffer = make(batch_size=1, group_size=3, alpha=0)
    admit(buffer)
    assert all(buffer.fail(task(0, i)) for i in range(3))
    complete(buffer, [0])
    assert len(buffer.pop_batch()) == 3 and buffer.dropped == {}


def test_late_results_of_a_dropped_group_are_ignored():
    buffer = make(batch_size=1, group_size=2, alpha=0)
    admit(buffer)
    buffer.drop(0, "filtered")
    assert not buffer.wants(task(0, 0))
    assert not buffer.add(finished(0, 0)) and not buffer.add(finished(0, 1))
    assert not buffer.fail(task(0, 0)) and not buffer.fail(task(0, 0))
    assert buffer.dropped == {0: "filtered"} and not buffer.batch_ready()
    assert admit(buffer) == [1]


def test_the_first_of_two_results_for_one_sample_counts():
    buffer = make(batch_size=1, group_size=2, alpha=0)
    admit(buffer)
    first, second = finished(0, 0), finished(0, 0)
    buffer.add(first)
    assert not buffer.add(second)
    buffer.add(finished(0, 1))
    assert buffer.pop_batch()[0] is first


def test_dropping_the_straggler_frees_the_batch_behind_it():
    buffer = make(batch_size=2, group_size=1, alpha=1)
    complete(buffer, admit(buffer)[1:])
    assert not buffer.batch_ready()
    buffer.drop(0, "stale")
    assert indices_of(buffer.pop_batch(), 1) == [1, 2]


def test_when_everything_fails_replacements_keep_coming():
    buffer = make(batch_size=2, group_size=1, alpha=0.5, steps=2)
    waiting, seen = [], 0
    for _ in range(100):
        waiting += admit(buffer)
        assert len(waiting) == 3  # as many as the version allows, however many were dropped
        fail_twice(buffer, waiting.pop(0))
        seen += 1
    assert buffer.count_dropped("failed") == seen == 100


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
    known = dict.fromkeys([10, 20, 30, 40, 50], "failed")
    buffer = make(batch_size=5, group_size=1, version=20, steps=40, first_index=105, dropped=known)
    fail_twice(buffer, admit(buffer)[0])
    assert buffer.count_dropped("failed") == 6
    assert not buffer.too_many_failed()  # 6 of the 106 groups that ended, and 1 since the resume


# -- resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
def test_capacity_after_a_resume_is_that_of_the_version(alpha):
    buffer = make(batch_size=4, alpha=alpha, steps=50, version=7, first_index=31)
    assert admit(buffer) == list(range(31, 31 + 4 + math.ceil(alpha * 4)))


def test_a_resumed_run_trains_on_each_prompt_exactly_once():
    first = make(batch_size=2, group_size=1, alpha=2, steps=4)
    admit(first)  # 0 to 5
    fail_twice(first, 1)
    complete(first, [0, 2, 4])  # 3 and 5 are in progress, 4 waits for 3
    trained = indices_of(first.pop_batch(), 1)
    first.commit(1)
    admit(first)
    fail_twice(first, 5)  # after the cursor: the resumed run gives it another chance
    assert first.cursor() == 3 and first.dropped_before(3) == {1: "failed"}

    second = make(
        batch_size=2, group_size=1, alpha=2, steps=4,
        version=first.version, first_index=3, dropped=first.dropped_before(3),
    )  # fmt: skip
    for version in range(1, 4):
        complete(second, admit(second))
        trained += indices_of(second.pop_batch(), 1)
        second.commit(version + 1)
    assert trained == [0, 2, 3, 4, 5, 6, 7, 8] and second.dropped == {1: "failed"}


def test_cursor_of_an_untouched_buffer_and_after_everything_was_handed_out():
    buffer = make(batch_size=2, alpha=0)
    assert buffer.cursor() == 0
    complete(buffer, admit(buffer))
    assert buffer.cursor() == 0  # finished, but not handed out
    buffer.pop_batch()
    assert buffer.cursor() == 2


# -- cost, settings, examples ----------------------------------------------------------------------


def seconds_per_sample(groups, group_size=8):
    buffer = make(batch_size=groups // 4, group_size=group_size, alpha=3)
    indices = admit(buffer)
    assert len(indices) == groups
    blank = {"ids": None, "mask": None, "logprobs": None, "versions": None, "reward": 0.0}
    tasks = (task(index, i) for index in reversed(indices) for i in range(group_size))
    samples = [Sample(each, **blank) for each in tasks]
    start = time.process_time()
    for sample in samples:  # newest first: everything waits for the oldest
        buffer.wants(sample.task)
        buffer.add(sample)
    for _ in range(4):
        buffer.cursor()
        buffer.pop_batch()
    return (time.process_time() - start) / len(samples)


def test_cost_per_sample_is_flat_from_a_thousand_to_a_hundred_thousand_in_flight():
    few = min(seconds_per_sample(124) for _ in range(5))
    many = seconds_per_sample(12_500)
    assert many < 10 * few + 1e-6  # linear growth would make it a hundred times as much


@pytest.mark.parametrize(
    "wrong", [{"batch_size": -1}, {"group_size": 0}, {"alpha": -1}, {"alpha": math.nan}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))} must be"):
        BufferConfig(**wrong)


def test_examples_in_the_docstrings():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
