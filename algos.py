"""Advantages, policy losses and how they are summed: pure tensor functions.

Everything here is *flat*: a batch is one row of the T tokens that are trained on, whatever samples
they belong to. Padding never appears, so no mask can be wrong.

    logp       [T]  log-probability under the policy being trained, with gradient
    behaviour  [T]  log-probability that the engine recorded when it sampled the token
    advantage  [T]  of the sample that the token belongs to
    weight     [T]  what the token counts for (`token_weights`); sums to 1 over the whole batch

Importance ratios are taken against the *behaviour* policy. Against a policy that the trainer
recomputes at the start of the step they would be 1 with one update a batch, and every clip and
correction would do nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass
class AlgoConfig:
    loss: str = field(default="ppo", metadata={"help": "policy loss: ppo"})
    advantage: str = field(default="grpo", metadata={"help": "advantage estimator: grpo"})
    clip_low: float = field(default=0.2, metadata={"help": "ratio is clipped below 1 - clip_low"})
    clip_high: float = field(default=0.2, metadata={"help": "ratio is clipped above 1 + clip_high"})
    truncated: str = field(
        default="train",
        metadata={
            "help": "samples that a limit on tokens or turns has ended: train on them, or mask "
            "their tokens (their reward still counts for the others of their group)",
            "choices": ["train", "mask"],
        },
    )
    kl_coef: float = field(
        default=0.0, metadata={"help": "weight of the KL to the initial model; 0: no such model"}
    )

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise ValueError(f"--loss is one of {', '.join(LOSSES)} (got {self.loss})")
        if self.advantage not in ADVANTAGES:
            known = ", ".join(ADVANTAGES)
            raise ValueError(f"--advantage is one of {known} (got {self.advantage})")
        if not (0 < self.clip_low < 1 and self.clip_high > 0):  # also true of NaN
            raise ValueError("--clip_low lies between 0 and 1, --clip_high above 0")
        if self.truncated not in ("train", "mask"):
            raise ValueError(f"--truncated is train or mask (got {self.truncated})")
        if not self.kl_coef >= 0:
            raise ValueError(f"--kl_coef must be 0 or more (got {self.kl_coef})")


# -- advantages: rewards [groups, n] -> advantages [groups, n] -----------------------------------


def grpo_advantage(rewards: Tensor) -> Tensor:
    """Group-relative: (R - mean of the group) / (standard deviation of the group + 1e-6).

    GRPO, DeepSeekMath (arXiv 2402.03300), §4.1.2; unbiased standard deviation, as ROLL has it.
    A group whose rewards are all equal gets exactly 0: judged by its spread, since the rounding
    left over from the mean, divided by a tiny deviation, would otherwise pass for a signal.
    """
    rewards = rewards.double()  # [G, n]
    centred = rewards - rewards.mean(1, keepdim=True)
    scaled = centred / (rewards.std(1, keepdim=True) + 1e-6)
    spread = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True)
    return torch.where(spread <= 1e-8, 0.0, scaled).float()  # NaN stays NaN


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo_advantage}


# -- policy losses: per token, to be minimised ---------------------------------------------------


def ppo_loss(logp: Tensor, behaviour: Tensor, advantage: Tensor, config: AlgoConfig):
    """Clipped surrogate: -min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_behaviour.

    PPO (arXiv 1707.06347), eq. 7, with the two clip bounds apart. Departure: r is against the
    behaviour policy (see the top of this file), so the clip also bounds stale samples.
    Returns the loss [T], and per-token diagnostics [T].
    """
    ratio = (logp - behaviour).exp()  # [T]
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    acts = (clipped * advantage < ratio * advantage).float()  # the clip took the gradient away
    return loss, {"ratio": ratio.detach(), "clip": acts}


LOSSES: dict[str, Callable] = {"ppo": ppo_loss}


def kl_penalty(logp: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, always positive estimate of KL(pi || reference), per token: e^d - d - 1 with
    d = log reference - log pi ("k3", Schulman 2020, "Approximating KL divergence")."""
    d = (reference - logp).clamp(-10, 10)
    return d.exp() - d - 1


# -- aggregation ---------------------------------------------------------------------------------


def token_weights(count: int, total_tokens: float) -> Tensor:
    """Token-mean: every token counts 1 / (tokens of the whole batch, over all ranks).

    The denominator is global, so the loss is the same however the batch is cut into micro-batches
    or spread over ranks. Returns [count], for the trained tokens here.
    """
    return torch.full((count,), 1.0 / max(total_tokens, 1.0))


# -- log-probabilities ---------------------------------------------------------------------------


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    chunk: int = 2048,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [T], in fp32.

    hidden [T, D], targets [T]; head maps [t, D] to logits [t, V]. Works in chunks and recomputes
    each in the backward pass, so that at most `chunk` rows of logits exist at any time.
    """

    def piece(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logp = (head(h).float() / temperature).log_softmax(-1)  # [t, V]
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)  # [t]
        return logp.gather(-1, y[:, None]).sum(-1), entropy  # not a view: FSDP2 warns of those

    if len(targets) <= chunk:
        return piece(hidden, targets)
    parts = [
        checkpoint(piece, h, y, use_reentrant=False)
        for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])
