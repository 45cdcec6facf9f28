"""One sample's life, line by line: which weights made which token, and what training made of it.

bash launch.sh story RUN_DIR            the first sample that was made by more than one version
bash launch.sh story RUN_DIR 310:7      sample 7 of group 310
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from report.timeline import read_trace
from report.tokens import read_samples


def choose(samples: dict, name: str) -> tuple[int, int]:
    """The sample that is asked for, GROUP or GROUP:SAMPLE; if none is, the first that more than one
    version made. Raises ValueError if there is none."""
    if not name:
        spans_versions = (key for key, s in samples.items() if len(set(s.get("versions", ()))) > 1)
        return next(spans_versions, next(iter(samples)))
    group, _, sample = name.partition(":")
    if not (group.isdigit() and (sample or "0").isdigit()):
        raise ValueError(f"a sample is named GROUP or GROUP:SAMPLE, as 310:7 (got {name})")
    key = int(group), int(sample or 0)
    if key not in samples:
        groups = [group for group, _ in samples]
        raise ValueError(
            f"no sample {name} was trained on; groups go from {min(groups)} to {max(groups)}"
        )
    return key


def tell(key: tuple[int, int], sample: dict, events: list[dict]) -> list[str]:
    """The story, a line an event. Times are milliseconds since the sample's group was admitted, or
    since its first turn where the trace does not hold the admission."""
    mine = {"group": key[0], "sample": key[1]}
    turns = [e for e in events if e["name"] == "turn" and mine.items() <= e["args"].items()]
    turns = turns[-len(sample.get("turns", turns)) :]  # those of a failed first try come before
    admitted = [e for e in events if e["name"] == "admit" and e["args"]["group"] == key[0]]
    told = []  # time in microseconds, line
    for event in admitted:
        what = f"group {key[0]} is admitted at version {event['args']['version']}"
        told.append((event["ts"], what))
    began = min((at for at, _ in told), default=turns[0]["ts"] if turns else 0)
    for number, turn in enumerate(turns):
        told += tell_turn(number, turn, sample, events)
    stale = sample["version"] - min(sample["versions"]) if sample.get("versions") else None
    what = f"reward {sample['reward']:g}, advantage {shown(sample['advantage'])}"
    ends = [turn["ts"] + turn["dur"] for turn in turns]
    told.append((max(ends, default=began), what))
    at = trained_at(sample["step"], events) or max(ends, default=began)
    what = f"trained on in step {sample['step']}, at version {sample['version']}"
    told.append((at, what + ("" if stale is None else f": staleness {stale}")))
    order = sorted(range(len(told)), key=lambda i: (told[i][0], i))
    lines = [f"{(told[i][0] - began) / 1e3:9.1f} ms  {told[i][1]}" for i in order]
    return lines + list(table(sample))


def trained_at(step: int, events: list[dict]) -> int:
    """When the update of a step began, in microseconds; 0 if the trace does not hold it."""
    of_step = (e for e in events if e["name"] == "step" and e["args"]["step"] == step)
    for whole in of_step:
        for event in events:
            if event["name"] == "train" and 0 <= event["ts"] - whole["ts"] <= whole["dur"]:
                return event["ts"]
    return 0


def tell_turn(number: int, turn: dict, sample: dict, events: list[dict]) -> list[tuple]:
    """When a turn began and ended, which versions made its tokens, what was loaded meanwhile."""
    start, end = turn["ts"], turn["ts"] + turn["dur"]
    told = [(start, f"turn {number + 1} begins on {place(turn)}")]
    versions = versions_of_turn(number, sample)
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    made = ", then ".join(f"{count} under version {version}" for version, count in runs)
    loads = [e for e in events if e["name"] == "load" and e["pid"] == turn["pid"]]
    for load in loads:
        if start <= load["ts"] <= end:
            what = f"new weights are loaded, {load['dur'] / 1e3:.1f} ms; decoding goes on after it"
            told.append((load["ts"], what))
    what = f"turn {number + 1} ends; its tokens: {made}" if made else f"turn {number + 1} ends"
    return [*told, (end, what)]


def versions_of_turn(number: int, sample: dict) -> list[int]:
    bounds = sample.get("turns", [])
    if number >= len(bounds):
        return []
    first = sum(end - begin for begin, end in bounds[:number])
    return sample["versions"][first : first + bounds[number][1] - bounds[number][0]]


def place(turn: dict) -> str:
    return f"rollout process {turn['pid'] - 2}"


def shown(value: float | None) -> str:
    return "not known here" if value is None else f"{value:+.3f}"


def table(sample: dict):
    """A line a sampled token."""
    if "ids" not in sample:
        yield "its tokens were not written: its step had more than tokens.jsonl keeps of one"
        return
    sampled = [i for begin, end in sample["turns"] for i in range(begin, end)]
    count = len(sampled)
    ratios, clipped = sample["ratios"] or [None] * count, sample["clipped"] or [0] * count
    if len(ratios) != count:  # none is trained on (--truncated mask)
        ratios, clipped = [None] * count, [0] * count
    prompt = "".join(sample["text"][: sampled[0]]) if sampled else "".join(sample["text"])
    yield f"prompt {prompt!r}"
    yield f"{'token':>16}  version  logprob  ratio"
    columns = (sampled, sample["versions"], sample["logprobs"], ratios, clipped)
    for i, version, logprob, ratio, clip in zip(*columns, strict=True):
        of = "      -" if ratio is None else f"{ratio:7.4f}"
        mark = "  clipped" if clip else ""
        yield f"{sample['text'][i]!r:>16}  {version:7}  {logprob:7.3f}{of}{mark}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("sample", nargs="?", default="", metavar="GROUP[:SAMPLE]")
    args = parser.parse_args()
    samples = read_samples(args.run)
    if not samples:
        print(f"report.story: no tokens.jsonl with samples in {args.run}", file=sys.stderr)
        return 2
    try:
        key = choose(samples, args.sample)
    except ValueError as error:
        print(f"report.story: {error}", file=sys.stderr)
        return 2
    print(f"sample {key[1]} of group {key[0]}, of {args.run}")
    print("\n".join(tell(key, samples[key], read_trace(args.run / "trace.json"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
