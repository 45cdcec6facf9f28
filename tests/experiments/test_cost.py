"""What the benchmarks of cost promise, where a test can hold them to it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cost(*args: str) -> str:
    command = [sys.executable, "-m", "experiments.cost", *args]
    return subprocess.run(
        command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def test_the_schedulers_thread_takes_at_most_a_tenth_of_a_core_at_a_thousand_samples_a_second():
    shown = cost("scheduler", "--steps", "20")
    assert shown.startswith("10240 samples of 1000 tokens")
    assert float(re.search(r"samples a second ([\d.]+)% of a core", shown)[1]) < 10


def test_a_large_vocabulary_is_never_held_for_the_whole_batch():
    plain, chunked = (
        float(n) for n in re.findall(r"([\d.]+) GiB", cost("memory", "--tokens", "1024"))
    )
    assert plain > 1.7 > 1.0 > chunked  # logits of 1,024 tokens take 0.6 GiB in each form
