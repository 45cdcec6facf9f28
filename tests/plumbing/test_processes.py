"""The rollout processes: what they start with, whose words count, and what ends a run."""

import os
import select
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch.multiprocessing as mp
from fakes import Pipes

from plumbing.processes import Processes, RolloutError, child_environment, die_with_parent
from plumbing.settings import Settings

TORCHRUN = """RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
ROLE_NAME ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT
TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE"""


# -- what a child starts with ----------------------------------------------------------------------


def test_children_start_without_torchruns_variables_which_come_back_afterwards(monkeypatch):
    for name in TORCHRUN.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("MY_OWN", "kept")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with child_environment("2,3", threads=4):
        assert not set(TORCHRUN.split()) & set(os.environ)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert os.environ["OMP_NUM_THREADS"] == "4" and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and os.environ["MY_OWN"] == "kept"
    assert dict(os.environ) == before
    with pytest.raises(KeyError), child_environment(None, threads=1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        raise KeyError
    assert dict(os.environ) == before


@pytest.mark.skipif(not hasattr(os, "fork") or os.uname().sysname != "Linux", reason="Linux only")
def test_a_worker_dies_with_its_parent_even_if_that_is_killed():
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:  # the trainer
        child = os.fork()
        if not child:  # the rollout process
            die_with_parent(os.getppid())
            os.write(writer, f"{os.getpid()} ".encode())
            time.sleep(600)
            os._exit(0)
        time.sleep(600)
        os._exit(0)
    os.close(writer)
    child = int(os.read(reader, 100))
    os.kill(child, 0)  # it lives
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    gone, _, _ = select.select([reader], [], [], 60)
    assert gone and os.read(reader, 1) == b""  # nobody is left who could write to it
    os.close(reader)


# -- what is said, and by whom ---------------------------------------------------------------------


class Owner:
    """What a scheduler is to the processes."""

    def __init__(self):
        self.heard = []

    def hear(self, *said):
        self.heard.append(said)

    def holds(self, worker):
        return "3 tickets"


def listening(workers=2, **settings):
    """Ready workers, and what was heard of them."""
    processes, owner = Pipes(workers), Owner()
    heard = owner.heard
    processes.listen(owner, Settings(max_restarts=0, start_timeout=200, **settings))
    for worker in range(workers):
        processes.say(worker, "ready")
    return processes, heard


def test_what_was_said_before_a_worker_is_ready_is_of_an_earlier_run():
    processes, owner = Pipes(2), Owner()
    heard = owner.heard
    processes.listen(owner, Settings())
    processes.say(0, "results", 1)
    assert heard == []
    for word in ("ready", "results"):
        processes.say(0, word, 2)
    processes.say(1, "results", 3)
    assert heard == [(0, "ready", 2), (0, "results", 2)]
    with pytest.raises(RolloutError, match="waited 0 s for 1 workers to be ready"):
        processes.await_word("ready", timeout=0)
    processes.say(1, "ready")
    processes.await_word("ready", timeout=0)
    heard.clear()
    processes.listen(owner, Settings())  # the next run
    processes.say(1, "results", 4)
    processes.say(1, "begun")
    processes.say(1, "results", 5)
    assert heard == [(1, "begun"), (1, "results", 5)]


def test_a_silent_worker_ends_the_run_and_is_named():
    processes, _ = listening()
    processes.check_alive()
    processes.heard[1] -= 46
    silent = "rollout process 1 has not answered for .* s .*it holds 3 tickets; --worker_timeout 45"
    with pytest.raises(RolloutError, match=silent):
        processes.check_alive()
    processes.say(1, "results")
    processes.check_alive()


def test_a_worker_with_slack_may_be_silent_for_longer():
    processes, _ = listening()
    processes.slack[1] = 4.0
    processes.heard[1] -= 2 * 45
    processes.check_alive()
    processes.slack.clear()
    with pytest.raises(RolloutError, match="rollout process 1 has not answered"):
        processes.check_alive()


def test_the_traceback_of_a_failed_worker_travels_with_the_error():
    processes, _ = listening()
    with pytest.raises(RolloutError, match="rollout process 1 failed: ValueError: no") as caught:
        processes.say(1, "fatal", "Traceback\n  File\nValueError: no")
    assert caught.value.details.startswith("Traceback")


@pytest.mark.parametrize(("code", "how"), [(-9, "killed by SIGKILL"), (3, "exit 3")])
def test_a_dead_worker_is_named_with_the_way_it_ended(code, how):
    processes, _ = listening()
    ended = SimpleNamespace(join=lambda seconds: None, exitcode=code)
    processes.processes = [None, ended]
    processes.ends[1].close()
    processes.send(1, "stop")  # is no error: that it is dead is noticed where it is listened to
    with pytest.raises(RolloutError, match=rf"rollout process 1 died \({how}\)"):
        processes.receive(1)


# -- real ones -------------------------------------------------------------------------------------


def echo(pipe, spec):
    """A rollout process with a child of its own. It says what it is told."""
    os.setpgid(0, 0)
    name, lifeline = spec  # open as long as anybody here lives
    subprocess.Popen(["sleep", "600"], pass_fds=[lifeline.fileno()])
    pipe.send(("ready", name, os.environ.get("RANK"), os.environ["OMP_NUM_THREADS"]))
    while (message := pipe.recv()) != ("stop",):
        pipe.send(("echo", *message))


def test_processes_start_and_answer_and_none_is_left_when_one_was_killed(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    processes, owner = Processes(), Owner()
    heard = owner.heard
    end, lifeline = mp.Pipe(duplex=False)
    try:
        specs = [("first", lifeline), ("second", lifeline)]
        processes.start(echo, specs, [None, None], threads=1)
        processes.listen(owner, Settings(max_restarts=1))
        processes.await_word("ready", timeout=200)
        first, second = sorted(heard)
        assert first == (0, "ready", "first", None, "1")
        assert second == (1, "ready", "second", None, "1")
        heard.clear()
        processes.send(1, "hello", 5)
        processes.wait(lambda: heard, lambda: "an echo", timeout=200)
        assert heard == [(1, "echo", "hello", 5)]
        heard.clear()
        os.kill(processes.processes[1].pid, signal.SIGKILL)  # another takes its place
        processes.wait(lambda: len(heard) == 2, lambda: "a new one", timeout=200)
        (_, lost, why, _), ready = heard
        assert lost == "lost" and "process 1 died (killed by SIGKILL)" in str(why)
        assert ready == (1, "ready", "second", None, "1") and processes.lives == {1: 1}
        processes.send(1, "hello again")
        processes.wait(lambda: len(heard) == 3, lambda: "an echo", timeout=200)
        assert heard[-1] == (1, "echo", "hello again")
        os.kill(processes.processes[1].pid, signal.SIGKILL)  # that was once too often
        often = r"process 1 died \(killed by SIGKILL\); 1 were replaced within 10 minutes"
        with pytest.raises(RolloutError, match=often):
            processes.check(200, lambda: False)
        with pytest.raises(RolloutError, match="process 1 died"):
            processes.wait(lambda: True, str, timeout=0)  # whoever waits is told, too
    finally:
        processes.close()
    lifeline.close()
    assert [process.exitcode for process in processes.processes] == [-9, -9]
    assert end.poll(60)
    with pytest.raises(EOFError):  # their children are gone, too
        end.recv()
