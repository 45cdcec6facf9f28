"""The harness: the order of arms, what Ctrl-C does, and the arithmetic of the tables."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments import bench as bench_module
from experiments.bench import Bench, ratio, spread, table


def test_arms_take_turns_and_every_other_round_goes_backwards(tmp_path):
    order = []

    def measure(arm, repeat):
        order.append(arm.name)
        return repeat

    with Bench(tmp_path) as bench:
        values = bench.in_turn([SimpleNamespace(name=name) for name in "ab"], 3, measure)
    assert order == list("abbaab") and values == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert bench.code == 0


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt, 130), (RuntimeError, 0)])
def test_an_interrupt_ends_the_block_alone_and_engines_are_always_closed(tmp_path, error, code):
    closed = []
    engines = SimpleNamespace(close=lambda: closed.append(True))
    try:
        with Bench(tmp_path) as bench:
            bench.engines["kind"] = engines
            raise error
    except RuntimeError:
        assert error is RuntimeError
    assert bench.code == code and closed == [True]


@pytest.mark.parametrize("gpus, left", [(0, {"other", "mine"}), (2, {"mine"})])
def test_on_gpus_engines_of_another_kind_end_before_new_ones_start(
    tmp_path, monkeypatch, gpus, left
):
    monkeypatch.setattr(bench_module, "usable_gpus", lambda: gpus)
    events = []
    run = SimpleNamespace(
        log=SimpleNamespace(bar=SimpleNamespace(disable=True), lines=False),
        start=lambda engines, dispatcher: events.append("start"),
        workers=SimpleNamespace(close=lambda: events.append("mine ends")),
        close=lambda keep_workers: None,
    )
    with Bench(tmp_path) as bench:
        bench.engines["other"] = SimpleNamespace(close=lambda: events.append("other ends"))
        bench.measure(run, lambda run: None, kind="mine")
        assert set(bench.engines) == left
    assert (events.index("other ends") < events.index("start")) == (gpus > 0)


def test_numbers_are_shown_with_their_range_and_ratios_are_of_pairs():
    assert spread([1.0, 2.0, 6.0]) == "2.00 (1.00-6.00)"
    assert spread([1.0, 2.0, 6.0], digits=1, middle=np.mean) == "3.0 (1.0-6.0)"
    assert ratio([4.0, 6.0], [2.0, 1.0]) == "4.00 (2.00-6.00)"
    assert table(["", "n"], [["a", 1]]) == "| | n |\n|---|---|\n| a | 1 |"
