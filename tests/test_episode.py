"""One episode, with an engine that answers as it is told: tokens, turns, limits, faults, waits."""

import asyncio
import threading
import time

import numpy as np
import pytest

from buffer import Ticket, derive_seed
from envs import (
    Env,
    EnvError,
    EnvTask,
    Episode,
    Latency,
    Limits,
    Row,
    Task,
    Unwanted,
    run_episode,
)
from experiments.naive import run_lockstep
from plumbing.calls import EnvCalls, history
from plumbing.chat import encode_reply, remembered
from plumbing.settings import Settings
from plumbing.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
WIDE = Limits(max_tokens=9, max_turns=5, max_model_len=200)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Scripted:
    """An engine whose n-th answer in an episode is the n-th of `answers`, after `seconds`."""

    def __init__(self, *answers, version=3, seconds=0.0, on_turn=lambda engine: None):
        self.answers, self.version, self.seconds, self.on_turn = answers, version, seconds, on_turn
        self.asked = []

    async def generate(self, turn):
        number = sum(other.seed != turn.seed for other in self.asked)
        self.asked.append(turn)
        await asyncio.sleep(self.seconds)
        answer = self.answers[number % len(self.answers)][: turn.max_tokens]
        turn.ids += answer
        turn.logprobs += [-1.0 - i for i in range(len(answer))]
        turn.versions += [self.version] * len(answer)
        self.on_turn(self)


class Counting(Env):
    """Says `seed:turn`; a number is its reward, `end` ends it."""

    max_turns = 5
    blocking = False
    log: list = []

    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return f"{seed}:0", {}

    def step(self, action):
        self.turn += 1
        self.log.append((self.seed, self.turn, action))
        reward = float(action) if action.isdigit() else 0.0
        return f"{self.seed}:{self.turn}", reward, action == "end", False, {}


def ticket(group=0, sample=0, prompt=7, seed=11, **more):
    return Ticket(group, sample, prompt, seed, **more)


def games(env_class=Counting, **config):
    return EnvTask(env_class, Settings(env="counting", **config))


def episode_of(task, engine, one=None, limits=WIDE, tokenizer=TOKENIZER, calls=None):
    calls = calls or EnvCalls(task.config.env_timeout, 8)
    return Episode(one or ticket(), task, engine, tokenizer, calls, limits)


def play(task, engine, one=None, limits=WIDE, tokenizer=TOKENIZER):
    return asyncio.run(run_episode(episode_of(task, engine, one, limits, tokenizer)))


# -- single-turn tasks -----------------------------------------------------------------------------


class Parrot(Task):
    """Rewards the length of a response."""

    chat = False
    stop = "\n"
    train = [Row("ab", "x"), Row("cde", "y")]
    test = [Row("held out", "z")]

    def reward(self, row, response):
        return len(response)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_sample_is_the_prompt_and_the_ids_as_they_were_sampled(blocking):
    task, engine = Parrot(Settings()), Scripted([70, 71, EOS])
    task.blocking = blocking
    sample = play(task, engine, ticket(prompt=1, seed=7), Limits(9, 1, 64))
    prompt = ids_of("cde")
    (turn,) = engine.asked
    assert (turn.context, turn.max_tokens, turn.seed) == (prompt, 9, 7)
    assert turn.stop_ids == [EOS, *ids_of("\n")]
    assert sample.ticket == ticket(prompt=1, seed=7)
    assert sample.ids.tolist() == [*prompt, 70, 71, EOS]
    assert sample.mask.tolist() == [False] * 3 + [True] * 3
    assert sample.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert sample.versions.tolist() == [-1, -1, -1, 3, 3, 3] and sample.staleness(5) == 2
    dtypes = [x.dtype for x in (sample.ids, sample.mask, sample.logprobs, sample.versions)]
    assert dtypes == [np.int32, bool, np.float32, np.int32]
    text = TOKENIZER.decode([70, 71, EOS], skip_special_tokens=True)
    assert sample.reward == len(text) and isinstance(sample.reward, float)
    assert sample.truncated is False and sample.turns == ((3, 6),)


def test_an_evaluation_ticket_takes_a_held_out_prompt():
    sample = play(Parrot(Settings()), Scripted([70]), ticket(prompt=0, eval=True), Limits(9, 1, 64))
    assert len(sample.ids) == len("held out") + 1


def test_a_response_cut_by_its_limit_is_truncated():
    def cut(engine):
        engine.asked[-1].truncated = True

    engine = Scripted([70], on_turn=cut)
    assert play(Parrot(Settings()), engine, ticket(prompt=0), Limits(1, 1, 64)).truncated is True


def test_a_turn_ends_at_what_model_and_template_declare_too():
    engine = Scripted([70, 71])
    play(Parrot(Settings()), engine, ticket(prompt=0), Limits(9, 1, 64, stops=(EOS, 65, 66)))
    assert engine.asked[0].stop_ids == [EOS, *ids_of("\n"), 65, 66]


# -- several turns ---------------------------------------------------------------------------------


def test_turns_are_appended_as_ids_with_the_environments_text_in_between_unmasked():
    first, last = [*ids_of("2"), EOS], [*ids_of("end"), EOS]
    sample = play(games(), Scripted(first, last))
    seed = 512 + 7
    prompt = ids_of(f"<|im_start|>{seed}:0<|im_end|>")
    between = ids_of(f"<|im_start|>{seed}:1<|im_end|>")  # the turn's own EOS is there already
    assert sample.ids.tolist() == prompt + first + between + last
    sampled = [False] * len(prompt) + [True] * 2 + [False] * len(between) + [True] * 4
    assert sample.mask.tolist() == sampled
    assert [sample.ids[a:b].tolist() for a, b in sample.turns] == [first, last]
    assert sample.logprobs[sample.mask].tolist() == [-1, -2, -1, -2, -3, -4]
    assert not sample.logprobs[~sample.mask].any() and (sample.versions[~sample.mask] == -1).all()
    assert sample.reward == 2.0 and not sample.truncated


def test_a_turn_without_its_end_gets_one_that_is_not_trained_on():
    sample = play(games(), Scripted(ids_of("2"), [*ids_of("end"), EOS]))
    first, _ = sample.turns
    assert sample.ids[first[1]] == EOS and not sample.mask[first[1]]


def test_ids_that_no_tokenizer_would_give_back_are_kept_verbatim():
    half = ids_of("é")[:1]  # half a character: its text is another one's
    assert ids_of(TOKENIZER.decode(half)) != half
    sample = play(games(), Scripted([*half, EOS], [*ids_of("end"), EOS]))
    assert sample.ids[sample.mask].tolist() == [*half, EOS, *ids_of("end"), EOS]


def test_a_template_that_drops_earlier_thinking_changes_no_recorded_id():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% set text = m.content.split('</think>')[-1] if m.role =="
        " 'assistant' and not loop.last else m.content %}<|im_start|>{{ m.role }}\n{{ text }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    said = "<think>six and one</think>7"
    first, last = [*ids_of(said), EOS], [*ids_of("end"), EOS]
    engine = Scripted(first, last)
    limits = Limits(max_tokens=60, max_turns=5, max_model_len=400)
    sample = play(games(), engine, limits=limits, tokenizer=tokenizer)
    middle = "\n<|im_start|>user\n519:1<|im_end|>\n<|im_start|>assistant\n"
    prompt = "<|im_start|>user\n519:0<|im_end|>\n<|im_start|>assistant\n"
    assert sample.ids.tolist() == ids_of(prompt) + first + ids_of(middle) + last
    assert engine.asked[1].context == sample.ids.tolist()[: -len(last)]  # nothing was rewritten
    messages = [{"role": "user", "content": "519:0"}, {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": "519:1"})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "six and one" not in rendered  # as it would have been, rendered again


def test_a_template_that_changes_the_last_answer_is_refused(monkeypatch):
    tokenizer = byte_tokenizer()
    shouting = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", shouting)
    with pytest.raises(ValueError, match="template changes what the model said"):
        encode_reply(games(), "go on", tokenizer)


def test_without_a_chat_template_the_text_alone_is_appended():
    task = games()
    task.chat = False
    sample = play(task, Scripted(ids_of("2"), ids_of("end")))
    assert sample.ids.tolist() == ids_of("519:0" + "2" + "519:1" + "end")
    assert encode_reply(task, "", TOKENIZER) == ()


def test_without_a_template_a_text_that_begins_as_the_turn_ended_loses_nothing():
    class Says(Counting):
        def step(self, action):
            return "2 is more", 0.0, action == "end", False, {}

    task = games(Says)
    task.chat = False
    sample = play(task, Scripted(ids_of("2"), ids_of("end")))
    assert sample.ids.tolist() == ids_of("519:0" + "2" + "2 is more" + "end")


def test_an_async_reset_of_an_environment_that_does_not_block():
    class Mixed(Counting):
        async def reset(self, seed):
            await asyncio.sleep(0.01)
            return Counting.reset(self, seed)

    assert play(games(Mixed), Scripted(ids_of("end"))).ids[:7].tolist() == ids_of(
        "<|im_start|>519:0<|im_end|>"
    )


def test_each_turn_has_a_seed_of_its_own_that_depends_on_the_sample_and_the_turn():
    engines = [Scripted(ids_of("1"), ids_of("2"), ids_of("end")) for _ in range(2)]
    for engine in engines:
        play(games(), engine)
    seeds = [[turn.seed for turn in engine.asked] for engine in engines]
    assert seeds[0] == seeds[1] == [11, derive_seed(11, 1), derive_seed(11, 2)]
    assert len(set(seeds[0])) == 3


def test_the_samples_of_a_group_play_the_same_seed_and_evaluation_others():
    task = games()
    texts = [task.first_text(task.train[i]) for i in range(3)]
    assert len(set(texts)) == 3 and not set(task.train) & set(task.test)
    samples = [play(task, Scripted(ids_of("end")), ticket(sample=i)) for i in range(2)]
    assert samples[0].ids.tolist() == samples[1].ids.tolist()


# -- limits ----------------------------------------------------------------------------------------


def test_an_environment_may_say_itself_whether_an_episode_is_solved():
    class Says(Counting):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, info | self.says

    for says, solved in (({}, False), ({"success": None}, False), ({"success": True}, True)):
        Says.says = says
        assert play(games(Says), Scripted(ids_of("end"))).solved is solved
    Says.says = {"success": False}
    assert play(games(Says), Scripted(ids_of("1"))).reward == 5  # a point a turn
    assert play(games(Says), Scripted(ids_of("1"))).solved is False


def test_the_limit_on_turns_ends_an_episode_as_truncated():
    sample = play(games(), Scripted(ids_of("1")), limits=WIDE._replace(max_turns=3))
    assert len(sample.turns) == 3 and sample.truncated and sample.reward == 3.0
    assert sample.mask[-1]  # nothing is appended that no turn follows


def test_an_episode_with_a_turn_that_its_limit_cut_is_truncated():
    def cut_first(engine):
        engine.asked[-1].truncated = len(engine.asked) == 1

    engine = Scripted(ids_of("1"), ids_of("end"), on_turn=cut_first)
    sample = play(games(), engine)
    assert len(sample.turns) == 2 and sample.truncated  # it went on all the same


def test_an_episode_that_ends_in_its_last_turn_is_not_truncated():
    engine = Scripted(ids_of("1"), ids_of("end"))
    sample = play(games(), engine, limits=WIDE._replace(max_turns=2))
    assert len(sample.turns) == 2 and not sample.truncated


def test_the_limit_on_the_whole_length_ends_an_episode_before_it_is_passed():
    for limit in range(12, 60):
        engine = Scripted([*ids_of("1"), EOS])
        sample = play(games(), engine, limits=WIDE._replace(max_model_len=limit))
        assert len(sample.ids) <= limit and sample.truncated and sample.mask[-1]
        assert all(len(turn.context) + turn.max_tokens <= limit for turn in engine.asked)
        assert all(turn.max_tokens >= 1 for turn in engine.asked)


def test_a_prompt_that_leaves_no_room_is_a_fault_with_the_setting_named():
    with pytest.raises(EnvError, match=r"seed 519, reset: a prompt of 7 tokens .*max_model_len 7"):
        play(games(), Scripted([5]), limits=WIDE._replace(max_model_len=7))


def test_an_environment_may_cut_itself_short():
    class Cut(Counting):
        def step(self, action):
            return "", 0.5, False, True, {}

    sample = play(games(Cut), Scripted(ids_of("1")))
    assert sample.truncated and len(sample.turns) == 1 and sample.reward == 0.5


# -- still wanted ----------------------------------------------------------------------------------


def test_an_episode_that_has_become_too_old_stops_before_its_next_turn():
    def publish(engine):
        engine.version += 1

    engine = Scripted(ids_of("1"), on_turn=publish)
    with pytest.raises(Unwanted):
        play(games(), engine, limits=WIDE._replace(max_staleness=2))
    assert len(engine.asked) == 3  # by versions 3, 4 and 5; before a fourth turn it is 3 behind
    assert len(play(games(), Scripted(ids_of("1"), on_turn=publish)).turns) == 5  # no such bound


def test_an_episode_without_a_token_is_never_too_old():
    episode = episode_of(games(), Scripted([5]), limits=WIDE._replace(max_staleness=0))
    assert not episode.too_old(99)


# -- faults ----------------------------------------------------------------------------------------


def raising(self, *_):
    raise KeyError("no such cell")


def returning(value):
    return lambda self, *_: value


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("reset", raising, "seed 519, reset: KeyError: 'no such cell'"),
        ("step", raising, "seed 519, step 1: KeyError: 'no such cell'"),
        ("reset", returning("text"), r"reset has to return \(text, info\), got 'text'"),
        ("reset", returning((3, {})), r"reset has to return \(text, info\)"),
        ("step", returning(("", 1.0, True, {})), "step has to return"),
        ("step", returning(None), "step has to return .* got None"),
        ("step", returning((None, 1.0, True, False, {})), "None as observation"),
        ("step", returning(("", "1", True, False, {})), "'1' as reward: a finite number"),
        ("step", returning(("", float("nan"), True, False, {})), "nan as reward"),
        ("step", returning(("", float("inf"), True, False, {})), "inf as reward"),
        ("step", returning(("", None, True, False, {})), "as reward|must be real number"),
        ("step", returning(("", 1.0, "no", False, {})), "bools are expected"),
        ("step", returning(("\ud800", 0.0, False, False, {})), "surrogates not allowed"),
        ("reset", returning(("\ud800", {})), "surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("blocking", [True, False])
def test_what_raises_or_returns_nonsense_is_reported_with_its_seed(
    method, wrong, message, blocking
):
    task = games(type("Faulty", (Counting,), {method: wrong, "blocking": blocking}))
    with pytest.raises(EnvError, match=message) as error:
        play(task, Scripted(ids_of("1")))
    assert str(error.value).startswith("counting, seed 519, ")


@pytest.mark.parametrize("wrong", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["inline", "blocking", "async"])
def test_what_would_end_a_loop_or_a_thread_is_an_ordinary_fault(wrong, kind):
    class Leaving(Counting):
        blocking = kind == "blocking"
        if kind == "async":

            async def step(self, action):
                await asyncio.sleep(0)
                raise wrong

        else:

            def step(self, action):
                raise wrong

    task = games(Leaving)
    calls = EnvCalls(task.config.env_timeout, 8)

    async def main():
        for _ in range(2):  # the second finds all as it was
            episode = episode_of(task, Scripted(ids_of("1")), calls=calls)
            with pytest.raises(EnvError, match=f"step 1: RuntimeError: .*{type(wrong).__name__}"):
                await run_episode(episode)

    asyncio.run(main())


def test_a_cancellation_of_the_environments_own_is_a_fault_and_not_taken_for_ours():
    class Cancels(Counting):
        async def step(self, action):
            inner = asyncio.create_task(asyncio.sleep(60))
            inner.cancel()
            await inner

    with pytest.raises(EnvError, match="seed 519, step 1: CancelledError"):
        play(games(Cancels), Scripted(ids_of("1")))


def test_a_message_of_several_lines_becomes_one():
    class Verbose(Counting):
        def step(self, action):
            raise ValueError("bad move:\n row 3\nsee the manual")

    with pytest.raises(EnvError, match="step 1: ValueError: bad move: row 3 see the manual"):
        play(games(Verbose), Scripted(ids_of("1")))


class Odd(BaseException):
    """As the timeouts of some libraries are, which an `except Exception` is not to swallow."""


class Broken(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("how", ["blocking", "on the loop", "async"])
@pytest.mark.parametrize(
    "wrong", [Odd(), GeneratorExit(), asyncio.CancelledError(), StopIteration(), Broken()], ids=repr
)
def test_whatever_a_reward_raises_is_its_samples_failure(how, wrong):
    task = Parrot(Settings())
    task.blocking = how == "blocking"

    def raises(row, response):
        raise wrong

    async def raises_later(row, response):
        await asyncio.sleep(0)
        raise wrong

    task.reward = raises_later if how == "async" else raises
    with pytest.raises(EnvError, match=f"the reward: .*{type(wrong).__name__}"):
        play(task, Scripted([70]), ticket(prompt=0))


def test_the_text_of_an_error_is_clipped_wherever_it_is_kept():
    task = Parrot(Settings())

    def raises(row, response):
        try:
            raise ValueError("x" * 20_000_000)
        except ValueError as error:
            raise OSError("y" * 20_000_000 + " the end") from error

    task.reward = raises
    with pytest.raises(EnvError, match="OSError: yyy.* the end$") as failed:
        play(task, Scripted([70]), ticket(prompt=0))
    kept = history(failed.value)
    assert len(str(failed.value)) < 5000 and len(kept) < 50_000
    assert "in raises" in kept and "ValueError: xxx" in kept


def test_nonsense_of_any_size_is_shown_in_short():
    class Large(Counting):
        def step(self, action):
            return ["x" * 1000] * 100_000

    with pytest.raises(EnvError, match="step has to return") as failed:
        play(games(Large), Scripted(ids_of("1")))
    assert len(str(failed.value)) < 5000


@pytest.mark.parametrize("where", ["reset", "step"])
def test_of_a_huge_observation_no_more_is_tokenised_than_shows_that_it_does_not_fit(where):
    class Huge(Counting):
        def reset(self, seed):
            text, info = super().reset(seed)
            return "go on " * 10**6 if where == "reset" else text, info

        def step(self, action):
            return "go on " * 10**6, 0.0, False, False, {}

    class Asked:
        """The tokenizer, and what it is asked."""

        sizes: list = []
        chat_template = None

        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def __call__(self, text, **how):
            self.sizes.append((len(text), threading.current_thread() is threading.main_thread()))
            return TOKENIZER(text, **how)

    tokenizer, limits = Asked(), Limits(9, 5, 8000)
    if where == "reset":
        with pytest.raises(EnvError, match="leaves no room"):
            play(games(Huge), Scripted(ids_of("1")), None, limits, tokenizer)
    else:
        assert play(games(Huge), Scripted(ids_of("1")), None, limits, tokenizer).truncated
    size, on_the_loop = max(tokenizer.sizes)
    assert 8000 < size < 200_000 and not on_the_loop
    assert remembered.currsize <= remembered.maxsize < 10**8  # bytes, whatever came


def test_a_timeout_says_at_which_line_it_stands():
    def sleeps():
        time.sleep(0.3)

    async def waits():
        await asyncio.sleep(30)

    calls = EnvCalls(0.1, 1)
    for what, name in ((sleeps, "sleeps"), (waits, "waits")):
        with pytest.raises(TimeoutError, match=rf"0.1 s \(--env_timeout\), at .*py:\d+ {name}"):
            asyncio.run(calls(what, blocking=True))
        time.sleep(0.3)


@pytest.fixture
def for_ever():
    """Waits until the test has ended: whoever waits for it hangs."""
    over = threading.Event()
    yield over.wait
    over.set()


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_step_that_hangs_is_given_up_and_the_setting_named(kind, for_ever):
    class Hanging(Counting):
        blocking = kind == "blocking"
        if kind == "blocking":

            def step(self, action):
                for_ever()

        else:

            async def step(self, action):
                await asyncio.sleep(3600)

    calls = EnvCalls(30.0, 8)

    def hurry(_):  # not before: the reset may take its time
        calls.timeout = 0.1

    episode = episode_of(games(Hanging), Scripted(ids_of("1"), on_turn=hurry), calls=calls)
    with pytest.raises(EnvError, match=r"step 1: TimeoutError: took longer than 0.1 s .*env_time"):
        asyncio.run(run_episode(episode))


def test_a_reward_that_hangs_is_given_up_too(for_ever):
    task = Parrot(Settings(env_timeout=0.1))
    task.reward = lambda row, response: for_ever()
    with pytest.raises(EnvError, match=r"the reward: TimeoutError: took longer than 0.1 s"):
        play(task, Scripted([70]), ticket(prompt=0))


def test_a_timeout_of_the_environments_own_is_not_taken_for_ours():
    task = Parrot(Settings())

    def own(row, response):
        raise TimeoutError("the judge is busy")

    task.reward = own
    with pytest.raises(EnvError, match="TimeoutError: the judge is busy"):
        play(task, Scripted([70]), ticket(prompt=0))


# -- nobody waits for anybody else -----------------------------------------------------------------


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_a_fast_environment_is_done_while_a_slow_one_is_still_at_its_first_step():
    ended = []

    class Slow(Counting):
        """Ends after two turns; with seed 520 it takes until the other one has ended."""

        async def step(self, action):
            if self.seed == 520:
                await until(lambda: 7 in ended)
            self.turn += 1
            return "", 1.0, self.turn == 2, False, {}

    task, calls = games(Slow), EnvCalls(30.0, 8)

    async def play_one(prompt):
        one = ticket(prompt=prompt, seed=prompt)
        sample = await run_episode(episode_of(task, Scripted([5]), one, calls=calls))
        ended.append(prompt)
        return sample

    async def both():
        return await asyncio.gather(play_one(7), play_one(8))

    samples = asyncio.run(both())
    assert ended == [7, 8] and [len(sample.turns) for sample in samples] == [2, 2]


def test_in_lockstep_every_turn_waits_for_the_slowest():
    log = []

    class Slow(Counting):
        """Ends after two turns; with seed 520 each step ends some time after the other's."""

        async def step(self, action):
            if self.seed == 520:
                await until(lambda: log.count(519) > log.count(520))
                await asyncio.sleep(0.05)
            log.append(self.seed)
            self.turn += 1
            return "", 1.0, self.turn == 2, False, {}

    class Logged(Scripted):
        async def generate(self, turn):
            log.append("turn")
            await super().generate(turn)

    task, engine = games(Slow), Logged([5])
    tickets = [ticket(prompt=prompt, seed=prompt) for prompt in (7, 8)]
    samples = asyncio.run(run_lockstep([episode_of(task, engine, one) for one in tickets]))
    assert [len(sample.turns) for sample in samples] == [2, 2]
    assert log == ["turn", "turn", 519, 520] * 2  # both begin turn 2 together
    alone = [play(task, Scripted([5]), one) for one in tickets]
    assert [s.ids.tolist() for s in samples] == [s.ids.tolist() for s in alone]  # the same episodes


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_environments_go_on_while_the_event_loop_is_held_up_by_a_weight_update(kind):
    begun, held, ended = (threading.Event() for _ in range(3))

    class Noting(Counting):
        """Its step begins before the loop is held up, and ends after that."""

        blocking = kind == "blocking"
        if kind == "blocking":

            def step(self, action):
                begun.set()
                held.wait()
                ended.set()
                return "", 1.0, True, False, {}

        else:

            async def step(self, action):
                begun.set()
                await until(held.is_set)
                ended.set()
                return "", 1.0, True, False, {}

    async def main():
        playing = asyncio.create_task(run_episode(episode_of(games(Noting), Scripted([5]))))
        await until(begun.is_set)
        held.set()
        went_on = ended.wait(20)  # this loop does nothing else meanwhile, as if it loaded weights
        return went_on, await playing

    went_on, sample = asyncio.run(main())
    assert went_on and sample.reward == 1.0


def test_a_cancelled_episode_stops_its_environment_too():
    seen = []

    class Waiting(Counting):
        async def step(self, action):
            try:
                seen.append("begun")
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    async def main():
        playing = asyncio.create_task(run_episode(episode_of(games(Waiting), Scripted([5]))))
        await until(lambda: seen)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await until(lambda: len(seen) > 1)

    asyncio.run(main())
    assert seen == ["begun", "cancelled"]


# -- latency ---------------------------------------------------------------------------------------


def test_latency_is_drawn_as_told_and_depends_on_the_sample_and_the_turn_alone():
    latency = Latency.parse("0.1,0.05")
    draws = np.array([[latency.draw(seed, turn) for turn in range(4)] for seed in range(2000)])
    assert (draws == [[latency.draw(s, t) for t in range(4)] for s in range(2000)]).all()
    assert abs(draws.mean() - 0.1) < 0.005 and abs(draws.std() - 0.05) < 0.005
    assert draws.min() >= 0 and (Latency.parse("0,0.1").draw(3, 1) >= 0)
    assert Latency.parse("").draw(3, 1) == 0.0


def test_a_share_of_the_episodes_is_slower_in_all_their_steps():
    latency = Latency.parse("0.1,0,0.05,20")
    draws = np.array([[latency.draw(seed, turn) for turn in range(3)] for seed in range(4000)])
    slow = draws[:, 0] > 1
    assert 0.03 < slow.mean() < 0.07
    assert np.allclose(draws[slow], 2.0) and np.allclose(draws[~slow], 0.1)


BAD_LATENCIES = ["x", "0.1,", ",0.1", "-1,0", "0.1,nan", "1,2,3,4,5", "1,2,3", "1,2,1,", "1,inf"]


@pytest.mark.parametrize("text", BAD_LATENCIES)
def test_a_latency_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--env_latency is MEAN,STD or MEAN,STD,SHARE,FACTOR"):
        Settings(env_latency=text)


def test_a_latency_that_no_step_would_survive_is_refused():
    with pytest.raises(ValueError, match="--env_latency 40,1: .*--env_timeout 30"):
        Settings(env_latency="40,1")


def test_a_step_waits_for_its_latency():
    waits = []

    class Recording(EnvCalls):
        async def __call__(self, call, *args, wait=0.0, **how):
            waits.append(wait)
            return await super().__call__(call, *args, wait=wait, **how)

    task = games(env_latency="0.2,0")
    episode = episode_of(task, Scripted(ids_of("end")), calls=Recording(30.0, 8))
    start = time.monotonic()
    asyncio.run(run_episode(episode))
    assert time.monotonic() - start >= 0.2
    assert waits == [0.0, 0.2]  # none before the reset
