"""Advantages, policy losses and how they are summed: pure tensor functions.

Everything here is *flat*: a batch is one row of the T tokens that are trained on, whatever samples
they belong to. Padding never appears, so no mask can be wrong.

    logp       [T]  log pi, under the policy being trained, with gradient
    behaviour  [T]  log pi_b, that the engine recorded when it sampled the token (at any version)
    proximal   [T]  log pi_prox, under the policy as it was when this batch was begun
    advantage  [T]  A, of the sample that the token belongs to
    reward     [T]  R, the same
    sample     [T]  which sample that is

A policy loss returns two values for every token: the loss, and whether a bound (a clip, a cap)
acted on it. sg(x) is x without gradient; r = pi / pi_b is the importance ratio, against the
*behaviour* policy, whose log-probabilities the engine recorded. Systems that recompute them in the
trainer, when a step begins, get r = 1 if a batch is one optimiser step: there no clip acts, and no
correction.

A new loss is a function here, with its flags beside its name:

    @register(LOSSES, "mine", my_cap=flag(2.0, "largest weight", above=0))
    def mine_loss(t, settings): ...              # --loss mine --my_cap 3, and it is in --help

A flag has the type of its default. docs/algorithms.md has all losses in one table, with a figure of
each; a test asks for the row of a new one.
"""

from collections.abc import Callable
from dataclasses import Field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from plumbing.flags import flag

LOSSES: dict[str, Callable] = {}  # (Tokens, settings) -> loss [T], where a bound acts [T]
ADVANTAGES: dict[str, Callable] = {}  # rewards [groups, n] -> advantages [groups, n]
AGGREGATIONS: dict[str, Callable] = {}  # what a token counts for: see `token_weights`
KINDS = {"loss": LOSSES, "advantage": ADVANTAGES, "aggregation": AGGREGATIONS}


def register(
    kind: dict[str, Callable], name: str, proximal: bool = False, **flags: Field
) -> Callable:
    """Make a function known by its name on the command line, with its own flags. `proximal`: a loss
    that uses pi_prox, which costs one more forward pass if a batch is several optimiser steps."""

    def add(function: Callable) -> Callable:
        kind[name], function.flags, function.proximal = function, flags, proximal
        return function

    return add


class Tokens(NamedTuple):
    """What a loss is computed from, each [T]: see the top of this file."""

    logp: Tensor
    behaviour: Tensor
    proximal: Tensor
    advantage: Tensor
    reward: Tensor
    sample: Tensor  # int64


# -- policy losses: per token, to be minimised; and the tokens that their bound acts on ------------


CLIP = dict(
    clip_low=flag(0.2, "ratio is clipped below 1 - clip_low", above=0, below=1),
    clip_high=flag(0.2, "ratio is clipped above 1 + clip_high", above=0),
    dual_clip=flag(
        0.0, "the clipped loss of a bad token is at most this times |A|; 0: no bound", least=0
    ),
)


@register(LOSSES, "ppo", **CLIP)
def ppo_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = pi / pi_b.

    PPO (arXiv 1707.06347); bounds apart as in DAPO (arXiv 2503.14476). With `dual_clip` c
    (arXiv 1912.09729) the loss for A < 0 is at most c |A|.
    Departure: r is against the behaviour policy, so the clip also bounds what stale samples do.
    """
    return clipped_surrogate(ratio(t.logp, t.behaviour), t.advantage, settings)


def clipped_surrogate(r: Tensor, advantage: Tensor, settings) -> tuple[Tensor, Tensor]:
    clipped = r.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = -torch.minimum(r * advantage, clipped * advantage)
    acts = clipped * advantage < r * advantage  # the clip took the gradient away
    if settings.dual_clip:
        bound = -settings.dual_clip * advantage
        cut = (advantage < 0) & (loss > bound)
        loss, acts = torch.where(cut, bound, loss), acts | cut
    return loss, acts.float()


def ratio(logp: Tensor, anchor: Tensor) -> Tensor:
    """The importance ratio pi / pi_anchor of each token, [T], from log-probabilities."""
    return bounded_exp(logp - anchor)


def bounded_exp(x: Tensor, most: float = 20.0) -> Tensor:
    """e^x, and beyond `most` its tangent there: so nothing becomes infinite, and no gradient jumps
    to 0 where a ratio is large (a bad token of PPO would suddenly be left alone)."""
    return x.clamp(max=most).exp() * (1 + (x - most).clamp(min=0))


@register(LOSSES, "pg")
def pg_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-A log pi: REINFORCE (Williams 1992). No ratio: stale data counts as if it were fresh."""
    return -t.advantage * t.logp, torch.zeros_like(t.logp)


def outside(r: Tensor, low: float, high: float) -> Tensor:
    """Which ratios two bounds cut, as 0 and 1. The rounding of two kernels, some 1e-6, is not
    counted: with a bound at 1 it would be half of all fresh tokens."""
    return ((r < low - 1e-4) | (r > high + 1e-4)).float()


CAP = flag(2.0, "largest weight pi_prox / pi_b", above=0)


@register(LOSSES, "decoupled_ppo", proximal=True, **CLIP, behaviour_cap=CAP)
def decoupled_ppo_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-sg(min(pi_prox / pi_b, cap)) min(u A, clip(u, 1 - low, 1 + high) A), u = pi / pi_prox.

    Decoupled PPO (arXiv 2110.00641), as used in AReaL (arXiv 2505.24298): the clip is around where
    this update begins, however old the samples are; the first factor corrects for their age.
    Departures: that factor is truncated at `behaviour_cap` (it has no bound below); pi_prox is the
    policy at the beginning of the batch, as in AReaL, where Hilton et al. average older ones.
    """
    rho, cap = ratio(t.proximal, t.behaviour).detach(), settings.behaviour_cap
    loss, acts = clipped_surrogate(ratio(t.logp, t.proximal), t.advantage, settings)
    return rho.clamp(max=cap) * loss, torch.maximum(acts, outside(rho, 0.0, cap))


@register(
    LOSSES, "tis",
    tis_low=flag(0.0, "smallest weight", least=0),
    tis_high=flag(1.0, "largest weight", above=0),
)  # fmt: skip
def tis_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, low, high)) A log pi: truncated importance sampling, as ROLL's `tis`, which clips
    to 0..1. The name is used elsewhere for weights between trainer and engine alone."""
    r = ratio(t.logp, t.behaviour).detach()
    weight = r.clamp(settings.tis_low, settings.tis_high)
    return -weight * t.advantage * t.logp, outside(r, settings.tis_low, settings.tis_high)


@register(
    LOSSES, "cispo",
    cispo_low=flag(1.0, "smallest weight is 1 - cispo_low; 1: no bound below", above=0, most=1),
    cispo_high=flag(0.2, "largest weight is 1 + cispo_high", above=0),
)  # fmt: skip
def cispo_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi.

    CISPO, MiniMax-M1 (arXiv 2506.13585): the weight is clipped, not the gradient, so that no
    token is left out. As in the paper there is no lower bound, unless `cispo_low` is below 1 (ROLL
    has 0.1: then bad tokens are pushed down at nearly full weight also when they are long gone).
    Departure: r is against the behaviour policy.
    """
    r = ratio(t.logp, t.behaviour).detach()
    low, high = 1 - settings.cispo_low, 1 + settings.cispo_high
    return -r.clamp(low, high) * t.advantage * t.logp, outside(r, low, high)


@register(LOSSES, "topr")
def topr_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-A log pi where R > 0, -sg(clip(r, 0, 1)) A log pi where R <= 0.

    TOPR (arXiv 2503.14286): what is right is imitated, what is wrong is pushed away only as far as
    it is still likely. Departures: per token, as in ROLL, where the paper's r is of the sequence;
    the paper's factor is R, with R = 0 on the imitated side, where ours is A.
    """
    return tapered(t, 1.0, 1.0)


@register(
    LOSSES, "wtopr",
    topr_positive=flag(1.0, "weight where R > 0", least=0),
    topr_negative=flag(0.5, "weight where R <= 0", least=0),
)  # fmt: skip
def wtopr_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """TOPR with the two kinds of samples weighted: w+ where R > 0, w- where R <= 0 (ROLL Flash's
    weighted TOPR; which weights the paper used is not known)."""
    return tapered(t, settings.topr_positive, settings.topr_negative)


def tapered(t: Tokens, positive: float, negative: float) -> tuple[Tensor, Tensor]:
    r = ratio(t.logp, t.behaviour).detach()
    right = t.reward > 0  # the reward itself, not the advantage
    weight = torch.where(right, positive, negative * r.clamp(max=1.0))
    return -weight * t.advantage * t.logp, ~right * outside(r, 0.0, 1.0)


def mean_by_sample(values: Tensor, sample: Tensor) -> Tensor:
    """The mean of each sample's tokens, at each of them, [T]."""
    size = int(sample.max()) + 1 if len(sample) else 0
    total = values.new_zeros(size).index_add(0, sample, values)
    count = values.new_zeros(size).index_add(0, sample, torch.ones_like(values))
    return (total / count.clamp(min=1))[sample]


@register(
    LOSSES, "gspo",
    gspo_low=flag(3e-4, "ratio is clipped below 1 - gspo_low", above=0, below=1),
    gspo_high=flag(4e-4, "ratio is clipped above 1 + gspo_high", above=0),
)  # fmt: skip
def gspo_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the sequence of log r).

    GSPO (arXiv 2507.18071), eq. 5: one ratio a sequence, the geometric mean of its tokens'.
    Departures: every token carries its sequence's value, so that --aggregation decides how those
    of different lengths count (sequence_mean is the paper's); r is against the behaviour policy.
    """
    s = bounded_exp(mean_by_sample(t.logp - t.behaviour, t.sample))
    clipped = s.clamp(1 - settings.gspo_low, 1 + settings.gspo_high)
    loss = -torch.minimum(s * t.advantage, clipped * t.advantage)
    return loss, (clipped * t.advantage < s * t.advantage).float()


@register(LOSSES, "kimi", kimi_tau=flag(0.1, "weight of the squared distance", least=0))
def kimi_loss(t: Tokens, settings) -> tuple[Tensor, Tensor]:
    """-A log pi + tau / 2 (log pi - log pi_b)^2.

    Kimi k1.5 (arXiv 2501.12599), §2.3.2: the square holds the policy near the one that sampled.
    Departures: per token, as in ROLL, where the paper squares the sequence's log-ratio; A is what
    --advantage says, where the paper has R - mean (dr_grpo).
    """
    log_r = t.logp - t.behaviour
    loss = -t.advantage * t.logp + settings.kimi_tau / 2 * log_r.square()
    return loss, torch.zeros_like(loss)


def kl_penalty(logp: Tensor, reference: Tensor) -> Tensor:
    """Estimate of KL(pi || reference) that is never negative, per token: e^d - d - 1 with
    d = log reference - log pi ("k3", Schulman 2020, "Approximating KL divergence").

    As a value it is unbiased for tokens that pi itself has sampled. Times r = pi / pi_b (with its
    gradient), the default of --kl_correction, value and gradient are unbiased at any age of a token
    (DeepSeek-V3.2, arXiv 2512.02556, eq. 7). As it is (`none`, and so used in GRPO) its gradient is
    another one: that of KL(reference || pi), for tokens of pi.
    """
    d = (reference - logp).clamp(-10, 10)
    return d.expm1() - d  # e^d - 1 without the rounding that would make small ones negative


# -- advantages: rewards [groups, n] -> advantages [groups, n] -----------------------------------


def centred(rewards: Tensor) -> Tensor:
    """R - mean of the group, in float64. A group whose rewards are all equal gets exactly 0: judged
    by its spread, since the rounding left over from the mean, divided by a tiny deviation, would
    otherwise pass for a signal."""
    rewards = rewards.double()  # [G, n]
    spread = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True)
    # Written so that NaN stays NaN.
    return torch.where(spread <= 1e-8, 0.0, rewards - rewards.mean(1, keepdim=True))


@register(ADVANTAGES, "grpo")
def grpo_advantage(rewards: Tensor, settings) -> Tensor:
    """Group-relative: (R - mean of the group) / (standard deviation of the group + 1e-6).

    GRPO, DeepSeekMath (arXiv 2402.03300); unbiased standard deviation, as ROLL has it.
    """
    return (centred(rewards) / (rewards.double().std(1, keepdim=True) + 1e-6)).float()


@register(ADVANTAGES, "dr_grpo")
def dr_grpo_advantage(rewards: Tensor, settings) -> Tensor:
    """R - mean of the group. Dr. GRPO (arXiv 2503.20783): dividing by the deviation favours
    questions that are nearly always, or nearly never, solved."""
    return centred(rewards).float()


@register(ADVANTAGES, "rloo")
def rloo_advantage(rewards: Tensor, settings) -> Tensor:
    """R - mean of the others of the group: (R - mean) n / (n - 1).

    REINFORCE leave-one-out (arXiv 2402.14740): the baseline does not depend on the sample.
    """
    n = rewards.shape[1]
    return (centred(rewards) * n / (n - 1)).float()


@register(ADVANTAGES, "reinforce_pp")
def reinforce_pp_advantage(rewards: Tensor, settings) -> Tensor:
    """(R - mean of the batch) / (standard deviation of the batch + 1e-6).

    REINFORCE++ (arXiv 2501.03262): normalised over the whole batch instead of the group.
    Departures: its KL is not in the reward (see --kl_coef); mean and deviation are over samples,
    where others take them over tokens (R = 1 and 0 with 3 tokens and 1: ours +-0.707).
    """
    whole = rewards.double().reshape(1, -1)  # [1, G * n]
    return (centred(whole) / (whole.std() + 1e-6)).reshape(rewards.shape).float()


ACROSS_PROMPTS = ("reinforce_pp",)  # those that need no second sample of a prompt


# -- corrections: on how far the trainer's policy is from the one that sampled ---------------------

CORRECTIONS = ("none", "token_mask", "token_truncate", "sequence_mask", "sequence_truncate")


def correct(
    proximal: Tensor, behaviour: Tensor, sample: Tensor, settings
) -> tuple[Tensor, Tensor]:
    """What to multiply a token's loss by, and whether it counts at all (then also in the
    denominator), both [T], from rho = pi_prox / pi_b: for a fresh token the mismatch of trainer and
    engine, for a stale one its age too. On sequences rho is the geometric mean.

    Masks after IcePop and MIS, truncation after "Your efficient RL framework secretly brings you
    off-policy RL training" (Yao et al. 2025). Departure: what a mask keeps has weight 1, where
    those papers keep rho. Truncation is for losses that have no ratio against
    pi_b of their own (pg, kimi): with the others it would correct twice.
    """
    log_rho = proximal - behaviour
    if settings.correction.startswith("sequence"):
        log_rho = mean_by_sample(log_rho, sample)
    rho, keep = bounded_exp(log_rho), torch.ones_like(log_rho, dtype=torch.bool)
    if settings.correction.endswith("truncate"):
        return rho.clamp(max=settings.correction_high), keep
    if settings.correction.endswith("mask"):
        keep = (rho >= settings.correction_low) & (rho <= settings.correction_high)
    return torch.ones_like(rho), keep


def corrected(factor: Tensor | None, behaviour: Tensor, settings) -> Tensor:
    """Whether the correction cut a token's weight, [T]; `factor` is what `correct` made of it."""
    if factor is None or not settings.correction.endswith("truncate"):
        return torch.zeros_like(behaviour)
    return (factor >= settings.correction_high).float()


# -- aggregation ---------------------------------------------------------------------------------


@register(AGGREGATIONS, "token_mean")
def token_mean(lengths: Tensor, tokens: float, samples: float, settings) -> Tensor:
    """1 / (tokens of the batch): every token counts the same (DAPO, arXiv 2503.14476)."""
    return torch.full_like(lengths, 1.0 / max(tokens, 1.0))


@register(AGGREGATIONS, "sequence_mean")
def sequence_mean_weights(lengths: Tensor, tokens: float, samples: float, settings) -> Tensor:
    """1 / (samples of the batch x length): every sample counts the same (GRPO, arXiv 2402.03300):
    a token of a long one counts less."""
    return 1.0 / (max(samples, 1.0) * lengths.clamp(min=1))


@register(
    AGGREGATIONS, "constant",
    constant_length=flag(0, "tokens to divide by; 0: the limit of an episode", least=0),
)  # fmt: skip
def constant_weights(lengths: Tensor, tokens: float, samples: float, settings) -> Tensor:
    """1 / (samples of the batch x a fixed length) (Dr. GRPO, arXiv 2503.20783). Samples without a
    trained token are not counted: those that --truncated mask leaves out make no step smaller."""
    return torch.full_like(lengths, 1.0 / (max(samples, 1.0) * settings.constant_length))


def token_weights(
    sample: Tensor, lengths: Tensor, tokens: float, samples: float, settings
) -> Tensor:
    """What each token's loss counts for, [T]. `lengths` [S] has the trained tokens of each sample;
    `tokens` and `samples` are counted over the whole minibatch, on all ranks, under the same mask:
    so the loss is the same however it is cut into micro-batches or spread over ranks."""
    weigh = AGGREGATIONS[settings.aggregation]
    return weigh(lengths.float(), tokens, samples, settings)[sample]


# -- log-probabilities ---------------------------------------------------------------------------


CHUNK_NUMBERS = 64 * 2**20  # logits at a time: 256 MiB in fp32, a few times that with what is kept


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    chunk: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [T], in fp32.

    hidden [T, D], targets [T]; head maps [t, D] to logits [t, V]. Works in chunks and recomputes
    each in the backward pass, so that at most `chunk` rows of logits exist at any time; by default
    as many as make CHUNK_NUMBERS over the vocabulary, or one.
    """
    if chunk is None:
        with torch.no_grad():
            vocabulary = head(hidden[:1]).shape[-1]
        chunk = max(1, CHUNK_NUMBERS // vocabulary)

    def piece(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logp = (head(h).float() / temperature).log_softmax(-1)  # [t, V]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logp.exp() * logp).sum(-1)  # [t]
        return logp.gather(-1, y[:, None]).sum(-1), entropy  # not a view: FSDP2 warns of those

    if len(targets) <= chunk:
        return piece(hidden, targets)
    parts = [
        checkpoint(piece, h, y, use_reentrant=False)
        for h, y in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])
