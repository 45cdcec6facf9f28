"""Propositions 1 and 2: against list scheduling, against each other, and what they advise."""

import heapq
import json
import math
import random
import re

import numpy as np
import pytest

from experiments.simulator import Load, Rates, Setting, simulate
from report import advice, theory
from report.advice import advise_run
from report.theory import advise, async_bound, best_async_bound, beta_star, max_speedup, sync_bound


def list_schedule(times, workers):
    """When the last ends, if each goes to whichever worker is free first."""
    free = [0.0] * workers
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


def instance(rng):
    """Random samples and workers: (times, workers, mean, longest)."""
    times = [rng.lognormvariate(2, rng.choice([0, 0.5, 1, 2])) for _ in range(rng.randint(1, 80))]
    return times, rng.randint(1, 20), sum(times) / len(times), max(times)


def test_proposition_1_holds_on_thousands_of_random_instances():
    rng, closest = random.Random(0), 0.0
    for _ in range(5000):
        times, workers, mean, longest = instance(rng)
        took, eps = list_schedule(times, workers), 1e-9 * longest
        tight = theory.tight_makespan_bound(len(times), workers, mean, longest)
        assert took <= tight + eps
        assert tight <= theory.makespan_bound(len(times), workers, mean, longest) + eps
        closest = max(closest, took / tight)
    assert closest > 0.95  # the bound is no wild guess either


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_the_tight_form_is_attained(workers):
    times = [1.0] * (workers * (workers - 1)) + [float(workers)]
    mean = sum(times) / len(times)
    bound = theory.tight_makespan_bound(len(times), workers, mean, workers)
    assert list_schedule(times, workers) == pytest.approx(bound) == 2 * workers - 1


def test_seconds_a_sample_fall_with_alpha_to_the_throughput_of_the_workers():
    sizes = dict(samples=40, workers=8, mean=2.0, longest=30.0)
    assert theory.per_sample_bound(**sizes) * 40 == pytest.approx(theory.makespan_bound(**sizes))
    assert theory.per_sample_bound(**sizes, alpha=1) == pytest.approx(2 / 8 + 30 / 80)
    assert theory.per_sample_bound(**sizes, alpha=math.inf) == 2 / 8


def random_sizes(rng):
    mean = rng.uniform(0.5, 50)
    return dict(
        samples=rng.randint(1, 4096),
        workers=rng.randint(2, 128),
        mean=mean,
        longest=mean * rng.uniform(1, 30),
        train=rng.uniform(0.1, 20),
        epochs=rng.choice([1, 2]),
    )


def test_proposition_2_the_best_split_found_by_search_is_beta_star():
    rng = random.Random(1)
    for _ in range(2000):
        sizes, alpha = random_sizes(rng), rng.choice([0.5, 1, 2, 8])
        star = beta_star(**sizes, alpha=alpha)
        at_star = async_bound(**sizes, beta=star, alpha=alpha)
        assert at_star == pytest.approx(best_async_bound(**sizes, alpha=alpha))
        found = min(async_bound(**sizes, beta=i / 500, alpha=alpha) for i in range(1, 500))
        assert at_star <= found * (1 + 1e-9)
        near = async_bound(**sizes, beta=min(max(star, 0.002), 0.998), alpha=alpha)
        assert near <= found * (1 + 1e-9)
        assert theory.pipeline_bound(**sizes, beta=star, alpha=alpha) >= at_star


def test_the_worked_example_and_the_greatest_speedup():
    sizes = dict(samples=4096, workers=64, mean=20.0, longest=200.0, train=5.0)
    assert sync_bound(**sizes) == 1800
    bounds = [best_async_bound(**sizes, alpha=a) for a in (1, 2, 4, 8)]
    assert bounds == pytest.approx([1700, 1666.67, 1640, 1622.22], abs=0.01)
    stars = [beta_star(**sizes, alpha=a) for a in (1, 2, 4, 8)]
    assert stars == pytest.approx([0.188, 0.192, 0.195, 0.197], abs=5e-4)
    limit = sync_bound(**sizes) / best_async_bound(**sizes, alpha=1e12)
    assert max_speedup(**sizes) == pytest.approx(limit)


def test_advice_is_the_best_whole_split_and_the_smallest_alpha_that_is_enough():
    rng = random.Random(2)
    for _ in range(300):
        sizes = random_sizes(rng)
        said = advise(**sizes)
        if said.alpha == 0:
            assert said.rollout_workers == said.trainers == sizes["workers"]
            assert said.seconds == said.sync_seconds == sync_bound(**sizes)
            continue
        assert said.rollout_workers + said.trainers == sizes["workers"]
        assert said.trainers >= 1 and said.rollout_workers >= 1
        for trainers in range(1, sizes["workers"]):
            share = trainers / sizes["workers"]
            bound = theory.pipeline_bound(**sizes, beta=share, alpha=said.alpha)
            assert said.seconds <= bound + 1e-9


def test_a_heavy_tail_needs_a_greater_alpha_and_none_needs_none():
    sizes = dict(samples=512, workers=64, mean=20.0, train=5.0)
    heavy, light = advise(**sizes, longest=2000.0), advise(**sizes, longest=20.0)
    assert heavy.alpha == 4 and heavy.seconds < heavy.sync_seconds / 2
    assert light.alpha < heavy.alpha


@pytest.mark.parametrize("wrong", [dict(workers=1), dict(mean=0.0), dict(train=math.nan)])
def test_what_cannot_be_advised_on_is_refused(wrong):
    sizes = dict(samples=64, workers=2, mean=1.0, longest=2.0, train=1.0) | wrong
    with pytest.raises(ValueError, match="worker|above 0"):
        advise(**sizes)


# -- from a run's own times ------------------------------------------------------------------------


def rows(count=13, **more):
    """Steps of 64 samples of 10 tokens, the longest of 40: a worker makes 16 at a time."""
    row = {"samples": 64, "tokens_made": 640, "length_mean": 10.0, "length_max": 40}
    row |= {"slots_used": 16.0, "t_worker_decode": 0.7, "t_worker_episodes": 0.1, "t_wait": 0.2}
    row |= {"t_worker_load": 0.16, "t_train": 0.6, "t_publish": 0.04} | more
    return [row | {"step": step} for step in range(1, count + 1)]


def test_a_run_is_advised_by_the_times_that_it_measured():
    said = advise_run(rows(t_wait=2.0), {"rollout_workers": 1, "alpha": 1.0})
    # 40 engine steps in 0.8 s; a sample takes a worker 0.96 / 64 s, a trainer 0.64 / 64 s.
    sizes = dict(samples=64, workers=2, mean=0.015, longest=0.8, train=0.01)
    best = advise(**sizes)
    first, second, third = said.splitlines()
    assert f"alpha {best.alpha}, 1 rollout + 1 trainer processes" in first
    assert f", at most {best.seconds:.3f} s a step; of sync {sync_bound(**sizes):.3f} s" in first
    assert "measured: 2.640 s at alpha 1" in first
    assert "15.00 ms" in second and "10.00 ms, the longest 0.800 s" in second
    assert f"{max_speedup(**sizes):.2f}" in third


def test_a_run_that_is_faster_than_the_bounds_is_left_as_it_is():
    said = advise_run(rows(), {"rollout_workers": 1, "alpha": 1.0})
    assert said.startswith("advice: stay with this setting") and "measured: 0.840 s" in said


def test_a_second_worker_halves_what_each_does_but_not_what_a_sample_costs():
    config = {"rollout_workers": 2, "alpha": 1.0}
    half = dict(t_worker_decode=0.35, t_worker_episodes=0.05, t_worker_load=0.08)
    said = advise_run(rows(**half), config)
    assert "15.00 ms" in said and "longest 0.800 s" in said


def test_in_sync_each_side_counts_for_the_whole_machine():
    said = advise_run(rows(t_wait=0.96), {"rollout_workers": 1, "alpha": 0.0})
    # All of the machine takes 0.96 s to generate 64 samples and 0.64 s to train on them.
    assert "(measured: 1.600 s at alpha 0)" in said and "of sync 2.400 s" in said
    assert "30.00 ms" in said and "20.00" in said


LONG_TAIL = {"t_wait": 5.0, "t_worker_decode": 1.0, "t_worker_load": 0.01, "t_train": 0.1}
LONG_TAIL |= {"slots_used": 2.0, "length_max": 600}


@pytest.mark.parametrize(
    ("alpha", "free", "times", "said"),
    [
        (1.0, 1, {"t_wait": 2.0}, "trainer waits 76% .* another worker (--rollout_workers 2)"),
        (1.0, 0, {"t_wait": 2.0}, ""),  # nobody could act on it
        (1.0, 1, {"t_worker_idle": 2.0}, "workers wait 68% .* another rank of it (NPROC=2)"),
        (1.0, 0, {"t_worker_idle": 2.0}, ""),
        (1.0, 1, {}, ""),
        # A reward that waits for a server: what overlaps more is not what helps, nor is sync.
        (1.0, 1, {"t_wait": 2.0, "t_worker_idle": 2.0}, "wait at once .* (--batch_size, --alpha)"),
        (0.0, 1, {"t_wait": 2.0, "t_worker_idle": 2.0}, "wait at once .* (--batch_size)"),
        (0.0, 1, {"t_wait": 0.96, "t_worker_idle": 0.7}, ""),  # the bounds promise less
        (1.0, 0, {"t_env_cpu": 0.5}, "compute for .*% of a worker's time"),
        (0.0, 1, LONG_TAIL, "at most 3.0. s .* --alpha 4"),
    ],
)
def test_a_run_ends_with_one_sentence_that_can_be_acted_on_or_none(alpha, free, times, said):
    hint = advice.hint(rows(**times), {"rollout_workers": 1, "alpha": alpha}, free)
    assert bool(hint) == bool(said) and hint.count("\n") == 0
    assert re.search(said.replace("(", r"\(").replace(")", r"\)"), hint)
    assert advice.hint(rows(9, **times), {"rollout_workers": 1, "alpha": alpha}, free) == ""


def test_a_short_run_is_given_no_advice(tmp_path, capsys, monkeypatch):
    assert advise_run(rows(9), {"rollout_workers": 1, "alpha": 1.0}) == ""
    monkeypatch.setattr("sys.argv", ["report.advice", str(tmp_path)])
    assert advice.main() == 2
    assert "has not the times of 10 steps" in capsys.readouterr().err


def test_the_command_prints_what_a_run_speaks_for(tmp_path, capsys, monkeypatch):
    config = {"rollout_workers": 1, "alpha": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = [json.dumps(row) + "\n" for row in rows()]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    monkeypatch.setattr("sys.argv", ["report.advice", str(tmp_path)])
    assert advice.main() == 0
    assert capsys.readouterr().out == advise_run(rows(), config) + "\n"


@pytest.mark.parametrize(
    ("alpha", "steps", "measured"), [(2, 30, 1.9), (4, 20, 3.5), (0.5, 14, 0.46)]
)
def test_where_the_trainer_is_the_bottleneck_staleness_is_alpha_after_a_cold_start(
    alpha, steps, measured
):
    low, high = theory.expected_range(alpha, 128, 64, 1, 1, waits=0.01, steps=steps)
    assert low == high == pytest.approx(measured, abs=0.01)  # real runs of the grid game


@pytest.mark.parametrize("slots", [1, 8, 32, 48, 64, 96])
@pytest.mark.parametrize("alpha", [1, 2, 4])
def test_simulated_staleness_is_as_expected(slots, alpha):
    """Two GPUs generate, with a light tail; the more places, the less the trainer waits."""
    recorded, rates = [], Rates(decode_s=0.01, slots=slots, train_s=0.2, publish_s=0.01)
    load = Load(20, 0.3, 200, prompt=0)
    buffer = {"batch_size": 32, "group_size": 4, "alpha": float(alpha)}
    setting = Setting(rates, load, buffer, 2, 1, steps=40)
    result = simulate(setting, lambda *step: recorded.extend(step[-1]))
    decoding = sum(end - start for name, _, start, end, _ in recorded if name == "turn")
    low, high = theory.expected_range(
        alpha,
        samples=128,
        running=decoding / result.seconds,
        update=0.21,
        step=result.seconds / 40,
        waits=result.wait / result.seconds,
        steps=40,
    )
    assert low - 0.1 <= np.mean(result.staleness) <= high + 0.1
