"""The demonstration, short: both arms, one sentence, one picture."""

import os
import re

import pytest

from experiments import demo
from experiments.machines import as_machine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_ends_with_a_sentence_and_a_picture(tmp_path, capsys):
    assert demo.main(["--steps", "4", "--out", str(tmp_path / "demo")]) == 0
    sentence, picture = capsys.readouterr().out.splitlines()[-2:]
    assert re.match(r"256 samples: sync [\d.]+ s, async [\d.]+ s, [\d.]+ times as fast", sentence)
    assert picture == str(tmp_path / "demo/demo.png")
    assert (tmp_path / "demo/demo.png").stat().st_size > 20_000


def test_one_response_in_thirty_is_long_and_the_others_are_short():
    lengths = [demo.HeavyTail.length(None, seed, 0) for seed in range(3000)]
    assert 60 < lengths.count(demo.LONG) < 140
    assert {length for length in lengths if length < demo.LONG} == set(range(4, 13))


def test_a_machine_is_what_its_name_says_and_only_for_a_while():

    before = os.sched_getaffinity(0)
    with as_machine("one-core") as environment:
        assert len(os.sched_getaffinity(0)) == 1 and environment == os.environ
    assert os.sched_getaffinity(0) == before
    with as_machine("avx2") as environment:
        assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    why = "no machine 'vax'; there are: native, avx2"
    with pytest.raises(ValueError, match=why), as_machine("vax"):
        pass
