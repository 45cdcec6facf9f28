"""From samples to the rows of a forward pass.

The n samples of a group have one prompt. *Shared-prompt packing* puts them into one row, the prompt
once, and lets no response see another:

    row        p0 p1 p2 | a0 a1 a2 | b0 b1           prompt, response a, response b
    segment     0  0  0 |  1  1  1 |  2  2           a token attends earlier tokens of
    position    0  1  2 |  3  4  5 |  3  4           segment 0 and of its own

Log-probabilities are those of the plain form, a row a sample, up to rounding. With short responses
most tokens of the plain form are copies of prompts: addition trains three times faster this way.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from buffer import Sample
from plumbing.ranks import Ranks

PACK_LIMIT = 512  # tokens; the mask of a packed row is quadratic, so long ones stay plain


class Packed(NamedTuple):
    """N rows padded to L, and the T tokens in them that are trained on, in the order of rows."""

    ids: Tensor  # [N, L]
    positions: Tensor  # [N, L]
    attention: Tensor | None  # bool [N, 1, L, L], true where row attends column; None is causal
    predictors: Tensor  # [T] index into N * L of the position that predicts the token
    targets: Tensor  # [T]
    behaviour: Tensor  # [T] log-probability that the engine recorded
    versions: Tensor  # [T] of the weights that made the token
    sample: Tensor  # [T] which sample the token belongs to

    def to(self, device) -> "Packed":
        return Packed(*(None if part is None else part.to(device) for part in self))


@dataclass
class Piece:
    """A micro-batch, whether it counts, and how its tokens stand to the policy before the step."""

    packed: Packed
    counts: bool
    proximal: Tensor | None = None  # [T] log-probability
    factor: Tensor | None = None  # [T] of the correction
    keep: Tensor | None = None  # bool [T], what it does not leave out


def cut(samples: list[Sample], chosen: list[int], ranks: Ranks, max_tokens: int) -> list[Piece]:
    """This rank's share of the chosen samples in micro-batches. FSDP's collectives need as many
    forward passes on every rank, so a rank with fewer repeats one, without counting it."""
    rows = [[chosen[i] for i in row] for row in share_prompts([samples[i] for i in chosen])]
    rows.sort(key=lambda row: row_length(samples, row))
    mine = rows[ranks.local_rank :: ranks.local_world] or rows[:1]
    counts = len(rows) > ranks.local_rank
    pieces = cut_micro_batches([row_length(samples, row) for row in mine], max_tokens)
    spare = int(ranks.max(len(pieces))) - len(pieces)
    return [
        Piece(
            pack(samples, [mine[i] for i in piece]).to(ranks.device),
            counts and number < len(pieces),
        )
        for number, piece in enumerate(pieces + pieces[:1] * spare)
    ]


def share_prompts(samples: list[Sample], limit: int = PACK_LIMIT) -> list[list[int]]:
    """Which samples go into one row: those of a group whose prompt is the same, in pieces that stay
    within `limit` tokens. Returns rows of indices; with limit 0 every sample has its own row."""
    rows: list[list[int]] = []
    used, group, shared = 0, None, None  # of the last row
    for i, sample in enumerate(samples):
        prompt = prompt_of(sample)
        tail = len(sample.ids) - len(prompt)
        if sample.ticket.group == group and used + tail <= limit and np.array_equal(shared, prompt):
            rows[-1].append(i)
            used += tail
        else:
            rows.append([i])
            used, group, shared = len(sample.ids), sample.ticket.group, prompt
    return rows


def prompt_of(sample: Sample) -> np.ndarray:
    """The ids before the first sampled token (all of them, if nothing was sampled)."""
    return sample.ids[: int(sample.mask.argmax())] if sample.mask.any() else sample.ids


def row_length(samples: list[Sample], row: list[int]) -> int:
    prompt = len(prompt_of(samples[row[0]]))
    return prompt + sum(len(samples[i].ids) - prompt for i in row)


def cut_micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Cut sorted rows into runs whose padded size stays within max_tokens (or one row).

    >>> cut_micro_batches([2, 3, 3, 9], max_tokens=9)
    [[0, 1, 2], [3]]
    """
    pieces: list[list[int]] = []
    for i, length in enumerate(lengths):
        if pieces and (len(pieces[-1]) + 1) * length <= max_tokens:
            pieces[-1].append(i)
        else:
            pieces.append([i])
    return pieces


def pack(samples: list[Sample], rows: list[list[int]]) -> Packed:
    """Lay out the rows. Padding is on the right, of whatever token 0 is: it is in no segment, and
    what is trained on is told by the samples' masks alone."""
    n, longest = len(rows), max(row_length(samples, row) for row in rows)
    ids, positions = np.zeros((n, longest), np.int64), np.zeros((n, longest), np.int64)
    segments = np.full((n, longest), -1)
    predictors, targets, behaviour, versions, sample = [], [], [], [], []
    for r, row in enumerate(rows):
        p = len(prompt_of(samples[row[0]]))
        ids[r, :p], positions[r, :p], segments[r, :p] = samples[row[0]].ids[:p], np.arange(p), 0
        start = p
        for segment, i in enumerate(row, 1):
            tail, sampled = samples[i].ids[p:], np.flatnonzero(samples[i].mask[p:])
            end = start + len(tail)
            ids[r, start:end], positions[r, start:end] = tail, np.arange(p, p + len(tail))
            segments[r, start:end] = segment
            before = start + sampled - 1
            before[sampled == 0] = p - 1  # the prompt's end predicts each first
            predictors.append(r * longest + before)
            targets.append(tail[sampled])
            behaviour.append(samples[i].logprobs[p:][sampled])
            versions.append(samples[i].versions[p:][sampled])
            sample.append(np.full(len(sampled), i))
            start = end
    attention = None
    if any(len(row) > 1 for row in rows):
        of, to = segments[:, None, :, None], segments[:, None, None, :]  # [N, 1, L, L]
        attention = np.tril((to == 0) | (to == of))
    flat = (np.concatenate(part) for part in (predictors, targets, behaviour, versions, sample))
    predictors, targets, behaviour, versions, sample = map(torch.from_numpy, flat)
    return Packed(
        torch.from_numpy(ids),
        torch.from_numpy(positions),
        None if attention is None else torch.from_numpy(attention),
        predictors,
        targets.long(),
        behaviour,
        versions,
        sample,
    )
