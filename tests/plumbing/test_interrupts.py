"""Ctrl-C and SIGTERM: when the first one is noticed, and that the second one waits for nothing."""

import os
import signal

import pytest

from plumbing import interrupts as module
from plumbing.interrupts import Interrupts


@pytest.fixture
def interrupts(monkeypatch):
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    ends = []
    monkeypatch.setattr(module, "kill_children_and_exit", ends.append)
    ours = Interrupts()
    ours.ends = ends
    ours.install()
    yield ours
    for number, handler in before:
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


def test_ctrl_c_is_noticed_at_once(interrupts):
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_sigterm_ends_with_the_code_of_a_shell(interrupts):
    with pytest.raises(SystemExit) as end:
        send(signal.SIGTERM)
    assert end.value.code == 143


def test_what_is_held_is_finished_first(interrupts):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        send(signal.SIGINT)
        with interrupts.held():
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_a_wait_within_what_is_held_notices_it(interrupts):
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        send(signal.SIGINT)
        done.append("a step")
        with interrupts.released():
            done.append("no wait")
    assert done == ["a step"]


def test_it_is_noticed_once_and_an_error_of_what_is_held_is_not_hidden(interrupts):
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        send(signal.SIGINT)
    with interrupts.held():  # for what is still to be saved
        pass
    with pytest.raises(ValueError, match="mine"), Interrupts().held():
        raise ValueError("mine")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_one_waits_for_nothing(interrupts, second):
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        send(signal.SIGINT)
        assert not interrupts.ends
        send(second)
        assert interrupts.ends == [128 + second]


def test_while_a_run_ends_by_itself_the_first_one_waits_for_nothing(interrupts):
    interrupts.last()
    with interrupts.held():
        send(signal.SIGINT)
    assert interrupts.ends == [130]
