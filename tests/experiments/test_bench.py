"""The harness: the order of arms, what Ctrl-C does, and the arithmetic of the tables."""

from types import SimpleNamespace

import numpy as np
import pytest

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


def test_numbers_are_shown_with_their_range_and_ratios_are_of_pairs():
    assert spread([1.0, 2.0, 6.0]) == "2.00 (1.00-6.00)"
    assert spread([1.0, 2.0, 6.0], digits=1, middle=np.mean) == "3.0 (1.0-6.0)"
    assert ratio([4.0, 6.0], [2.0, 1.0]) == "4.00 (2.00-6.00)"
    assert table(["", "n"], [["a", 1]]) == "| | n |\n|---|---|\n| a | 1 |"
