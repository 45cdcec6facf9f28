"""Environments of several turns, small enough for the model `tiny`: grid, frozenlake, guess."""

import random
import re

from envs import Env
from plumbing.packages import require
from plumbing.settings import Settings

MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}


def distances(cells: list[str], goal: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Steps to the goal from every cell that it can be reached from without entering a hole."""
    found, wave = {goal: 0}, [goal]
    for row, column in wave:  # grows while it is walked
        for down, right in MOVES.values():
            to = row + down, column + right
            inside = 0 <= to[0] < len(cells) and 0 <= to[1] < len(cells[0])
            if inside and to not in found and cells[to[0]][to[1]] != "H":
                found[to] = found[row, column] + 1
                wave.append(to)
    return found


class Grid(Env):
    """Walk from P to the goal G on a 4 x 4 grid, past three holes H, one letter a turn: u d l r.

    Every seed is another map with a way through. The goal gives 1.0, a hole ends the episode, a
    wall or another text leaves P where it is. Made for the model `tiny`.
    """

    max_tokens = 2  # a letter and EOS
    blocking = False
    size, holes = 4, 3

    def reset(self, seed: int) -> tuple[str, dict]:
        rng = random.Random(f"grid {seed}")
        while True:
            cells = [(row, column) for row in range(self.size) for column in range(self.size)]
            self.place, self.goal, *holes = rng.sample(cells, 2 + self.holes)
            rows = [["."] * self.size for _ in range(self.size)]
            for row, column in holes:
                rows[row][column] = "H"
            rows[self.goal[0]][self.goal[1]] = "G"
            self.cells = ["".join(row) for row in rows]
            self.far = distances(self.cells, self.goal)
            if self.place in self.far:
                return self._text(), {}

    def _text(self) -> str:
        row, column = self.place
        rows = list(self.cells)
        rows[row] = rows[row][:column] + "P" + rows[row][column + 1 :]
        return "\n".join(rows)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        down, right = MOVES.get(action.strip(), (0, 0))
        row, column = self.place[0] + down, self.place[1] + right
        if 0 <= row < self.size and 0 <= column < self.size:
            self.place = row, column
        on = self.cells[self.place[0]][self.place[1]]
        return self._text(), float(on == "G"), on in "GH", False, {}

    def best(self) -> str:
        """A move that is on a shortest way."""
        row, column = self.place
        steps = {m: self.far.get((row + d, column + r), 99) for m, (d, r) in MOVES.items()}
        return min(steps, key=steps.get)

    @classmethod
    def warmup(cls, rng: random.Random) -> list[tuple[str, str]]:
        env, said, over = cls(Settings()), [], False
        text, _ = env.reset(rng.getrandbits(32))
        while not over and len(said) < cls.max_turns:
            move = env.best()
            said.append((text, move))
            text, _, over, _, _ = env.step(move)
        return said


class FrozenLake(Grid):
    """Gymnasium's FrozenLake-v1 as text, not slippery, on a random 4 x 4 map for every seed.

    As on the grid, P is to get to G past H in moves u d l r, from the upper left to the lower right
    corner.
    """

    max_turns = 12

    def __init__(self, config):
        super().__init__(config)
        require("gymnasium", f"env {config.env}")

    def reset(self, seed: int) -> tuple[str, dict]:
        import gymnasium
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        desc = generate_random_map(self.size, p=0.75, seed=seed)
        self.lake = gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=False)
        self.lake.reset(seed=seed)
        self.cells = [row.replace("F", ".").replace("S", ".") for row in desc]
        self.place, self.goal = (0, 0), (self.size - 1, self.size - 1)
        self.far = distances(self.cells, self.goal)
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action.strip() not in MOVES:
            return self._text(), 0.0, False, False, {}
        place, reward, terminated, _, _ = self.lake.step("ldru".index(action.strip()))
        self.place = divmod(int(place), self.size)
        return self._text(), float(reward), terminated, False, {}


class Guess(Env):
    """Guess a number from 1 to 15 in four turns; the answers are `higher` and `lower`.

    A player who halves what is left always finds it.
    """

    max_turns = 4
    max_tokens = 3  # two digits and EOS
    blocking = False
    most = 15

    def reset(self, seed: int) -> tuple[str, dict]:
        self.secret = random.Random(f"guess {seed}").randint(1, self.most)
        return f"1-{self.most}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if not re.fullmatch(r"[0-9]{1,9}", action.strip()):
            return "a number", 0.0, False, False, {}
        guess = int(action)
        found = guess == self.secret
        return "higher" if guess < self.secret else "lower", float(found), found, False, {}

    @classmethod
    def warmup(cls, rng: random.Random) -> list[tuple[str, str]]:
        env, said, over, low, high = cls(Settings()), [], False, 1, cls.most
        text, _ = env.reset(rng.getrandbits(32))
        while not over and len(said) < cls.max_turns:
            guess = rng.randint(low, high)  # of what is left, anyhow: RL may find the best one
            said.append((text, str(guess)))
            text, _, over, _, _ = env.step(str(guess))
            low = max(low, guess + 1) if text == "higher" else low
            high = min(high, guess - 1) if text == "lower" else high
        return said
