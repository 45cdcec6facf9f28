"""Every number of a row of metrics.jsonl that is not a loss or a clock. A new one is a line here:
`bash launch.sh plot RUN_DIR --metrics NAME` draws it.
"""

import math

import numpy as np
import torch
from torch import Tensor

from plumbing.ranks import Ranks
from plumbing.spans import spans
from report.rows import TRAINER_TIMES, WORKER_TIMES

DROP_REASONS = ("filtered", "stale", "failed", "redundant", "killed")


def update_metrics(stats: list[dict], version: int, ranks: Ranks) -> dict[str, float]:
    """Means over the trained tokens of the whole batch. `log_ratio` is log pi - log pi_b, when
    each token is trained on."""
    tokens = {key: torch.cat([part[key] for part in stats]) for key in stats[0]}  # [T] each
    counts = tokens.pop("counts") > 0
    tokens = {key: value[counts].double() for key, value in tokens.items()}
    count = max(ranks.sum(float(counts.sum())), 1.0)
    log_ratio = tokens["log_ratio"].clamp(-20, 20)
    ratio, ages = log_ratio.exp(), version - tokens["version"]

    def mean(values: Tensor) -> float:
        return ranks.sum(float(values.sum())) / count

    def most(values: Tensor) -> float:
        return ranks.max(float(values.max()) if len(values) else 0.0)

    ratio_mean, second_moment = mean(ratio), mean(ratio.square())
    by_age = {}
    for age in range(int(most(ages)) + 1):
        of_age = ranks.sum(float((ages == age).sum()))
        total = ranks.sum(float(log_ratio[ages == age].abs().sum()))
        if of_age:
            by_age[str(age)] = total / of_age
    return {
        "entropy": mean(tokens["entropy"]),
        "ratio_mean": ratio_mean,
        "ratio_max": most(ratio),
        "ratio_ess": ratio_mean**2 / max(second_moment, 1e-12),  # effective sample size, share
        "clip_frac": mean(tokens["clip"]),
        "masked_frac": mean(tokens["masked"]),
        "cut_frac": mean(tokens["cut"]),
        "kl_behaviour": mean(ratio - 1 - log_ratio),  # KL(pi_b || pi), "k3"
        "advantage_std": math.sqrt(mean(tokens["advantage"].square())),
        "advantage_max": most(tokens["advantage"].abs()),
        # With one update a batch, age 0 is the mismatch of trainer and engine alone.
        "abs_log_ratio_by_age": by_age,
    }


def batch_metrics(run) -> dict:
    """What the samples, the workers and the clock say about the step that has just ended."""
    batch, at, seconds = run.batch, run.version - 1, spans.seconds
    rewards = np.array([s.reward for s in batch])
    trained = [s.penalised(run.settings.penalty) for s in batch]
    trained = np.reshape(trained, (-1, run.settings.group_size))
    stale = np.array([s.staleness(at) for s in batch])
    lengths = [int(s.mask.sum()) for s in batch]
    news, mismatch = run.scheduler.news(), run.scheduler.mismatch(at)
    counts, dropped = news["counts"], news["dropped"]
    workers = run.settings.rollout_workers
    worker_time = sum(counts[what] for what in WORKER_TIMES) or 1.0
    engine_steps = counts["engine_steps"] or 1
    return {
        "reward_mean": float(rewards.mean()),
        "solve_rate": float(np.mean([s.solved for s in batch])),
        "groups_with_signal": float((np.ptp(trained, 1) > 1e-8).mean()),
        "mismatch_max": mismatch[0],
        "mismatch_mean": mismatch[1],
        "staleness_mean": float(stale.mean()),
        "staleness_max": int(stale.max()),
        "staleness_hist": np.bincount(stale).tolist(),  # samples of age 0, 1, ...
        "tokens": int(sum(lengths)),
        "tokens_made": counts["tokens"],
        "samples": len(batch),
        "length_mean": float(np.mean(lengths)),
        "length_max": int(max(lengths)),
        "length_quantiles": np.quantile(lengths, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist(),
        "turns_mean": float(np.mean([len(s.turns) for s in batch])),
        "truncated": float(np.mean([s.truncated for s in batch])),
        **{f"dropped_{why}": dropped[why] for why in DROP_REASONS},
        # What was thrown away unfinished or too old, against what is trained on: the bias of
        # `ready` and of redundancy. Lengths are of what had been sampled by then.
        "lost_samples": counts["lost_samples"],
        "lost_length_mean": counts["lost_tokens"] / (counts["lost_samples"] or 1),
        "lost_reward_mean": counts["lost_reward"] / (counts["lost_finished"] or 1),
        **{f"t_{what}": seconds[what] for what in TRAINER_TIMES},
        **{f"t_worker_{what}": counts[what] / workers for what in WORKER_TIMES},
        "t_env_cpu": counts["env_cpu"] / workers,  # of threads that share a worker's interpreter
        "slots_used": counts["slots_used"] / engine_steps,
        "steps_below_cap": counts["steps_below_cap"] / engine_steps,
        "steps_starved": counts["steps_starved"] / engine_steps,  # below it while tasks waited
        "restarts": counts["restarts"],  # rollout processes that were replaced
        "failed_samples": counts["failed_samples"],  # first failures, which a retry may mend, too
        "trainer_idle": seconds["wait"] / sum(seconds[what] for what in TRAINER_TIMES),
        "rollout_idle": counts["idle"] / worker_time,
        "prompt_ids": [s.ticket.prompt_id for s in batch[:: run.settings.group_size]],
        "dropped_prompts": news["dropped_prompts"],  # [reason, prompt id]: whom `ready` passes
        "dropped_groups": news["dropped_groups"],  # [reason, admission index]
    }
