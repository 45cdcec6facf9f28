"""gpu-check: its table, what it makes of steps that fail, and, slow, all of it on this machine."""

import os
import signal

import pytest

from experiments import gpu_check


def lines_of(text: str) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return dict(row for row in rows[1:])


def test_a_step_that_fails_is_a_line_with_its_cause_and_the_rest_goes_on(tmp_path, capsys):
    code = gpu_check.main(["--only", "sleep", "group"], prepare=lambda folder: None)
    said = lines_of(capsys.readouterr().out)
    assert code == 0
    assert [state.split(":")[0] for state in said.values()] == ["skipped", "measured"]
    code = gpu_check.main(["--only", "trainer", "group"], prepare=lambda folder: None)
    said = lines_of(capsys.readouterr().out)
    assert code == 1  # there is no model in the folder
    failed, measured = said.values()
    assert failed.startswith("FAILED: ") and "/0" in failed and measured.startswith("measured: ")


def test_a_step_that_hangs_is_ended_with_what_it_started(monkeypatch):
    monkeypatch.setattr(gpu_check, "LIMIT", 0.5)
    ended = []
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda *args: (ended.append(args), kill(*args)))
    ((title, state),) = gpu_check.supervise("group", "nowhere")
    assert (title, state) == ("Weight group made, used and aborted", "FAILED: not done after 0.5 s")
    assert ended[0][1] == signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_steps_run_where_there_is_no_gpu(capsys):
    if gpu_check.DEVICE != "cpu":
        pytest.skip("this machine has a GPU: bash launch.sh gpu-check")
    code = gpu_check.main([])
    out = capsys.readouterr().out
    said = lines_of(out)
    assert code == 0, out
    skipped = {what for what, state in said.items() if state.startswith("skipped")}
    assert skipped == {
        "Sleep and wake of the engine", "trainer, memory peak against the estimate",
    }  # fmt: skip
    assert len(said) == 14
