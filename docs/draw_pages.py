"""Draws the figures of the pages beside it, on the program's own simulator or from a finished run.

    python docs/draw_pages.py why nodes staleness agentic    seconds; half a minute; four minutes
    python docs/draw_pages.py life weights --run RUN_DIR     from a run's trace.json, tokens.jsonl

What a figure shows is printed too, so that a page can be held against it.
"""

import argparse
import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from experiments import sim  # noqa: E402
from experiments.simulator import LANES, Load, Rates, Setting, simulate  # noqa: E402
from plumbing.devices import default_workers, plan  # noqa: E402
from report import theory  # noqa: E402
from report.figures import color_of, finish  # noqa: E402
from report.story import choose, trained_at, versions_of_turn  # noqa: E402
from report.timeline import read_trace  # noqa: E402
from report.tokens import read_samples  # noqa: E402

# -- why.md: four places, batches of eight samples, the last of them long -------------------------

PLACES, SAMPLES, SHORT, LONG, TRAIN = 4, 8, 1, 6, 2  # the last three in seconds


class OneLong(Load):
    """Seven responses of SHORT tokens and one of LONG, at a token a second."""

    def length(self, seed: int, turn: int) -> int:
        return LONG if seed % 64 == SAMPLES - 1 else SHORT


def by_hand(alpha: int, steps: int = 61):
    """The run of the page, its spans, and the bound that Proposition 2 gives for it."""
    rates = Rates(decode_s=1.0, slots=PLACES, train_s=TRAIN)
    load = OneLong(SHORT, 0.0, LONG, prompt=0)
    buffer = {"batch_size": 1, "group_size": SAMPLES, "alpha": float(alpha)}
    setting = Setting(rates, load, buffer, 1, 1, not alpha, steps, tasks_per_worker=PLACES)
    spans = []
    result = simulate(setting, lambda *step: spans.extend(step[-1]))
    mean = ((SAMPLES - 1) * SHORT + LONG) / SAMPLES
    bound = theory.makespan_bound(SAMPLES, PLACES, mean, LONG) + TRAIN
    if alpha:
        sizes = SAMPLES, PLACES + 1, mean, LONG, TRAIN / SAMPLES
        bound = theory.async_bound(*sizes, beta=1 / (PLACES + 1), alpha=alpha)
    return result, spans, bound


def why() -> None:
    figure, axes = plt.subplots(2, 1, figsize=(10, 4.4), sharex=True)
    for alpha in (0, 1, 2, 4):
        result, spans, bound = by_hand(alpha)
        seconds = result.step_seconds(12)
        print(f"alpha {alpha}: {seconds:.2f} s a step, bound {bound:.2f} s")
        if alpha > 1:
            continue
        axis = axes[alpha]
        turns = [(begin, end, lane - LANES, args["group"])
                 for name, lane, begin, end, args in spans if name == "turn"]  # fmt: skip
        trained = sorted((begin, end) for name, _, begin, end, _ in spans if name == "train")
        turns += [(begin, end, 0, batch) for batch, (begin, end) in enumerate(trained)]
        start = min(turns)[0]
        for begin, end, row, batch in turns:
            bar = (begin - start, end - begin)
            axis.broken_barh([bar], (row - 0.45, 0.9), color=color_of(batch), edgecolor="white")
            axis.text(
                bar[0] + bar[1] / 2, row, batch, ha="center", va="center", fontsize=8, clip_on=True
            )
        axis.set_yticks(range(5), ["trainer", *(f"place {i}" for i in range(1, 5))], fontsize=8)
        axis.set(xlim=(0, 36), ylim=(4.6, -0.6))
        axis.set_title(f"{f'async, α = {alpha}' if alpha else 'sync'}", fontsize=10, loc="left")
    axes[1].set(xlabel="seconds; the number of a bar is its batch")
    print(finish(figure, axes, HERE / "why.png"))


# -- staleness.md: measured against alpha, and between which two ends it was to be expected --------


def simulated_staleness(places: int, alpha: float) -> tuple[float, float, float]:
    """Mean staleness of a simulated run on two GPUs, and the two ends of `expected_range`."""
    recorded, steps = [], 40
    rates = Rates(decode_s=0.01, slots=places, train_s=0.2, publish_s=0.01)
    load = Load(20, 0.3, 200, prompt=0)
    buffer = {"batch_size": 32, "group_size": 4, "alpha": alpha}
    setting = Setting(rates, load, buffer, 2, 1, steps=steps)
    result = simulate(setting, lambda *step: recorded.extend(step[-1]))
    decoding = sum(end - start for name, _, start, end, _ in recorded if name == "turn")
    share = decoding / result.seconds, 0.21, result.seconds / steps, result.wait / result.seconds
    return np.mean(result.staleness), *theory.expected_range(alpha, 128, *share, steps)


def staleness() -> None:
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    alphas = (1.0, 2.0, 3.0, 4.0)
    for places, axis in zip((16, 64, 96), axes, strict=True):
        found = [simulated_staleness(places, alpha) for alpha in alphas]
        measured, low, high = zip(*found, strict=True)
        axis.fill_between(alphas, np.array(low) - 0.03, np.array(high) + 0.03, alpha=0.3,
                          label="expected")  # fmt: skip
        axis.plot(alphas, measured, "o", color="C1", label="measured")
        axis.plot(alphas, np.ceil(alphas), "k_", label="bound, ⌈α⌉")
        axis.set(title=f"{places} places an engine", xlabel="α")
        print(places, *(f"{m:.2f} ({lo:.2f} to {hi:.2f})" for m, lo, hi in found))
    axes[0].set(ylabel="mean staleness, versions")
    axes[0].legend(fontsize=8)
    print(finish(figure, axes, HERE / "staleness.png"))


# -- agentic.md: what the spread of an environment's latency costs ---------------------------------


def agentic() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    rows = {row.what: row.ours for row in sim.envs(sim.Scale(quick=False, seed=0))}
    spreads = (0, 2.5, 5, 10)
    for arm, label in (("in step", "in step"), ("async", "each by itself")):
        left.plot(spreads, [rows[f"N(10, {std:g}): {arm}"] for std in spreads], "o-", label=label)
    left.set(xlabel="spread of a step's latency, s (mean 10 s)", ylabel="seconds a batch")
    left.legend(fontsize=8)
    rows = {row.what: row.ours for row in sim.redundancy(sim.Scale(quick=False, seed=0))}
    for size in (8, 9, 12):
        label = f"{size} episodes a group, 8 win"
        right.plot([32, 34, 36], [rows[f"{g} x {size}"] for g in (32, 34, 36)], "o-", label=label)
    right.set(xlabel="groups that start, 32 win", ylabel="seconds a batch", xticks=[32, 34, 36])
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.set(ylim=(0, None))
    print(finish(figure, (left, right), HERE / "agentic.png"))


# -- scaling.md: who sits on which GPU ------------------------------------------------------------


def nodes() -> None:
    """A row for each start of the page's table; a node of eight GPUs is a row of eight squares."""
    starts = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 4, 1), (8, 6, 2)]
    figure, axis = plt.subplots(figsize=(10, 3.2))
    for row, (gpus, ranks, count) in enumerate(starts):
        found = plan(gpus, ranks, default_workers(gpus, ranks, 1), 1)
        for node in range(count):
            for gpu in range(gpus):
                trainer = f"T{found.trainers.index(gpu)}" if gpu in found.trainers else ""
                mine = [f"W{w}" for w, places in enumerate(found.workers) if gpu in places]
                color = "#6fb36f" if trainer else "#4c78a8"
                at = gpu + 8.6 * node
                axis.barh(row, 0.92, left=at, height=0.8, color=color)
                said = " + ".join(filter(None, [trainer, *mine]))
                axis.text(at + 0.46, row, said, ha="center", va="center", fontsize=8, color="white")
        print(f"{count} x {gpus} GPUs, {ranks} ranks: {found}")
    named = [
        f"{n} nodes of {g}, {r} ranks" if n > 1 else f"GPUs: {g}, trainer ranks: {r}"
        for g, r, n in starts
    ]
    axis.set_yticks(range(len(starts)), named, fontsize=8)
    axis.set_xticks([])
    axis.invert_yaxis()
    axis.set_title("T: a trainer rank, W: a worker", fontsize=9, loc="left")
    axis.set_xlim(0, 16.6)
    axis.spines[["top", "right", "bottom", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "nodes.png", dpi=110)
    print(HERE / "nodes.png")


# -- life_of_a_sample.md, weights_in_flight.md: from a run ----------------------------------------


def life(run: Path) -> None:
    """One sample: in the queue, decoded by one version after the other, waiting, trained on."""
    samples, events = read_samples(run), read_trace(run / "trace.json")
    key = max((k for k in samples if samples[k].get("versions")),
              key=lambda k: len(set(samples[k]["versions"])))  # fmt: skip
    sample, mine = samples[choose(samples, f"{key[0]}:{key[1]}")], {"group": key[0]}
    (admitted,) = (e["ts"] for e in events if e["name"] == "admit" and e["args"]["group"] == key[0])
    (turn,) = (e for e in events if e["name"] == "turn"
               and (mine | {"sample": key[1]}).items() <= e["args"].items())  # fmt: skip
    begin, end = turn["ts"], turn["ts"] + turn["dur"]
    loads = [e for e in events if e["name"] == "load" and e["pid"] == turn["pid"]]
    cuts = [begin, *(e["ts"] for e in loads if begin < e["ts"] < end), end]
    trained = trained_at(sample["step"], events)
    (train,) = (e for e in events if e["name"] == "train" and e["ts"] == trained)
    made = [(v, len(list(same))) for v, same in groupby(versions_of_turn(0, sample))]
    parts = [("in the queue", admitted, begin, "#dddddd")]
    for (version, tokens), start, stop in zip(made, cuts[:-1], cuts[1:], strict=True):
        parts.append((f"version {version}: {tokens} tokens", start, stop, color_of(version)))
    parts.append(("waits for its batch", end, trained, "#dddddd"))
    parts.append(("trained on", trained, trained + train["dur"], "#444444"))
    figure, axis = plt.subplots(figsize=(10, 2.6))
    for row, (what, start, stop, color) in enumerate(parts):
        start, stop = (start - admitted) / 1e3, (stop - admitted) / 1e3
        axis.barh(row, max(stop - start, 2), left=start, color=color)
        print(f"{what}: {start:.1f} to {stop:.1f} ms")
    axis.set_yticks(range(len(parts)), [what for what, *_ in parts], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel=f"milliseconds since group {key[0]} was admitted (sample {key[1]})")
    print(finish(figure, [axis], HERE / "life.png"))


def weights(runs: list[Path]) -> None:
    """How many samples of each run were decoded under one version, two, three, ..."""
    figure, axes = plt.subplots(1, len(runs), figsize=(4.5 * len(runs), 3), squeeze=False)
    for run, axis in zip(runs, axes[0], strict=True):
        config = json.loads((run / "config.json").read_text())
        kept = [sample for sample in read_samples(run).values() if sample.get("versions")]
        counts = Counter(len(set(sample["versions"])) for sample in kept)
        shares = {n: counts[n] / len(kept) for n in sorted(counts)}
        axis.bar(list(shares), list(shares.values()), color=[color_of(n - 1) for n in shares])
        axis.set(xlabel="versions that decoded a sample", xticks=list(shares), ylim=(0, 1))
        name = config["env"].split(":")[-1]
        axis.set_title(f"{name}, α = {config['alpha']:g}: {len(kept)} samples", fontsize=9)
        print(
            f"{run}: {len(kept)} samples; by versions",
            *(f"{n}: {x:.1%}" for n, x in shares.items()),
        )
    axes[0][0].set(ylabel="share of samples")
    print(finish(figure, axes[0], HERE / "weights_in_flight.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*ALONE, *OF_RUNS], metavar="NAME")
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="directories of runs")
    args = parser.parse_args()
    for name in args.names:
        if name in ALONE:
            ALONE[name]()
        elif not args.run:
            parser.error(f"{name} is drawn from a run: --run RUN_DIR")
        else:
            OF_RUNS[name](args.run)


ALONE = {"why": why, "staleness": staleness, "agentic": agentic, "nodes": nodes}
OF_RUNS = {"life": lambda runs: life(runs[0]), "weights": weights}

if __name__ == "__main__":
    main()
