"""How many threads everything has."""

import os

from plumbing.ranks import cpu_threads


def test_whoever_has_the_machine_alone_uses_all_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cpu_threads(alone=True, ranks=2, workers=3) == (4, 2)
    assert cpu_threads(alone=True, ranks=16, workers=16) == (1, 1)
    assert cpu_threads(alone=False, ranks=1, workers=1) == (1, 1)
