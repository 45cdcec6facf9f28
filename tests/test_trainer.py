"""One optimiser step: against a slow form without padding, over cuts, over ranks, on odd data."""

import dataclasses
import doctest
import math
import os
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import models
import packing
import rollout
import trainer as module
from algos import AlgoConfig
from buffer import RolloutTask, Sample
from packing import cut_micro_batches, pack, row_length, share_prompts
from rollout import RolloutConfig
from trainer import Cell, NonFiniteError, Trainer, TrainerConfig, whole

VOCAB, TEMPERATURE, N = 48, 0.8, 3  # N samples a group
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
def cell(monkeypatch):
    """One rank on the CPU, whatever this machine has."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # Cell sets it: put it back afterwards
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return Cell(RolloutConfig())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_trainer(cell, path, reference=None, algo=None, **settings):
    settings = {"learning_rate": 1e-2, "grad_clip": 1e9} | settings
    algo = algo or AlgoConfig()
    trainer = Trainer(
        cell, TrainerConfig(**settings), algo, path, reference or path, N, TEMPERATURE, "float32"
    )
    # Adam divides a gradient by its own size, also one that is nothing but rounding; with a larger
    # epsilon the weights after a step can be compared.
    trainer.optimizer.param_groups[0]["eps"] = 1e-3
    trainer.gradients = {}

    def keep_gradients(*_):
        for name, p in trainer.policy.model.named_parameters():
            trainer.gradients[name] = whole(p.grad).clone()

    trainer.optimizer.register_step_pre_hook(keep_gradients)
    return trainer


def weights(trainer):
    return {name: whole(p).clone() for name, p in trainer.policy.model.named_parameters()}


def make_sample(index, ids, mask, logprobs, reward):
    """logprobs has one entry a trained token."""
    ids, mask = np.array(ids, np.int32), np.array(mask, bool)
    spread, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
    spread[mask], versions[mask] = logprobs, 0
    task = RolloutTask(index // N, index % N, prompt=index // N, seed=index)
    return Sample(task, ids, mask, spread, versions, reward)


def make_samples(path, seed=0, shapes=SHAPES):
    """Samples with rewards that differ, from a policy somewhat off the one in `path`. A group has
    one prompt, except group 2, where each sample has another."""
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
        logp = logp + rng.normal(0, 0.3, len(logp))
        samples.append(make_sample(index, ids, mask, logp, float(rng.normal())))
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


def slow_step(path, samples, algo, reference=None):
    """Loss, metrics and gradients, sample by sample and token by token, without any padding."""
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fixed = AutoModelForCausalLM.from_pretrained(reference or path, dtype=torch.float32)
    total, loss = sum(int(s.mask.sum()) for s in samples), torch.zeros(())
    entropies, ratios, clips = [], [], 0
    for number, sample in enumerate(samples):
        group = [s.reward for s in samples[number // N * N :][:N]]
        mean = sum(group) / N
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (N - 1))
        advantage = (sample.reward - mean) / (deviation + 1e-6)
        logp, entropy = slow_logprobs(policy, sample.ids, sample.mask)
        with torch.no_grad():
            anchor, _ = slow_logprobs(fixed, sample.ids, sample.mask)
        for t, behaviour in enumerate(sample.logprobs[sample.mask].tolist()):
            ratio = (logp[t] - behaviour).exp()
            clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
            gap = anchor[t] - logp[t]
            loss = loss - torch.min(ratio * advantage, clipped * advantage)
            loss = loss + algo.kl_coef * (gap.exp() - gap - 1)
            entropies.append(entropy[t].item())
            ratios.append(ratio.item())
            clips += (clipped * advantage < ratio * advantage).item()
    loss = loss / total
    loss.backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    metrics = {
        "loss": loss.item(),
        "grad_norm": math.sqrt(sum(float((g**2).sum()) for g in gradients.values())),
        "entropy": sum(entropies) / total,
        "ratio_mean": sum(ratios) / total,
        "ratio_max": max(ratios),
        "clip_frac": clips / total,
    }
    return metrics, gradients


def assert_same(found: dict, expected: dict, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not isinstance(value, torch.Tensor):
            value, found[name] = torch.tensor(value), torch.tensor(found[name])
        torch.testing.assert_close(
            found[name],
            value,
            rtol=10 * tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n} {m}",
        )


@pytest.mark.parametrize(("micro_tokens", "kl_coef"), [(10**6, 0.0), (40, 0.3), (1, 0.3)])
def test_step_equals_a_loop_over_samples_without_padding(
    cell, model, other_model, micro_tokens, kl_coef
):
    samples, algo = make_samples(model), AlgoConfig(kl_coef=kl_coef)
    trainer = make_trainer(cell, model, other_model, algo, micro_tokens=micro_tokens)
    metrics = trainer.step(samples)
    expected, gradients = slow_step(model, samples, algo, other_model)
    assert expected["clip_frac"] > 0.05 and abs(expected["loss"]) > 0.01  # something to compare
    assert_same(metrics, expected, 1e-5)
    assert_same(trainer.gradients, gradients, 1e-5)


# -- how a batch is cut ----------------------------------------------------------------------------


def test_one_micro_batch_or_many_give_the_same_weights_and_loss(cell, model):
    results = []
    for micro_tokens in (10**6, 60, 1):
        trainer = make_trainer(cell, model, micro_tokens=micro_tokens, grad_clip=0.5)
        metrics = [trainer.step(make_samples(model, seed)) for seed in range(3)]
        results.append((metrics, weights(trainer)))
    before = weights(make_trainer(cell, model))
    assert any((results[0][1][k] - before[k]).abs().max() > 1e-3 for k in before)
    for metrics, after in results[1:]:
        for found, expected in zip(metrics, results[0][0], strict=True):
            assert_same(found, expected, 1e-5)
        assert_same(after, results[0][1])


def test_order_of_groups_does_not_matter(cell, model):
    samples = make_samples(model)
    first, second = make_trainer(cell, model), make_trainer(cell, model)
    first.step(samples)
    second.step(samples[2 * N :] + samples[: 2 * N])
    assert_same(second.gradients, first.gradients)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_and_stay_within_the_limit(lengths, limit):
    lengths = sorted(lengths)
    pieces = cut_micro_batches(lengths, limit)
    assert [i for piece in pieces for i in piece] == list(range(len(lengths)))
    for number, piece in enumerate(pieces):
        longest = max(lengths[i] for i in piece)
        assert len(piece) == 1 or len(piece) * longest <= limit
        if number + 1 < len(pieces):  # and no row that had room was left to the next
            assert (len(piece) + 1) * lengths[piece[-1] + 1] > limit


def small_group(*responses, prompt=(7, 8)):
    """A group with one prompt; each response is ids, of which negative ones are the environment's.
    The behaviour log-probability of a token is minus its id."""
    samples = []
    for index, response in enumerate(responses):
        ids = [*prompt, *map(abs, response)]
        mask = [False] * len(prompt) + [token >= 0 for token in response]
        logprobs = [-float(token) for token in response if token >= 0]
        samples.append(make_sample(index, ids, mask, logprobs, 0.0))
    return samples


def test_a_packed_row_has_the_prompt_once_and_no_response_sees_another():
    samples = small_group([1, 0, 0], [2, -3, 4])  # the first ends in pad = EOS, twice
    packed = pack(samples, share_prompts(samples))
    assert packed.ids.tolist() == [[7, 8, 1, 0, 0, 2, 3, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4]]
    assert packed.targets.tolist() == [1, 0, 0, 2, 4]  # the 3 is not trained on
    assert packed.behaviour.tolist() == [-1, 0, 0, -2, -4]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 6]  # the prompt's end predicts both firsts
    assert packed.sample.tolist() == [0, 0, 0, 1, 1]
    sees = packed.attention[0, 0]  # [L, L]
    for row in range(8):
        own = range(2, 5) if row < 5 else range(5, 8)
        expected = [at for at in range(8) if at <= row and (at < 2 or at in own)]
        assert sees[row].nonzero().flatten().tolist() == expected


def test_rows_of_one_sample_are_causal_and_need_no_mask():
    samples = small_group([1, 0, 0], [2, -3, 4], [5])
    packed = pack(samples, share_prompts(samples, limit=0))
    assert packed.attention is None
    assert packed.ids.tolist() == [[7, 8, 1, 0, 0], [7, 8, 2, 3, 4], [7, 8, 5, 0, 0]]
    assert packed.targets.tolist() == [1, 0, 0, 2, 4, 5]
    assert packed.predictors.tolist() == [1, 2, 3, 6, 8, 11]
    assert packed.sample.tolist() == [0, 0, 0, 1, 1, 2]


def test_only_samples_of_one_group_and_one_prompt_share_a_row_up_to_the_limit():
    same = small_group([1] * 3, [2] * 3, [3] * 3)
    assert share_prompts(same) == [[0, 1, 2]]
    assert share_prompts(same, limit=8) == [[0, 1], [2]] and row_length(same, [0, 1]) == 8
    assert share_prompts(same, limit=7) == [[0], [1], [2]]
    other_group = make_sample(N, [7, 8, 4], [False, False, True], [-1], 0.0)
    assert share_prompts([*same, other_group]) == [[0, 1, 2], [3]]
    other_prompt = make_sample(2, [7, 9, 4], [False, False, True], [-1], 0.0)
    assert share_prompts([*same[:2], other_prompt]) == [[0, 1], [2]]


# -- odd data --------------------------------------------------------------------------------------


def test_equal_rewards_give_loss_zero_and_leave_the_weights_alone(cell, model):
    samples = [dataclasses.replace(s, reward=0.35) for s in make_samples(model)]
    trainer = make_trainer(cell, model, grad_clip=1.0)
    before = weights(trainer)
    metrics = trainer.step(samples)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["clip_frac"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_responses_of_one_token(cell, model):
    samples = make_samples(model, shapes=[(2, 1), (4, 1), (1, 1)])
    trainer = make_trainer(cell, model)
    expected, gradients = slow_step(model, samples, AlgoConfig())
    assert_same(trainer.step(samples), expected, 1e-5)
    assert_same(trainer.gradients, gradients, 1e-5)


def test_a_truncated_response_counts_all_its_tokens(cell, model):
    samples = make_samples(model)
    whole_ones, cut_off = make_trainer(cell, model), make_trainer(cell, model)
    expected = whole_ones.step(samples)
    metrics = cut_off.step([dataclasses.replace(s, truncated=True) for s in samples])
    assert metrics == expected
    assert all(torch.equal(g, whole_ones.gradients[k]) for k, g in cut_off.gradients.items())


def test_a_sample_without_a_trained_token_counts_only_in_its_groups_baseline(cell, model):
    samples = make_samples(model)
    empty = samples[4]
    empty.mask[:] = False
    trainer = make_trainer(cell, model, micro_tokens=1)  # also as a micro-batch of its own
    expected, gradients = slow_step(model, samples, AlgoConfig())
    assert_same(trainer.step(samples), expected, 1e-5)
    assert_same(trainer.gradients, gradients, 1e-5)


def test_a_batch_without_a_trained_token_changes_nothing(cell, model):
    samples = make_samples(model)
    for sample in samples:
        sample.mask[:] = False
    trainer = make_trainer(cell, model, micro_tokens=60)
    before = weights(trainer)
    metrics = trainer.step(samples)
    assert metrics["loss"] == 0 and all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_a_sample_without_a_token_is_not_stale():
    sample = make_sample(0, [1, 2], [False, False], [], 0.0)
    assert sample.staleness(5) == 0


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("logprob", math.nan),
        ("logprob", -math.inf),
        ("reward", math.nan),
        ("reward", math.inf),
        ("reward", -math.inf),
    ],
)
def test_a_step_that_is_not_finite_names_the_samples_and_changes_nothing(cell, model, what, value):
    samples = make_samples(model)
    for index in (1, 5):
        if what == "reward":
            samples[index].reward = value
        else:
            samples[index].logprobs[-1] = value
    trainer = make_trainer(cell, model)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match="samples at fault: 0:1, 1:2$") as caught:
        trainer.step(samples)
    assert caught.value.samples is samples
    assert all(torch.equal(p, before[name]) for name, p in weights(trainer).items())


def test_a_gradient_that_is_not_finite_is_noticed_also_when_the_loss_is(cell, model):
    samples = make_samples(model)
    samples[4].reward = 1e3  # advantage above 0: the loss takes the clipped ratio, and is finite
    samples[4].logprobs[-1] = -math.inf
    trainer = make_trainer(cell, model)
    with pytest.raises(NonFiniteError, match=r"^loss -?\d.*gradient norm nan.*fault: 1:1$"):
        trainer.step(samples)


def test_when_the_model_is_at_fault_no_sample_is_blamed(cell, model):
    trainer = make_trainer(cell, model)
    with torch.no_grad():
        trainer.policy.model.get_input_embeddings().weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="samples at fault: none"):
        trainer.step(make_samples(model))


# -- around the step -------------------------------------------------------------------------------


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_it_is_reported(cell, model):
    samples = make_samples(model)
    free, clipped = make_trainer(cell, model), make_trainer(cell, model, grad_clip=0.1)
    norm = free.step(samples)["grad_norm"]
    assert norm > 0.1 and clipped.step(samples)["grad_norm"] == pytest.approx(norm)
    shrunk = {name: g * (0.1 / norm) for name, g in free.gradients.items()}
    assert_same(clipped.gradients, shrunk)


def test_learning_rate_rises_linearly_over_the_warm_up(cell, model):
    trainer = make_trainer(cell, model, learning_rate=0.01, lr_warmup=4)
    rates = []
    for _ in range(6):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.step(make_samples(model))
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_score_is_the_raw_logprob_of_every_token_after_the_first(cell, model):
    ids = [3, 0, 47, 12, 12, 5]
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logp = policy(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logp[t - 1, ids[t]].item() for t in range(1, len(ids))]
    scored = make_trainer(cell, model).score(ids)
    np.testing.assert_allclose(scored, expected, atol=1e-5)


def test_a_restored_trainer_goes_on_as_if_never_stopped(cell, model, tmp_path):
    batches = [make_samples(model, seed) for seed in range(4)]
    straight = make_trainer(cell, model, lr_warmup=3)
    for batch in batches:
        straight.step(batch)

    stopped = make_trainer(cell, model, lr_warmup=3)
    for batch in batches[:2]:
        stopped.step(batch)
    path = tmp_path / "checkpoint-2"
    stopped.save(path, models.byte_tokenizer(), {"version": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]  # no temporary one beside it

    again = make_trainer(cell, str(path), reference=model, lr_warmup=3)
    state = torch.load(path / module.STATE_FILE, weights_only=False)
    assert state["version"] == 2
    again.restore(state)
    for batch in batches[2:]:
        again.step(batch)
    assert_same(weights(again), weights(straight), 1e-7)


# -- ranks -----------------------------------------------------------------------------------------


def take_steps(cell, path, batches, checkpoint=None):
    """Train on each batch, of which a node of several gets its share of the groups; with
    `checkpoint`, the run is stopped and resumed from there before the last one."""
    settings = {"micro_tokens": 60, "grad_clip": 0.5, "lr_warmup": 5}
    trainer = make_trainer(cell, path, **settings)
    metrics = []
    for number, samples in enumerate(batches, 1):
        if checkpoint and number == len(batches):
            trainer.score([1, 2, 3])  # as the publish before a checkpoint does
            trainer.save(checkpoint, models.byte_tokenizer(), {})
            cell.barrier()
            trainer = make_trainer(cell, str(checkpoint), **settings)
            trainer.restore(torch.load(checkpoint / module.STATE_FILE, weights_only=False))
        share = len(samples) // cell.nodes
        metrics.append(trainer.step(samples[cell.node * share :][:share]))
    return metrics, weights(trainer), trainer.score([1, 2, 3])


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
    cell = Cell(RolloutConfig())
    one_node = take_steps(cell, path, batches, directory / "checkpoint-2")
    # The same two ranks as two nodes of one rank each, every one with half of the groups.
    cell.local_rank, cell.local_world, cell.nodes, cell.node = 0, 1, 2, rank
    two_nodes = take_steps(cell, path, batches[:2])
    torch.save((one_node, two_nodes), directory / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(150)
def test_two_ranks_or_two_nodes_give_what_one_rank_gives(cell, model, tmp_path):
    # The second batch has a sample that fills a micro-batch, so that one rank has more of them than
    # the other; the third is one row, and leaves one rank without any.
    shapes = [SHAPES + SHAPES[:3], SHAPES + [(3, 1), (3, 60), (3, 2)], [(2, 3), (2, 9), (2, 1)]]
    batches = [make_samples(model, seed, shape) for seed, shape in enumerate(shapes)]
    torch.save(batches, tmp_path / "batches.pt")
    expected = take_steps(cell, model, batches), take_steps(cell, model, batches[:2])
    store = rollout.open_store(3, timedelta(seconds=60), "127.0.0.1")  # this process, two ranks
    # Both ranks are forked from one process, which imports what is slow once.
    mp.set_forkserver_preload([Qwen2ForCausalLM.__module__, "torch.distributed.fsdp", "pytest"])
    args = (model, store.port, tmp_path)
    mp.start_processes(rank_main, args, nprocs=2, daemon=True, start_method="forkserver")
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for found, alone in zip(results, expected, strict=True):
            for mine, one in zip(found[0], alone[0], strict=True):
                assert_same(mine, one, 1e-5)
            assert_same(found[1], alone[1], 1e-5)
            np.testing.assert_allclose(found[2], alone[2], atol=1e-4)


# -- settings, examples ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learning_rate", "lr_warmup"])
def test_settings_below_zero_are_refused_and_named(name):
    with pytest.raises(ValueError, match=f"--{name} must be 0 or more"):
        TrainerConfig(**{name: -1})


@pytest.mark.parametrize("name", ["grad_clip", "micro_tokens", "bucket_mb"])
def test_settings_of_zero_are_refused_and_named(name):
    with pytest.raises(ValueError, match=f"--{name} must be above 0"):
        TrainerConfig(**{name: 0})


def test_examples_in_the_docstrings():
    result = doctest.testmod(packing)
    assert result.attempted and not result.failed
