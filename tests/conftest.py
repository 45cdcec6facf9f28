"""Shared by the tests of the loop: a barely warmed-up tiny model, and one vLLM worker for all."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import train
from plumbing.models import resolve_model
from plumbing.settings import Settings, as_flags, parse
from report.timeline import read_trace
from tasks.find import make_task

TASKS = '''
import asyncio
import time
from pathlib import Path

from envs import Env, prompt_order
from tasks.puzzles import Addition

class Odd(Addition):
    """About half of all responses are right, whatever the model: there is always a signal."""
    def reward(self, row, response):
        return float(bool(response) and ord(response[-1]) % 2)

class Untaught(Odd):
    """With random weights, which are made at once."""
    warmup_steps = 0

class Slow(Odd):
    """A reward that holds up the engine: whoever feeds it has the time to, on any machine."""
    def reward(self, row, response):
        time.sleep(1e-3)
        return super().reward(row, response)

class Hopeless(Addition):
    """Every response scores the same."""
    def reward(self, row, response):
        return 0.0

class Exact(Odd):
    """Responses of given lengths, longer than the model would make them."""
    max_tokens = 12
    def length(self, seed, turn):
        return 8 + seed % 4

class Short(Odd):
    """Three prompts: less than a batch."""
    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        self.train, self.test = self.train[:3], self.test[:2]

class Flaky(Odd):
    """Raises for some responses, whatever prompt they are to."""
    blocking = True
    def reward(self, row, response):
        if sum(map(ord, response)) % 50 == 0:
            raise RuntimeError(f"cannot judge {response!r}")
        return super().reward(row, response)

class Broken(Addition):
    """Never gives a reward."""
    def reward(self, row, response):
        raise KeyError("no gold answer")

def at_third_update(do):
    """In the rollout process: let the third weight update go wrong while it is received."""
    import sys
    if "plumbing.engine" in sys.modules:
        from plumbing.engine import BroadcastReceiver
        receive = BroadcastReceiver.receive_weights
        def wrong(self, info):
            self.updates = getattr(self, "updates", 0) + 1
            if self.updates == 3:
                do()
            receive(self, info)
        BroadcastReceiver.receive_weights = wrong

def die():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

class DiesOnce(Odd):
    """The process that computes the 21st reward is killed, the first time."""
    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        self.died, self.left = Path(config.run_dir) / "died", 21
    def reward(self, row, response):
        self.left -= 1
        if not self.left and not self.died.exists():
            self.died.touch()
            die()
        return super().reward(row, response)

class Poison(Odd):
    """Whoever scores the fifth prompt of a run is killed."""
    def reward(self, row, response):
        if row == self.train[prompt_order(len(self.train), 0, 4)]:
            die()
        return super().reward(row, response)

class DiesAtStart(Odd):
    """The first process that has its task made is killed."""
    def __init__(self, config, seed=0):
        import sys
        super().__init__(config, seed)
        died = Path(config.run_dir) / "died"
        if "plumbing.engine" in sys.modules and not died.exists():
            died.touch()
            die()

class DiesInUpdate(Odd):
    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        at_third_update(die)

class HangsInUpdate(Odd):
    def __init__(self, config, seed=0):
        import time
        super().__init__(config, seed)
        at_third_update(lambda: time.sleep(3600))

class Talk(Env):
    """Three turns; about half of them are right, whatever the model says."""
    max_turns, max_tokens = 3, 4
    async def reset(self, seed):
        self.seed, self.turn = seed, 0
        return f"{seed}:0", {}
    async def step(self, action):
        await asyncio.sleep(0.002)
        self.turn += 1
        right = bool(action) and ord(action[-1]) % 2
        return f"{self.seed}:{self.turn}", right / 3, self.turn == 3, False, {}

class Threaded(Talk):
    """The same, as blocking code."""
    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return f"{seed}:0", {}
    def step(self, action):
        self.turn += 1
        right = bool(action) and ord(action[-1]) % 2
        return f"{self.seed}:{self.turn}", right / 3, self.turn == 3, False, {}

class Trips(Threaded):
    """Raises in its second step, for some answers of some seeds."""
    def step(self, action):
        if self.turn == 1 and (self.seed + len(action)) % 20 == 0:
            raise OSError("the game has crashed")
        return super().step(action)

class Stuck(Talk):
    """The second prompt of a run never ends."""
    async def step(self, action):
        if self.seed == 512 + prompt_order(8192, 0, 1):
            await asyncio.sleep(36_000)
        return await super().step(action)

class Hanging(Addition):
    """Never comes back."""
    blocking = True
    def reward(self, row, response):
        import time
        time.sleep(3600)
'''


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Path:
    """A file of tasks as a user would write one."""
    path = tmp_path_factory.mktemp("tasks") / "my_tasks.py"
    path.write_text(TASKS)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """The tiny model after a few seconds of warm-up: it writes digits and stops, mostly wrongly."""
    task = make_task(Settings(env="addition"), 0)
    return resolve_model("tiny", task, "addition", tmp_path_factory.mktemp("models"), 40)


class SharedWorker:
    """Runs training in this process; all runs use the rollout process that the first one starts."""

    def __init__(self, model: str, env: str, directory: Path):
        self.model, self.env, self.directory = model, env, directory
        self.workers, self.runs = None, 0  # `Processes`, and how many runs there were

    def train(self, *flags: str, prepare=lambda run: None, **settings) -> train.Run:
        """Train with these flags to the end. `prepare(run)` may change the run before it starts."""
        self.runs += 1
        defaults = {
            "model": self.model,
            "env": self.env,
            "learning_rate": 3e-4,
            "max_model_len": 128,
            "max_num_seqs": 64,
            "batch_size": 4,
            "group_size": 4,
            "eval_every": 0,
            "run_dir": self.directory / f"run-{self.runs}",
        }
        run = train.Run(parse([*flags, *as_flags(defaults | settings)]))
        try:
            prepare(run)
            run.start(self.workers)
            self.workers = run.workers
            (train.train_sync if run.settings.mode == "sync" else train.train_async)(run)
            run.wait_committed()
        finally:
            run.close(keep_workers=True)
        return run


@pytest.fixture(scope="session")
def worker(tiny, tasks, tmp_path_factory):
    shared = SharedWorker(tiny, f"{tasks}:Odd", tmp_path_factory.mktemp("runs"))
    yield shared
    if shared.workers:
        shared.workers.close()


def rows_of(run: train.Run) -> list[dict]:
    """The step rows that a run wrote."""
    lines = (run.log.dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step" in row]


def nested_or_apart(events):
    """Whether no two spans of a lane overlap in part: what viewers of the format ask for."""
    lanes = {}
    for event in events:
        span = event["ts"], event["ts"] + event["dur"]
        lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in lanes.values():
        ends = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            if ends and end > ends[-1]:
                return False
            ends.append(end)
    return True


CLOCK = ("t_", "wall_s")  # keys that differ between identical runs


def same(row: dict) -> dict:
    """What two identical runs have in common: all but clocks and what is derived from them."""
    loose = {
        "trainer_idle",
        "rollout_idle",
        "tokens_made",
        "slots_used",
        "steps_below_cap",
        "steps_starved",
    }
    return {k: v for k, v in row.items() if not k.startswith(CLOCK) and k not in loose}


def weights_of(run) -> dict:
    return load_file(run.log.dir / f"checkpoint-{run.version}" / "model.safetensors")


def record_batches(run) -> list:
    """Let a run keep every batch that it trains on."""
    batches, step = [], run.trainer.step

    def recording(samples, version):
        batches.append(samples)
        return step(samples, version)

    run.trainer.step = recording
    return batches


def spans_of(run, name: str, pid: int) -> list[tuple[int, int]]:
    """Begin and end (us) of all spans of a name in trace.json; the trainer is process 1, the worker
    process 2."""
    events = read_trace(run.log.dir / "trace.json")
    mine = [e for e in events if e["pid"] == pid and e["name"] == name and e["ph"] == "X"]
    return [(e["ts"], e["ts"] + e["dur"]) for e in mine]
