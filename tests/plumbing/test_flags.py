"""What a flag refuses: values out of its bounds are named, in one line."""

import doctest
import math

import pytest

from plumbing import flags
from plumbing.settings import Settings

COMPARES_NOTHING = {"advantage": "reinforce_pp", "batch_size": 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_workers", -1),
        ("tensor_parallel", 0),
        ("max_num_seqs", 0),
        ("max_tokens", -1),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("on_update", "foo"),
        ("worker_timeout", 0.0),
        ("start_timeout", -1.0),
        ("batch_size", -1),
        ("group_size", 0),
        ("alpha", -1),
        ("alpha", math.nan),
        ("alpha", math.inf),
        ("consume", "lifo"),
        ("redundant_samples", -1),
        ("redundant_groups", -1),
        ("filter_limit", 0),
        ("filter_limit", math.nan),
    ],
)
def test_settings_out_of_range_are_refused_and_named(name, value):
    with pytest.raises(ValueError, match=f"^--{name} .*\\(got {value}\\)$"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        ({"redundant_groups": 1}, {"consume": "ready"}),
        ({"filter_groups": True, "group_size": 1} | COMPARES_NOTHING, {"group_size": 2}),
    ],
)
def test_a_flag_that_needs_another_one_says_which(wrong, missing):
    ((needed, value),) = missing.items()
    with pytest.raises(ValueError, match=f"^--{next(iter(wrong))} .*--{needed} {value}"):
        Settings(**wrong)
    Settings(**wrong | missing)


def test_examples_in_the_docstrings():
    result = doctest.testmod(flags)
    assert result.attempted and not result.failed
