"""What a run says of its first batch and is silent of in all others; its bar, or lines."""

import contextlib
import itertools
import json
import os
import resource
from types import SimpleNamespace

import numpy as np
import pytest

from plumbing.files import WriteError, write_whole
from plumbing.settings import Settings
from plumbing.tiny import byte_tokenizer
from report.log import Log

WELL = {
    "truncated": 0.1, "groups_with_signal": 0.5, "failed_samples": 0, "samples": 64, "version": 0,
    "reward_mean": 0.3, "staleness_mean": 0.0, "tokens": 9, "t_wait": 1.0, "t_train": 1.0,
    "t_publish": 1.0, "trainer_idle": 0.1, "rollout_idle": 0.1, "step": 1,
}  # fmt: skip
ILL = {"truncated": 1.0, "groups_with_signal": 0.0, "failed_samples": 32}


def said(tmp_path, capfd, *rows, resumed_at=None) -> list[str]:
    log = Log(Settings(run_dir=str(tmp_path / "run")), 1, resumed_at)
    log.open()
    capfd.readouterr()
    for row in rows:
        log.step(row, [], [], byte_tokenizer())
    log.close()
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]


def test_a_first_batch_that_teaches_nothing_is_told_about_once(tmp_path, capfd):
    first, second = said(tmp_path, capfd, WELL | ILL, WELL | ILL | {"step": 2})[::2]
    assert "100% of the first batch was cut off" in first and "33% of the first batch's" in second
    assert not said(tmp_path, capfd, WELL | ILL | {"step": 2}, resumed_at=1)


def test_a_first_batch_with_something_to_learn_is_not_told_about(tmp_path, capfd):
    assert said(tmp_path, capfd, WELL, WELL | ILL | {"step": 2}) == []


def test_where_there_is_no_terminal_lines_are_written_now_and_then_and_no_bar(
    tmp_path, capfd, monkeypatch
):
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr("report.log.time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = Log(Settings(run_dir=str(tmp_path / "run"), steps=7), 1, None)
    log.open()
    log.begin()
    for step in range(1, 8):
        log.step(WELL | {"step": step}, [], [], byte_tokenizer())
    log.close()
    lines = capfd.readouterr().err
    assert "\r" not in lines and "step/s" not in lines
    assert [line.split(":")[0] for line in lines.splitlines()] == ["step 3 of 7", "step 6 of 7"]


def test_the_clock_of_the_bar_begins_with_the_first_step(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    log = Log(Settings(run_dir=str(tmp_path / "run"), steps=7), 1, None)
    log.open()
    log.bar._time = lambda: now[0]
    log.bar.start_t = log.bar.last_print_t = 0.0
    now[0] = 100.0  # the workers have started
    log.begin()
    now[0] = 102.0
    assert log.bar.format_dict["elapsed"] == 2.0
    log.close()


# -- the directory, and a disk that is full --------------------------------------------------------


@contextlib.contextmanager
def room(size: int):
    """No file may become larger than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_runs_cannot_write_one_directory(tmp_path):
    settings = Settings(run_dir=str(tmp_path / "run"))
    first = Log(settings, 1, None)
    with pytest.raises(ValueError, match="run: another run is writing there"):
        Log(settings, 1, None)
    first.close()
    Log(settings, 1, None).close()


def test_two_runs_of_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logs = [Log(Settings(), 1, None) for _ in range(3)]
    assert len({log.dir for log in logs}) == 3
    for log in logs:
        log.close()


def test_a_run_that_does_not_start_leaves_what_was_there(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3}) + "\n")
    Log(Settings(run_dir=str(tmp_path)), 1, 2).close()
    assert (tmp_path / "config.json").read_text() == "{}"
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3}


def test_one_that_begins_again_at_0_keeps_no_row(tmp_path):
    rows = {"version": 0, "eval/solve_rate": 0.1}, {"step": 1, "version": 0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = Log(Settings(run_dir=str(tmp_path)), 1, 0)
    log.open()
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "" and log.rows == []


def test_without_room_for_a_row_the_run_ends_and_no_half_of_it_stays(tmp_path):
    log = Log(Settings(run_dir=str(tmp_path / "run")), 1, None)
    log.open()
    log.step(WELL, [], [], byte_tokenizer())
    before = (log.dir / "metrics.jsonl").read_bytes()
    no_room = r"metrics.jsonl cannot be written: No space"
    with room(len(before) + 20), pytest.raises(WriteError, match=no_room):
        log.step(WELL | {"step": 2}, [], [], byte_tokenizer())
    assert (log.dir / "metrics.jsonl").read_bytes() == before
    log.close()


def test_without_room_for_what_is_nice_to_have_the_run_goes_on_and_says_it_once(tmp_path, capfd):
    log = Log(Settings(run_dir=str(tmp_path / "run")), 1, None)
    log.open()
    log.samples.close()
    log.samples = open("/dev/full", "w")  # noqa: SIM115 - the log closes it
    sample = SimpleNamespace(
        ticket=SimpleNamespace(group=0, sample=0), mask=np.array([False, True]),
        ids=np.array([65, 66]), reward=1.0, truncated=False,
        versions=np.array([-1, 0]), logprobs=np.zeros(2), turns=(),
    )  # fmt: skip
    for step in (1, 2):
        log.step(WELL | {"step": step}, [sample], [], byte_tokenizer())
    log.close()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(said) == 1 and "samples.jsonl is not written any more: No space left" in said[0]
    assert len((log.dir / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "config.json"
    write_whole(path, b"before")
    with room(100), pytest.raises(OSError):
        write_whole(path, bytes(1000))
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["config.json"]
