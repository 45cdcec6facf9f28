"""The event loop of a rollout process, with an engine that decodes letters: what it does when."""

import asyncio
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.multiprocessing as mp

from buffer import RolloutTask
from envs import EnvConfig
from episode import Limits
from plumbing.models import byte_tokenizer
from rollout import RolloutConfig
from worker import Worker, WorkerSpec

ENVS = '''
import asyncio
from envs import Env

LOG = []

class Slow(Env):
    """Its first step takes as many seconds as its seed is above 1000; the second ends it."""
    blocking = False
    max_turns = 9
    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return "go", {}
    async def step(self, action):
        LOG.append(("begun", self.seed))
        try:
            await asyncio.sleep(0.05 if self.seed != 513 else 60)
        except asyncio.CancelledError:
            LOG.append(("cancelled", self.seed))
            raise
        self.turn += 1
        return "on", 1.0, self.turn == 2, False, {}
    def close(self):
        LOG.append(("closed", getattr(self, "seed", None)))
'''


OPEN = []


class FakeEngine:
    """Every step makes one letter for each turn; a turn has three, or goes on for ever."""

    endless = False

    def __init__(self, spec):
        self.turns, self.counts, self.version = {}, Counter(), -1
        self.wake, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.steps, self.aborted = 0, []

    async def generate(self, turn):
        done = asyncio.get_running_loop().create_future()
        self.turns[id(turn)] = turn, done
        self.wake.set()
        try:
            await done
        except asyncio.CancelledError:
            self.turns.pop(id(turn), None)
            self.aborted.append(self.steps)
            raise

    def step(self):
        time.sleep(0.01)
        self.steps += 1
        for key, (turn, done) in list(self.turns.items()):
            turn.ids.append(70)
            turn.logprobs.append(-1.0)
            turn.versions.append(self.version)
            if len(turn.ids) == 3 and not self.endless:
                del self.turns[key]
                done.set_result(None)
        return len(self.turns)

    def take_counts(self):
        counts, self.counts = self.counts, Counter()
        return counts


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """A worker in a thread, and the owner's end of its pipe."""
    path = tmp_path / "slow_envs.py"
    path.write_text(ENVS)
    monkeypatch.setitem(sys.modules, "plumbing.engine", SimpleNamespace(Engine=FakeEngine))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: byte_tokenizer())
    mine, theirs = mp.Pipe()
    OPEN.append(mine)  # a worker whose pipe ends kills its process group: here, the tests
    config = RolloutConfig(max_num_seqs=8)
    spec = WorkerSpec(
        0, "", config, EnvConfig(env=f"{path}:Slow"), 0, Limits(9, 9, 200, 1), "float32", True, 0.0
    )
    worker = Worker(theirs, spec)
    loops = []

    async def serve():
        loops.append(asyncio.get_running_loop())
        await worker.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert mine.recv() == ("ready",)
    mine.send(("commit", 0))
    yield SimpleNamespace(
        loop=loops[0],
        worker=worker,
        pipe=mine,
        log=sys.modules["custom_env_slow_envs"].LOG,
        engine=worker.engine,
    )
    mine.send(("stop",))
    thread.join(10)
    assert not thread.is_alive()


def task(prompt, sample=0, **more):
    return RolloutTask(prompt, sample, prompt, 7, **more)  # prompt i is seed 512 + i


def results(pipe, count, seconds=5):
    """The next so many samples or stopped tasks."""
    samples, failed, too_old, deadline = [], [], [], time.monotonic() + seconds
    while len(samples) + len(failed) + len(too_old) < count:
        assert pipe.poll(deadline - time.monotonic()), f"only {len(samples)} after {seconds} s"
        kind, *more = pipe.recv()
        assert kind == "results"
        samples += more[0]
        failed += more[1]
        too_old += more[2]
    return samples, failed, too_old


def wait_for(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_idle_loop_wakes_up_when_an_environment_has_answered(serving):
    start = time.monotonic()
    serving.pipe.send(("tasks", [task(2)]))
    samples, _, _ = results(serving.pipe, 1)
    assert len(samples[0].turns) == 2 and samples[0].reward == 2.0
    assert time.monotonic() - start < 1  # not at the next sign of life


def test_one_slow_environment_holds_up_nobody_else(serving):
    serving.pipe.send(("tasks", [task(1), task(2), task(3)]))  # the first waits for a minute
    samples, _, _ = results(serving.pipe, 2)
    assert {sample.task for sample in samples} == {task(2), task(3)}


def test_a_cancelled_episode_stops_in_its_environment(serving):
    serving.pipe.send(("tasks", [task(1)]))
    wait_for(lambda: ("begun", 513) in serving.log)
    serving.pipe.send(("cancel", [task(1)]))
    wait_for(lambda: ("cancelled", 513) in serving.log and ("closed", 513) in serving.log, 1)
    wait_for(lambda: not serving.worker.episodes)


def test_a_cancelled_episode_stops_in_the_engine_within_one_step(serving):
    serving.engine.endless = True
    serving.pipe.send(("tasks", [task(2), task(3)]))
    wait_for(lambda: len(serving.engine.turns) == 2)
    begun = serving.engine.steps
    wait_for(lambda: serving.engine.steps > begun + 1)  # both have tokens
    serving.pipe.send(("cancel", [task(2)]))
    before = serving.engine.steps
    wait_for(lambda: list(serving.worker.episodes) == [task(3)])
    assert serving.engine.aborted[0] - before <= 2  # the one under way, and the message's own
    assert len(serving.engine.turns) == 1
    assert serving.worker.counts["lost_samples"] == 1 and serving.worker.counts["lost_tokens"] > 0


def test_a_commit_stops_what_it_makes_too_old_but_no_evaluation(serving):
    serving.engine.endless = True
    evaluation = task(3, eval=True)
    serving.pipe.send(("tasks", [task(2), evaluation]))
    wait_for(lambda: len(serving.engine.turns) == 2 and serving.engine.steps > 1)
    serving.pipe.send(("commit", 1))  # one version behind is allowed
    wait_for(lambda: serving.engine.version == 1)
    serving.pipe.send(("commit", 2))
    _, _, too_old = results(serving.pipe, 1)
    assert too_old == [task(2)]
    wait_for(lambda: list(serving.worker.episodes) == [evaluation])
    assert len(serving.engine.turns) == 1


def test_an_episode_without_a_token_outlives_any_commit(serving):
    serving.engine.gate.clear()
    serving.engine.step = lambda: time.sleep(0.01)  # nothing is decoded
    serving.pipe.send(("tasks", [task(2)]))
    wait_for(lambda: serving.engine.turns)
    for version in (1, 2, 3):
        serving.pipe.send(("commit", version))
    wait_for(lambda: serving.engine.version == 3)
    assert list(serving.worker.episodes) == [task(2)]


def test_a_row_that_cannot_be_made_costs_its_own_episode_only(serving):
    serving.pipe.send(("tasks", [task(2), task(10**9), task(3)]))
    samples, failed, _ = results(serving.pipe, 3)
    assert {sample.task for sample in samples} == {task(2), task(3)}
    ((one, details),) = failed
    assert one == task(10**9) and "IndexError" in details


def test_an_episode_that_is_cancelled_before_it_began_is_forgotten(serving):
    def both():
        serving.worker.on_message("tasks", [task(2)])
        serving.worker.on_message("cancel", [task(2)])

    serving.loop.call_soon_threadsafe(both)
    wait_for(lambda: serving.worker.counts["lost_samples"] == 1)
    wait_for(lambda: not serving.worker.episodes)


def test_the_naive_form_plays_all_its_episodes_in_step(serving):
    serving.pipe.send(("lockstep", [task(2), task(3), task(4)]))
    samples, _, _ = results(serving.pipe, 3)
    assert [len(sample.turns) for sample in samples] == [2, 2, 2]
    begun = [seed for what, seed in serving.log if what == "begun"]
    assert sorted(begun[:3]) == sorted(begun[3:]) == [514, 515, 516]


def test_a_failure_is_reported_with_its_seed_and_step(serving, monkeypatch):
    env = sys.modules["custom_env_slow_envs"].Slow

    async def crash(self, action):
        raise OSError("the game has crashed")

    monkeypatch.setattr(env, "step", crash)
    serving.pipe.send(("tasks", [task(2)]))
    _, failed, _ = results(serving.pipe, 1)
    one, details = failed[0]
    assert one == task(2)
    assert details.rstrip().endswith("seed 514, step 1: OSError: the game has crashed")
