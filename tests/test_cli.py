"""The command line: what is wrong is said in one line, before anything is written."""

import dataclasses
import json
import signal
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import yaml

import train
from algos import AlgoConfig
from buffer import BufferConfig
from envs import EnvConfig, make_task
from plumbing import models
from rollout import RolloutConfig, RolloutError
from train import RunConfig, derive_seed, load_checkpoint, main, parse
from trainer import STATE_FILE, TrainerConfig

CONFIGS = (RunConfig, TrainerConfig, RolloutConfig, BufferConfig, EnvConfig, AlgoConfig)
FIELDS = [field for config in CONFIGS for field in dataclasses.fields(config)]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A model directory, made without any training."""
    cache = tmp_path_factory.mktemp("models")
    return models.resolve_model("tiny", make_task(EnvConfig()), "addition", cache, warmup_steps=0)


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
        ("--mode foo", "--mode is sync or async (got foo)"),
        ("--loss foo", "--loss is one of pg, ppo"),
        ("--advantage foo", "--advantage is one of grpo"),
        ("--on_update foo", "--on_update"),
        ("--steps 0", "--steps must be above 0"),
        ("--steps 1.5", "--steps: invalid int value"),
        ("--batch_size -1", "--batch_size must be"),
        ("--group_size 1", "--group_size 2 or more"),
        ("--temperature 0", "--temperature must be above 0"),
        ("--rollout_workers 0", "--rollout_workers"),
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
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(refused, argv, words):
    assert words in refused(*argv.split())


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


@pytest.mark.parametrize("how", ["--resume old", "--resume=old"])
def test_resuming_a_directory_without_a_checkpoint(refused, random_model, tmp_path, how):
    (tmp_path / "old/.checkpoint-2").mkdir(parents=True)  # one that was not finished
    (tmp_path / "old/config.json").write_text(json.dumps({"model": random_model}))
    assert "--resume old: no checkpoint" in refused(*how.split())


# -- settings --------------------------------------------------------------------------------------


def flat(configs):
    return {name: value for part in configs for name, value in vars(part).items()}


def test_without_flags_the_defaults_hold():
    configs = parse([])
    assert [type(part) for part in configs] == list(CONFIGS)
    assert configs == [config() for config in CONFIGS]


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_flags_override_settings_of_a_file_which_override_defaults(tmp_path, dump):
    text = dump({"alpha": 3, "steps": 7, "env": "max3", "data": None, "learning_rate": 1e-5})
    (tmp_path / "settings").write_text(text)
    values = flat(parse(["settings", "--steps", "9", "--alpha=0.5"]))
    assert (values["steps"], values["alpha"]) == (9, 0.5)
    assert (values["env"], values["learning_rate"], values["data"]) == ("max3", 1e-5, None)
    assert values["batch_size"] == BufferConfig().batch_size


def test_settings_as_a_run_writes_them_read_back_the_same(tmp_path):
    configs = parse(["--alpha=2.5", "--mode=sync", "--run_dir=x", "--data=d.jsonl", "--seed=3"])
    (tmp_path / "written.json").write_text(json.dumps(flat(configs)))
    assert parse(["written.json"]) == configs


@pytest.mark.parametrize("how", ["--resume old", "--resume=old"])
def test_a_resumed_run_has_its_old_settings_and_directory_and_the_new_flags(tmp_path, how):
    (tmp_path / "old").mkdir()
    settings = flat(parse(["--alpha", "3", "--steps", "7", "--run_dir", "moved"]))
    settings["trainers"] = 2  # what a run notes besides
    (tmp_path / "old/config.json").write_text(json.dumps(settings))
    values = flat(parse([*how.split(), "--steps", "20"]))
    assert (values["alpha"], values["steps"]) == (3, 20)
    assert (values["run_dir"], values["resume"]) == ("old", "old")


def test_sync_has_alpha_zero_whatever_the_flag_says():
    run, _, _, buffer, _, algo = parse(["--mode", "sync", "--alpha", "2", "--model", "tiny"])
    train.check(run, buffer, algo)
    assert buffer.alpha == 0


def test_help_names_every_flag_with_what_it_does_and_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in FIELDS:
        assert f"--{field.name} " in text
        default = f"(default: {field.default})"
        words = " ".join(field.metadata["help"].split())
        assert f"{words} {default}" in text, field.name


def test_no_two_settings_share_a_name():
    names = [field.name for field in FIELDS]
    assert len(set(names)) == len(names)


# -- checkpoints -----------------------------------------------------------------------------------


BUFFER = BufferConfig(batch_size=4, group_size=2)


def write_checkpoint(path, **state):
    path.mkdir(parents=True)
    torch.save({"cells": [(0, {})], "batch": (4, 2)} | state, path / STATE_FILE)


def test_the_last_finished_checkpoint_is_resumed_from(tmp_path):
    for step in (2, 9, 10):
        write_checkpoint(tmp_path / f"checkpoint-{step}", version=step)
    write_checkpoint(tmp_path / ".checkpoint-11", version=11)  # stopped before it was renamed
    (tmp_path / "checkpoint-12").mkdir()
    state, path = load_checkpoint(str(tmp_path), 1, BUFFER)
    assert state["version"] == 10 and path == str(tmp_path / "checkpoint-10")


def test_a_checkpoint_of_another_number_of_nodes_is_refused(tmp_path):
    write_checkpoint(tmp_path / "checkpoint-1", cells=[(0, {}), (0, {})])
    with pytest.raises(ValueError, match="on 2 nodes, not on 1"):
        load_checkpoint(str(tmp_path), 1, BUFFER)


@pytest.mark.parametrize("batch", [(8, 2), (4, 4)])
def test_a_checkpoint_of_other_batches_is_refused(tmp_path, batch):
    write_checkpoint(tmp_path / "checkpoint-1", batch=batch)
    with pytest.raises(ValueError, match=f"batches of {batch[0]} x {batch[1]}"):
        load_checkpoint(str(tmp_path), 1, BUFFER)


def test_nothing_to_resume_is_no_error():
    assert load_checkpoint("", 1, BUFFER) == ({}, "")


# -- exit codes, seeds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [(RolloutError("no worker", "Traceback"), 1), (KeyboardInterrupt(), 130), (None, 0)],
)
def test_exit_codes_of_a_run(monkeypatch, capsys, error, code):
    class Run:
        def __init__(self, config, *_):
            self.config, self.log, self.closed = config, None, False
            runs.append(self)

        def start(self):
            if error:
                raise error

        def close(self):
            self.closed = True

    runs = []
    monkeypatch.setattr(train, "Run", Run)
    monkeypatch.setattr(train, "train_async", lambda run: None)
    assert main([]) == code and runs[0].closed
    err = capsys.readouterr().err
    assert err.splitlines()[-1:] == {
        1: ["train.py: no worker"],
        130: ["train.py: interrupted"],
    }.get(code, [])


def test_a_value_error_while_training_is_a_bug_and_shows_where(monkeypatch):
    class Run:
        def __init__(self, *_):
            pass

        def start(self):
            raise ValueError("a bug")

        def close(self):
            pass

    monkeypatch.setattr(train, "Run", Run)
    with pytest.raises(ValueError, match="a bug"):
        main([])


def test_seeds_depend_on_every_part_and_on_nothing_else():
    seeds = {
        derive_seed(run, place, i) for run in range(3) for place in range(40) for i in range(9)
    }
    assert len(seeds) == 3 * 40 * 9 and all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3) != derive_seed(3, 2, 1)
