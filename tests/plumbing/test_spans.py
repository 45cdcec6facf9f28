"""Spans of time, as a process records them."""

import asyncio
import sys
import threading
import time

import pytest

from plumbing.spans import MAIN, STEP_LIMIT, Spans


def test_a_span_has_name_lane_times_and_args_also_when_the_block_raises():
    recorder, before = Spans(), time.perf_counter()
    with recorder("turn", lane=3, group=7) as args:
        args["tokens"] = 5
        time.sleep(0.01)
    with pytest.raises(KeyError), recorder("load"):
        raise KeyError
    (turn, load), after = recorder.take(), time.perf_counter()
    name, lane, start, end, args = turn
    assert (name, lane, args) == ("turn", 3, {"group": 7, "tokens": 5})
    assert before <= start <= end - 0.01 and end <= load[2] <= load[3] <= after
    assert load[:2] == ("load", MAIN) and recorder.take() == []


def test_seconds_are_summed_up_by_name_for_the_loop_alone():
    recorder = Spans()
    recorder.add("decode", 1.0, 1.5)
    recorder.add("decode", 2.0, 2.25)
    recorder.add("env step", 0.0, 9.0, lane=1)
    assert recorder.seconds == {"decode": 0.75}
    assert [name for name, *_ in recorder.take()] == ["decode", "decode", "env step"]
    recorder.clear()
    assert not recorder.seconds


def test_a_decorated_function_and_a_coroutine_are_timed_at_every_call():
    recorder = Spans()

    @recorder("pack")
    def double(x):
        return 2 * x

    async def answer():
        await asyncio.sleep(0.01)
        return 42

    assert [double(1), double(2)] == [2, 4]
    assert asyncio.run(recorder.around(answer(), "reward", 2)) == 42
    one, other, reward = recorder.take()
    assert one[0] == other[0] == "pack" and one[3] <= other[2]
    assert reward[:2] == ("reward", 2) and reward[3] - reward[2] >= 0.01


def test_threads_may_record_while_spans_are_taken():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    recorder, taken = Spans(), []

    def record():
        for i in range(2000):
            recorder.add("env step", i, i + 1, lane=1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += recorder.take()
    sys.setswitchinterval(interval)
    assert len(taken + recorder.take()) == 8000


def test_what_nobody_takes_is_bounded():
    recorder = Spans()
    for i in range(STEP_LIMIT + 10):
        recorder.add("turn", i, i + 1, lane=1)
    assert [span[2] for span in recorder.take()] == list(range(10, STEP_LIMIT + 10))
