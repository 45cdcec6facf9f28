"""tokens.jsonl: every token that was trained on, with the version that made it, its log-probability
and its ratio. The page of a run and `launch.sh story` are drawn from it.

A line a step, in columns, an entry a sample:

    step, version     the step, and the version that the trainer held in it
    group, sample     the ticket: admission index, and which of the n samples of the group
    reward, advantage
    ids               whole samples, prompt first; left out beyond TOKENS_A_STEP tokens of a step
    turns             where sampled tokens begin and end in ids; the lists below are of those alone
    versions, logprobs, ratios, clipped
                      ratios and clips are those of rank 0's share; null for samples of other ranks
    text              of token ids that occur here for the first time in the file
"""

import json
from pathlib import Path

import numpy as np
import torch

from report.rows import read_rows

TOKENS_A_STEP = 8192  # some 200 kB a step at most; later samples of a step are written without
ENCODE = json.JSONEncoder(separators=(",", ":")).encode


class TokenFile:
    """Appends what a step was trained on."""

    def __init__(self, path: Path):
        """Goes on with the file of a run that is resumed."""
        self._texts = {int(i) for row in read_rows(path) for i in row["text"]}
        self._file = path.open("a")

    def write(self, step: int, batch: list, seen: list[dict], tokenizer) -> None:
        """`seen`: what the update knows of each token, [T] a micro-batch (`Trainer.seen`)."""
        trained = by_sample(seen)
        shown = show_until(TOKENS_A_STEP, [len(s.ids) for s in batch])
        row = {"step": step, "version": step - 1}
        row |= {key: [] for key in ("group", "sample", "reward", "advantage", "ids", "turns")}
        row |= {key: [] for key in ("versions", "logprobs", "ratios", "clipped")}
        for i, sample in enumerate(batch):
            ratios, clipped, advantage = trained.get(i, (None, None, None))
            row["group"].append(sample.ticket.group)
            row["sample"].append(sample.ticket.sample)
            row["reward"].append(round(sample.reward, 4))
            row["advantage"].append(advantage)
            if i < shown:
                row["ids"].append(sample.ids.tolist())
                row["turns"].append(sample.turns)
                row["versions"].append(sample.versions[sample.mask].tolist())
                row["logprobs"].append(rounded(sample.logprobs[sample.mask]))
                row["ratios"].append(ratios)
                row["clipped"].append(clipped)
        new = {i for ids in row["ids"] for i in ids} - self._texts
        self._texts |= new
        row["text"] = {i: tokenizer.decode([i]) for i in sorted(new)}
        self._file.write(ENCODE(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def by_sample(seen: list[dict]) -> dict[int, tuple[list, list, float]]:
    """Ratios and clips of the trained tokens of each sample, and its advantage."""
    parts = [part for part in seen if len(part["counts"]) and part["counts"][0]]
    if not parts:
        return {}
    keys = ("sample", "log_ratio", "clip", "advantage")
    of = {key: torch.cat([part[key] for part in parts]).cpu().numpy() for key in keys}
    order = np.argsort(of["sample"], kind="stable")  # within a sample the order of tokens stays
    names, starts = np.unique(of["sample"][order], return_index=True)
    ratios = rounded(np.exp(np.clip(of["log_ratio"][order], -20, 20)))
    clips = (of["clip"][order] > 0).astype(int).tolist()
    advantages = rounded(of["advantage"][order])
    bounds = [*starts.tolist(), len(order)]
    return {
        int(name): (ratios[a:b], clips[a:b], advantages[a])
        for name, a, b in zip(names, bounds, bounds[1:], strict=False)
    }


def show_until(limit: int, lengths: list[int]) -> int:
    """How many samples, from the first, have at most `limit` tokens together; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), limit, side="right")))


def rounded(values: np.ndarray) -> list[float]:
    return np.round(values.astype(float), 4).tolist()


def read_samples(run: Path) -> dict[tuple[int, int], dict]:
    """Every trained sample of a run by (group, sample): reward, advantage and step, and of those
    that were written whole `ids`, `turns`, `versions`, `logprobs`, `ratios`, `clipped`, `text`."""
    samples, text = {}, {}
    for row in read_rows(run / "tokens.jsonl"):
        text |= {int(i): piece for i, piece in row["text"].items()}
        for i, key in enumerate(zip(row["group"], row["sample"], strict=True)):
            sample = {"step": row["step"], "version": row["version"]}
            sample |= {name: row[name][i] for name in ("reward", "advantage")}
            if i < len(row["ids"]):
                whole = ("ids", "turns", "versions", "logprobs", "ratios", "clipped")
                sample |= {name: row[name][i] for name in whole}
                sample["text"] = [text[token] for token in sample["ids"]]
            samples[key] = sample
    return samples
