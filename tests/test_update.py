"""One update: against a slow form without padding, over cuts, over ranks, on odd data."""

import dataclasses
import math
import os
import warnings
from itertools import product

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import algos
from algos import Tokens
from buffer import Sample, Ticket
from plumbing import checkpoint, packing
from plumbing.packing import share_prompts
from plumbing.policy import checkpoint_activations
from plumbing.ranks import Ranks, whole
from plumbing.settings import Settings
from plumbing.tiny import byte_tokenizer
from plumbing.weights import open_store
from train import NonFiniteError, Trainer

VOCAB, TEMPERATURE, N = 48, 0.8, 3  # N samples a group
RATE, EPSILON, VERSION = 1e-2, 1e-2, 4  # of AdamW; of the weights before the step
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

# Prompt and response of each sample: uneven, a response of one token, a prompt of one token.
SHAPES = [(3, 5), (3, 1), (3, 17), (1, 2), (1, 9), (1, 1), (6, 4), (6, 30), (6, 12)]


def make_model(path, seed):
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=128,
        initializer_range=0.4,  # far from uniform, so that every term of the loss counts
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def ranks(monkeypatch):
    """One rank on the CPU, whatever this machine has."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # Ranks sets it: put it back afterwards
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return Ranks()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FIXED = {"group_size": N, "temperature": TEMPERATURE, "learning_rate": RATE, "grad_clip": 1e9}


def make_trainer(ranks, path, reference=None, **chosen):
    trainer = Trainer(ranks, Settings(**FIXED | chosen), path, reference or path, "float32")
    # Adam divides a gradient by its own size, also one that is nothing but rounding; with a larger
    # epsilon the weights after a step can be compared.
    trainer.optimizer.param_groups[0]["eps"] = EPSILON
    trainer.gradients, trainer.rates = {}, []

    def keep_gradients(*_):
        trainer.rates.append(trainer.optimizer.param_groups[0]["lr"])
        for name, p in trainer.policy.model.named_parameters():
            if p.grad is not None:  # there is a signal
                trainer.gradients[name] = whole(p.grad).clone()

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    return trainer


def weights(trainer):
    return {name: whole(p).clone() for name, p in trainer.policy.model.named_parameters()}


def make_sample(index, ids, mask, logprobs, reward, made=0):
    """`logprobs` and `made` (by which version) have one entry a trained token."""
    ids, mask = np.array(ids, np.int32), np.array(mask, bool)
    spread, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
    spread[mask], versions[mask] = logprobs, made
    ticket = Ticket(index // N, index % N, prompt_id=index // N, seed=index)
    return Sample(ticket, ids, mask, spread, versions, reward)


def make_samples(path, seed=0, shapes=SHAPES):
    """Samples with rewards that differ, from a policy somewhat off the one in `path`. A group has
    one prompt, except group 2, where each sample has another, and where `shapes` says so."""
    rng = np.random.default_rng(seed)
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    samples = []
    for index, (before, after) in enumerate(shapes):
        ids = rng.integers(VOCAB, size=before + after)
        ids[before + after // 2 :: 3] = 0  # the id that padding has
        if index % N and index // N != 2 and before == shapes[index - 1][0]:
            ids[:before] = samples[-1].ids[:before]
        mask = np.repeat([False, True], [before, after])
        if after > 8:
            mask[before + 3 : before + 5] = False  # the environment speaks in between
        with torch.no_grad():
            logp = slow_logprobs(policy, ids, mask)[0].numpy()
        logp = logp + rng.normal(0, 0.2) + rng.normal(0, 0.3, len(logp))
        made = np.sort(rng.choice([0, 1, 3, VERSION], size=len(logp)))
        samples.append(make_sample(index, ids, mask, logp, float(rng.normal()), made))
    return samples


def make_odd_samples(path):
    """The same; one sample has no trained token, one was cut off, and all of a group were."""
    samples = make_samples(path)
    samples[6].mask[:] = False
    samples[2].reward = 0.2  # below 0, once penalised
    for index in (2, 3, 4, 5):
        samples[index].truncated = True
    return samples


# -- a slow form of the step -----------------------------------------------------------------------


def slow_logprobs(policy, ids, mask):
    """Log-probabilities and entropies of the trained tokens of one sample, from all its logits."""
    ids = torch.from_numpy(np.asarray(ids, np.int64))
    logp = (policy(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)  # [T, V]
    at = [t for t in range(len(ids)) if mask[t]]
    rows = [logp[t - 1] for t in at]
    if not at:
        return torch.zeros(0), torch.zeros(0)
    chosen = torch.stack([row[ids[t]] for row, t in zip(rows, at, strict=True)])
    return chosen, torch.stack([-(row.exp() * row).sum() for row in rows])


def slow_advantages(rewards, settings):
    advantages = []
    for number, reward in enumerate(rewards):
        peers = rewards[number // N * N :][:N] if settings.advantage == "grpo" else rewards
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        advantages.append((reward - mean) / (deviation + 1e-6))
    return advantages


def slow_loss(t, settings):
    """Loss of each token of one sample, and whether it is clipped; of the others see test_algos."""
    ratio = (t.logp - t.behaviour).exp()
    if settings.loss == "pg":
        return -t.advantage * t.logp, torch.zeros_like(ratio)
    if settings.loss == "ppo":
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * t.advantage
        return -torch.min(ratio * t.advantage, clipped), clipped < ratio * t.advantage
    if settings.loss == "tis":
        weight = ratio.detach().clamp(settings.tis_low, settings.tis_high)
        return -weight * t.advantage * t.logp, weight != ratio
    if settings.loss == "gspo":
        s = (t.logp - t.behaviour).mean().exp()
        clipped = s.clamp(1 - settings.gspo_low, 1 + settings.gspo_high) * t.advantage
        return -torch.min(s * t.advantage, clipped), clipped < s * t.advantage
    return algos.LOSSES[settings.loss](t, settings)


def slow_correction(begun, behaviour, settings):
    """Factor of each token of one sample, and whether it counts."""
    rho, low, high = (begun - behaviour).exp(), settings.correction_low, settings.correction_high
    if settings.correction.startswith("sequence"):
        rho = torch.full_like(rho, math.exp(float((begun - behaviour).sum()) / max(len(rho), 1)))
    if settings.correction.endswith("mask"):
        return torch.ones_like(rho), (low <= rho) & (rho <= high)
    truncates = settings.correction.endswith("truncate")
    return rho.clamp(max=high) if truncates else torch.ones_like(rho), torch.ones_like(rho) > 0


def slow_step(path, samples, settings, reference=None):
    """Metrics, the last gradients, and weights: sample by sample, without any padding."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fixed = AutoModelForCausalLM.from_pretrained(reference or path, dtype=torch.float32)
    of_adam = {"lr": RATE, "betas": (0.9, 0.95), "eps": EPSILON, "weight_decay": 0.0}
    optimizer, count = torch.optim.AdamW(policy.parameters(), **of_adam), len(samples)
    masks = [s.mask & (settings.truncated != "mask" or not s.truncated) for s in samples]
    penalty = settings.truncated_penalty if settings.truncated == "penalise" else 0.0
    rewards = [s.reward - penalty if s.truncated else s.reward for s in samples]
    advantages = slow_advantages(rewards, settings)
    recorded = [torch.from_numpy(samples[i].logprobs[masks[i]]) for i in range(count)]
    with torch.no_grad():  # before the first minibatch
        begun = [slow_logprobs(policy, samples[i].ids, masks[i])[0] for i in range(count)]
        anchors = [slow_logprobs(fixed, samples[i].ids, masks[i])[0] for i in range(count)]
    corrections = [slow_correction(begun[i], recorded[i], settings) for i in range(count)]
    kept = [int(keep.sum()) for _, keep in corrections]
    minibatches = min(settings.minibatches, count // N)
    losses, norms, seen = [], [], []
    for part in range(minibatches):
        chosen = [i for i in range(count) if i // N % minibatches == part]
        tokens, sequences = sum(kept[i] for i in chosen), sum(kept[i] > 0 for i in chosen)
        loss = sum(p.sum() * 0 for p in policy.parameters())
        for i in chosen:
            divisor = {
                "token_mean": tokens,
                "sequence_mean": sequences * kept[i],
                "constant": sequences * settings.constant_length,
            }[settings.aggregation]
            logp, entropy = slow_logprobs(policy, samples[i].ids, masks[i])
            each, (factor, keep), gap = torch.ones(len(logp)), corrections[i], anchors[i] - logp
            judged = advantages[i] * each, rewards[i] * each, torch.zeros_like(each).long()
            columns = (logp, recorded[i], begun[i], *judged)
            values, cut = slow_loss(Tokens(*(column[keep] for column in columns)), settings)
            kl, aged = gap.exp() - gap - 1, settings.kl_correction == "ratio"
            kl = kl * (logp - recorded[i]).exp() if aged else kl
            values = values * factor[keep] + settings.kl_coef * kl[keep]
            values = values - settings.entropy_coef * entropy[keep]
            loss = loss + values.sum() / max(divisor, 1)
            clips, truncated = torch.zeros_like(each), factor == settings.correction_high
            clips[keep] = cut.to(clips)
            ages = torch.from_numpy(VERSION - samples[i].versions[masks[i]])
            judged = advantages[i] * each, ages
            columns = (logp - recorded[i], entropy, clips, ~keep, truncated, *judged)
            seen.append(torch.stack([column.detach().double() for column in columns]))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(policy.parameters(), settings.grad_clip)))
        losses.append(loss.item())
        if norms[-1]:  # else momentum alone would move the weights
            gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}
            optimizer.step()
    log_ratio, entropy, clips, masked, truncated, advantage, ages = torch.cat(seen, 1)
    ratio, of = log_ratio.exp(), {int(age): log_ratio[ages == age].abs() for age in ages.unique()}
    metrics = {
        "loss": sum(losses) / minibatches,
        "grad_norm": sum(norms) / minibatches,
        "entropy": entropy.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
        "clip_frac": clips.mean(),
        "masked_frac": masked.mean(),
        "cut_frac": truncated.mean(),
        "kl_behaviour": (ratio - 1 - log_ratio).mean(),
        "advantage_std": (advantage**2).mean().sqrt(),
        "advantage_max": advantage.abs().max(),
        "abs_log_ratio_by_age": {str(age): float(gap.mean()) for age, gap in of.items()},
    }
    return metrics, gradients, dict(policy.named_parameters())


def assert_same(found: dict, expected: dict, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value, tolerance)
            continue
        mine, value = torch.as_tensor(found[name]).double(), torch.as_tensor(value).double()
        bounds = {"rtol": 10 * tolerance, "atol": tolerance}
        torch.testing.assert_close(mine, value, **bounds, msg=lambda m, n=name: f"{n} {m}")


def assert_step_is_slow_step(trainer, model, samples, reference=None):
    """Returns the metrics that both have."""
    expected, gradients, after = slow_step(model, samples, trainer.settings, reference)
    metrics = trainer.step(samples, VERSION)
    assert_same(metrics, expected, 1e-5)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=2e-6)
    largest = max(float(g.abs().max()) for g in gradients.values())
    tolerance = 1e-5 * max(1.0, largest)
    assert_same(trainer.gradients, gradients, tolerance)
    # An error of a gradient moves a weight by RATE / EPSILON times as much, at most.
    assert_same(weights(trainer), after, tolerance * RATE / EPSILON)
    return metrics


# Every loss with every aggregation; the other settings take turns. There are 3 groups, so that 5
# minibatches are 3.
TURNS = [
    {
        "loss": loss,
        "aggregation": aggregation,
        "correction": algos.CORRECTIONS[(a + 2 * b + 3) % 5],
        "truncated": ("train", "mask", "penalise")[(a + 2 * b) % 3],
        "minibatches": (1, 2, 5)[(a + b) % 3],
        "micro_tokens": (10**6, 60, 1)[(a // 3 + b) % 3],
        "kl_coef": (0.0, 0.02)[(a // 2 + b) % 2],
        "kl_correction": ("ratio", "none")[a // 4 % 2],
        "entropy_coef": (0.2, 0.0)[(a + b) % 2],
        "advantage": ("grpo", "reinforce_pp")[a % 2],
        "grad_clip": (1e9, 0.5)[b % 2],
    }
    for a, loss in enumerate(algos.LOSSES)
    for b, aggregation in enumerate(algos.AGGREGATIONS)
]
# Bounds close enough that each of them acts on some tokens.
BOUNDS = {
    "clip_low": 0.15, "clip_high": 0.2, "tis_low": 0.8, "tis_high": 1.2, "behaviour_cap": 1.2,
    "gspo_low": 0.05, "gspo_high": 0.06, "correction_low": 0.8, "correction_high": 1.15,
    "constant_length": 7, "truncated_penalty": 0.4,
}  # fmt: skip
# Where the trainer is compared with itself: loss, minibatches, and what else is chosen.
CASES = [
    {"loss": loss, "minibatches": minibatches} | rest
    for loss, minibatches, rest in (
        ("ppo", 1, {}),
        ("decoupled_ppo", 2, {"aggregation": "sequence_mean", "correction": "token_mask"}),
        ("gspo", 1, {"correction": "sequence_mask", "truncated": "mask"}),
        ("tis", 2, {"correction": "token_mask", "advantage": "reinforce_pp"}),
        ("pg", 2, {"aggregation": "constant", "kl_coef": 0.2, "entropy_coef": 0.1}),
    )
]


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: "-".join(map(str, turn.values())))
def test_step_equals_a_loop_over_samples_without_padding(ranks, model, other_model, turn):
    trainer = make_trainer(ranks, model, other_model, **turn, **BOUNDS)
    settings = trainer.settings
    metrics = assert_step_is_slow_step(trainer, model, make_odd_samples(model), other_model)
    assert abs(metrics["loss"]) > 0.01 and metrics["grad_norm"] > 0.1  # something to compare
    # What a mask leaves out has no bound of a loss to meet.
    unbounded = settings.loss in ("pg", "kimi") or settings.correction == "token_mask"
    assert metrics["clip_frac"] > 0.05 or unbounded
    assert (metrics["masked_frac"] > 0.1) == settings.correction.endswith("mask")
    assert (metrics["cut_frac"] > 0.01) == settings.correction.endswith("truncate")
    assert sorted(metrics["abs_log_ratio_by_age"]) == ["0", "1", "3", "4"]


@pytest.mark.parametrize("correction", ["token_mask", "sequence_mask"])
@pytest.mark.parametrize("loss", algos.LOSSES)
def test_what_a_mask_leaves_out_is_in_no_loss(ranks, model, loss, correction):
    """A token whose recorded log-probability is far off, and what it would do to its sample."""
    results = []
    for gap in (15.0, 30.0):
        samples = make_samples(model)
        (first, *_) = np.flatnonzero(samples[0].mask)
        samples[0].logprobs[first] -= gap
        trainer = make_trainer(ranks, model, loss=loss, correction=correction, **BOUNDS)
        metrics = trainer.step(samples, VERSION)
        assert 0 < metrics["masked_frac"] < 1
        results.append((metrics["loss"], metrics["grad_norm"], weights(trainer)))
    assert_same(dict(enumerate(results[0][:2])), dict(enumerate(results[1][:2])))
    assert_same(results[0][2], results[1][2])


def test_small_differences_of_large_rewards_reach_the_loss(ranks, model):
    samples = [
        dataclasses.replace(sample, reward=1e6 + 0.01 * (i % N))
        for i, sample in enumerate(make_samples(model))
    ]
    trainer = make_trainer(ranks, model, advantage="dr_grpo")
    assert trainer.step(samples)["advantage_max"] > 0.009


# -- how a batch is cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["loss"])
def test_however_a_batch_is_cut_it_is_the_same_step(ranks, model, monkeypatch, case):
    results = []
    for micro_tokens, limit in product((10**6, 60, 1), (packing.PACK_LIMIT, 0)):
        monkeypatch.setattr(packing, "share_prompts", lambda s, n=limit: share_prompts(s, n))
        chosen = case | BOUNDS | {"micro_tokens": micro_tokens, "grad_clip": 0.5}
        trainer = make_trainer(ranks, model, **chosen)
        metrics = [trainer.step(make_samples(model, seed), VERSION) for seed in range(2)]
        results.append((metrics, weights(trainer)))
    before = weights(make_trainer(ranks, model))
    assert any((results[0][1][k] - before[k]).abs().max() > 1e-3 for k in before)
    for metrics, after in results[1:]:
        for found, expected in zip(metrics, results[0][0], strict=True):
            # A step in between lets rounding grow.
            rounding = 1e-6 if case["minibatches"] == 1 else 1e-5
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=rounding)
            assert_same(found, expected, 1e-5)
        assert_same(after, results[0][1], 1e-6)


def test_activations_that_are_computed_again_change_nothing(ranks, model, monkeypatch):
    """What a GPU does, to have room for longer rows."""
    kept, again = make_trainer(ranks, model), make_trainer(ranks, model)
    checkpoint_activations(again.policy.model)
    layers, samples = [], make_samples(model)
    forward = type(again.policy.model.model.layers[0].mlp).forward
    monkeypatch.setattr(
        type(again.policy.model.model.layers[0].mlp),
        "forward",
        lambda self, *args: (layers.append(self), forward(self, *args))[1],
    )
    metrics, count = kept.step(samples, VERSION), len(layers)
    assert_same(again.step(samples, VERSION), metrics)
    assert len(layers) - count == 2 * count > 0  # each layer once more
    assert_same(weights(again), weights(kept), 1e-7)
    again.policy.model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="the model has dropout .*'attention_dropout': 0.1"):
        checkpoint_activations(again.policy.model)


def test_order_of_groups_does_not_matter(ranks, model):
    samples = make_samples(model)
    first, second = make_trainer(ranks, model), make_trainer(ranks, model)
    first.step(samples)
    second.step(samples[2 * N :] + samples[: 2 * N])
    assert_same(second.gradients, first.gradients)


# -- odd data --------------------------------------------------------------------------------------


def all_finite(metrics):
    by_age = metrics["abs_log_ratio_by_age"]
    return all(math.isfinite(v) for v in (metrics | by_age).values() if v is not by_age)


def test_equal_rewards_give_loss_zero_and_leave_the_weights_alone(ranks, model):
    samples = [dataclasses.replace(s, reward=0.35) for s in make_samples(model)]
    trainer = make_trainer(ranks, model, grad_clip=1.0)
    before = weights(trainer)
    metrics = trainer.step(samples)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["clip_frac"] == 0
    assert all_finite(metrics)
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_responses_of_one_token(ranks, model):
    samples = make_samples(model, shapes=[(2, 1), (4, 1), (1, 1)])
    assert_step_is_slow_step(make_trainer(ranks, model), model, samples)


@pytest.mark.parametrize("correction", ["none", "sequence_mask"])
def test_a_batch_without_a_trained_token_changes_nothing(ranks, model, correction):
    samples = make_samples(model)
    for sample in samples:
        sample.mask[:] = False
    chosen = {"correction": correction, "aggregation": "sequence_mean", "entropy_coef": 0.1}
    trainer = make_trainer(ranks, model, **chosen, micro_tokens=60, minibatches=2)
    before = weights(trainer)
    metrics = trainer.step(samples)
    assert metrics["loss"] == 0 and all_finite(metrics)
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_a_sample_without_a_token_is_not_stale():
    sample = make_sample(0, [1, 2], [False, False], [], 0.0)
    assert sample.staleness(5) == 0


@pytest.mark.parametrize(
    ("what", "value"),
    [("logprob", math.nan), *product(["reward"], [math.nan, math.inf, -math.inf])],
)
def test_a_step_that_is_not_finite_names_the_samples_and_changes_nothing(ranks, model, what, value):
    samples = make_samples(model)
    for index in (1, 5):
        if what == "reward":
            samples[index].reward = value
        else:
            samples[index].logprobs[-1] = value
    trainer = make_trainer(ranks, model)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match="samples at fault: 0:1, 1:2$") as caught:
        trainer.step(samples)
    assert caught.value.samples is samples
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


@pytest.mark.parametrize("loss", algos.LOSSES)
def test_a_token_that_the_engine_calls_impossible_is_noticed_with_any_loss(ranks, model, loss):
    samples = make_samples(model)
    samples[4].logprobs[-1] = -math.inf
    trainer = make_trainer(ranks, model, loss=loss, correction="token_mask")
    with pytest.raises(NonFiniteError, match="samples at fault: 1:1$"):
        trainer.step(samples)


def test_a_gradient_that_is_not_finite_is_noticed_also_when_the_loss_is(ranks, model):
    trainer = make_trainer(ranks, model)
    next(trainer.policy.parameters()).register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NonFiniteError, match=r"^loss -?\d.*gradient norm nan.*fault: none"):
        trainer.step(make_samples(model))


def test_when_the_model_is_at_fault_no_sample_is_blamed(ranks, model):
    trainer = make_trainer(ranks, model)
    with torch.no_grad():
        trainer.policy.model.get_input_embeddings().weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="samples at fault: none"):
        trainer.step(make_samples(model))


# -- around the step -------------------------------------------------------------------------------


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_it_is_reported(ranks, model):
    samples = make_samples(model)
    free, clipped = make_trainer(ranks, model), make_trainer(ranks, model, grad_clip=0.1)
    norm = free.step(samples)["grad_norm"]
    assert norm > 0.1 and clipped.step(samples)["grad_norm"] == pytest.approx(norm)
    shrunk = {name: g * (0.1 / norm) for name, g in free.gradients.items()}
    assert_same(clipped.gradients, shrunk)


def test_a_batch_without_signal_changes_no_weight_also_after_one_that_had_some(ranks, model):
    trainer = make_trainer(ranks, model)
    trainer.step(make_samples(model))
    before = weights(trainer)
    equal = [dataclasses.replace(s, reward=1.0) for s in make_samples(model)]
    masked = [dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in make_samples(model)]
    for samples in (equal, masked):
        metrics = trainer.step(samples)
        assert metrics["grad_norm"] == 0
        assert all(torch.equal(before[name], w) for name, w in weights(trainer).items())


def test_a_first_batch_without_signal_gives_no_warning(ranks, model):
    equal = [dataclasses.replace(s, reward=1.0) for s in make_samples(model)]
    trainer = make_trainer(ranks, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(equal)  # torch warns of a schedule that goes on without its optimiser


def test_weights_that_are_not_finite_any_more_are_named_before_they_are_sent(ranks, model):
    trainer = make_trainer(ranks, model)
    with torch.no_grad():
        next(iter(trainer.policy.parameters())).fill_(math.inf)
    with pytest.raises(NonFiniteError, match="the weights are not finite"):
        trainer.score([3, 0, 47, 12])


def test_learning_rate_rises_linearly_over_the_warm_up(ranks, model):
    trainer = make_trainer(ranks, model, learning_rate=0.01, lr_warmup=4, minibatches=2, loss="pg")
    for version in range(6):
        trainer.step(make_samples(model), version)
    rates = [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
    assert trainer.rates == pytest.approx([rate for rate in rates for _ in range(2)])


def test_score_is_the_raw_logprob_of_every_token_after_the_first(ranks, model):
    ids = [3, 0, 47, 12, 12, 5]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logp = policy(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logp[t - 1, ids[t]].item() for t in range(1, len(ids))]
    scored = make_trainer(ranks, model).score(ids)
    np.testing.assert_allclose(scored, expected, atol=1e-5)


def test_a_restored_trainer_goes_on_as_if_never_stopped(ranks, model, tmp_path):
    batches = [make_samples(model, seed) for seed in range(4)]
    straight = make_trainer(ranks, model, lr_warmup=3)
    for version, batch in enumerate(batches):
        straight.step(batch, version)

    stopped = make_trainer(ranks, model, lr_warmup=3)
    for version, batch in enumerate(batches[:2]):
        stopped.step(batch, version)
    path = tmp_path / "checkpoint-2"
    checkpoint.write(
        path, stopped, byte_tokenizer(), *checkpoint.gather(stopped, {"version": 2})
    )
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]  # no temporary one beside it

    again = make_trainer(ranks, str(path), reference=model, lr_warmup=3)
    state = torch.load(path / checkpoint.STATE_FILE, weights_only=True)
    assert state["version"] == 2
    checkpoint.restore(again, state)
    for version, batch in enumerate(batches[2:], 2):
        again.step(batch, version)
    assert_same(weights(again), weights(straight), 1e-7)


# -- ranks -----------------------------------------------------------------------------------------


def take_steps(ranks, path, case, batches, stop=None):
    """Train on each batch, of which a node of several gets its share of the groups. With a path as
    `stop`, the run is saved there before the last one, and resumed."""
    chosen = CASES[case] | BOUNDS | {"micro_tokens": 60, "grad_clip": 0.5, "lr_warmup": 4 * VERSION}
    trainer = make_trainer(ranks, path, **chosen)
    metrics = []
    for number, samples in enumerate(batches, 1):
        if stop and number == len(batches):
            gathered = checkpoint.gather(trainer, {})
            if ranks.rank == 0:
                checkpoint.write(stop, trainer, byte_tokenizer(), *gathered)
            ranks.barrier()
            trainer = make_trainer(ranks, str(stop), path, **chosen)
            state = torch.load(stop / checkpoint.STATE_FILE, weights_only=True)
            checkpoint.restore(trainer, state)
        share = len(samples) // ranks.nodes
        metrics.append(trainer.step(samples[ranks.node * share :][:share], VERSION))
        score = trainer.score([1, 2, 3])
    return metrics, weights(trainer), score


def rank_main(rank, path, port, directory):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the test's, as it would be torchrun's
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.cuda.device_count = lambda: 0
    batches = torch.load(directory / "batches.pt", weights_only=False)
    ranks = Ranks()
    results = [take_steps(ranks, path, 0, batches, directory / "checkpoint-2")]
    results += [take_steps(ranks, path, case, batches) for case in range(1, len(CASES))]
    # The same two ranks as two nodes of one rank each, every one with half of the groups.
    ranks.local_rank, ranks.local_world, ranks.nodes, ranks.node = 0, 1, 2, rank
    results += [take_steps(ranks, path, case, batches[:2]) for case in range(len(CASES))]
    torch.save(results, directory / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_or_two_nodes_give_what_one_rank_gives(ranks, model, tmp_path):
    # The first batch has an odd number of rows; the second a sample that fills a micro-batch, so
    # that one rank has more of them than the other; the third is one row: one rank has none.
    odd = SHAPES + [(3, 5), (4, 11), (4, 2)]
    shapes = [odd, SHAPES + [(3, 1), (3, 60), (3, 2)], [(2, 3), (2, 9), (2, 1)]]
    batches = [make_samples(model, seed, shape) for seed, shape in enumerate(shapes)]
    batches[0][1].truncated = batches[0][7].truncated = True
    assert len(share_prompts(batches[0])) % 2
    torch.save(batches, tmp_path / "batches.pt")
    expected = [
        take_steps(ranks, model, case, part)
        for part in (batches, batches[:2])
        for case in range(len(CASES))
    ]
    store = open_store(3, 60, "127.0.0.1")  # this process, two ranks
    # Both ranks are forked from one process, which imports what is slow once.
    mp.set_forkserver_preload([Qwen2ForCausalLM.__module__, "torch.distributed.fsdp", "pytest"])
    args = (model, store.port, tmp_path)
    mp.start_processes(rank_main, args, nprocs=2, daemon=True, start_method="forkserver")
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for found, alone in zip(results, expected, strict=True):
            for mine, one in zip(found[0], alone[0], strict=True):
                assert_same(mine, one, 1e-6)
            assert_same(found[1], alone[1], 1e-6)
            np.testing.assert_allclose(found[2], alone[2], atol=1e-4)
