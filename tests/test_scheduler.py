"""The scheduler and its dispatcher, with workers that are only pipes. What holds at any time:

- no ticket is lost, and none is with two workers: it is queued, held by one worker, or has ended;
- no worker with room waits while tickets are queued, and none holds more than it may;
- nothing is handed out before all workers hold the first weights, nor is anything admitted for a
  version before all hold that one;
- a publish is committed only if every worker agrees with the trainer on its probe;
- a failed sample is tried once more, then done without: its group leaves, and another takes its
  place;
- what runs for a group that has ended is stopped, and what it still sends is ignored;
- a worker that is lost takes nothing along: its tickets are next, and its successor decodes nothing
  before it holds the version that the others hold;
- a run that cannot go on (no signal, most groups fail, too few held-out prompts) ends and says why.
"""

import math
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import Pipes

from buffer import Sample, SampleBuffer, Ticket
from plumbing.processes import LOADING, RolloutError
from plumbing.settings import Settings
from plumbing.weights import Broken, Manifest
from rollout import Dispatcher, Scheduler

MANIFEST = Manifest(["w"], [[2]], "float32", 2**20)
FAILURE = "Traceback\nKeyError: 'x'"


def ticket(group, sample=0, **more):
    return Ticket(group, sample, prompt_id=group, seed=7, **more)


# -- the dispatcher: one queue, and the emptiest worker is next ------------------------------------


def test_tickets_go_out_in_order_to_the_emptiest_worker_with_room():
    dispatcher = Dispatcher(workers=2, places=2, fixed=2)
    dispatcher.held[0].add(ticket(90))
    dispatcher.queue.extend(ticket(i) for i in range(5))
    assert dispatcher.assign() == {1: [ticket(0), ticket(2)], 0: [ticket(1)]}
    assert list(dispatcher.queue) == [ticket(3), ticket(4)]
    assert dispatcher.assign() == {}  # both have all that they may
    dispatcher.held[0].discard(ticket(1))
    assert dispatcher.assign() == {0: [ticket(3)]}


def test_a_ticket_at_the_front_of_the_queue_is_next():
    dispatcher = Dispatcher(1, 1, fixed=1)
    dispatcher.queue.extend([ticket(1), ticket(2)])
    dispatcher.queue.appendleft(ticket(0))  # a retry
    assert dispatcher.assign() == {0: [ticket(0)]}


def test_cancel_forgets_queued_tickets_of_the_group_and_names_the_running_ones():
    dispatcher = Dispatcher(3, 2, fixed=2)
    tickets = [ticket(g, i) for g in range(3) for i in range(3)]
    dispatcher.queue.extend(tickets)
    dispatcher.assign()  # six of the nine: groups 0 and 1
    stop = dispatcher.cancel(1)
    assert sorted(t for held in stop.values() for t in held) == [ticket(1, i) for i in range(3)]
    assert all(t.group == 0 for held in dispatcher.held for t in held)
    assert dispatcher.cancel(2) == {} and dispatcher.cancel(2) == {}  # none of it was running
    for held in dispatcher.held:
        held.clear()
    assert dispatcher.assign() == {} and not dispatcher.queue  # nor will it


def test_a_worker_is_given_more_at_a_time_only_while_its_engine_starves():
    dispatcher = Dispatcher(workers=1, places=16)
    assert dispatcher.in_hand == 18  # an eighth more than it can run
    for _ in range(100):
        dispatcher.widen()
    assert dispatcher.in_hand == 64
    fixed = Dispatcher(1, 16, fixed=20)
    fixed.widen()
    assert fixed.in_hand == 20


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_loses_and_doubles_no_ticket_and_leaves_no_room_unused(seed):
    rng = random.Random(seed)
    workers, room = rng.randint(1, 4), rng.randint(1, 5)
    dispatcher = Dispatcher(workers, room, room)
    made, ended = [], set()
    for step in range(200):
        for _ in range(rng.randint(0, 3)):
            made.append(ticket(step, len(made)))
            dispatcher.queue.append(made[-1])
        given = dispatcher.assign()
        assert all(set(tickets) <= dispatcher.held[worker] for worker, tickets in given.items())
        assert all(len(held) <= room for held in dispatcher.held)
        queue = [t for t in dispatcher.queue if t not in ended]
        assert not queue or all(len(held) == room for held in dispatcher.held)
        for held in dispatcher.held:
            for one in [t for t in sorted(held) if rng.random() < 0.3]:
                held.discard(one)
                ended.add(one)
        if rng.random() < 0.2:
            group = rng.randint(0, step)
            live = [t for t in made if t not in ended and t.group == group]
            queued = [t for t in queue if t.group == group]
            stop = [t for tickets in dispatcher.cancel(group).values() for t in tickets]
            assert sorted(stop + queued) == live
            ended.update(live)
        running = [t for held in dispatcher.held for t in held]
        queued = [t for t in dispatcher.queue if t not in ended]
        assert sorted([*queued, *running, *ended]) == made


class Sealed(deque):
    """A queue of which one may see whether there is anything in it, and no more."""

    def seal(self, *_):
        raise AssertionError("somebody searches the queue")

    __iter__ = __getitem__ = __contains__ = popleft = pop = seal


def test_tickets_of_a_lost_worker_are_next_and_it_gets_none_while_it_is_away():
    dispatcher = Dispatcher(workers=2, places=2, fixed=2)
    dispatcher.queue.extend(ticket(i) for i in range(6))
    dispatcher.assign()
    assert dispatcher.lose(0) == []
    assert list(dispatcher.queue) == [ticket(i) for i in (0, 2, 4, 5)]
    assert dispatcher.assign() == {}
    dispatcher.held[1].clear()
    assert dispatcher.assign() == {1: [ticket(0), ticket(2)]}
    dispatcher.away.discard(0)
    assert dispatcher.assign() == {0: [ticket(4), ticket(5)]}


def test_what_was_in_hand_at_two_deaths_goes_out_one_at_a_time_until_a_third_tells_which_it_is():
    dispatcher = Dispatcher(workers=1, places=4, fixed=4)
    dispatcher.queue.extend(ticket(i) for i in range(3))
    dispatcher.assign()
    for _ in range(2):
        assert dispatcher.lose(0) == []
        dispatcher.away.clear()
        dispatcher.assign()
    dispatcher.queue.append(ticket(9))
    assert dispatcher.assign() == {0: [ticket(9)]}  # nothing holds this one up
    assert dispatcher.held[0] == {ticket(0), ticket(9)}
    dispatcher.held[0].discard(ticket(0))  # it was not this one
    assert dispatcher.assign() == {0: [ticket(1)]}
    assert dispatcher.lose(0) == [ticket(1)]  # but this one
    dispatcher.away.clear()
    assert dispatcher.assign() == {0: [ticket(9), ticket(2)]}


@pytest.mark.parametrize("seed", range(20))
def test_one_poisonous_ticket_costs_three_workers_and_harms_no_other(seed):
    rng = random.Random(seed)
    workers, places = rng.randint(1, 3), rng.randint(1, 6)
    dispatcher = Dispatcher(workers, places, fixed=places)
    tickets = [ticket(i) for i in range(40)]
    dispatcher.queue.extend(tickets)
    poison, ended, dropped, deaths = rng.choice(tickets), [], [], 0
    while len(ended) + len(dropped) < 40:
        dispatcher.assign()
        worker = rng.randrange(workers)
        if poison in dispatcher.held[worker] and rng.random() < 0.3:
            dropped += dispatcher.lose(worker)
            dispatcher.away.clear()
            deaths += 1
        elif others := sorted(dispatcher.held[worker] - {poison}):
            ended.append(rng.choice(others))
            dispatcher.held[worker].discard(ended[-1])
    assert dropped == [poison] and deaths == 3
    assert sorted(ended) == [one for one in tickets if one != poison]


def test_without_room_the_longest_queue_is_not_looked_at():
    dispatcher = Dispatcher(4, 2, fixed=2)
    dispatcher.queue.extend(ticket(i) for i in range(100_000))
    dispatcher.assign()
    dispatcher.queue = Sealed(dispatcher.queue)
    assert dispatcher.assign() == {}
    assert len(dispatcher.cancel(0)) == 1  # nor is it when a group ends
    assert len(dispatcher.queue) == 100_000 - 8


# -- the scheduler, with workers that are only pipes -----------------------------------------------


class Willing(Pipes):
    """These pause as soon as they are told of an update."""

    def send(self, worker, *message):
        super().send(worker, *message)
        if message[0] == "update":
            self.say(worker, "paused", message[1])


class Owner:
    """A scheduler whose workers are ready, and what they say to it."""

    def __init__(self, workers=2, places=8, dtype="float32", **buffer):
        buffer = {"batch_size": 2, "group_size": 2, "alpha": 0} | buffer
        settings = Settings(rollout_workers=workers, max_num_seqs=places, worker_timeout=1e9)
        self.buffer = SampleBuffer(steps=10, **buffer)
        self.workers = Willing(workers)
        self.scheduler = Scheduler(self.workers, settings, self.buffer, ticket, dtype=dtype)
        self.workers.listen(self.scheduler, settings)
        for worker in range(workers):
            self.workers.say(worker, "ready")

    def results(self, worker, samples=(), failures=(), too_old=(), **counts):
        results = list(samples), list(failures), list(too_old), counts, []
        self.workers.say(worker, "results", *results)

    def told(self, worker):
        """What this worker has been sent since the last look."""
        return self.workers.told(worker)

    def tickets(self, worker):
        return [one for kind, *args in self.told(worker) if kind == "tickets" for one in args[0]]

    def pause(self, version, sent=0):
        self.scheduler.pause(version, MANIFEST, [3, 4, 5], np.zeros(2))
        if sent is not None:
            self.scheduler.publisher.sent(sent)

    def loaded(self, worker, version, score=0.0, sums=((0, 0),)):
        self.workers.say(worker, "loaded", version, [score, 0.0], sums)

    def publish(self, version, scores=(0.0, 0.0)):
        self.pause(version)
        for worker, score in zip(range(self.workers.count), scores, strict=True):
            self.loaded(worker, version, score)


def done(one, version=0):
    ids, mask = np.array([1, 2], np.int32), np.array([False, True])
    return Sample(one, ids, mask, np.zeros(2, np.float32), np.array([-1, version], np.int32), 1.0)


def test_nothing_is_handed_out_before_every_worker_has_the_first_weights():
    owner = Owner()
    owner.results(0)
    assert owner.told(0) == owner.told(1) == []
    owner.pause(0)
    for worker in range(2):
        ((kind, version, manifest, probe_ids),) = owner.told(worker)
        assert (kind, version, probe_ids) == ("update", 0, [3, 4, 5])
        assert Manifest(**manifest) == MANIFEST
    owner.loaded(0, 0)
    owner.results(0)
    assert owner.told(0) == owner.told(1) == [] and not owner.scheduler.decoding
    owner.loaded(1, 0)
    assert owner.scheduler.decoding and owner.buffer.version == 0
    first, second = owner.told(0), owner.told(1)
    assert first[0] == second[0] == ("commit", 0)  # before any ticket
    tickets = [one for _, given in (*first[1:], *second[1:]) for one in given]
    assert sorted(tickets) == [ticket(g, i) for g in range(2) for i in range(2)]


def test_version_and_admission_advance_only_when_the_last_worker_has_loaded():
    owner = Owner()
    owner.publish(0)
    for worker in range(2):
        owner.results(worker, [done(one) for one in owner.tickets(worker)])
    assert len(owner.scheduler.get_batch(1)) == 4
    owner.pause(1)
    owner.told(0), owner.told(1)
    owner.loaded(1, 1)
    owner.results(0)
    assert owner.buffer.version == 0 and owner.told(0) == owner.told(1) == []
    owner.loaded(0, 1)
    assert owner.buffer.version == 1
    new = sorted(owner.tickets(0) + owner.tickets(1))
    assert new == [ticket(g, i) for g in (2, 3) for i in (0, 1)]


def test_a_worker_may_be_silent_for_long_while_it_receives_and_loads():
    owner = Owner(workers=2)
    owner.pause(0, sent=None)
    assert owner.workers.slack == {}
    owner.scheduler.publisher.receive()
    assert owner.workers.slack == {0: LOADING, 1: LOADING}
    assert [kind for kind, *_ in owner.told(0)] == ["update", "receive"]
    owner.loaded(0, 0)
    assert owner.workers.slack == {1: LOADING}


def test_weights_are_held_against_what_was_sent_before_the_commit():
    owner = Owner()
    owner.pause(0, sent=None)
    for worker in range(2):
        owner.loaded(worker, 0, sums=[(7, 7)])
    assert not owner.scheduler.decoding  # what was sent is not known yet
    owner.scheduler.publisher.sent(7)
    assert owner.buffer.version == 0 and owner.scheduler.decoding
    owner.pause(1, sent=8)
    owner.loaded(0, 1, sums=[(8, 8)])
    with pytest.raises(RolloutError, match="not all weights of version 1 arrived .* process 1"):
        owner.loaded(1, 1, sums=[(7, 8)])
    assert owner.buffer.version == 0


# -- workers that are lost -------------------------------------------------------------------------


def running(**settings):
    """Two workers that decode under version 0; the tickets that each has in hand."""
    owner = Owner(**settings)
    owner.publish(0)
    return owner, owner.tickets(0), owner.tickets(1)


def test_others_go_on_with_the_tasks_of_a_lost_worker_and_its_failures_are_not_theirs(capsys):
    owner, first, second = running(places=8)
    owner.workers.lose(0)
    assert owner.tickets(1) == first
    assert "rollout process 0 died: a new one starts, its 2 tasks are queued again" in (
        capsys.readouterr().err
    )
    owner.results(1, [done(one) for one in first + second])
    assert len(owner.scheduler.get_batch(1)) == 4
    assert not owner.buffer.dropped
    counts = owner.scheduler.news()["counts"]
    assert counts["restarts"] == 1 and counts["failed_samples"] == 0


def test_a_successor_is_published_to_alone_and_decodes_nothing_before():
    owner, first, _ = running(alpha=1)
    assert owner.workers.told(0) == []
    owner.workers.lose(0)
    owner.told(1)
    owner.workers.say(0, "ready")
    assert owner.told(0) == [] and owner.scheduler.publisher.behind
    assert owner.scheduler.get_batch(60) is None  # the trainer is to publish
    assert owner.scheduler.pause(0, MANIFEST, [3, 4, 5], np.zeros(2)) == [0]
    assert owner.told(1) == []  # which goes on to decode
    owner.scheduler.publisher.sent(0)
    owner.loaded(0, 0)
    assert owner.told(0) == [("update", 0, MANIFEST.__dict__, [3, 4, 5]), ("commit", 0)]
    assert not owner.scheduler.publisher.behind
    owner.scheduler.dispatcher.queue.append(ticket(9))
    owner.results(1)
    assert owner.tickets(0) == [ticket(9)]  # it is one of them again


@pytest.mark.parametrize("when", ["before it paused", "when it had", "when it had loaded"])
def test_a_publish_goes_on_without_a_member_that_is_lost(when):
    owner, *_ = running()
    publisher = owner.scheduler.publisher
    if when == "before it paused":
        with ThreadPoolExecutor(1) as pool:
            owner.workers.send = Pipes.send.__get__(owner.workers)  # nobody pauses of himself
            pausing = pool.submit(owner.scheduler.pause, 1, MANIFEST, [3, 4, 5], np.zeros(2))
            assert owner.workers.ends[0].poll(60)
            owner.workers.lose(0)
            owner.workers.say(1, "paused", 1)
            assert pausing.result() == [1]
        publisher.sent(0)
    else:
        owner.pause(1)
        if when == "when it had loaded":
            owner.loaded(0, 1)
        owner.workers.lose(0)
        assert not publisher.update.broken
    owner.loaded(1, 1)
    assert owner.buffer.version == 1 and publisher.update is None
    assert publisher.versions == {1: 1}


def test_all_that_were_receiving_with_a_lost_worker_are_replaced_and_the_publish_repeated():
    owner, *_ = running()
    publisher = owner.scheduler.publisher
    owner.pause(1, sent=None)
    publisher.receive()
    owner.workers.lose(0)
    for call in (publisher.alive, publisher.receive, publisher.wait_joined):
        with pytest.raises(Broken):
            call()
    publisher.wait_committed()  # it is abandoned
    assert owner.workers.lives == {0: 1, 1: 1}
    assert len(owner.workers.faults) == 1  # the second is none of its own
    assert publisher.versions == {} and owner.buffer.version == 0
    for worker in range(2):
        owner.workers.say(worker, "ready")
    owner.publish(1)
    assert owner.buffer.version == 1 and publisher.versions == {0: 1, 1: 1}
    everything = [ticket(g, i) for g in range(4) for i in (0, 1)]
    assert sorted(owner.tickets(0) + owner.tickets(1)) == everything


def test_when_all_members_are_lost_nothing_is_committed_until_one_is_back():
    owner, *_ = running(workers=2)
    owner.pause(1)
    for worker in range(2):
        owner.workers.lose(worker)
    assert owner.scheduler.publisher.update is None and owner.buffer.version == 0
    owner.workers.say(0, "ready")
    owner.pause(1)
    owner.loaded(0, 1)
    assert owner.buffer.version == 1 and ticket(0, 0) in owner.tickets(0)


def test_a_prompt_that_killed_three_workers_is_dropped_and_another_takes_its_place(capsys):
    owner = Owner(workers=1)
    owner.publish(0, (0.0,))
    for _ in range(3):
        tickets = owner.tickets(0)
        assert ticket(0, 0) in tickets
        owner.results(0, [done(one) for one in tickets if one.group])
        owner.workers.lose(0)
        owner.workers.say(0, "ready")
        owner.publish(0, (0.0,))
    assert owner.buffer.dropped == {0: "killed"}
    assert "dropped prompt 0: three rollout processes died with it in hand" in (
        capsys.readouterr().err
    )
    assert owner.tickets(0) == [ticket(2, 0), ticket(2, 1)]


def test_more_restarts_than_allowed_end_the_run():
    owner, *_ = running()
    for _ in range(5):
        owner.workers.lose(0)
    with pytest.raises(RolloutError, match="process 0 died; 5 were replaced within 10 minutes"):
        owner.workers.lose(0)
    owner.workers.faults = [when - 601 for when in owner.workers.faults]  # that was long ago
    owner.workers.lose(0)


# -- what is wrong with weights --------------------------------------------------------------------


@pytest.mark.parametrize("score", [2e-3, -2e-3, math.nan])
def test_a_worker_that_disagrees_with_the_trainer_ends_the_run_before_the_commit(score):
    owner = Owner()
    with pytest.raises(RolloutError, match="trainer and engine disagree .* version 0"):
        owner.publish(0, (0.0, score))
    assert [kind for kind, *_ in owner.told(0)] == ["update"] and not owner.scheduler.decoding


def test_in_low_precision_the_first_mismatch_sets_the_limit():
    owner = Owner(dtype="bfloat16")
    owner.publish(0, (0.02, 0.01))
    owner.publish(1, (0.19, 0.0))
    assert owner.scheduler.mismatch(1) == (0.19, pytest.approx(0.19 / 4))
    with pytest.raises(RolloutError, match="version 2"):
        owner.publish(2, (0.21, 0.0))


def test_a_failed_sample_is_retried_ahead_of_the_queue_and_its_group_then_given_up(capsys):
    owner = Owner(workers=1, places=1, alpha=1)  # two tickets at a time: one running, one at hand
    owner.publish(0, (0.0,))
    assert owner.tickets(0) == [ticket(0, 0), ticket(0, 1)]
    owner.results(0, failures=[(ticket(0, 0), FAILURE)])
    assert owner.tickets(0) == [ticket(0, 0)]  # the same ticket, same seed, ahead of group 1
    owner.results(0, failures=[(ticket(0, 0), FAILURE)])
    cancel, tickets = owner.told(0)
    assert cancel == ("cancel", [ticket(0, 1)])
    assert tickets == ("tickets", [ticket(1, 0), ticket(1, 1)])
    assert owner.buffer.dropped == {0: "failed"}
    assert "dropped prompt 0, which failed twice: KeyError: 'x'" in capsys.readouterr().err
    owner.results(0, [done(ticket(0, 1))])  # it was on its way: too late
    assert owner.told(0) == [] and not owner.buffer.wants(ticket(0, 1))
    groups = {one.group for one in owner.scheduler.dispatcher.queue}
    assert groups == {2, 3, 4}  # the next prompt takes the place of group 0


def test_losers_of_a_race_are_stopped_and_their_queued_tickets_forgotten():
    owner = Owner(workers=1, places=4, redundant_samples=1)  # 3 samples a group, 2 are needed
    owner.publish(0, (0.0,))
    assert owner.tickets(0) == [*(ticket(0, i) for i in range(3)), ticket(1, 0), ticket(1, 1)]
    owner.results(0, [done(ticket(0, 2)), done(ticket(0, 0))])
    assert owner.told(0) == [("cancel", [ticket(0, 1)]), ("tickets", [ticket(1, 2)])]
    owner.results(0, [done(ticket(1, 0)), done(ticket(1, 1))])
    assert owner.told(0) == [("cancel", [ticket(1, 2)])]
    batch = owner.scheduler.get_batch(1)
    assert [s.ticket[:2] for s in batch] == [(0, 0), (0, 2), (1, 0), (1, 1)]


def test_at_alpha_0_a_full_batch_stops_the_groups_that_lost():
    owner = Owner(workers=1, places=8, consume="ready", redundant_groups=1)
    owner.publish(0, (0.0,))
    assert len(owner.tickets(0)) == 6
    owner.results(0, [done(ticket(g, i)) for g in (0, 2) for i in (0, 1)])
    assert {s.ticket.group for s in owner.scheduler.get_batch(1)} == {0, 2}
    ((kind, stopped),) = owner.told(0)
    assert kind == "cancel" and sorted(stopped) == [ticket(1, 0), ticket(1, 1)]
    owner.results(0)
    assert owner.tickets(0) == [] and owner.buffer.dropped == {1: "redundant"}
    owner.publish(1, (0.0,))
    assert {one.group for one in owner.tickets(0)} == {3, 4, 5}


def test_a_group_with_an_episode_that_got_too_old_is_dropped_and_replaced():
    owner = Owner(workers=1, places=16, consume="ready", alpha=1)
    owner.publish(0, (0.0,))
    assert {one.group for one in owner.tickets(0)} == {0, 1, 2, 3}
    owner.results(0, too_old=[ticket(1, 0)])
    given = ("tickets", [ticket(4, 0), ticket(4, 1)])
    assert owner.told(0) == [("cancel", [ticket(1, 1)]), given]
    assert owner.buffer.dropped == {1: "stale"}
    owner.results(0, too_old=[ticket(1, 1)])  # it was on its way
    assert owner.told(0) == []


def test_filtering_without_end_ends_the_run_and_names_the_setting():
    owner = Owner(workers=1, places=64, filter_groups=True, filter_limit=2)
    owner.publish(0, (0.0,))
    with pytest.raises(RolloutError, match="no signal: 4 groups dropped, --filter_limit 2"):
        for index in range(9):
            owner.results(0, [done(ticket(index, i)) for i in (0, 1)])


def test_a_starving_engine_gets_more_tickets_only_while_some_are_waiting():
    owner = Owner(workers=1, places=8, batch_size=8, group_size=8)
    owner.publish(0, (0.0,))
    assert len(owner.tickets(0)) == 9
    owner.results(0, steps_below_cap=1)
    assert len(owner.tickets(0)) == 2 and owner.scheduler.dispatcher.in_hand == 11
    owner.scheduler.dispatcher.queue.clear()
    owner.results(0, steps_below_cap=1)
    assert owner.scheduler.dispatcher.in_hand == 11
    assert owner.scheduler.news()["counts"]["steps_starved"] == 1


def test_which_prompts_were_dropped_is_told_once():
    owner = Owner(workers=1, places=64, filter_groups=True)
    owner.publish(0, (0.0,))
    owner.results(0, [done(ticket(1, i)) for i in (0, 1)])
    news = owner.scheduler.news()
    assert news["dropped_prompts"] == [("filtered", 1)]
    assert news["dropped_groups"] == [("filtered", 1)]
    news = owner.scheduler.news()
    assert news["dropped_prompts"] == [] and news["dropped"] == {"filtered": 1}


def test_every_failure_is_counted_also_one_that_the_retry_mends():
    owner = Owner(workers=1, places=64)
    owner.publish(0, (0.0,))
    owner.results(0, failures=[(ticket(0), FAILURE)])
    assert owner.scheduler.news()["counts"]["failed_samples"] == 1
    assert not owner.buffer.dropped


def test_when_most_groups_fail_the_run_ends_with_the_last_error():
    owner = Owner(workers=1, places=64, batch_size=8, group_size=1)
    owner.publish(0, (0.0,))
    with pytest.raises(RolloutError, match="5 groups failed.*prompt 4: KeyError: 'x'") as caught:
        for index in range(8):
            for _ in range(2):
                owner.results(0, failures=[(ticket(index), FAILURE)])
    assert caught.value.details.startswith("Traceback")


def test_a_held_out_prompt_is_tried_again_then_left_out_and_too_many_end_the_run():
    owner = Owner(workers=1, places=64)
    owner.publish(0, (0.0,))
    owner.told(0)
    evals = [Ticket(-1, 0, prompt_id, 7, eval=True) for prompt_id in (2, 3, 4)]
    mended, first, second = evals
    with ThreadPoolExecutor(1) as pool:
        owner.scheduler.begin_evaluation(evals)
        evaluation = pool.submit(owner.scheduler.evaluated, 60)
        assert owner.workers.ends[0].poll(60) and owner.tickets(0) == evals
        owner.results(0, failures=[(mended, FAILURE), (first, FAILURE)])
        assert sorted(owner.tickets(0)) == [mended, first]  # once more
        owner.results(0, failures=[(first, FAILURE)])
        assert owner.tickets(0) == []
        owner.results(0, [done(mended), done(second)])
        assert [sample.ticket for sample in evaluation.result()] == [mended, second]
    first, second = evals[1:]
    owner.scheduler.begin_evaluation([first, second])
    with pytest.raises(RolloutError, match="waited 0 s for 2 evaluation samples"):
        owner.scheduler.evaluated(timeout=0)
    failure = [(first, "x\nValueError: no")]
    owner.results(0, failures=2 * failure + [(second, "x\nValueError: no")])
    with pytest.raises(RolloutError, match="more than half; the last, prompt 4: ValueError: no"):
        owner.results(0, failures=[(second, "x\nValueError: no")])


def test_evaluation_goes_ahead_of_training_tickets_and_past_admission():
    owner = Owner(workers=1, places=1)
    owner.publish(0, (0.0,))
    assert owner.tickets(0) == [ticket(0, 0), ticket(0, 1)]
    evals = [Ticket(-1, 0, i, 7, eval=True) for i in range(2)]
    owner.scheduler.begin_evaluation(evals)
    with pytest.raises(RolloutError, match="waited 0 s for 2 evaluation samples"):
        owner.scheduler.evaluated(timeout=0)
    owner.results(0, [done(ticket(0, 0)), done(ticket(0, 1))])
    assert owner.tickets(0) == evals
    owner.results(0, [done(evals[1]), done(evals[0])])
    assert [s.ticket for s in owner.scheduler.evaluated(1)] == evals
    assert owner.buffer.next_index == 2


def test_a_trainer_that_waits_says_what_for():
    owner = Owner(workers=1)
    owner.publish(0, (0.0,))
    with pytest.raises(RolloutError, match=r"waited 0 s for 0 of 2 groups ready, 2 in progress"):
        owner.scheduler.get_batch(timeout=0)


def test_what_a_silent_worker_holds_is_told():
    owner = Owner(workers=1, places=4)
    assert owner.scheduler.holds(0) == "0 tasks"
    owner.publish(0, (0.0,))
    assert owner.scheduler.holds(0) == "4 tasks"
