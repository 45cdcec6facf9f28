"""Environments of other packages: seeds, whole games, threads, and what is refused in one line."""

import importlib.util
import math
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs import check_reset, check_step
from plumbing.settings import Settings
from tasks import adapters
from tasks.adapters import OwnRandom, number
from tasks.find import make_task

pytestmark = pytest.mark.slow  # where their packages are installed (requirements/envs.txt)

PACKAGE = {"gem": "gem", "textarena": "textarena", "textworld": "textworld", "rg": "reasoning_gym"}
GEM, ARENA = "gem:game:GuessTheNumber-v0-easy", "textarena:GuessTheNumber-v0"
# With turns to take: some say more about the map, some draw random numbers.
GAMES = {
    GEM: [r"\boxed{5}", r"\boxed{3}", r"\boxed{8}"],
    "gem:game:Game2048-v0-easy": [r"\boxed{left}", r"\boxed{up}"] * 4,
    "gem:game:Sokoban-v0-easy": [r"\boxed{up}", "left"],
    ARENA: ["[10]", "[5]", "none", "none"],
    "textarena:FrozenLake-v0": ["[right]", "[down]", "[left]"],
    "textarena:2048-v0-ultra-easy": ["[left]", "[up]"] * 4,
    "textworld": ["look", "go north", "inventory", "save", "", "look \0box", "n then look", "I"],
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Generate TextWorld's games anew, once for all tests."""
    before, adapters.CACHE = adapters.CACHE, tmp_path_factory.mktemp("textworld")
    yield
    adapters.CACHE = before


def task(name: str):
    pytest.importorskip(PACKAGE[name.partition(":")[0]])
    return make_task(Settings(env=name))


def play(games, seed: int, actions: list[str]) -> list:
    """A game as text and rewards, every value checked."""
    env = games.make_env()
    said = env.reset(seed)
    check_reset(said)
    seen = [said[0]]
    for action in actions:
        said = env.step(action)
        check_step(said)
        seen.append(said[:4])
        if said[2] or said[3]:
            break
    env.close()
    return seen


def bisect(env, seed: int, low: int, high: int, form: str) -> list[float]:
    """Guess the number; the rewards of the turns."""
    env.reset(seed)
    rewards, over = [], False
    while not over:
        guess = (low + high) // 2
        text, reward, over, _, _ = env.step(form.format(guess))
        rewards.append(reward)
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    return rewards


@pytest.mark.parametrize("name", GAMES)
def test_a_game_depends_on_its_seed_and_turns_only(name):
    games = task(name)
    seeds = [0, 1]
    alone = {seed: play(games, seed, GAMES[name]) for seed in seeds}
    # Even what begins with the same rules goes on in another way.
    assert len({str(game) for game in alone.values()}) > 1
    random.seed(1)
    with ThreadPoolExecutor(8) as pool:  # interleaved, off the main thread
        again = [(seed, pool.submit(play, games, seed, GAMES[name])) for seed in seeds * 4]
    assert all(game.result() == alone[seed] for seed, game in again)
    assert random.random() == random.Random(1).random()  # ... and the process's own draws


def test_own_random_takes_up_where_it_was():
    mine, alone = OwnRandom(7), random.Random(7)
    for _ in range(2):
        with mine:
            assert random.random() == alone.random()
        random.seed(3)


@pytest.mark.parametrize("seed", range(8))
def test_the_number_is_found_by_bisection(seed):
    assert bisect(task(GEM).make_env(), seed, 1, 10, r"\boxed{{{}}}")[-1] == 1.0
    assert bisect(task(ARENA).make_env(), seed, 1, 20, "so I say [{}]") == pytest.approx(
        bisect(task(ARENA).make_env(), seed, 1, 20, "[{}]")
    )


def test_the_reward_of_textarena_comes_once_at_the_end():
    rewards = bisect(task(ARENA).make_env(), 3, 1, 20, "[{}]")
    assert rewards[-1] == 1.0 and not any(rewards[:-1])


def test_observations_of_textarena_are_not_repeated():
    first, *steps = play(task(ARENA), 5, ["[10]", "[5]"])
    assert "Guess The Number" in first
    assert all("Guess The Number" not in text and "[" not in text for text, *_ in steps)


def test_the_board_of_gem_is_in_the_observation():
    games = task("gem:game:Sokoban-v0-easy")
    assert all("# # #" in (text if isinstance(text, str) else text[0])
               for text in play(games, 5, [r"\boxed{up}"]))  # fmt: skip


def test_textworld_is_won_by_its_own_solution():
    games = task("textworld")
    import textworld

    env = games.make_env()
    text, _ = env.reset(3)
    path = adapters.CACHE.glob("*/3/game.z8").__next__()
    infos = textworld.EnvInfos(policy_commands=True, max_score=True)
    solution = textworld.start(str(path), infos).reset().policy_commands
    assert len(solution) == 3 and "$$" not in text and "\n>" not in text
    said = [env.step(f"I think...\n> {command.upper()}") for command in solution]
    env.close()
    assert [reward for _, reward, *_ in said] == [0.0, 0.0, 1.0]
    assert [over for _, _, over, *_ in said] == [False, False, True]


def test_textworld_takes_no_command_that_leaves_the_game(tmp_path, monkeypatch):
    games = task("textworld")
    monkeypatch.chdir(tmp_path)
    _, *said = play(games, 0, ["save", "script", "look. save", "undo", "quit", "yes", "\0", "look"])
    assert [text == "That is not a command." for text, *_ in said] == [True] * 2 + [False] + [
        True
    ] * 4 + [False]
    assert not list(tmp_path.iterdir())


def test_a_game_of_textworld_is_generated_once(monkeypatch):
    games = task("textworld")
    games.first_text(0)
    import textworld

    made, make = [], textworld.generator.make_game
    monkeypatch.setattr(
        textworld.generator, "make_game", lambda options: made.append(1) or make(options)
    )
    folder = adapters.CACHE / f"{textworld.__version__}-3-4-3" / "9"
    folder.mkdir(parents=True)
    (folder / "new.z8").write_text("of a process that was killed")
    shutil.copy(folder.parent / "0" / "game.json", folder / "new.json")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda seed: games.first_text(seed), [9] * 8))
    assert len(set(texts)) == len(made) == 1
    assert {path.name for path in folder.iterdir()} == {"game.json", "game.z8", "lock"}


# -- reasoning-gym -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rg:chain_sum", "rg:tower_of_hanoi", "rg:list_functions"])
def test_rows_depend_on_the_seed_and_no_question_is_on_both_sides(name):
    one, again = task(name), task(name)
    other = make_task(Settings(env=name), seed=1)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(again.train.__getitem__, reversed(range(60))))[::-1]
    assert rows == one.train[:60] != other.train[:60]
    test = {row.prompt for row in one.test[:60]}
    assert not test & {row.prompt for row in rows} and len(test) > 10
    assert len(one.train) == 8192 and len(one.test) == 512 and one.test[-1] == one.test[511]


def test_scores_of_reasoning_gym():
    games = task("rg:chain_sum")
    row = games.train[3]
    answer = games.entry(int(row.answer))["answer"]
    assert games.reward(row, f"<answer>1</answer> no: <answer> {answer}\n</answer>") == 1.0
    assert games.reward(row, "<answer>no number</answer>") < 0.1
    assert games.reward(row, answer) == games.reward(row, "") == 0.0
    env = games.make_env()
    check_reset(env.reset(row))
    check_step(env.step("7"))


def test_a_task_with_too_few_questions_is_refused(monkeypatch):
    games = task("rg:chain_sum")
    monkeypatch.setattr(games, "entry", lambda index: {"question": "always this"})
    with pytest.raises(ValueError, match="too few questions"):
        games.train[0], games.test[0]


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [GEM, ARENA, "textworld", "rg:chain_sum"])
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ValueError, match=f"^env {name} needs: pip install .*requirements/envs.txt"):
        make_task(Settings(env=name))


@pytest.mark.parametrize(
    "name, why",
    [
        ("gem:game:GuessTheNumber", "not 'game:GuessTheNumber'.* game:GuessTheNumber-v0-"),
        ("textarena:FrozenLake", "not 'FrozenLake'.* FrozenLake-v0"),
        ("rg:chain", "not 'chain'.* chain_sum"),
        ("textarena:TicTacToe-v0", "players"),
        ("textarena:PublicGoodsGame-v0", "several players"),
        ("textarena:ThreeCardMonte-v0", "as reward: a number is expected"),
        ("textarena:Countdown-v0", "as observation: text is expected"),
        ("textarena:GuessWho-v0", "API key not found"),
        ("gem:math:GSM8K", "No module named"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(name, why, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=why) as error:
        task(name)
    assert re.match(f"^env {re.escape(name)} does not start: [^\n]*$", str(error.value))


@pytest.mark.parametrize("reward", ["bad move", None, [1.0], math.nan, -math.inf, 11])
def test_a_reward_that_is_no_sane_number_is_refused(reward):
    with pytest.raises((TypeError, ValueError), match="^env it: .* as reward: "):
        number("it", reward)


def test_wrapped_games_are_held_to_it(monkeypatch):
    env = task(GEM).make_env()
    env.reset(1)
    monkeypatch.setattr(env.game, "step", lambda action: ("", "1", True, False, {}))
    with pytest.raises(TypeError, match=f"env {GEM}: '1' as reward"):
        env.step("")
    monkeypatch.setattr(env.game, "step", lambda action: (None, 1, True, False, {}))
    with pytest.raises(TypeError, match=f"env {GEM}: None as observation"):
        env.step("")


@pytest.mark.parametrize("rewards", [{0: "no"}, {1: 1.0}, None, 1.0])
def test_the_rewards_of_textarena_are_held_to_it(rewards, monkeypatch):
    env = task(ARENA).make_env()
    env.reset(1)
    monkeypatch.setattr(type(env.core), "close", lambda self: (rewards, {}))
    env.step("none")
    with pytest.raises(TypeError, match=f"env {ARENA}: .* as reward"):
        env.step("none")


def test_scores_of_reasoning_gym_are_held_to_it(monkeypatch):
    games = task("rg:chain_sum")
    monkeypatch.setattr(games.dataset, "score_answer", lambda answer, entry: "1")
    with pytest.raises(TypeError, match="env rg:chain_sum: '1' as reward"):
        games.reward(games.train[0], "<answer>1</answer>")


def test_scores_of_textworld_are_held_to_it(monkeypatch):
    env = task("textworld").make_env()
    env.reset(0)
    step = env.game.step
    monkeypatch.setattr(env.game, "step", lambda command: (step(command)[0], None, False))
    with pytest.raises(TypeError, match="env textworld: None as reward"):
        env.step("look")
    env.close()


def test_closing_waits_for_a_step():
    env = task("textworld").make_env()
    env.reset(0)
    with env.busy:
        closing = threading.Thread(target=env.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        assert env.game.step("look")[0].feedback
    closing.join(10)
    assert not closing.is_alive()


def test_gem_leaves_the_logging_of_the_process_alone():
    import logging
    import subprocess
    import sys

    pytest.importorskip("gem")
    code = (
        "import logging\n"
        "from plumbing.settings import Settings\n"
        "from tasks.find import make_task\n"
        f"make_task(Settings(env={GEM!r}))\n"
        "root = logging.getLogger()\n"
        "assert root.level == logging.WARNING and not root.handlers, root.handlers\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert logging.getLogger().level == logging.WARNING
