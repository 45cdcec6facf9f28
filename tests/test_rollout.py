"""The rollout side without an engine: scheduling, weights, what workers inherit, their owner."""

import doctest
import math
import os
import random
import select
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout as module
from buffer import BufferConfig, RolloutTask, Sample, SampleBuffer
from envs import EnvConfig
from episode import Limits
from rollout import (
    Dispatcher,
    RolloutConfig,
    RolloutError,
    Rollouts,
    child_environment,
    cut_buckets,
    join_weight_group,
    open_store,
    place_workers,
)
from worker import WorkerSpec, die_with_parent


def task(group, sample=0, **more):
    return RolloutTask(group, sample, prompt=group, seed=7, **more)


# -- queue scheduling ------------------------------------------------------------------------------


def test_tasks_go_out_in_order_to_the_emptiest_worker_with_a_free_slot():
    dispatcher = Dispatcher(workers=2, places=2, fixed=2)
    dispatcher.held[0].add(task(90))
    dispatcher.queue.extend(task(i) for i in range(5))
    assert dispatcher.assign() == {1: [task(0), task(2)], 0: [task(1)]}
    assert list(dispatcher.queue) == [task(3), task(4)]
    assert dispatcher.assign() == {}  # every slot is taken
    dispatcher.held[0].discard(task(1))
    assert dispatcher.assign() == {0: [task(3)]}


def test_a_task_at_the_front_of_the_queue_is_next():
    dispatcher = Dispatcher(1, 1, fixed=1)
    dispatcher.queue.extend([task(1), task(2)])
    dispatcher.queue.appendleft(task(0))  # a retry
    assert dispatcher.assign() == {0: [task(0)]}


def test_cancel_forgets_queued_tasks_of_the_group_and_names_the_running_ones():
    dispatcher = Dispatcher(3, 2, fixed=2)
    tasks = [task(g, i) for g in range(3) for i in range(3)]
    dispatcher.queue.extend(tasks)
    dispatcher.assign()  # six of the nine: groups 0 and 1
    stop = dispatcher.cancel(1)
    assert sorted(t for held in stop.values() for t in held) == [task(1, i) for i in range(3)]
    assert all(t.group == 0 for held in dispatcher.held for t in held)
    assert dispatcher.cancel(2) == {} and dispatcher.cancel(2) == {}  # none of it was running
    for held in dispatcher.held:
        held.clear()
    assert dispatcher.assign() == {} and not dispatcher.queue  # nor will it


def test_a_worker_is_given_more_at_a_time_only_while_its_engine_starves():
    dispatcher = Dispatcher(workers=1, places=16)
    assert dispatcher.slots == 18  # an eighth more than it can run
    for _ in range(100):
        dispatcher.widen()
    assert dispatcher.slots == 64
    fixed = Dispatcher(1, 16, fixed=20)
    fixed.widen()
    assert fixed.slots == 20


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_loses_and_doubles_no_task_and_leaves_no_slot_free(seed):
    rng = random.Random(seed)
    workers, slots = rng.randint(1, 4), rng.randint(1, 5)
    dispatcher = Dispatcher(workers, slots, slots)
    made, ended = [], set()
    for step in range(200):
        for _ in range(rng.randint(0, 3)):
            made.append(task(step, len(made)))
            dispatcher.queue.append(made[-1])
        given = dispatcher.assign()
        assert all(set(tasks) <= dispatcher.held[worker] for worker, tasks in given.items())
        assert all(len(held) <= slots for held in dispatcher.held)
        queue = [t for t in dispatcher.queue if t not in ended]
        assert not queue or all(len(held) == slots for held in dispatcher.held)
        for held in dispatcher.held:
            for one in [t for t in sorted(held) if rng.random() < 0.3]:
                held.discard(one)
                ended.add(one)
        if rng.random() < 0.2:
            group = rng.randint(0, step)
            live = [t for t in made if t not in ended and t.group == group]
            queued = [t for t in queue if t.group == group]
            stop = [t for tasks in dispatcher.cancel(group).values() for t in tasks]
            assert sorted(stop + queued) == live
            ended.update(live)
        running = [t for held in dispatcher.held for t in held]
        queued = [t for t in dispatcher.queue if t not in ended]
        assert sorted([*queued, *running, *ended]) == made


def test_without_free_slots_the_longest_queue_costs_nothing_to_look_at():
    dispatcher = Dispatcher(4, 2, fixed=2)
    dispatcher.queue.extend(task(i) for i in range(100_000))
    dispatcher.assign()
    start = time.process_time()
    for _ in range(1000):
        assert dispatcher.assign() == {}
    assert time.process_time() - start < 1  # a scan of the queue would be a hundred times that


# -- weights ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=20),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 200),
)
def test_buckets_hold_every_parameter_in_order_and_are_as_full_as_they_may_be(
    shapes, itemsize, limit
):
    buckets = list(cut_buckets(shapes, itemsize, limit))
    assert [i for bucket in buckets for i in bucket] == list(range(len(shapes)))
    sizes = [math.prod(shape) * itemsize for shape in shapes]
    for number, bucket in enumerate(buckets):
        used = sum(sizes[i] for i in bucket)
        assert used <= limit or len(bucket) == 1
        if number + 1 < len(buckets):
            assert used + sizes[buckets[number + 1][0]] > limit


SHAPES, BUCKET_BYTES = [(300, 7), (5,), (1000,), ()], 6000
UNDER_TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # every tcp:// rendezvous becomes a client of this:
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
}


def receive_weights(port, conn):
    """The other end of a weight group, in a process of its own: reports what was broadcast."""
    for environment in ({}, UNDER_TORCHRUN):
        os.environ.update(environment)
        group = join_weight_group("127.0.0.1", port, 1, 2, "gloo", timedelta(seconds=60))
        for bucket in cut_buckets(SHAPES, 4, BUCKET_BYTES):
            flat = torch.empty(sum(math.prod(SHAPES[i]) for i in bucket))
            group.broadcast(flat, 0).wait()
            conn.send(flat.numpy())
        port = conn.recv()


def test_weights_reach_a_receiver_over_gloo_also_under_torchrun(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    limit, buckets = timedelta(seconds=60), list(cut_buckets(SHAPES, 4, BUCKET_BYTES))
    assert [len(bucket) for bucket in buckets] == [1, 3]
    parameters = [torch.rand(shape) for shape in SHAPES]
    mine, theirs = mp.Pipe()
    store = open_store(2, limit, "127.0.0.1")
    receiver = mp.get_context("spawn").Process(target=receive_weights, args=(store.port, theirs))
    receiver.start()
    theirs.close()
    for environment in ({}, UNDER_TORCHRUN):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = store or open_store(2, limit, "127.0.0.1")
        group = join_weight_group("127.0.0.1", store.port, 0, 2, "gloo", limit, store)
        for bucket in buckets:
            flat = torch.cat([parameters[i].flatten() for i in bucket])
            group.broadcast(flat, 0).wait()
            assert mine.poll(60)
            np.testing.assert_array_equal(mine.recv(), flat.numpy())
        store = None if environment else open_store(2, limit, "127.0.0.1")
        mine.send(store and store.port)
    receiver.join(60)
    assert receiver.exitcode == 0


def test_each_store_has_a_port_of_its_own_that_is_open_at_once():
    stores = [open_store(2, timedelta(seconds=5), "127.0.0.1") for _ in range(3)]
    assert len({store.port for store in stores}) == 3
    for store in stores:
        client = torch.distributed.TCPStore("127.0.0.1", store.port, 2, False)
        client.set("key", str(store.port))
        assert store.get("key").decode() == str(store.port)


def test_a_receiver_that_never_comes_is_waited_for_no_longer_than_the_timeout(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    limit, start = timedelta(seconds=1), time.monotonic()
    store = open_store(2, limit, "127.0.0.1")
    with pytest.raises(RuntimeError, match="[Tt]ime"):
        join_weight_group("127.0.0.1", store.port, 0, 2, "gloo", limit, store)
    assert time.monotonic() - start < 20


# -- where workers go, and what they inherit -------------------------------------------------------


@pytest.fixture
def no_device_list(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_gpus_workers_get_weights_over_gloo():
    assert place_workers(gpus=0, ranks=2, workers=3, tensor_parallel=1) == ([None] * 3, "gloo", 0.0)


def test_enough_gpus_keep_trainer_and_workers_apart(no_device_list):
    places, wire, share = place_workers(gpus=8, ranks=2, workers=3, tensor_parallel=2)
    assert places == ["2,3", "4,5", "6,7"] and wire == "nccl" and share == 0.9


@pytest.mark.parametrize(
    ("gpus", "ranks", "workers", "parallel", "places", "share"),
    [
        (1, 1, 1, 1, ["0"], 0.45),
        (1, 1, 3, 1, ["0", "0", "0"], 0.15),
        (2, 2, 1, 2, ["0,1"], 0.45),
        (4, 2, 3, 1, ["0", "1", "2"], 0.45),
        (4, 4, 3, 2, ["0,1", "2,3", "0,1"], 0.225),
    ],
)
def test_too_few_gpus_are_shared_without_nccl(
    no_device_list, gpus, ranks, workers, parallel, places, share
):
    found = place_workers(gpus, ranks, workers, parallel)
    assert found == (places, "gloo", pytest.approx(share))


def test_places_are_named_as_in_the_callers_device_list(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc,7")
    assert place_workers(3, 1, 2, 1)[0] == ["GPU-abc", "7"]


def test_more_tensor_parallel_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match="--tensor_parallel 4, but this machine has 2 GPUs"):
        place_workers(gpus=2, ranks=1, workers=1, tensor_parallel=4)


TORCHRUN = """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
ROLE_NAME ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT
TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE"""


def test_children_start_without_torchruns_variables_which_come_back_afterwards(monkeypatch):
    for name in TORCHRUN.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("MY_OWN", "kept")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with child_environment("2,3", threads=4):
        assert not set(TORCHRUN.split()) & set(os.environ)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert os.environ["OMP_NUM_THREADS"] == "4" and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and os.environ["MY_OWN"] == "kept"
    assert dict(os.environ) == before
    with pytest.raises(KeyError), child_environment(None, threads=1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        raise KeyError
    assert dict(os.environ) == before


@pytest.mark.skipif(not hasattr(os, "fork") or os.uname().sysname != "Linux", reason="Linux only")
def test_a_worker_dies_with_its_parent_even_if_that_is_killed():
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:  # the trainer
        child = os.fork()
        if not child:  # the rollout process
            die_with_parent(os.getppid())
            os.write(writer, f"{os.getpid()} ".encode())
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    os.close(writer)
    child = int(os.read(reader, 100))
    os.kill(child, 0)  # it lives
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    gone, _, _ = select.select([reader], [], [], 10)
    assert gone and os.read(reader, 1) == b""  # nobody is left who could write to it
    os.close(reader)


# -- the owner, with workers that are only pipes ---------------------------------------------------


class Owner:
    """`Rollouts` without processes: the test speaks for workers, and takes the owner's turns."""

    def __init__(self, workers=2, slots=8, dtype="float32", **buffer):
        buffer = {"batch_size": 2, "group_size": 2, "alpha": 0} | buffer
        config = RolloutConfig(rollout_workers=workers, max_num_seqs=slots)
        spec = WorkerSpec(0, "", config, EnvConfig(), 0, Limits(8, 1, 64), dtype, True, 0.0)
        self.buffer = SampleBuffer(BufferConfig(**buffer), steps=10)
        self.rollouts = Rollouts(spec, self.buffer, task)
        pairs = [mp.Pipe() for _ in range(workers)]
        self.rollouts.pipes = [mine for mine, _ in pairs]
        self.ends = [theirs for _, theirs in pairs]

    def say(self, worker, *message):
        self.ends[worker].send(message)
        self.rollouts._receive(worker)

    def results(self, worker, samples=(), failures=(), too_old=()):
        self.say(worker, "results", list(samples), list(failures), list(too_old), {}, [])

    def told(self, worker):
        """What this worker has been sent since the last look."""
        messages = []
        while self.ends[worker].poll():
            messages.append(self.ends[worker].recv())
        return messages

    def tasks(self, worker):
        return [one for kind, *args in self.told(worker) if kind == "tasks" for one in args[0]]

    def publish(self, version, scores=(0.0, 0.0)):
        self.rollouts._update = module.Update(version, np.zeros(2))
        for worker in range(len(self.ends)):
            self.say(worker, "paused", version)
        for worker, score in zip(range(len(self.ends)), scores, strict=True):
            self.say(worker, "loaded", version, [score, 0.0])


def done(one, version=0):
    ids, mask = np.array([1, 2], np.int32), np.array([False, True])
    return Sample(one, ids, mask, np.zeros(2, np.float32), np.array([-1, version], np.int32), 1.0)


def test_nothing_is_handed_out_before_every_worker_has_the_first_weights():
    owner = Owner()
    owner.rollouts._update = module.Update(0, np.zeros(2))
    owner.results(0)
    owner.say(0, "paused", 0)
    owner.say(0, "loaded", 0, [0.0, 0.0])
    assert owner.told(0) == owner.told(1) == [] and owner.rollouts.version == -1
    owner.say(1, "loaded", 0, [0.0, 0.0])
    assert owner.rollouts.version == 0
    first, second = owner.told(0), owner.told(1)
    assert first[0] == second[0] == ("commit", 0)  # before any task
    tasks = [one for _, given in (*first[1:], *second[1:]) for one in given]
    assert sorted(tasks) == [task(g, i) for g in range(2) for i in range(2)]


def test_version_and_admission_advance_only_when_the_last_worker_has_loaded():
    owner = Owner()
    owner.publish(0)
    for worker in range(2):
        owner.results(worker, [done(one) for one in owner.tasks(worker)])
    assert len(owner.rollouts.get_batch(1)) == 4
    owner.rollouts._update = module.Update(1, np.zeros(2))
    owner.say(1, "loaded", 1, [0.0, 0.0])
    owner.results(0)
    assert owner.buffer.version == 0 and owner.told(0) == owner.told(1) == []
    owner.say(0, "loaded", 1, [0.0, 0.0])
    assert owner.buffer.version == 1
    assert sorted(owner.tasks(0) + owner.tasks(1)) == [task(g, i) for g in (2, 3) for i in (0, 1)]


@pytest.mark.parametrize("score", [2e-3, -2e-3, math.nan])
def test_a_worker_that_disagrees_with_the_trainer_ends_the_run_before_the_commit(score):
    owner = Owner()
    with pytest.raises(RolloutError, match="trainer and engine disagree .* version 0"):
        owner.publish(0, (0.0, score))
    assert owner.told(0) == [] and owner.rollouts.version == -1


def test_in_low_precision_the_first_mismatch_sets_the_limit():
    owner = Owner(dtype="bfloat16")
    owner.publish(0, (0.02, 0.01))
    owner.publish(1, (0.19, 0.0))
    with pytest.raises(RolloutError, match="version 2"):
        owner.publish(2, (0.21, 0.0))


def test_a_failed_sample_is_retried_ahead_of_the_queue_and_its_group_then_given_up(capsys):
    owner = Owner(workers=1, slots=1, alpha=1)  # two tasks at a time: one running, one at hand
    owner.publish(0, (0.0,))
    assert owner.tasks(0) == [task(0, 0), task(0, 1)]
    owner.results(0, failures=[(task(0, 0), "Traceback\nKeyError: 'x'")])
    assert owner.tasks(0) == [task(0, 0)]  # the same task, same seed, ahead of group 1
    owner.results(0, failures=[(task(0, 0), "Traceback\nKeyError: 'x'")])
    cancel, tasks = owner.told(0)
    assert cancel == ("cancel", [task(0, 1)]) and tasks == ("tasks", [task(1, 0), task(1, 1)])
    assert owner.buffer.dropped == {0: "failed"}
    assert "dropped prompt 0, which failed twice: KeyError: 'x'" in capsys.readouterr().err
    owner.results(0, [done(task(0, 1))])  # it was on its way: too late
    assert owner.told(0) == [] and not owner.buffer.wants(task(0, 1))
    groups = {one.group for one in owner.rollouts.dispatcher.queue}
    assert groups == {2, 3, 4}  # the next prompt takes the place of group 0


def test_losers_of_a_race_are_stopped_and_their_queued_tasks_forgotten():
    owner = Owner(workers=1, slots=4, redundant_samples=1)  # 3 samples a group, 2 are needed
    owner.publish(0, (0.0,))
    assert owner.tasks(0) == [task(0, 0), task(0, 1), task(0, 2), task(1, 0), task(1, 1)]
    owner.results(0, [done(task(0, 2)), done(task(0, 0))])
    assert owner.told(0) == [("cancel", [task(0, 1)]), ("tasks", [task(1, 2)])]
    owner.results(0, [done(task(1, 0)), done(task(1, 1))])
    assert owner.told(0) == [("cancel", [task(1, 2)])]
    assert [s.task[:2] for s in owner.rollouts.get_batch(1)] == [(0, 0), (0, 2), (1, 0), (1, 1)]


def test_at_alpha_0_a_full_batch_stops_the_groups_that_lost():
    owner = Owner(workers=1, slots=8, consume="ready", redundant_groups=1)
    owner.publish(0, (0.0,))
    assert len(owner.tasks(0)) == 6
    owner.results(0, [done(task(g, i)) for g in (0, 2) for i in (0, 1)])
    assert {s.task.group for s in owner.rollouts.get_batch(1)} == {0, 2}
    ((kind, stopped),) = owner.told(0)
    assert kind == "cancel" and sorted(stopped) == [task(1, 0), task(1, 1)]
    owner.results(0)
    assert owner.tasks(0) == [] and owner.buffer.dropped == {1: "redundant"}
    owner.publish(1, (0.0,))
    assert {one.group for one in owner.tasks(0)} == {3, 4, 5}


def test_a_group_with_an_episode_that_got_too_old_is_dropped_and_replaced():
    owner = Owner(workers=1, slots=16, consume="ready", alpha=1)
    owner.publish(0, (0.0,))
    assert {one.group for one in owner.tasks(0)} == {0, 1, 2, 3}
    owner.results(0, too_old=[task(1, 0)])
    assert owner.told(0) == [("cancel", [task(1, 1)]), ("tasks", [task(4, 0), task(4, 1)])]
    assert owner.buffer.dropped == {1: "stale"}
    owner.results(0, too_old=[task(1, 1)])  # it was on its way
    assert owner.told(0) == []


def test_filtering_without_end_ends_the_run_and_names_the_setting():
    owner = Owner(workers=1, slots=64, filter_groups=True, filter_limit=2)
    owner.publish(0, (0.0,))
    with pytest.raises(RolloutError, match="no signal: 4 groups dropped, --filter_limit 2"):
        for index in range(9):
            owner.results(0, [done(task(index, i)) for i in (0, 1)])


def test_a_starving_engine_gets_more_tasks_only_while_some_are_waiting():
    owner = Owner(workers=1, slots=8, batch_size=8, group_size=8)
    owner.publish(0, (0.0,))
    assert len(owner.tasks(0)) == 9
    owner.say(0, "results", [], [], [], {"steps_below_cap": 1}, [])
    assert len(owner.tasks(0)) == 2 and owner.rollouts.dispatcher.slots == 11
    owner.rollouts.dispatcher.queue.clear()
    owner.say(0, "results", [], [], [], {"steps_below_cap": 1}, [])
    assert owner.rollouts.dispatcher.slots == 11
    assert owner.rollouts.take_counts()["steps_starved"] == 1


def test_which_prompts_were_dropped_is_told_once():
    owner = Owner(workers=1, slots=64, filter_groups=True)
    owner.publish(0, (0.0,))
    owner.results(0, [done(task(1, i)) for i in (0, 1)])
    assert owner.rollouts.take_dropped() == [("filtered", 1)]
    assert owner.rollouts.take_dropped() == []


def test_every_failure_is_counted_also_one_that_the_retry_mends():
    owner = Owner(workers=1, slots=64)
    owner.publish(0, (0.0,))
    owner.results(0, failures=[(task(0), "Traceback\nKeyError: 'x'")])
    assert owner.rollouts.take_counts()["failed_samples"] == 1
    assert not owner.buffer.dropped


def test_when_most_groups_fail_the_run_ends_with_the_last_error():
    owner = Owner(workers=1, slots=64, batch_size=8, group_size=1)
    owner.publish(0, (0.0,))
    with pytest.raises(RolloutError, match="5 groups failed.*prompt 4: KeyError: 'x'") as caught:
        for index in range(8):
            for _ in range(2):
                owner.results(0, failures=[(task(index), "Traceback\nKeyError: 'x'")])
    assert caught.value.details.startswith("Traceback")


def test_a_held_out_prompt_is_tried_again_then_left_out_and_too_many_end_the_run():
    owner = Owner()
    first, second = (RolloutTask(-1, 0, prompt, 7, eval=True) for prompt in (3, 4))
    owner.rollouts._evaluating = {first: None, second: None}
    failure = [(first, "x\nValueError: no")]
    owner.results(0, failures=failure)
    assert first in owner.rollouts._evaluating  # once more
    owner.results(0, failures=failure)
    assert list(owner.rollouts._evaluating) == [second]
    owner.results(0, failures=[(second, "x\nValueError: no")])
    with pytest.raises(RolloutError, match="more than half; the last, prompt 4: ValueError: no"):
        owner.results(0, failures=[(second, "x\nValueError: no")])


def test_evaluation_goes_ahead_of_training_tasks_and_past_admission():
    owner = Owner(workers=1, slots=1)
    owner.publish(0, (0.0,))
    assert owner.tasks(0) == [task(0, 0), task(0, 1)]
    evals = [RolloutTask(-1, 0, i, 7, eval=True) for i in range(2)]
    with pytest.raises(RolloutError, match="waited 0 s for 2 evaluation samples"):
        owner.rollouts.evaluate(evals, timeout=0)
    owner.results(0, [done(task(0, 0)), done(task(0, 1))])
    assert owner.tasks(0) == evals
    owner.results(0, [done(evals[1]), done(evals[0])])
    assert [s.task for s in owner.rollouts.evaluate([], 1)] == []
    assert owner.buffer.next_index == 2


def test_a_silent_worker_ends_the_run_and_is_named():
    owner = Owner()
    owner.rollouts._heard[1] -= owner.rollouts._limit + 1
    with pytest.raises(
        RolloutError, match="rollout process 1 has not answered for .*holds 0 tasks"
    ):
        owner.rollouts._check_alive()


def test_the_traceback_of_a_failed_worker_travels_with_the_error():
    owner = Owner()
    with pytest.raises(RolloutError, match="rollout process 1 failed: ValueError: no") as caught:
        owner.say(1, "fatal", "Traceback\n  File\nValueError: no")
    assert caught.value.details.startswith("Traceback")


def test_a_trainer_that_waits_says_what_for():
    owner = Owner(workers=1)
    owner.publish(0, (0.0,))
    with pytest.raises(RolloutError, match=r"waited 0 s for 0 of 2 groups ready, 2 in progress"):
        owner.rollouts.get_batch(timeout=0)


# -- settings, examples ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_workers", 0),
        ("tensor_parallel", 0),
        ("max_num_seqs", 0),
        ("max_tokens", -1),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("on_update", "foo"),
        ("worker_timeout", 0.0),
        ("start_timeout", -1.0),
    ],
)
def test_settings_out_of_range_are_refused_and_named(name, value):
    with pytest.raises(ValueError, match=f"--{name}"):
        RolloutConfig(**{name: value})


def test_examples_in_the_docstrings():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
