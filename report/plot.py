"""Figures of finished runs.

    bash launch.sh plot RUN_DIR...          reward.png, timeline.png, turns.png, run.html
    bash launch.sh plot RUN_DIR... --metrics ratio_ess,kl_behaviour     and these, step by step
"""

import argparse
import json
import sys
from pathlib import Path

from report.figures import plot_metrics, plot_reward, plot_timeline, plot_turns
from report.page import write_page
from report.rows import read_rows, summarize


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, help="where to; default: the first run's directory")
    parser.add_argument("--metrics", default="", help="keys of metrics.jsonl to draw, by comma")
    args = parser.parse_args()
    for run in args.runs:
        rows = read_rows(run / "metrics.jsonl")
        if not any("step" in row for row in rows):
            print(f"report.plot: no metrics.jsonl with steps in {run}", file=sys.stderr)
            return 2
        config = run / "config.json"
        known = json.loads(config.read_text()) if config.exists() else {}
        print(f"{run}\n{summarize(rows, known)}")
    directory = args.out or args.runs[0]
    directory.mkdir(parents=True, exist_ok=True)
    reward = "reward.png" if len(args.runs) == 1 else "compare.png"
    print(plot_reward(args.runs, directory / reward))
    print(plot_timeline(args.runs, directory / "timeline.png"))
    if turns := plot_turns({run.name: run for run in args.runs}, directory / "turns.png"):
        print(turns)
    print(write_page(args.runs, directory / "run.html"))
    try:
        if keys := [key for key in args.metrics.split(",") if key]:
            print(plot_metrics(args.runs, keys, directory / "metrics.png"))
    except ValueError as error:
        print(f"report.plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
