"""What a run says of its first batch and is silent of in all others; its bar, or lines."""

import itertools
from types import SimpleNamespace

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
    log.bar._time = lambda: now[0]
    log.bar.start_t = log.bar.last_print_t = 0.0
    now[0] = 100.0  # the workers have started
    log.begin()
    now[0] = 102.0
    assert log.bar.format_dict["elapsed"] == 2.0
    log.close()
