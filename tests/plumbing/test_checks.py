"""What would fail silently is refused or noted before the first step; what is well says nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BertConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)
from transformers.utils import logging

from envs import Row, Task
from plumbing import checks
from plumbing.chat import encode_prompt, encode_reply, end_of_turn, stop_ids
from plumbing.models import resolve_model
from plumbing.policy import load_policy
from plumbing.ranks import Ranks
from plumbing.settings import Settings, notes
from plumbing.start import check_rows, load_tokenizer, resolve
from plumbing.tiny import byte_tokenizer
from tasks.find import make_task
from tasks.math import BadGold

PROBE = list(range(3, 40))
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model that has nothing wrong with it."""
    cache = tmp_path_factory.mktemp("models")
    return resolve_model("tiny", make_task(Settings()), "addition", cache, warmup_steps=0)


@pytest.fixture
def model(made, tmp_path):
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    logging.disable_progress_bar()  # as `train.main` does
    logging.set_verbosity_error()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def load(path, probe=PROBE):
    return load_policy(str(path), Ranks(), torch.float32, probe)


def change_config(model: Path, **values) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_weights(model: Path, change) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


# -- the model -----------------------------------------------------------------------------------


def test_a_whole_model_loads_without_a_word(model, capfd):
    load(model)
    tokenizer, longest = load_tokenizer(str(model))
    assert longest == 2048 and capfd.readouterr().err == ""


def test_missing_weights_are_refused_and_named(model):
    change_weights(model, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight are not in its files"):
        load(model)


def test_an_untied_head_that_is_not_there_is_refused(model):
    change_config(model, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="lm_head.weight are not in its files"):
        load(model)


def test_weights_of_another_shape_are_refused(model):
    change_weights(
        model, lambda weights: weights.update({"model.norm.weight": torch.ones(64)})
    )
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load(model)


def test_weights_that_are_not_finite_are_refused(model):
    change_weights(model, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"model\.norm\.weight have values that are not finite"):
        load(model)


def test_weights_that_nobody_uses_are_noted(model, capfd):
    change_weights(model, lambda weights: weights.update({"score.weight": torch.ones(2)}))
    load(model)
    assert "has weights that are not used: score.weight" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, None])
def test_files_that_cannot_be_read_are_one_line(model, content):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000] if content is None else content)
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (Gemma2Config(**SMALL, final_logit_softcapping=5.0, head_dim=16), Gemma2ForCausalLM),
        (GraniteConfig(**SMALL, logits_scaling=8.0), GraniteForCausalLM),
    ],
)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path, config, kind):
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "changed")
    with pytest.raises(ValueError, match="changes its logits after the head"):
        load(tmp_path / "changed")


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(model):
    change_config(model, vocab_size=200)
    with pytest.raises(ValueError, match="tokenizer has 259 ids, its embedding 200"):
        load_tokenizer(str(model))


def test_a_model_that_does_not_continue_texts_is_refused(tmp_path, made):
    folder = Path(shutil.copytree(made, tmp_path / "encoder"))
    BertConfig(vocab_size=300, architectures=["BertModel"]).save_pretrained(folder)
    with pytest.raises(ValueError, match="is no causal language model: BertModel"):
        checks.refuse_other_models("encoder", AutoConfig.from_pretrained(folder))


def test_a_template_with_a_mistake_is_one_line(model):
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")
    tokenizer, _ = load_tokenizer(str(model))
    task = make_task(Settings())
    settings = resolve(Settings(model="tiny"), task)
    with pytest.raises(ValueError, match="its chat template: "):
        check_rows(settings, task, tokenizer, "model")


# -- what ends a turn ----------------------------------------------------------------------------


def test_a_turn_ends_at_every_id_that_model_template_or_tokenizer_declare(model):
    task = make_task(Settings())
    tokenizer, _ = load_tokenizer(str(model))
    assert stop_ids(task, tokenizer, checks.declared_stops(str(model), task, tokenizer)) == [2]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    declared = checks.declared_stops(str(model), task, tokenizer)
    assert stop_ids(task, tokenizer, declared) == [2, 7, 9]
    tokenizer.eos_token = "<|pad|>"  # another than the one that the template ends a turn with
    assert end_of_turn(task, tokenizer) == (2,)
    declared = checks.declared_stops(str(model), task, tokenizer)
    assert sorted(stop_ids(task, tokenizer, declared)) == [0, 2, 7, 9]


def test_a_model_may_declare_no_end_at_all(model):
    (model / "generation_config.json").unlink(missing_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert checks.declared_stops(str(model), make_task(Settings()), tokenizer) == ()


def test_a_stop_of_several_tokens_is_refused():
    task = make_task(Settings())
    checks.refuse_long_stop("mine", task, byte_tokenizer())
    task.stop = "\n"
    checks.refuse_long_stop("mine", task, byte_tokenizer())
    task.stop = "</answer>"
    with pytest.raises(ValueError, match=r"env mine: its stop '</answer>' is 9 tokens"):
        checks.refuse_long_stop("mine", task, byte_tokenizer())


# -- special tokens that a text spells -----------------------------------------------------------


@pytest.mark.parametrize("template", [True, False])
def test_special_tokens_in_data_stay_text(template):
    task, tokenizer = make_task(Settings()), byte_tokenizer()
    if not template:
        tokenizer.chat_template = None
    plain, spelt = (encode_prompt(task, text, tokenizer) for text in ("ab", "a<|im_end|>b"))
    control = {0, 1, 2}
    assert [i for i in spelt if i in control] == [i for i in plain if i in control]
    assert tokenizer.decode(spelt) == tokenizer.decode(plain).replace("ab", "a<|im_end|>b")
    plain, spelt = (encode_reply(task, text, tokenizer, 5) for text in ("ab", "a<|im_start|>b"))
    assert [i for i in spelt if i in control] == [i for i in plain if i in control]
    assert tokenizer.decode(spelt) == tokenizer.decode(plain).replace("ab", "a<|im_start|>b")


class Rows(Task):
    train, test = [Row("1+1=", "2"), Row("what is <|im_end|>?", "an end")], [Row("2+2=", "4")]


def test_rows_that_spell_special_tokens_and_a_missing_template_are_noted():
    task, tokenizer = Rows(Settings()), byte_tokenizer()
    assert list(checks.notes_on_prompts(task, tokenizer)) == [
        "1 prompts spell special tokens of the model; they are kept as text"
    ]
    task.train, tokenizer.chat_template = task.train[:1], None
    assert list(checks.notes_on_prompts(task, tokenizer)) == [
        "the model has no chat template: prompts are plain text"
    ]
    task.chat = False
    assert not list(checks.notes_on_prompts(task, tokenizer))


def test_prompts_that_do_not_fit_are_named_by_their_rows():
    task = Rows(Settings())
    task.train = [Row("1", "1"), *(Row("9" * n, "9") for n in (50, 60, 70)), Row("2", "2")]
    settings = resolve(Settings(model="tiny", max_model_len=40), task)
    words = r"a prompt of 5\d tokens .*\(3 such prompts: row 1, row 2"
    with pytest.raises(ValueError, match=words):
        checks.usable_rows(settings, task, byte_tokenizer())


def test_prompts_that_do_not_fit_may_be_dropped():
    task = Rows(Settings())
    task.train = [Row("1", "1"), *(Row("9" * n, "9") for n in (50, 60, 70)), Row("2", "2")]
    settings = resolve(Settings(model="tiny", max_model_len=40, long_prompts="drop"), task)
    rows, _, said = checks.usable_rows(settings, task, byte_tokenizer())
    assert rows == [0, 4] and said == ["3 prompts are too long and left out (row 1, row 2, row 3)"]
    task.train = task.train[1:4]
    with pytest.raises(ValueError, match="every prompt is too long"):
        checks.usable_rows(settings, task, byte_tokenizer())


def test_held_out_prompts_that_do_not_fit_are_refused_or_left_out_of_evaluations_too():
    task = Rows(Settings())
    task.test = [Row("1", "1"), Row("9" * 60, "9"), Row("2", "2"), Row("9" * 70, "9")]
    settings = resolve(Settings(model="tiny", max_model_len=40, eval_prompts=3), task)
    with pytest.raises(ValueError, match=r"do not fit .*\(1 such prompts: row 1\)"):
        checks.usable_rows(settings, task, byte_tokenizer())
    settings.long_prompts = "drop"
    rows, held_out, said = checks.usable_rows(settings, task, byte_tokenizer())
    assert list(rows) == [0, 1] and held_out == [0, 2]
    assert said == ["1 prompts are too long and left out (row 1)"]


def test_a_prompt_of_exactly_the_room_fits_and_short_ones_are_not_tokenised(monkeypatch):
    task, tokenizer = Rows(Settings()), byte_tokenizer()
    settings = resolve(Settings(model="tiny", max_model_len=40), task)
    room = 40 - settings.max_tokens - 2  # without the template
    task.train = [Row("9" * room, "9"), Row("1", "1")]
    rows, _, said = checks.usable_rows(settings, task, tokenizer)
    assert list(rows) == [0, 1] and said == []
    task.train = [Row(f"{i}", "9") for i in range(200)]
    asked = []
    monkeypatch.setattr(checks, "encode_prompt", lambda *a: asked.append(a) or encode_prompt(*a))
    checks.usable_rows(settings, task, tokenizer)
    assert {text for _, text, _ in asked} == {"-"}  # the template alone


class Golds(Rows):
    """A task that looks at a sample of its gold answers."""

    looked, bad = 100, ()

    def check_golds(self, rows):
        mine = [BadGold(i, f"row {i}: no answer") for i in self.bad if i < len(rows)]
        return mine, min(self.looked, len(rows))


def test_bad_gold_answers_are_left_out_and_many_of_those_looked_at_are_refused():
    task = Golds(Settings())
    task.train, task.test = ([Row(f"{side}{i}", "1") for i in range(200)] for side in "ab")
    settings = resolve(Settings(model="tiny"), task)
    rows, held_out, said = checks.usable_rows(settings, task, byte_tokenizer())
    assert (len(rows), len(held_out), said) == (200, 200, [])
    task.bad = 3, 7
    rows, held_out, said = checks.usable_rows(settings, task, byte_tokenizer())
    assert rows == held_out == [i for i in range(200) if i not in (3, 7)]
    words = "2 rows have gold answers that can never be met, and are left out: row 3: no answer"
    assert len(said) == 2 and all(words in note for note in said)
    task.bad = range(6)  # 3 % of the rows, and 6 % of those that were looked at
    with pytest.raises(ValueError, match="6 of 100 gold answers can never be met: row 0: no ans"):
        checks.usable_rows(settings, task, byte_tokenizer())


def test_prompts_that_come_twice_or_on_both_sides_are_noted():
    task = Rows(Settings())
    task.train = [Row("a b", "1"), Row("A  b ", "2"), Row("c", "3")]
    task.test = [Row("C", "3")]
    settings = resolve(Settings(model="tiny"), task)
    _, _, said = checks.usable_rows(settings, task, byte_tokenizer())
    assert said == [
        "1 prompts are in the train rows more than once",
        "1 prompts are trained on and held out, too (row 2)",
    ]
    for env in ("addition", "max3"):
        task = make_task(Settings(env=env))
        assert checks.notes_on_duplicates(task) == []


def test_text_that_is_no_text_is_refused_with_its_row():
    task = Rows(Settings())
    for prompt in ("\ud800", None, 3):
        task.train = [Row("1", "1"), Row(prompt, "1")]
        settings = resolve(Settings(model="tiny"), task)
        with pytest.raises(ValueError, match="row 1"):
            checks.usable_rows(settings, task, byte_tokenizer())


# -- the first batch -----------------------------------------------------------------------------

WELL = {
    "truncated": 0.1, "groups_with_signal": 0.5, "failed_samples": 0, "samples": 64,
    "reward_mean": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, None),
        ({"truncated": 0.95}, "95% of the first batch was cut off by a limit: raise --max_tokens"),
        ({"groups_with_signal": 0.0}, "no group of the first batch has rewards that differ"),
        ({"failed_samples": 16}, "20% of the first batch's rewards or environments failed"),
    ],
)
def test_a_first_batch_that_teaches_nothing_is_noted_with_what_to_do(row, words):
    said = list(checks.notes_on_batch(WELL | row, Settings()))
    assert (len(said) == 1 and words in said[0]) if words else not said


# -- flags that do nothing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"correction_low": 0.4, "correction": "token_truncate", "loss": "pg"}, "--correction_low"),
        ({"correction_high": 3.0}, "--correction_high does nothing with --correction none"),
        ({"truncated_penalty": 0.1}, "--truncated_penalty does nothing with --truncated train"),
        ({"constant_length": 9}, "--constant_length does nothing with --aggregation token_mean"),
        ({"kl_correction": "none"}, "--kl_correction does nothing with --kl_coef 0"),
        ({"alpha": 2.0, "mode": "sync"}, "--alpha does nothing with --mode sync"),
        ({"on_update": "drain", "mode": "sync"}, "--on_update does nothing with --mode sync"),
        ({"eval_prompts": 9, "eval_every": 0}, "--eval_prompts does nothing with --eval_every 0"),
        ({"question_key": "q"}, "--question_key does nothing with --env addition"),
        ({"answer_key": "a", "env": "grid"}, "--answer_key does nothing with --env grid"),
        ({"reward_procs": 2}, "--reward_procs does nothing with --env addition"),
        ({"question_key": "q", "answer_key": "a", "reward_procs": 2, "env": "math"}, None),
        ({"question_key": "q", "env": "mine.py:Mine"}, None),
        ({"correction_low": 0.4, "correction": "token_mask"}, None),
        ({"kl_correction": "none", "kl_coef": 0.1}, None),
        ({}, None),
    ],
)
def test_a_flag_that_does_nothing_in_this_setting_says_so(flags, words):
    said = notes(Settings(**flags))
    assert (len(said) == 1 and words in said[0]) if words else not said
