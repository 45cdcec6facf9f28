"""The built-in environments of several turns: rules, seeds, what can be won, warm-up."""

import random

import pytest

from envs import Env, EnvTask, check_reset, check_step
from plumbing.settings import Settings
from plumbing.tiny import byte_tokenizer
from tasks.find import make_task
from tasks.games import MOVES, FrozenLake, Grid, Guess, distances

GAMES = ["grid", "frozenlake", "guess"]


def make(name):
    if name == "frozenlake":
        pytest.importorskip("gymnasium")
    return make_task(Settings(env=name))


def walk(env, seed, moves):
    """Texts and rewards of an episode."""
    texts, rewards, over = [env.reset(seed)[0]], [], False
    for move in moves:
        text, reward, over, _, _ = env.step(move)
        texts.append(text)
        rewards.append(reward)
        if over:
            break
    return texts, rewards, over


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_depends_on_its_seed_and_actions_alone(name):
    games = make(name)
    moves = random.Random(0).choices("udlr" if name != "guess" else ["3", "8", "12"], k=12)
    first = [walk(games.make_env(), seed, moves) for seed in range(50)]
    assert first == [walk(games.make_env(), seed, moves) for seed in range(50)]
    assert len({tuple(texts) for texts, _, _ in first}) > 5


@pytest.mark.parametrize("name", GAMES)
def test_what_it_returns_is_valid_whatever_it_is_told(name):
    env = make(name).make_env()
    rng = random.Random(0)
    for seed in range(30):
        check_reset(env.reset(seed))
        for _ in range(12):
            action = rng.choice(["u", "d ", "l", "r", "", "é", "ur", "-1", "7", "10" * 9, "\n"])
            said = env.step(action)
            check_step(said)
            if said[2]:
                break


@pytest.mark.parametrize("name", ["grid", "frozenlake"])
def test_every_map_can_be_won_within_the_limit_on_turns(name):
    games = make(name)
    for seed in range(300):
        env = games.make_env()
        env.reset(seed)
        for _ in range(games.max_turns):
            _, reward, over, _, _ = env.step(env.best())
            if over:
                break
        assert reward == 1.0 and over, f"seed {seed}"


def test_the_grid_shows_player_goal_and_three_holes():
    for seed in range(100):
        text, _ = Grid(Settings()).reset(seed)
        assert [len(row) for row in text.split("\n")] == [4] * 4
        assert [text.count(c) for c in "PGH"] == [1, 1, 3]


def test_moves_go_where_they_say_and_walls_and_other_words_hold_still():
    env = Grid(Settings())
    env.reset(0)
    env.cells, env.goal, env.place = ["..H.", "....", "....", "G..."], (3, 0), (1, 1)
    for move, (down, right) in MOVES.items():
        env.place = (1, 1)
        text, reward, over, _, _ = env.step(move)
        assert env.place == (1 + down, 1 + right) and (reward, over) == (0.0, False)
        assert text.split("\n")[1 + down][1 + right] == "P" and text.count("P") == 1
    env.place = (0, 0)
    for move in ("u", "l", "up", "", "é"):
        env.step(move)
        assert env.place == (0, 0)
    env.place = (0, 1)
    assert env.step("r")[1:3] == (0.0, True)  # a hole
    env.place = (2, 0)
    assert env.step(" d\n")[1:3] == (1.0, True)  # the goal


def test_distances_go_around_holes():
    far = distances([".H.", ".H.", "..G"], (2, 2))
    assert far == {(2, 2): 0, (1, 2): 1, (0, 2): 2, (2, 1): 1, (2, 0): 2, (1, 0): 3, (0, 0): 4}


def test_on_the_frozen_lake_other_words_hold_still():
    pytest.importorskip("gymnasium")
    env = FrozenLake(Settings(env="frozenlake"))
    before, _ = env.reset(3)
    for action in ("dr", "ru", "ld", "", "right", "é"):
        assert env.step(action) == (before, 0.0, False, False, {})


def test_frozen_lake_is_gymnasiums_own():
    pytest.importorskip("gymnasium")
    for seed in range(40):
        env = FrozenLake(Settings(env="frozenlake"))
        text, _ = env.reset(seed)
        desc = ["".join(c.decode() for c in row) for row in env.lake.unwrapped.desc]
        shown = text.replace("\n", "")
        assert shown[0] == "P" and shown[-1] == "G" == desc[-1][-1]
        assert [c == "H" for c in shown] == [c == "H" for c in "".join(desc)]
        for move in random.Random(seed).choices("udlr", k=12):
            text, reward, over, _, _ = env.step(move)
            place = text.replace("\n", "").index("P")
            assert place == env.lake.unwrapped.s
            assert over == ("".join(desc)[place] in "GH")
            assert reward == ("".join(desc)[place] == "G")
            if over:
                break


def test_halving_always_finds_the_number_and_the_answers_are_right():
    for seed in range(100):
        env = Guess(Settings())
        env.reset(seed)
        low, high = 1, Guess.most
        for _ in range(Guess.max_turns):
            guess = (low + high) // 2
            text, reward, over, _, _ = env.step(str(guess))
            if over:
                break
            assert text == ("higher" if guess < env.secret else "lower")
            low, high = (guess + 1, high) if text == "higher" else (low, guess - 1)
        assert reward == 1.0 and over
    assert env.step("many")[:3] == ("a number", 0.0, False)


@pytest.mark.parametrize("name", GAMES)
def test_the_warm_up_shows_whole_episodes_that_end_well(name):
    games, rng = make(name), random.Random(0)
    won = 0
    for _ in range(300):
        episode = games.warmup(rng)
        assert 1 <= len(episode) <= games.max_turns
        texts, answers = zip(*episode, strict=True)
        assert all(isinstance(text, str) and text for text in texts + answers)
        if name != "guess":
            last = texts[-1].split("\n")
            at = next((r, c) for r in range(4) for c in range(4) if last[r][c] == "P")
            down, right = MOVES[answers[-1]]
            row, column = at[0] + down, at[1] + right
            won += 0 <= row < 4 and 0 <= column < 4 and last[row][column] == "G"
        tokens = byte_tokenizer()(max(answers, key=len))["input_ids"]
        assert len(tokens) < games.max_tokens  # room for EOS
    assert won == (0 if name == "guess" else 300)


def test_an_environment_is_a_task_whose_rows_are_seeds():
    games = make("grid")
    assert isinstance(games, EnvTask) and not set(games.train) & set(games.test)
    assert games.max_turns == Grid.max_turns and games.max_tokens == Grid.max_tokens
    assert games.first_text(5) == Grid(Settings()).reset(5)[0]


def test_gymnasium_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="env frozenlake needs: pip install gymnasium"):
        make_task(Settings(env="frozenlake"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def __init__(self, config): raise KeyError('x')", "env .*:E: KeyError: 'x'"),
        ("def reset(self, seed): raise OSError('gone')", "seed 512, reset: OSError: gone"),
        ("def reset(self, seed): import sys; sys.exit(3)", "seed 512, reset: SystemExit: 3"),
        ("def reset(self, seed): return 'text'", r"'text' is not \(text, info\)"),
        ("def reset(self, seed): import time; time.sleep(60)", "took longer than 0.2 s"),
    ],
)
def test_an_environment_that_cannot_begin_is_refused_in_one_line(tmp_path, body, message):
    path = tmp_path / "faulty.py"
    path.write_text(f"from envs import Env\nclass E(Env):\n    {body}\n")
    patience = 0.2 if "sleep" in body else 30.0
    with pytest.raises(ValueError, match=message) as error:
        games = make_task(Settings(env=f"{path}:E", env_timeout=patience))
        games.first_text(games.train[0])
    assert "\n" not in str(error.value)


ECHO = '''
from envs import Env

class Echo(Env):
    max_turns = 3
    async def reset(self, seed):
        return f"repeat {seed}", {}
    async def step(self, action):
        return "again", 0.5, False, False, {}
'''


def test_an_environment_of_a_users_file_is_found_and_its_reset_may_be_async(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ECHO)
    games = make_task(Settings(env=f"{path}:Echo"))
    assert games.first_text(3) == "repeat 3" and games.max_turns == 3
    with pytest.raises(ValueError, match="environment Echo has no warm-up for --model tiny"):
        games.warmup(random.Random(0))


def test_an_environment_without_its_methods_says_so():
    with pytest.raises(NotImplementedError, match=r"environment Env has no reset\(seed\)"):
        Env(Settings()).reset(0)
    with pytest.raises(NotImplementedError, match=r"environment Env has no step\(action\)"):
        Env(Settings()).step("")
