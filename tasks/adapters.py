"""Environments and tasks of other packages, by name: gem:ID, textarena:ID, textworld, rg:TASK.

They run offline, after `pip install --no-deps -r requirements/envs.txt`. What needs more than that
(a download, a service, a second player) is refused when a run starts, and so is what returns no
number as reward: some games of textarena 0.7.4 put a message there after a bad move.
"""

import difflib
import fcntl
import logging
import numbers
import os
import random
import re
import threading
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from envs import Env, Row, Task
from plumbing.packages import require

LIMIT = 10.0  # the games known give 1.0 at most; far from that is a fault, not a score
INSTALL = "--no-deps -r requirements/envs.txt"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "textworld"
LOCK = threading.Lock()  # the packages share state in a process: `random`, numpy's, parsers


class OwnRandom:
    """Random state of one episode, in place of the global one while its game is at work: so it
    depends on its seed and its turns only. One game at a time: a second would draw from it too."""

    def __init__(self, seed: int):
        self.state = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    def __enter__(self) -> None:
        LOCK.acquire()
        self._swap()

    def __exit__(self, *_) -> None:
        self._swap()
        LOCK.release()

    def _swap(self) -> None:
        outside = random.getstate(), np.random.get_state()
        random.setstate(self.state[0])
        np.random.set_state(self.state[1])
        self.state = outside


@contextmanager
def starting(env: str):
    """Say in one line why an environment cannot be made: its name, players, data, a package."""
    try:
        yield
    except (
        ImportError, SyntaxError, LookupError, OSError, TypeError, ValueError, AssertionError
    ) as error:  # fmt: skip
        why = re.sub(r"[\s*]+", " ", str(error)).strip().removeprefix(f"env {env}: ")
        raise ValueError(f"env {env} does not start: {why or type(error).__name__:.250}") from error


def find(name: str, known: Iterable[str]) -> None:
    """Raise ValueError with the most similar names, unless it is a known one."""
    known = list(known)
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, 4, 0.0))
        raise ValueError(f"it knows {len(known)} names, but not {name!r}; the nearest are {near}")


def number(env: str, reward) -> float:
    """The reward, or TypeError or ValueError if it is no number from -LIMIT to LIMIT."""
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"env {env}: {reward!r:.100} as reward: a number is expected")
    if not abs(reward) <= LIMIT:  # written so that NaN is refused too
        raise ValueError(f"env {env}: {reward!r} as reward: at most {LIMIT:g} is expected")
    return float(reward)


def text(env: str, said) -> str:
    """The observation, stripped, or TypeError if it is no text."""
    if not isinstance(said, str):
        raise TypeError(f"env {env}: {said!r:.100} as observation: text is expected")
    return said.strip()


class Adapter(Env):
    """Base of the games. The first of a name in a process plays three turns when it is made."""

    packages: tuple[str, ...] = ()
    max_turns = 20
    max_tokens = 256
    tried: set[str] = set()

    def __init__(self, config):
        super().__init__(config)
        self.name, self.id = config.env, config.env.partition(":")[2]
        for package in self.packages:
            require(package, f"env {self.name}", INSTALL)
        if self.name not in self.tried:
            with starting(self.name):
                self.reset(0)
                any(self.step("?")[2] for _ in range(3))  # bad moves show what is faulty
            self.close()
            self.tried.add(self.name)


class Gem(Adapter):
    """A game of GEM (gem-llm); an answer is the last `\\boxed{...}` of a turn.

    Its rewards: 1.0 for success, parts of it on the way in some games, -0.1 for a turn without an
    answer, which ends the game. Games end by themselves after a number of turns of their own.
    """

    packages = ("gem", "reasoning_gym")

    def reset(self, seed: int) -> tuple[str, dict]:
        root = logging.getLogger()
        level, handlers = root.level, root.handlers[:]
        import gem  # sets up logging for the whole process: that is undone

        root.setLevel(level)
        root.handlers[:] = handlers
        find(self.id, gem.envs.registration.ENV_REGISTRY)
        self.random = OwnRandom(seed)
        with self.random:
            self.game = gem.make(self.id)
            said, info = self.game.reset(seed)
        return self._said(said, info), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        with self.random:
            said, reward, terminated, truncated, info = self.game.step(action)
        reward = number(self.name, reward)
        return self._said(said, info), reward, bool(terminated), bool(truncated), {}

    def _said(self, said, info: dict) -> str:
        # The suffix is part of it: in some games the board is there.
        return text(self.name, f"{text(self.name, said)}\n{info.get('suffix', '')}")


class TextArena(Adapter):
    """A game of textarena for one player; an answer is in square brackets.

    The reward comes at the end of a game: 1.0 if it is won, in most games a part of it for being
    near. A second invalid move in a row is an end, too; one that --max_turns makes has no reward.
    """

    packages = ("textarena",)

    def reset(self, seed: int) -> tuple[str, dict]:
        import textarena

        self.own_turn = textarena.ObservationType.PLAYER_ACTION
        find(self.id, textarena.envs.registration.ENV_REGISTRY)
        self.random = OwnRandom(seed)
        with self.random:
            self.game = self.core = textarena.make(self.id)
            # Its wrappers would repeat the whole game so far in every observation.
            while isinstance(self.core, textarena.Wrapper):
                self.core = self.core.env
            self.game.reset(num_players=1, seed=seed)
        if not isinstance(self.core.state, textarena.SinglePlayerState):
            raise ValueError("it is a game for several players; one is what can be trained here")
        return self._said(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        with self.random:
            over, _ = self.game.step(action)
        rewards = self.game.close()[0] if over else {0: 0.0}
        if not isinstance(rewards, dict) or 0 not in rewards:
            raise TypeError(f"env {self.name}: {rewards!r:.100} as rewards: no player 0 in it")
        return self._said(), number(self.name, rewards[0]), bool(over), False, {}

    def _said(self) -> str:
        """What the game has said since the last time, without the player's own turn."""
        said = self.core.get_observation()[1]
        said = [text(self.name, what) for _, what, kind in said if kind is not self.own_turn]
        return "\n\n".join(said)


# Commands outside of these would write files (save, script) or leave the game (restart, quit).
VERBS = re.compile(
    "close|drop|eat|examine|get|go|insert|inventory|lock|look|open|put|take|unlock|[nsewilx]|"
    "north|south|east|west"
)


class TextWorld(Adapter):
    """TextWorld: reach a goal of three commands in a house of three rooms, another for each seed.

    The reward is the rise of the score, as a part of the highest possible: 1.0 in sum if won. A
    game takes seconds to generate, once: it is kept under .cache/textworld/ (0.4 MB each).
    """

    packages = ("textworld",)
    max_tokens = 64
    rooms, objects, goal = 3, 4, 3

    def reset(self, seed: int) -> tuple[str, dict]:
        import textworld

        path = self._game_file(seed)
        self.busy = threading.Lock()
        with LOCK:
            self.game = textworld.start(str(path), textworld.EnvInfos(max_score=True))
        state, self.score = self.game.reset(), 0
        banner, _, said = state.feedback.rpartition("$$")  # a picture made of letters
        return (
            f"{self._clean(said)}\n\nAnswer with one command a turn and nothing else, for example: "
            "look, inventory, go east, open box, take key, unlock door with key."
        ), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        lines = action.strip().lower().splitlines() or [""]
        words = re.findall(r"[a-z0-9'-]+", lines[-1])[:12]  # a NUL would crash the interpreter
        if not words or not VERBS.fullmatch(words[0]) or "then" in words:
            return "That is not a command.", 0.0, False, False, {}
        with self.busy:
            state, score, over = self.game.step(" ".join(words))
        before, self.score = self.score, state.max_score if state.won else score
        reward = number(self.name, self.score) - before
        return self._clean(state.feedback), reward / state.max_score, bool(over), False, {}

    def close(self) -> None:
        if hasattr(self, "busy"):
            with self.busy:  # not under a step that took too long
                self.game.close()

    def _clean(self, said) -> str:
        said = re.sub(r"\n>[^\n]*$", "", text(self.name, said))  # the prompt and status line
        return re.sub(r"\s*\n\s*\n\s*", "\n\n", said).strip()

    def _game_file(self, seed: int) -> Path:
        import textworld

        made_by = f"{textworld.__version__}-{self.rooms}-{self.objects}-{self.goal}"
        folder = CACHE / made_by / str(seed)
        done = folder / "game.z8"
        if done.exists():
            return done
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the samples of a group ask at once, in any process
            if not done.exists():
                options = textworld.GameOptions()
                options.seeds, options.path = seed, str(folder / "new.z8")
                options.nb_rooms, options.nb_objects = self.rooms, self.objects
                options.quest_length, options.force_recompile = self.goal, True
                with LOCK:
                    game = textworld.generator.make_game(options)
                textworld.generator.compile_game(game, options)
                (folder / "new.ni").unlink()
                os.replace(folder / "new.json", folder / "game.json")
                os.replace(folder / "new.z8", done)  # last: with it, all of it is there
        return done


class ReasoningGym(Task):
    """A task of reasoning-gym. The answer goes between <answer> and </answer>, else it scores 0.

    Its scores are from 0 to 1; in many tasks a wrong answer still gets 0.01.
    """

    max_tokens = 512
    blocking_reset = True  # some rows take a second to make
    ask = "\n\nThink first, then write only the final answer, like this: <answer>...</answer>"

    def __init__(self, config, seed: int = 0):
        super().__init__(config, seed)
        require("reasoning_gym", f"env {config.env}", INSTALL)
        name = config.env.partition(":")[2]
        with starting(config.env):
            import reasoning_gym

            find(name, reasoning_gym.factory.DATASETS)
            self.dataset = reasoning_gym.create_dataset(name, size=2**20, seed=seed)
            self.entry = lru_cache(maxsize=4096)(self._entry)
            self.train, self.test = Entries(self, "train", 8192), Entries(self, "test", 512)
            self.train[0], self.test[0]  # raises what it cannot do

    def _entry(self, index: int) -> dict:
        with OwnRandom(index):
            return self.dataset[index]

    def reward(self, row: Row, response: str) -> float:
        answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        if not answers:
            return 0.0
        entry = self.entry(int(row.answer))
        return number(self.config.env, self.dataset.score_answer(answers[-1].strip(), entry))


class Entries(Sequence):
    """One side of a split, made row by row when asked for: some tasks take a second for each.

    A question's text decides on which side it is, so one that comes twice is never on both.
    """

    tries = 64  # half of the questions are on the other side

    def __init__(self, task: ReasoningGym, side: str, size: int):
        self.task, self.side, self.size = task, side, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place):
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self.size))]
        first = range(self.size)[place] * self.tries
        for index in range(first, first + self.tries):
            question = self.task.entry(index)["question"]
            if ("train", "test")[crc32(question.encode()) % 2] == self.side:
                return Row(question + self.task.ask, str(index))
        raise ValueError(f"it has too few questions for a {self.side} set")
