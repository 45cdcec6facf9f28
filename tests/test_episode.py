"""One episode, with an engine that answers as it is told: tokens, turns, limits, faults, waits."""

import asyncio
import time

import numpy as np
import pytest

from buffer import RolloutTask, derive_seed
from envs import Env, EnvConfig, EnvTask, Latency, Row, Task, encode_reply
from episode import EnvCalls, EnvError, Episode, Limits, Unwanted, run_episode, run_lockstep
from plumbing.models import byte_tokenizer

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


def task(group=0, sample=0, prompt=7, seed=11, **more):
    return RolloutTask(group, sample, prompt, seed, **more)


def games(env_class=Counting, **config):
    return EnvTask(env_class, EnvConfig(env="counting", **config))


def episode_of(env, engine, one=None, limits=WIDE, tokenizer=TOKENIZER):
    return Episode(one or task(), env, engine, tokenizer, EnvCalls(env.config, 8), limits)


def play(env, engine, one=None, limits=WIDE, tokenizer=TOKENIZER):
    return asyncio.run(run_episode(episode_of(env, engine, one, limits, tokenizer)))


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
    env, engine = Parrot(EnvConfig()), Scripted([70, 71, EOS])
    env.blocking = blocking
    sample = play(env, engine, task(prompt=1, seed=7), Limits(9, 1, 64))
    prompt = ids_of("cde")
    (turn,) = engine.asked
    assert (turn.prompt, turn.max_tokens, turn.seed) == (prompt, 9, 7)
    assert turn.stop_ids == [EOS, *ids_of("\n")]
    assert sample.task == task(prompt=1, seed=7)
    assert sample.ids.tolist() == [*prompt, 70, 71, EOS]
    assert sample.mask.tolist() == [False] * 3 + [True] * 3
    assert sample.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert sample.versions.tolist() == [-1, -1, -1, 3, 3, 3] and sample.staleness(5) == 2
    dtypes = [x.dtype for x in (sample.ids, sample.mask, sample.logprobs, sample.versions)]
    assert dtypes == [np.int32, bool, np.float32, np.int32]
    text = TOKENIZER.decode([70, 71, EOS], skip_special_tokens=True)
    assert sample.reward == len(text) and isinstance(sample.reward, float)
    assert sample.truncated is False and sample.turns == ((3, 6),)


def test_an_evaluation_task_takes_a_held_out_prompt():
    sample = play(Parrot(EnvConfig()), Scripted([70]), task(prompt=0, eval=True), Limits(9, 1, 64))
    assert len(sample.ids) == len("held out") + 1


def test_a_response_cut_by_its_limit_is_truncated():
    def cut(engine):
        engine.asked[-1].truncated = True

    engine = Scripted([70], on_turn=cut)
    assert play(Parrot(EnvConfig()), engine, task(prompt=0), Limits(1, 1, 64)).truncated is True


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
    assert engine.asked[1].prompt == sample.ids.tolist()[: -len(last)]  # nothing was rewritten
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
    env = games()
    env.chat = False
    sample = play(env, Scripted(ids_of("2"), ids_of("end")))
    assert sample.ids.tolist() == ids_of("519:0" + "2" + "519:1" + "end")
    assert encode_reply(env, "", TOKENIZER) == []


def test_without_a_template_a_text_that_begins_as_the_turn_ended_loses_nothing():
    class Says(Counting):
        def step(self, action):
            return "2 is more", 0.0, action == "end", False, {}

    env = games(Says)
    env.chat = False
    sample = play(env, Scripted(ids_of("2"), ids_of("end")))
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
    env = games()
    texts = [env.first_text(env.train[i]) for i in range(3)]
    assert len(set(texts)) == 3 and not set(env.train) & set(env.test)
    samples = [play(env, Scripted(ids_of("end")), task(sample=i)) for i in range(2)]
    assert samples[0].ids.tolist() == samples[1].ids.tolist()


# -- limits ----------------------------------------------------------------------------------------


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
        assert all(len(turn.prompt) + turn.max_tokens <= limit for turn in engine.asked)
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
    method, wrong, message, blocking, monkeypatch
):
    env = games(type("Faulty", (Counting,), {method: wrong, "blocking": blocking}))
    with pytest.raises(EnvError, match=message) as error:
        play(env, Scripted(ids_of("1")))
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

    env = games(Leaving, env_timeout=2)
    calls = EnvCalls(env.config, 8)

    async def main():
        for _ in range(2):  # the second finds all as it was
            episode = Episode(task(), env, Scripted(ids_of("1")), TOKENIZER, calls, WIDE)
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


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_step_that_hangs_is_given_up_and_the_setting_named(kind):
    class Hanging(Counting):
        blocking = kind == "blocking"
        if kind == "blocking":

            def step(self, action):
                time.sleep(1)

        else:

            async def step(self, action):
                await asyncio.sleep(60)

    env = games(Hanging, env_timeout=0.1)
    start = time.monotonic()
    with pytest.raises(EnvError, match=r"step 1: TimeoutError: took longer than 0.1 s .*env_time"):
        play(env, Scripted(ids_of("1")))
    assert time.monotonic() - start < 1


def test_a_reward_that_hangs_is_given_up_too():
    env = Parrot(EnvConfig(env_timeout=0.1))
    env.reward = lambda row, response: time.sleep(1)
    with pytest.raises(EnvError, match=r"the reward: TimeoutError: took longer than 0.1 s"):
        play(env, Scripted([70]), task(prompt=0))


def test_a_timeout_of_the_environments_own_is_not_taken_for_ours():
    env = Parrot(EnvConfig())

    def own(row, response):
        raise TimeoutError("the judge is busy")

    env.reward = own
    with pytest.raises(EnvError, match="TimeoutError: the judge is busy"):
        play(env, Scripted([70]), task(prompt=0))


# -- nobody waits for anybody else -----------------------------------------------------------------


class Slow(Counting):
    """Ends after two turns; a step takes as long as the seed says."""

    seconds = {519: 0.05, 520: 0.6}

    async def step(self, action):
        await asyncio.sleep(self.seconds[self.seed])
        self.turn += 1
        return "", 1.0, self.turn == 2, False, {}


def test_a_fast_environment_is_done_while_a_slow_one_is_still_at_its_first_step():
    env, ended = games(Slow), {}

    async def both():
        start = time.monotonic()

        async def one(prompt):
            await run_episode(episode_of(env, Scripted([5]), task(prompt=prompt, seed=prompt)))
            ended[prompt] = time.monotonic() - start

        await asyncio.gather(one(7), one(8))

    asyncio.run(both())
    assert ended[7] < 0.5 < 1.1 < ended[8]


def test_in_lockstep_every_turn_waits_for_the_slowest():
    env = games(Slow)
    ends = []

    class Clocked(Scripted):
        async def generate(self, turn):
            ends.append(time.monotonic())
            await super().generate(turn)

    engine = Clocked([5])
    episodes = [episode_of(env, engine, task(prompt=prompt, seed=prompt)) for prompt in (7, 8)]
    samples = asyncio.run(run_lockstep(episodes))
    assert [len(sample.turns) for sample in samples] == [2, 2]
    assert ends[2] - ends[1] > 0.55 and ends[3] - ends[2] < 0.3  # both begin turn 2 together
    one = [play(env, Scripted([5]), task(prompt=prompt, seed=prompt)) for prompt in (7, 8)]
    assert [s.ids.tolist() for s in samples] == [s.ids.tolist() for s in one]  # the same episodes


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_environments_go_on_while_the_event_loop_is_held_up_by_a_weight_update(kind):
    ended = []

    class Noting(Counting):
        blocking = kind == "blocking"
        if kind == "blocking":

            def step(self, action):
                time.sleep(0.1)
                ended.append(time.monotonic())
                return "", 1.0, True, False, {}

        else:

            async def step(self, action):
                await asyncio.sleep(0.1)
                ended.append(time.monotonic())
                return "", 1.0, True, False, {}

    async def main():
        playing = asyncio.create_task(run_episode(episode_of(games(Noting), Scripted([5]))))
        while not playing.done() and not ended:
            await asyncio.sleep(0.01)
            if not ended:
                time.sleep(0.4)  # as loading weights does
                held_until = time.monotonic()
                break
        sample = await playing
        return held_until, sample

    held_until, sample = asyncio.run(main())
    assert ended[0] < held_until and sample.reward == 1.0


def test_a_cancelled_episode_stops_its_environment_too():
    seen = []

    class Waiting(Counting):
        async def step(self, action):
            try:
                seen.append("begun")
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

    async def main():
        playing = asyncio.create_task(run_episode(episode_of(games(Waiting), Scripted([5]))))
        while not seen:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        for _ in range(100):
            if "cancelled" in seen:
                return
            await asyncio.sleep(0.01)

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
        EnvConfig(env_latency=text)


def test_a_latency_that_no_step_would_survive_is_refused():
    with pytest.raises(ValueError, match="--env_latency 40,1: .*--env_timeout 30"):
        EnvConfig(env_latency="40,1")


def test_a_step_waits_for_its_latency():
    env = games(env_latency="0.2,0")
    start = time.monotonic()
    play(env, Scripted(ids_of("end")))
    assert 0.2 <= time.monotonic() - start < 0.5
