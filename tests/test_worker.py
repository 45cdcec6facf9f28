"""The event loop of a rollout process, with an engine that decodes letters: what it does when."""

import asyncio
import math
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.multiprocessing as mp

from buffer import Ticket
from envs import Episode, Limits
from experiments.naive import LockstepWorker
from plumbing.settings import Settings, WorkerSpec
from plumbing.tiny import byte_tokenizer
from rollout import Worker

ENVS = '''
import asyncio
from envs import Env

LOG = []

class Slow(Env):
    """Its second step ends it. A step takes a moment; with seed 513 an hour."""
    blocking = False
    max_turns = 9
    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return "go", {}
    async def step(self, action):
        LOG.append(("begun", self.seed))
        try:
            await asyncio.sleep(0.05 if self.seed != 513 else 3600)
        except asyncio.CancelledError:
            LOG.append(("cancelled", self.seed))
            raise
        self.turn += 1
        return "on", 1.0, self.turn == 2, False, {}
    def close(self):
        LOG.append(("closed", getattr(self, "seed", None)))
'''


OPEN = []
PATIENCE = 120  # seconds, before a test gives up


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
def serving(tmp_path, monkeypatch, request):
    """A worker in a thread, and the owner's end of its pipe."""
    path = tmp_path / "slow_envs.py"
    path.write_text(ENVS)
    monkeypatch.setitem(sys.modules, "plumbing.engine", SimpleNamespace(Engine=FakeEngine))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _: byte_tokenizer())
    mine, theirs = mp.Pipe()
    OPEN.append(mine)  # a worker whose pipe ends kills its process group: here, the tests
    settings = Settings(max_num_seqs=8, env=f"{path}:Slow", env_timeout=7200)
    spec = WorkerSpec("", settings, Limits(9, 9, 200, 1), "float32", True, 0.0)
    worker = getattr(request, "param", Worker)(theirs, spec)
    worker.sent_at = math.inf  # no sign of life: what is counted stays where a test can see it
    loops = []

    async def serve():
        loops.append(asyncio.get_running_loop())
        await worker.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert mine.recv()[0] == "stage" and mine.recv() == ("ready",)
    mine.send(("commit", 0))
    yield SimpleNamespace(
        loop=loops[0],
        worker=worker,
        pipe=mine,
        log=sys.modules["custom_env_slow_envs"].LOG,
        engine=worker.engine,
    )
    mine.send(("stop",))
    thread.join(PATIENCE)
    assert not thread.is_alive()


def ticket(prompt, sample=0, **more):
    return Ticket(prompt, sample, prompt, 7, **more)  # prompt i is seed 512 + i


def results(pipe, count):
    """The next so many samples or stopped tickets."""
    samples, failed, too_old, deadline = [], [], [], time.monotonic() + PATIENCE
    while len(samples) + len(failed) + len(too_old) < count:
        assert pipe.poll(max(0.0, deadline - time.monotonic())), f"only {len(samples)}"
        kind, *more = pipe.recv()
        assert kind == "results"
        samples += more[0]
        failed += more[1]
        too_old += more[2]
    return samples, failed, too_old


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_tokens(engine, of):
    """Until so many turns are being decoded, and each has a token."""
    wait_for(lambda: [len(turn.ids) > 0 for turn, _ in [*engine.turns.values()]] == [True] * of)


def test_an_idle_loop_wakes_up_when_an_environment_has_answered(serving, monkeypatch):
    async def without_end(what, _):
        return await what

    monkeypatch.setattr(asyncio, "wait_for", without_end)  # no sign of life wakes it up
    serving.pipe.send(("tickets", [ticket(2)]))
    samples, _, _ = results(serving.pipe, 1)
    assert len(samples[0].turns) == 2 and samples[0].reward == 2.0


def test_one_slow_environment_holds_up_nobody_else(serving):
    serving.pipe.send(("tickets", [ticket(1), ticket(2), ticket(3)]))  # the first takes an hour
    samples, _, _ = results(serving.pipe, 2)
    assert {sample.ticket for sample in samples} == {ticket(2), ticket(3)}


def test_a_cancelled_episode_stops_in_its_environment(serving):
    serving.pipe.send(("tickets", [ticket(1)]))
    wait_for(lambda: ("begun", 513) in serving.log)
    serving.pipe.send(("cancel", [ticket(1)]))
    wait_for(lambda: ("cancelled", 513) in serving.log and ("closed", 513) in serving.log)
    wait_for(lambda: not serving.worker.episodes)


def test_a_cancelled_episode_stops_in_the_engine_within_one_step(serving):
    serving.engine.endless = True
    serving.pipe.send(("tickets", [ticket(2), ticket(3)]))
    wait_for_tokens(serving.engine, of=2)
    steps = []

    def cancel():
        steps.append(serving.engine.steps)
        serving.worker.on_message("cancel", [ticket(2)])

    serving.loop.call_soon_threadsafe(cancel)
    wait_for(lambda: list(serving.worker.episodes) == [ticket(3)])
    assert serving.engine.aborted[0] - steps[0] <= 1
    assert len(serving.engine.turns) == 1
    assert serving.worker.counts["lost_samples"] == 1 and serving.worker.counts["lost_tokens"] > 0


def test_a_commit_stops_what_it_makes_too_old_but_no_evaluation(serving):
    serving.engine.endless = True
    evaluation = ticket(3, eval=True)
    serving.pipe.send(("tickets", [ticket(2), evaluation]))
    wait_for_tokens(serving.engine, of=2)
    serving.pipe.send(("commit", 1))  # one version behind is allowed
    wait_for(lambda: serving.engine.version == 1)
    serving.pipe.send(("commit", 2))
    _, _, too_old = results(serving.pipe, 1)
    assert too_old == [ticket(2)]
    wait_for(lambda: list(serving.worker.episodes) == [evaluation])
    assert len(serving.engine.turns) == 1


def test_an_episode_without_a_token_outlives_any_commit(serving):
    serving.engine.gate.clear()
    serving.engine.step = lambda: time.sleep(0.01)  # nothing is decoded
    serving.pipe.send(("tickets", [ticket(2)]))
    wait_for(lambda: serving.engine.turns)
    for version in (1, 2, 3):
        serving.pipe.send(("commit", version))
    wait_for(lambda: serving.engine.version == 3)
    assert list(serving.worker.episodes) == [ticket(2)]


def test_a_row_that_cannot_be_made_costs_its_own_episode_only(serving):
    serving.pipe.send(("tickets", [ticket(2), ticket(10**9), ticket(3)]))
    samples, failed, _ = results(serving.pipe, 3)
    assert {sample.ticket for sample in samples} == {ticket(2), ticket(3)}
    ((one, details),) = failed
    assert one == ticket(10**9) and "IndexError" in details


def test_an_episode_that_is_cancelled_before_it_began_is_forgotten(serving):
    def both():
        serving.worker.on_message("tickets", [ticket(2)])
        serving.worker.on_message("cancel", [ticket(2)])

    serving.loop.call_soon_threadsafe(both)
    wait_for(lambda: serving.worker.counts["lost_samples"] == 1)
    wait_for(lambda: not serving.worker.episodes)


@pytest.mark.parametrize("serving", [LockstepWorker], indirect=True)
def test_the_naive_form_plays_all_its_episodes_in_step(serving):
    serving.pipe.send(("lockstep", [ticket(2), ticket(3), ticket(4)]))
    samples, _, _ = results(serving.pipe, 3)
    assert [len(sample.turns) for sample in samples] == [2, 2, 2]
    begun = [seed for what, seed in serving.log if what == "begun"]
    assert sorted(begun[:3]) == sorted(begun[3:]) == [514, 515, 516]


@pytest.mark.parametrize("wrong", [GeneratorExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_episode_that_ends_in_whatever_way_is_reported(serving, monkeypatch, wrong):
    def crash(self, *_):
        raise wrong

    monkeypatch.setattr(Episode, "sample", crash)  # past all that guards the user's code
    serving.pipe.send(("tickets", [ticket(2)]))
    _, failed, _ = results(serving.pipe, 1)
    assert failed[0][0] == ticket(2) and wrong.__name__ in failed[0][1]


def test_what_blocking_environments_compute_is_counted(serving, monkeypatch):
    env = sys.modules["custom_env_slow_envs"].Slow

    def spin(self, action):
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return "on", 1.0, True, False, {}

    monkeypatch.setattr(env, "step", spin)
    serving.worker.task.blocking = True
    serving.pipe.send(("tickets", [ticket(2)]))
    assert serving.pipe.poll(PATIENCE)
    kind, (sample,), _, _, counts, _ = serving.pipe.recv()
    assert kind == "results" and sample.reward == 1.0 and counts["env_cpu"] >= 0.2


def test_a_failure_is_reported_with_its_seed_and_step(serving, monkeypatch):
    env = sys.modules["custom_env_slow_envs"].Slow

    async def crash(self, action):
        raise OSError("the game has crashed")

    monkeypatch.setattr(env, "step", crash)
    serving.pipe.send(("tickets", [ticket(2)]))
    _, failed, _ = results(serving.pipe, 1)
    one, details = failed[0]
    assert one == ticket(2)
    assert details.rstrip().endswith("seed 514, step 1: OSError: the game has crashed")
