"""Packing: which samples share a row, what such a row holds, and how rows are cut."""

import doctest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer import Sample, Ticket
from plumbing import packing
from plumbing.packing import cut_micro_batches, pack, row_length, share_prompts


def make_sample(group, index, prompt, response):
    """Negative ids of the response are the environment's. A token is of the version that its id
    says, and has minus that as log-probability."""
    ids = np.array([*prompt, *map(abs, response)], np.int32)
    mask = np.array([False] * len(prompt) + [token >= 0 for token in response])
    logprobs = np.where(mask, -ids, 0).astype(np.float32)
    versions = np.where(mask, ids, -1).astype(np.int32)
    return Sample(Ticket(group, index, group, seed=index), ids, mask, logprobs, versions, 0.0)


def small_group(*responses):
    """A group with one prompt."""
    return [make_sample(0, index, (7, 8), response) for index, response in enumerate(responses)]


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


def test_a_packed_row_has_the_prompt_once_and_no_response_sees_another():
    samples = small_group([1, 0, 0], [2, -3, 4])  # the first ends in pad = EOS, twice
    packed = pack(samples, share_prompts(samples))
    assert packed.ids.tolist() == [[7, 8, 1, 0, 0, 2, 3, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4]]
    assert packed.targets.tolist() == [1, 0, 0, 2, 4]  # the 3 is not trained on
    assert packed.behaviour.tolist() == [-1, 0, 0, -2, -4]
    assert packed.versions.tolist() == [1, 0, 0, 2, 4]
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
    other_group = make_sample(1, 0, (7, 8), [4])
    assert share_prompts([*same, other_group]) == [[0, 1, 2], [3]]
    other_prompt = make_sample(0, 2, (7, 9), [4])
    assert share_prompts([*same[:2], other_prompt]) == [[0, 1], [2]]


def test_examples_in_the_docstrings():
    result = doctest.testmod(packing)
    assert result.attempted and not result.failed
