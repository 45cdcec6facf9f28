"""Settings and the command line: what is wrong is said in one line, before anything is written."""

import ast
import dataclasses
import inspect
import io
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import BertConfig

import train
from algos import KINDS
from plumbing import models
from plumbing.processes import RolloutError
from plumbing.settings import Settings, as_flags, parse
from plumbing.start import changes, resolve
from tasks.find import make_task
from train import main

FIELDS = dataclasses.fields(Settings)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A model directory, made without any training."""
    cache = tmp_path_factory.mktemp("models")
    return models.resolve_model("tiny", make_task(Settings()), "addition", cache, warmup_steps=0)


@pytest.fixture(autouse=True)
def outside(monkeypatch, tmp_path):
    """An empty working directory, one rank on the CPU, no way to the model hub, and no training."""

    def too_late(*_):
        pytest.fail("bad input got past the checks")

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "make_tiny", too_late)
    monkeypatch.setattr(train.Run, "start", too_late)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def files(directory):
    return {path: path.is_file() and path.read_bytes() for path in Path(directory).rglob("*")}


@pytest.fixture
def refused(capfd, tmp_path):
    """Run the program; it has to say one line, exit with 2, and write nothing. Returns the line."""

    def run(*argv):
        before = files(tmp_path)
        capfd.readouterr()
        try:
            code = main([str(part) for part in argv])
        except SystemExit as end:
            code = end.code
        out, err = capfd.readouterr()
        assert code == 2, err
        assert err.startswith("train.py: ") and err.count("\n") == 1 and err.endswith("\n"), err
        assert out == "" and files(tmp_path) == before
        return err

    return run


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--frobnicate 3", "--frobnicate"),
        ("--alpha -1", "--alpha must be 0 or more (got -1.0)"),
        ("--alpha abc", "--alpha: invalid float value: 'abc'"),
        ("--alpha nan", "--alpha must be 0 or more"),
        ("--alpha", "--alpha: expected one argument"),
        ("--mode foo", "--mode is one of sync, async (got foo)"),
        ("--loss foo", "--loss is one of ppo, pg"),
        ("--advantage foo", "--advantage is one of grpo"),
        ("--on_update foo", "--on_update"),
        ("--steps 0", "--steps must be above 0"),
        ("--steps 1.5", "--steps: invalid int value"),
        ("--batch_size -1", "--batch_size must be"),
        ("--group_size 1", "--group_size 2 or more"),
        ("--temperature 0", "--temperature must be above 0"),
        ("--rollout_workers -1", "--rollout_workers"),
        ("--max_tokens -3", "--max_tokens"),
        ("--seed -1", "--seed must be 0 or more"),
        ("--env foo", "unknown env 'foo'"),
        ("--env nothing.py:Mine", "no such file: nothing.py"),
        ("--env_timeout 0", "env_timeout"),
        ("--env gsm8k --data nothing.jsonl", "no such data file: nothing.jsonl"),
        ("--env gsm8k", "needs --data"),
        ("--report_to foo", "--report_to takes tensorboard and wandb (got foo)"),
        ("--model ./nothing", "no such directory: nothing"),
        ("--model nothing", "unknown model 'nothing'"),
        ("--model nobody/nothing", "nobody/nothing"),
        ("nothing.yaml --steps 3", "no such file: nothing.yaml"),
        ("--resume nothing", "nothing"),
        ("--batch_timeout nan", "--batch_timeout"),
        ("--learning_rate nan", "--learning_rate"),
        ("--grad_clip nan", "--grad_clip"),
        ("--filter_groups maybe", "--filter_groups: true or false is expected (got maybe)"),
        ("--dual_clip 0.5", "--dual_clip is 0 (off) or above 1 (got 0.5)"),
        ("--tis_low 1", "--tis_low must be below --tis_high (got 1.0)"),
        ("--correction_high 0.2", "--correction_low must be below --correction_high (got 0.5)"),
        ("--env_latency 1,2,3", "--env_latency is MEAN,STD or MEAN,STD,SHARE,FACTOR in seconds"),
        ("--env_latency 40,1", "most steps would take longer than --env_timeout 30 allows"),
        ("--advantage reinforce_pp --group_size 1 --batch_size 1", "one sample a batch"),
        ("--advantage reinforce_pp --group_size 1 --filter_groups", "--filter_groups compares"),
        ("--redundant_groups 2", "add --consume ready"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(refused, argv, words):
    assert words in refused(*argv.split())


# What would only fail late, or is a slip of the pen.
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--seed", 2**70), "--seed must be 0 or more and at most 4294967295"),
        (("--seed", "9" * 5000), "--seed: invalid int value"),
        (("--rollout_workers", 1000), "--rollout_workers 1000: "),
        (("--batch_size", 10**9), "a step of more than 1000000 samples"),
        (("--tensor_parallel", 2), "--tensor_parallel 2, but this machine has no GPUs"),
        (("--run_dir", "x" * 300), "File name too long"),
        (("--run_dir", "/proc/nothing/run"), "cannot be written to"),
        (("--group_size", 1, "--advantage", "rloo"), "--group_size 2 or more"),
    ],
)
def test_values_that_no_machine_could_serve_are_refused(refused, monkeypatch, argv, words):
    access = os.access  # a test may run as root, who may write everywhere

    def no_proc(path, how):
        return "proc" not in str(path) and access(path, how)

    monkeypatch.setattr(os, "access", no_proc)
    assert words in refused("--model", "tiny", *argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 3000 + "]" * 3000, "settings.json"),
        ('{"steps": ' + "9" * 5000 + "}", "settings.json"),
    ],
)
def test_a_settings_file_that_only_a_machine_would_write(refused, tmp_path, text, words):
    (tmp_path / "settings.json").write_text(text)
    assert words in refused("settings.json")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys\nsys.exit()", "SystemExit"),
        ("class Mine(Task):\n    def __init__(self, *_): self.rows[0]", "AttributeError"),
        ("class Mine(Task):\n    train = None\n    test = [1]", "its train rows are a NoneType"),
        ("class Mine(Task):\n    test = [1]\n    train = (i for i in [1])", "are a generator"),
        ("class Mine(Task):\n    train, test = [], [1]", "has no train rows"),
        ("class Mine(Task):\n    train = test = [Row('\\ud800', '')]", "row 0: its prompt is no"),
        ("class Mine(Task):\n    stop = '</a>'\n    train = test = [Row('1', '')]", "tokens of"),
    ],
)
def test_a_file_of_tasks_with_a_mistake_is_one_line(refused, tmp_path, random_model, code, words):
    (tmp_path / "mine.py").write_text(f"from envs import Row, Task\n{code}\n")
    assert words in refused("--env", "mine.py:Mine", "--model", random_model)


def test_under_torchrun_one_rank_speaks_for_all(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        main(["--loss", "foo"])
    assert end.value.code == 2 and capfd.readouterr().err == ""


def cut(model):
    """A copy that ended too early."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def noise(model):
    file = model / "model.safetensors"
    file.write_bytes(b"\x93" * 1000 + file.read_bytes()[1000:])


def empty(model):
    (model / "model.safetensors").write_bytes(b"")


def change_config(model, **values):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


def other_vocabulary(model):
    change_config(model, vocab_size=300)


def small_embedding(model):
    change_config(model, vocab_size=200)


def not_finite(model):
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def encoder(model):
    BertConfig(vocab_size=300, architectures=["BertModel"]).save_pretrained(model)


def template(model):
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }")


def no_json(model):
    (model / "config.json").write_text("[" * 3000)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, "cannot be loaded"),
        (noise, "cannot be loaded"),
        (empty, "cannot be loaded"),
        (other_vocabulary, "model.embed_tokens.weight have another shape in its files"),
        (small_embedding, "its tokenizer has 259 ids, its embedding 200"),
        (not_finite, "model.norm.weight have values that are not finite"),
        (encoder, "is no causal language model: BertModel"),
        (template, "its chat template: "),
        (no_json, "cannot be loaded"),
    ],
)
def test_a_spoilt_model_is_refused(refused, tmp_path, random_model, spoil, words):
    spoil(Path(shutil.copytree(random_model, tmp_path / "model")))
    line = refused("--model", "./model")
    assert "model model" in line and words in line


def test_a_model_without_a_tokenizer_is_refused(refused, tmp_path, random_model):
    shutil.copytree(random_model, tmp_path / "bare")
    (tmp_path / "bare/tokenizer.json").unlink()
    assert "model bare: no tokenizer in it" in refused("--model", "./bare")


def test_an_unknown_hub_model_without_a_network_is_one_line_and_soon(refused, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    line = refused("--model", "nobody/nothing")
    assert "model nobody/nothing is no directory and not in the cache, and the hub" in line


def test_a_model_directory_without_a_model_in_it(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused("--model", "./empty")


def test_a_model_directory_without_weights_or_tokenizer(refused, tmp_path, random_model):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/config.json").write_text((Path(random_model) / "config.json").read_text())
    assert "half" in refused("--model", "./half", "--eval_every", 0)


def test_a_bad_row_of_a_data_file_is_named_by_file_and_line(refused, tmp_path):
    pytest.importorskip("math_verify")
    pytest.importorskip("pebble")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?"}\n')
    assert f"{data} line 2 has no `answer`" in refused("--env", "gsm8k", "--data", data)
    data.write_text('{"question": "1+1?", "answer": "2"}\n\n{"question": \n')
    assert f"{data} line 3 is not JSON" in refused("--env", "gsm8k", "--data", data)
    data.write_text("[" * 3000 + "]" * 3000)
    assert f"{data} line 1 is not JSON that can be read" in refused("--env", "math", "--data", data)
    data.write_text('{"question": "1+1?", "answer": ' + "9" * 5000 + "}")
    assert f"{data} line 1 holds a number of too" in refused("--env", "math", "--data", data)
    data.write_text('{"question": "\\ud800", "answer": "2"}\n')
    assert f"{data} line 1 holds '\\ud800', half" in refused("--env", "math", "--data", data)


def test_one_long_row_is_named_by_its_line_also_if_no_batch_reaches_it(
    refused, tmp_path, random_model
):
    pytest.importorskip("math_verify")
    pytest.importorskip("pebble")
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(300)]
    rows[287]["question"] = "9" * 3000
    for name, part in (("train", rows), ("test", rows[:20])):
        lines = (json.dumps(row | {"question": f"{name} {row['question']}"}) for row in part)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    flags = ("--env", "math", "--data", "train.jsonl", "--model", random_model, "--steps", 1)
    assert "(1 such prompts: train.jsonl line 288)" in refused(*flags, "--batch_size", 2)


def test_a_prompt_that_leaves_no_room_for_a_response(refused, random_model):
    line = refused("--model", random_model, "--max_model_len", 16, "--max_tokens", 12)
    assert "a response of --max_tokens 12 do not fit into --max_model_len 16" in line
    assert "'" in line  # the prompt at fault


def test_a_run_directory_that_holds_a_run(refused, random_model, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text("{}")
    line = refused("--model", random_model, "--run_dir", "old")
    assert "old holds a run already" in line and "--resume" in line


def test_a_run_directory_that_is_a_file(refused, random_model, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "taken" in refused("--model", random_model, "--run_dir", "taken")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- alpha\n- 2\n", "a mapping of flags to values is expected"),
        ("", "a mapping of flags to values is expected"),
        ("alpha: [1\nb: }", "settings.yaml"),
        ("alpha: 1\nfrobnicate: 3\n", "--frobnicate"),
        ("alpha: -1\n", "--alpha must be 0 or more"),
    ],
)
def test_a_settings_file_that_cannot_be_used(refused, tmp_path, text, words):
    (tmp_path / "settings.yaml").write_text(text)
    assert words in refused("settings.yaml")


def test_a_settings_file_that_is_no_text(refused, tmp_path):
    (tmp_path / "settings.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "settings.yaml" in refused("settings.yaml")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--resume old --run_dir new", "--resume old goes on there: without --run_dir new"),
        ("--resume nothing", "no such file: nothing/config.json"),
        ("--resume old --seed 3", "--resume old is a run with --seed 0, not 3"),
        ("--resume old --env max3", "--resume old is a run with --env addition, not max3"),
        ("--resume old --model tiny", "--resume old is a run with --model "),
    ],
)
def test_what_cannot_be_resumed(refused, random_model, tmp_path, flags, words):
    (tmp_path / "old").mkdir()
    before = vars(parse(["--model", random_model, "--run_dir", "old"]))
    (tmp_path / "old/config.json").write_text(json.dumps(before))
    assert words in refused(*flags.split())


def test_the_same_command_can_be_given_again_and_again_with_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again = ["--alpha", "3", "--run_dir", "mine", "--resume", "mine"]
    assert (first := parse(again)).alpha == 3 and first.run_dir == first.resume == "mine"
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(vars(parse(["--alpha", "3", "--steps", "7"]))))
    assert parse(again).steps == 7


def test_what_is_changed_in_a_resumed_run_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(vars(parse(["--steps", "7"]))))
    settings = parse(["--resume", str(tmp_path), "--loss", "tis", "--steps", "9"])
    assert changes(settings) == ["--loss is tis from now on, and was ppo"]


# -- settings --------------------------------------------------------------------------------------


def test_without_flags_the_defaults_hold():
    assert parse([]) == Settings()
    assert all(getattr(Settings(), field.name) == field.default for field in FIELDS)


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_flags_override_settings_of_a_file_which_override_defaults(tmp_path, dump):
    text = dump({"alpha": 3, "steps": 7, "env": "max3", "data": None, "learning_rate": 1e-5})
    (tmp_path / "settings").write_text(text)
    settings = parse(["settings", "--steps", "9", "--alpha=0.5"])
    assert (settings.steps, settings.alpha) == (9, 0.5)
    assert (settings.env, settings.learning_rate, settings.data) == ("max3", 1e-5, None)
    assert settings.batch_size == Settings().batch_size


def test_settings_as_a_run_writes_them_read_back_the_same(tmp_path):
    flags = ["--alpha=2.5", "--mode=sync", "--run_dir=x", "--data=d.jsonl", "--seed=3"]
    settings = parse([*flags, "--filter_groups", "--loss=tis", "--tis_high=3"])
    (tmp_path / "written.json").write_text(json.dumps(vars(settings)))
    assert parse(["written.json"]) == settings
    assert parse(as_flags({k: v for k, v in vars(settings).items() if v})) == settings


@pytest.mark.parametrize("how", ["--resume old", "--resume=old"])
def test_a_resumed_run_has_its_old_settings_and_directory_and_the_new_flags(tmp_path, how):
    (tmp_path / "old").mkdir()
    written = vars(parse(["--alpha", "3", "--steps", "7", "--run_dir", "moved"]))
    written = written | {"trainers": 2}  # what a run notes besides
    (tmp_path / "old/config.json").write_text(json.dumps(written))
    settings = parse([*how.split(), "--steps", "20"])
    assert (settings.alpha, settings.steps) == (3, 20)
    assert (settings.run_dir, settings.resume) == ("old", "old")


def test_sync_has_alpha_zero_whatever_the_flag_says():
    settings = parse(["--mode", "sync", "--alpha", "2", "--model", "tiny"])
    assert resolve(settings, make_task(settings)).alpha == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("--filter_groups", True),
        ("--filter_groups --steps 3", True),
        ("--filter_groups True", True),
        ("--filter_groups yes", True),
        ("--filter_groups False", False),
        ("--filter_groups=0", False),
        ("", False),
    ],
)
def test_a_switch_is_on_by_its_name_alone_or_as_it_says(text, value):
    assert parse(text.split()).filter_groups is value


def test_a_function_is_given_the_settings_that_it_has_parameters_for():
    def call(alpha, first, *, steps=0, **rest): ...

    assert Settings(alpha=3.0).pick(call) == {"alpha": 3.0, "steps": Settings().steps}


def test_help_names_every_flag_with_what_it_does_and_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in FIELDS:
        assert f"--{field.name} " in text
        default = f"(default: {field.default})"
        words = " ".join(field.metadata["help"].split())
        if field.name in KINDS and ", ".join(KINDS[field.name]) not in words:
            words = f"{words}: {', '.join(KINDS[field.name])}"
        assert f"{words} {default}" in text, field.name


def test_no_two_settings_share_a_name():
    tree = ast.parse(inspect.getsource(Settings))
    names = [node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    for functions in KINDS.values():
        names += {name for function in functions.values() for name in function.flags}
    assert sorted(names) == sorted(field.name for field in FIELDS)


# -- bounds ----------------------------------------------------------------------------------------

OUTSIDE = {
    "least": lambda limit: limit - 1,
    "above": lambda limit: limit,
    "most": lambda limit: limit + 1,
    "below": lambda limit: limit,
}


def test_every_number_has_bounds():
    numbers = {field.name for field in FIELDS if field.type in (int, float)}
    assert numbers == {field.name for field in FIELDS if field.metadata["bounds"]}


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.metadata["bounds"]], ids=lambda field: field.name
)
def test_a_number_out_of_its_bounds_is_refused_and_named(field):
    wrong = [OUTSIDE[bound](limit) for bound, limit in field.metadata["bounds"].items()]
    for value in (*wrong, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError) as error:
            Settings(**{field.name: value})
        assert re.fullmatch(f"--{field.name} must be .* \\(got {value}\\)", str(error.value))


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.metadata["choices"]], ids=lambda field: field.name
)
def test_a_word_that_is_no_choice_is_refused_and_all_choices_are_named(field):
    choices = ", ".join(field.metadata["choices"])
    with pytest.raises(ValueError) as error:
        Settings(**{field.name: "foo"})
    assert str(error.value) == f"--{field.name} is one of {choices} (got foo)"


# -- exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [(RolloutError("no worker", "Traceback"), 1), (KeyboardInterrupt(), 130), (None, 0)],
)
def test_exit_codes_of_a_run(monkeypatch, capsys, error, code):
    told = []

    class Run:
        ranks = SimpleNamespace(leave=told.append, end=lambda: None, world=1, local_rank=0)

        def __init__(self, settings):
            self.settings, self.log, self.closed = settings, None, False
            runs.append(self)

        def start(self):
            if error:
                raise error

        def rescue(self, error):
            return "it is saved"

        def close(self):
            self.closed = True

    runs = []
    monkeypatch.setattr(train, "Run", Run)
    monkeypatch.setattr(train, "train_async", lambda run: None)
    assert main([]) == code and runs[0].closed
    said = {1: "no worker; it is saved", 130: "interrupted; it is saved"}.get(code, "")
    assert told == [said]  # the other nodes
    err = capsys.readouterr().err
    assert err.splitlines()[-1:] == ([f"train.py: {said}"] if said else [])


def test_a_terminal_that_has_no_arrows_does_not_end_a_run(monkeypatch):
    class Run:
        ranks = SimpleNamespace(leave=lambda why: None, end=lambda: None, world=1, local_rank=0)

        def __init__(self, settings):
            self.log = None

        def start(self):
            print("reward 0.1 → 0.9")

        def close(self):
            pass

    monkeypatch.setattr(train, "Run", Run)
    monkeypatch.setattr(train, "train_async", lambda run: None)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main([]) == 0
    out.flush()
    assert out.buffer.getvalue() == b"reward 0.1 ? 0.9\n"


def test_a_value_error_while_training_is_a_bug_and_shows_where(monkeypatch):
    told = []

    class Run:
        ranks = SimpleNamespace(leave=told.append, end=lambda: None, world=1, local_rank=0)

        def __init__(self, settings):
            pass

        def start(self):
            raise ValueError("a bug")

        def close(self):
            pass

    monkeypatch.setattr(train, "Run", Run)
    with pytest.raises(ValueError, match="a bug"):
        main([])
    assert told == ["ValueError('a bug')"]
