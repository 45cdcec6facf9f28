"""run.html: a run as one page, without a server or a network. `launch.sh plot` writes it.

Curves, a timeline with zoom in which a turn has the colours of the versions that decoded it, and
behind each turn the sample: its tokens with version, log-probability and ratio. `page.html` beside
this file draws it; here its data are put together, compressed, and set into it. Several runs stand
one below the other on one scale.
"""

import base64
import gzip
import json
import sys
from pathlib import Path

from report.rows import TRAINER_TIMES, read_rows
from report.timeline import read_trace
from report.tokens import read_samples

TEMPLATE = Path(__file__).with_name("page.html")
MARK = "/*DATA*/"
CURVES = (
    "reward_mean", "solve_rate", "staleness_mean", "ratio_ess", "clip_frac", "trainer_idle",
    "rollout_idle", "entropy",
)  # fmt: skip
SIZE_LIMIT = 8_000_000  # bytes; above it samples are shown without their tokens


def write_page(runs: list[Path], target: Path) -> Path:
    """Write the page of one or several finished runs. Returns `target`."""
    data = [run_data(run) for run in runs]
    text = fill(data)
    if len(text) > SIZE_LIMIT:
        for run in data:
            run["samples"] = [sample[:4] for sample in run["samples"]]
            run["text"] = []
        text = fill(data)
        print(f"report.page: too many tokens for {target}, left out", file=sys.stderr)
    target.write_text(text)
    return target


def fill(data: list[dict]) -> str:
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
    return TEMPLATE.read_text().replace(MARK, base64.b64encode(packed).decode())


def run_data(run: Path) -> dict:
    """What the page draws of one run. Times are milliseconds since the first turn of training."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if "step" in row]
    events, samples = read_trace(run / "trace.json"), read_samples(run)
    dropped = {index: why for row in rows for why, index in row.get("dropped_groups", ())}
    turns = [e for e in events if e["name"] == "turn" and e.get("args", {}).get("group", -1) >= 0]
    origin = min((e["ts"] for e in turns), default=0)

    def ms(event: dict) -> list[float]:
        return [round((event["ts"] - origin) / 1e3, 2), round(event.get("dur", 0) / 1e3, 2)]

    config = run / "config.json"
    return {
        "name": run.name,
        "config": json.loads(config.read_text()) if config.exists() else {},
        "curves": {key: [row[key] for row in rows] for key in CURVES if key in rows[0]},
        "wall": [row["wall_s"] for row in rows],
        "turns": [
            [e["pid"] - 2, e["tid"] - 1, *ms(e), e["args"]["group"], e["args"]["sample"],
             e["args"].get("versions", []), fate(e, samples, dropped)]
            for e in turns
        ],
        "loads": [[e["pid"] - 2, *ms(e)] for e in events if e["name"] == "load"],
        "trainer": [
            [e["name"], *ms(e)]
            for e in events
            if e["pid"] == 1 and e["tid"] == 1 and e["name"] in TRAINER_TIMES and e["ts"] >= origin
        ],
        "steps": [[e["args"]["step"], *ms(e)] for e in events if e["name"] == "step"],
        **columns(samples),
    }  # fmt: skip


def fate(turn: dict, samples: dict, dropped: dict[int, str]) -> str:
    """What became of a turn: `trained`, why its group was dropped, or, if that is not known, `lost`
    (a sample that others were faster than) or `unfinished` when the run ended."""
    group, sample = turn["args"]["group"], turn["args"]["sample"]
    if (group, sample) in samples:
        return "trained"
    return dropped.get(group) or ("lost" if (group, 0) in samples else "unfinished")


def columns(samples: dict) -> dict:
    """Samples as short lists, their tokens as places in one list of texts."""
    texts: dict[str, int] = {}
    listed = []
    for (group, number), sample in samples.items():
        line = [f"{group}:{number}", sample["step"], sample["reward"], sample["advantage"]]
        if "ids" in sample:
            line.append([texts.setdefault(text, len(texts)) for text in sample["text"]])
            keys = ("turns", "versions", "logprobs", "ratios", "clipped")
            line += [sample[key] for key in keys]
        listed.append(line)
    return {"samples": listed, "text": list(texts)}
