"""Advantages, losses and log-probabilities against slow forms written out in plain Python."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algos
from algos import AlgoConfig

CONFIG = AlgoConfig(clip_low=0.2, clip_high=0.3)


# -- advantages ------------------------------------------------------------------------------------


def slow_grpo(group):
    mean = sum(group) / len(group)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
    return [(r - mean) / (deviation + 1e-6) for r in group]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-8, 8), min_size=4, max_size=4), min_size=1, max_size=5))
def test_grpo_is_the_group_mean_taken_off_over_the_unbiased_deviation(quarters):
    rewards = torch.tensor(quarters) / 4
    expected = [slow_grpo(group) for group in rewards.tolist()]
    torch.testing.assert_close(algos.grpo_advantage(rewards), torch.tensor(expected))


def test_grpo_knows_no_other_group():
    rewards = torch.tensor([[0.0, 1.0, 1.0], [5.0, 7.0, 9.0]])
    both = algos.grpo_advantage(rewards)
    assert torch.equal(both[:1], algos.grpo_advantage(rewards[:1]))
    torch.testing.assert_close(both[1], torch.tensor([-1.0, 0.0, 1.0]))
    assert statistics.stdev([5, 7, 9]) == 2  # unbiased


@pytest.mark.parametrize(
    "group",
    [[0.35] * 8, [0.1 + 0.2] * 7 + [0.3], [1e6 + 0.1] * 5, [-0.7] * 3, [0.0] * 4, [1 / 3] * 7],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(group, dtype):
    advantage = algos.grpo_advantage(torch.tensor([group], dtype=dtype))
    assert torch.equal(advantage, torch.zeros(1, len(group)))


def test_grpo_is_bounded_however_small_or_large_the_differences():
    for scale in (1e-30, 1e-9, 1e-7, 1e-4, 1.0, 1e6):
        advantage = algos.grpo_advantage(torch.tensor([[0.0] * 7 + [scale]], dtype=torch.float64))
        assert advantage.abs().max() <= 7 / math.sqrt(8) + 1e-6  # the largest z-score of eight


def test_a_reward_that_is_no_number_is_not_taken_for_a_constant_group():
    rewards = torch.tensor([[0.0, math.nan, 1.0], [0.0, 0.0, 1.0]])
    advantage = algos.grpo_advantage(rewards)
    assert advantage[0].isnan().all()  # so that the loss says it, instead of a silent 0
    assert advantage[1].isfinite().all()


# -- the policy loss -------------------------------------------------------------------------------


def slow_ppo(logp, behaviour, advantage, low=0.2, high=0.3):
    """Loss, gradient with respect to logp, and whether the clip acts, for one token."""
    ratio = math.exp(logp - behaviour)
    if advantage >= 0:
        clips = ratio > 1 + high
        value = (1 + high if clips else ratio) * advantage
    else:
        clips = ratio < 1 - low
        value = (1 - low if clips else ratio) * advantage
    return -value, 0.0 if clips else -ratio * advantage, clips and advantage != 0


RATIOS = [0.01, 0.5, 0.79, 0.81, 1.0, 1.29, 1.31, 2.0, 50.0]


@pytest.mark.parametrize("advantage", [1.5, -1.5, 0.0])
def test_ppo_value_gradient_and_clip_against_the_plain_form(advantage):
    behaviour = torch.linspace(-4, -0.1, len(RATIOS), dtype=torch.float64)
    logp = (behaviour + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
    spread = torch.full_like(behaviour, advantage)
    loss, stats = algos.ppo_loss(logp, behaviour, spread, CONFIG)
    loss.sum().backward()
    tokens = zip(logp.tolist(), behaviour.tolist(), spread.tolist(), strict=True)
    values, gradients, clips = zip(*(slow_ppo(*token) for token in tokens), strict=True)
    np.testing.assert_allclose(loss.tolist(), values, rtol=1e-12)
    np.testing.assert_allclose(logp.grad.tolist(), gradients, rtol=1e-12)
    np.testing.assert_allclose(stats["ratio"].tolist(), RATIOS, rtol=1e-12)
    assert stats["clip"].tolist() == [float(clip) for clip in clips]


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 1.31), (2.0, 50.0), (-1.0, 0.79)])
def test_gradient_is_exactly_zero_where_the_clip_acts(advantage, ratio):
    logp = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    loss, stats = algos.ppo_loss(logp, torch.tensor([-1.0]), torch.tensor([advantage]), CONFIG)
    loss.sum().backward()
    assert logp.grad.item() == 0.0 and stats["clip"].item() == 1.0


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 0.01), (-1.0, 50.0)])
def test_a_step_back_towards_the_behaviour_policy_is_never_clipped(advantage, ratio):
    logp = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    loss, stats = algos.ppo_loss(logp, torch.tensor([-1.0]), torch.tensor([advantage]), CONFIG)
    loss.sum().backward()
    assert logp.grad.item() == pytest.approx(-ratio * advantage, rel=1e-5)
    assert stats["clip"].item() == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ppo_gradient_against_finite_differences(advantage):
    def objective(x):
        return algos.ppo_loss(x, torch.zeros_like(x), torch.full_like(x, advantage), CONFIG)[0]

    logp = torch.tensor([-2.0, -0.3, -0.1, 0.0, 0.2, 0.3, 1.0], dtype=torch.float64)
    logp.requires_grad_()  # none of them on an edge of the clip
    assert torch.autograd.gradcheck(objective, (logp,))


def test_on_policy_the_gradient_is_that_of_reinforce():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = torch.tensor([0.5, -0.25])
    loss, _ = algos.ppo_loss(logp, logp.detach(), advantage, CONFIG)
    loss.sum().backward()
    assert torch.equal(loss, -advantage) and torch.equal(logp.grad, -advantage)


# -- the KL penalty --------------------------------------------------------------------------------


def test_kl_penalty_against_the_closed_form_and_never_negative():
    logp = torch.linspace(-6, 0, 25, dtype=torch.float64).requires_grad_()
    reference = torch.linspace(0, -6, 25, dtype=torch.float64)
    penalty = algos.kl_penalty(logp, reference)
    penalty.sum().backward()
    for i, (p, r) in enumerate(zip(logp.tolist(), reference.tolist(), strict=True)):
        assert penalty[i].item() == pytest.approx(math.exp(r - p) - (r - p) - 1, abs=1e-12)
        assert logp.grad[i].item() == pytest.approx(1 - math.exp(r - p), abs=1e-12)
    assert (penalty >= 0).all()
    assert algos.kl_penalty(logp, logp).abs().max() == 0


def test_kl_penalty_averages_to_the_true_kl():
    torch.manual_seed(0)
    p, q = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    estimate = (p.exp() * algos.kl_penalty(p, q)).sum()  # the expectation over tokens drawn from p
    torch.testing.assert_close(estimate, (p.exp() * (p - q)).sum())


def test_kl_penalty_stays_finite_far_from_the_reference():
    far = algos.kl_penalty(torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0]))
    assert far.isfinite().all() and (far > 0).all()


# -- aggregation -----------------------------------------------------------------------------------


def test_every_token_weighs_one_over_the_tokens_of_the_whole_batch():
    weights = algos.token_weights(4, total_tokens=8)
    assert weights.tolist() == [1 / 8] * 4


def test_weights_of_the_parts_of_a_batch_sum_to_one():
    parts = [algos.token_weights(count, total_tokens=15) for count in (5, 1, 7, 2, 0)]
    torch.testing.assert_close(torch.cat(parts).sum(), torch.tensor(1.0))
    assert torch.equal(torch.cat(parts), algos.token_weights(15, 15))


def test_a_batch_without_a_trained_token_has_no_weights_and_divides_by_nothing():
    assert algos.token_weights(0, total_tokens=0).tolist() == []


def test_loss_and_gradient_are_the_same_however_the_batch_is_cut():
    torch.manual_seed(0)
    lengths = torch.tensor([4, 1, 3])
    logp, behaviour, advantage = torch.randn(3, 8, dtype=torch.float64)

    def run(cuts):
        x = logp.clone().requires_grad_()
        start, total = 0, 0.0
        for part in lengths.split(cuts):
            end = start + int(part.sum())
            inputs = (x[start:end], behaviour[start:end], advantage[start:end])
            loss, _ = algos.ppo_loss(*inputs, CONFIG)
            objective = (loss * algos.token_weights(end - start, 8)).sum()
            objective.backward()
            start, total = end, total + objective.item()
        return total, x.grad

    whole, gradient = run([3])
    assert whole == pytest.approx(algos.ppo_loss(logp, behaviour, advantage, CONFIG)[0].mean())
    for cuts in ([1, 1, 1], [2, 1], [1, 2]):
        loss, same = run(cuts)
        assert loss == pytest.approx(whole, abs=1e-14)
        torch.testing.assert_close(same, gradient)


# -- log-probabilities -----------------------------------------------------------------------------


def log_softmax_by_hand(logits):
    largest = max(logits)
    norm = largest + math.log(sum(math.exp(x - largest) for x in logits))
    return [x - norm for x in logits]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("chunk", [2, 100])
def test_logprob_and_entropy_are_those_of_the_distribution_at_that_temperature(temperature, chunk):
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 4), torch.nn.Linear(4, 7)
    targets = torch.tensor([0, 6, 3, 3, 1])
    logp, entropy = algos.token_logprobs(hidden, head, targets, temperature, chunk)
    for i, row in enumerate(head(hidden).tolist()):
        by_hand = log_softmax_by_hand([x / temperature for x in row])
        assert logp[i].item() == pytest.approx(by_hand[targets[i]], abs=1e-5)
        true_entropy = -sum(math.exp(x) * x for x in by_hand)
        assert entropy[i].item() == pytest.approx(true_entropy, abs=1e-5)


def test_entropy_of_a_uniform_distribution_is_the_logarithm_of_its_size():
    hidden, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
    logp, entropy = algos.token_logprobs(hidden, torch.nn.Linear(4, 16, bias=False), targets, 1.0)
    torch.testing.assert_close(entropy, torch.full((3,), math.log(16)))
    torch.testing.assert_close(logp, torch.full((3,), -math.log(16)))


def gradients_of(chunk):
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 7)
    hidden = torch.randn(11, 4, requires_grad=True)
    targets, weight = torch.randint(7, (11,)), torch.randn(11)
    logp, entropy = algos.token_logprobs(hidden, head, targets, 0.7, chunk)
    (logp * weight).sum().backward()
    return logp.detach(), entropy, hidden.grad, head.weight.grad, head.bias.grad


@pytest.mark.parametrize("chunk", [1, 3, 10, 11])
def test_chunks_change_neither_values_nor_gradients(chunk):
    for plain, chunked in zip(gradients_of(100), gradients_of(chunk), strict=True):
        torch.testing.assert_close(chunked, plain)


def test_no_more_rows_of_logits_at_a_time_than_a_chunk():
    rows = []

    def head(hidden):
        rows.append(len(hidden))
        return hidden

    hidden = torch.randn(10, 6, requires_grad=True)
    logp, _ = algos.token_logprobs(hidden, head, torch.zeros(10, dtype=torch.long), 1.0, chunk=4)
    assert rows == [4, 4, 2]
    logp.sum().backward()
    assert len(rows) == 6 and max(rows) == 4  # once more in the backward pass


def test_low_precision_hidden_states_give_float32_logprobs():
    hidden, head = torch.randn(3, 4).bfloat16(), torch.nn.Linear(4, 5).bfloat16()
    outputs = algos.token_logprobs(hidden, head, torch.tensor([0, 1, 2]), 1.0)
    assert all(x.dtype == torch.float32 for x in outputs)


def test_no_tokens_give_no_logprobs():
    head = torch.nn.Linear(4, 5)
    logp, entropy = algos.token_logprobs(torch.zeros(0, 4), head, torch.zeros(0).long(), 1.0)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()  # a micro-batch of empty responses


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "foo"},
        {"advantage": "foo"},
        {"clip_low": 0.0},
        {"clip_low": 1.0},
        {"clip_low": math.nan},
        {"clip_high": 0.0},
        {"clip_high": math.nan},
        {"kl_coef": -0.1},
        {"kl_coef": math.nan},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_and_named(wrong):
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))}"):
        AlgoConfig(**wrong)
