"""Propositions 1 and 2 of ROLL Flash (arXiv 2510.11345) as functions, and what they advise.

They bound the time of a step when samples are handed out one by one to whichever worker is free.
Symbols, the same throughout:

    samples   N     samples of one batch, B * n
    workers   K     what generates, or trains, one thing at a time: a GPU, a decode slot, a process
    mean      mu    mean seconds that one worker takes to generate one sample
    longest   L     seconds that the longest sample takes (of all that are generated); mean <= L
    train     mu_t  seconds that one worker takes to train on one sample, once
    epochs    E     times that a batch is trained on
    alpha     a     asynchronous ratio: a straggler has (1 + a) batches to end in
    beta            share of the workers that train, 0 < beta < 1

Every function takes plain numbers and returns seconds unless it says otherwise. Asynchrony removes
the wait for the longest sample, and nothing else: what remains of it goes as 1 / (1 + alpha).
"""

import math
from typing import NamedTuple

ALPHAS = (0, 1, 2, 4)  # that `advise` chooses from; most of what is to be had is had by 2


def makespan_bound(samples: float, workers: float, mean: float, longest: float) -> float:
    """Proposition 1: queue scheduling ends `samples` samples within N mu / K + L.

    When the sample that ends last begins, no worker has been idle, so it begins at N mu / K at the
    latest. (More precisely after (N mu - L) / K: the form with (1 - 1/K) L, which is attained.)
    """
    return samples * mean / workers + longest


def tight_makespan_bound(samples: float, workers: float, mean: float, longest: float) -> float:
    """Proposition 1 without what its proof gives away: N mu / K + (1 - 1/K) L.

    Attained by K (K - 1) samples of 1 s followed by one of K s: all workers are busy for K - 1
    seconds, then one is for K more, which is N mu / K + (1 - 1/K) K = 2 K - 1.
    """
    return samples * mean / workers + (1 - 1 / workers) * longest


def per_sample_bound(
    samples: float, workers: float, mean: float, longest: float, alpha: float = 0
) -> float:
    """Proposition 1, seconds a sample: mu / K + L / ((1 + alpha) N). Synchronous at alpha = 0; as
    alpha grows only the throughput of the workers is left, mu / K."""
    return mean / workers + longest / ((1 + alpha) * samples)


def sync_bound(samples, workers, mean, longest, train, epochs: float = 1) -> float:
    """Proposition 2, synchronous: N (mu + E mu_t) / K + L seconds a step; all K workers generate,
    then all of them train."""
    return samples * (mean + epochs * train) / workers + longest


def async_bound(samples, workers, mean, longest, train, beta, alpha, epochs: float = 1) -> float:
    """Proposition 2, asynchronous: the slower of generation on (1 - beta) K workers and training on
    beta K, max{(N mu + K L / (1 + alpha)) / ((1 - beta) K), E N mu_t / (beta K)} seconds a step.

    It takes both phases as independent, alpha > 0. A batch is first generated and then trained on,
    within 1 + alpha steps, so where both take about as long a step can be a few per cent above it.
    It is never above `pipeline_bound`."""
    generation = (samples * mean + workers * longest / (1 + alpha)) / ((1 - beta) * workers)
    return max(generation, epochs * samples * train / (beta * workers))


def pipeline_bound(samples, workers, mean, longest, train, beta, alpha, epochs: float = 1) -> float:
    """Not in the paper: `async_bound`, but at least the time from a batch's admission until it has
    been trained on, over 1 + alpha, which is how many batches are under way: seconds a step."""
    training = epochs * samples * train / (beta * workers)
    passage = makespan_bound(samples, (1 - beta) * workers, mean, longest) + training
    bound = async_bound(samples, workers, mean, longest, train, beta, alpha, epochs)
    return max(bound, passage / (1 + alpha))


def beta_star(samples, workers, mean, longest, train, alpha, epochs: float = 1) -> float:
    """Proposition 2: the share of training workers that makes both sides of `async_bound` equal,
    E N mu_t / (N mu + K L / (1 + alpha) + E N mu_t). No unit."""
    training = epochs * samples * train
    return training / (samples * mean + workers * longest / (1 + alpha) + training)


def best_async_bound(samples, workers, mean, longest, train, alpha, epochs: float = 1) -> float:
    """Proposition 2 at beta_star: N (mu + E mu_t) / K + L / (1 + alpha) seconds a step."""
    return samples * (mean + epochs * train) / workers + longest / (1 + alpha)


def max_speedup(samples, workers, mean, longest, train, epochs: float = 1) -> float:
    """Proposition 2: sync_bound over best_async_bound as alpha grows, a number of times:
    1 + K L / (N (mu + E mu_t)). Large with few samples a worker, or a heavy tail."""
    return 1 + workers * longest / (samples * (mean + epochs * train))


def expected_range(
    alpha: float,
    samples: float,
    running: float,
    update: float,
    step: float,
    waits: float,
    steps: int,
) -> tuple[float, float]:
    """Mean staleness to be expected with `fifo`, in versions: at least, and at most. The bound is
    ceil(alpha). Not in the paper; docs/staleness.md derives it.

    `running`: samples that decode at a time, a mean over time. `update`, `step`: time from handing
    out a batch until its update is committed, and of a whole step. `waits`: share of its time that
    the trainer waits.

    At most: a sample is finished within the version that admitted it, and waits for alpha batches.
    So it is where the trainer is the bottleneck, and hardly waits (`waits` below 0.05).
    At least: every batch is handed out when its last sample ends. A sample has decoded for
    running / samples steps (Little's law), waits for the rest of its batch, and the update is
    committed `update` later: running / samples + update / step commits. So it is where generation
    is the bottleneck, and the trainer waits for every batch (`waits` above 1/3). Samples that wait
    for a place have no token, so no version either.
    A run of `steps` steps begins cold: step k has at most k - 1 versions behind it."""

    def from_cold(mean: float) -> float:
        return sum(min(mean, k) for k in range(steps)) / steps

    low = from_cold(min(alpha, running / samples + update / step))
    high = from_cold(alpha)
    if waits < 0.05:
        return high, high
    return (low, low) if waits > 1 / 3 else (low, high)


class Advice(NamedTuple):
    """What to run with, and the bounds on its step time, in seconds."""

    rollout_workers: int
    trainers: int
    alpha: int
    seconds: float
    sync_seconds: float


def advise(
    samples: float,
    workers: int,
    mean: float,
    longest: float,
    train: float,
    epochs: float = 1,
    within: float = 0.05,
) -> Advice:
    """The split of `workers` into whole rollout workers and trainers, and alpha: the smallest of
    ALPHAS whose `pipeline_bound` is at most `within` above the best, each at its best split.
    alpha = 0 is synchronous: all workers do both. What staleness costs is not in it.

    Raises ValueError for fewer than two workers, which cannot be split, and for times that are not
    finite and above 0."""
    if workers < 2:
        raise ValueError(f"a split needs at least 2 workers (got {workers})")
    if not all(0 < x < math.inf for x in (samples, mean, longest, train, epochs)):
        raise ValueError("samples, epochs and all times must be finite and above 0")
    rest = (samples, workers, mean, longest, train)
    sync = sync_bound(*rest, epochs)

    def best(alpha: float) -> tuple[float, int]:
        """The best whole number of trainers, and its bound. At alpha = 0 nothing is split."""
        if alpha == 0:
            return sync, workers
        return min(
            (pipeline_bound(*rest, trainers / workers, alpha, epochs), trainers)
            for trainers in range(1, workers)
        )

    choices = [(alpha, *best(alpha)) for alpha in ALPHAS]
    limit = min(seconds for _, seconds, _ in choices) * (1 + within)
    alpha, seconds, trainers = next(choice for choice in choices if choice[1] <= limit)
    rollouts = workers - trainers if alpha else workers
    return Advice(rollouts, trainers, alpha, seconds, sync)
