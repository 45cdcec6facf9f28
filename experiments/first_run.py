"""Is the first run the same everywhere? The quick run, with its warm-up, by seed and machine.

    .venv/bin/python -m experiments.first_run --seeds 10 --machines native,avx2,baseline
    .venv/bin/python -m experiments.first_run --envs grid,guess --seeds 3 --steps 0

Every run starts from nothing: its model is made anew, in a process of its own that sees the machine
(experiments/machines.py). Prints, and writes, one table: the solve rate before and after, how long
the warm-up and all of it took. It can be interrupted and called again.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np

from experiments import bench
from experiments.machines import MACHINES, as_machine
from report.rows import read_rows

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import json, sys, time
from pathlib import Path
import train
from plumbing import models
from plumbing.settings import Settings
from tasks.find import make_task
out, env, seed, steps, *flags = sys.argv[1:]
models.CACHE = Path(out) / "cache"
start = time.perf_counter()
models.resolve_model("tiny", make_task(Settings(env=env), int(seed)), env)
times = {"warmup": time.perf_counter() - start}
(Path(out) / "times.json").write_text(json.dumps(times))
if int(steps):
    flags += ["--model", "tiny", "--env", env, "--seed", seed, "--steps", steps]
    sys.exit(train.main([*flags, "--run_dir", str(Path(out) / "run")]))
"""


def go(args, out: Path, machine: str, env: str, seed: int) -> int:
    """One first run, in `out`; result.json is written last. Returns the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    with as_machine(machine) as environment:
        what = [str(out), env, str(seed), str(args.steps), *args.flags]
        command = [sys.executable, "-c", CHILD, *what]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code:
        return code
    result = {"machine": machine, "env": env, "seed": seed, "steps": args.steps}
    result |= {"seconds": time.time() - start}
    result["warmup"] = json.loads((out / "times.json").read_text())["warmup"]
    if args.steps:
        rows = read_rows(out / "run" / "metrics.jsonl")
        held_out = [row["eval/solve_rate"] for row in rows if "eval/solve_rate" in row]
        result |= {"before": held_out[0], "after": held_out[-1]}
    (out / "result.json").write_text(json.dumps(result))
    return 0


def summary(results: list[dict]) -> str:
    """One line a machine and env: medians with ranges."""
    lines, keys = [], {(r["env"], r["machine"]): None for r in results}
    for env, machine in keys:
        of = [r for r in results if (r["env"], r["machine"]) == (env, machine)]
        cells = [env, machine, len(of), bench.spread([r["warmup"] for r in of], 1)]
        if "before" in of[0]:
            gains = np.subtract([r["after"] for r in of], [r["before"] for r in of])
            for values in ([r["before"] for r in of], [r["after"] for r in of], list(gains)):
                cells.append(bench.spread(values, 3))
        lines.append([*cells, bench.spread([r["seconds"] for r in of], 0)])
    head = ["env", "machine", "seeds", "warm-up, s"]
    if "before" in results[0]:
        head += ["solved at version 0", "solved at the end", "gain"]
    return bench.table([*head, "all, s"], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--machines", default="native,avx2,baseline", help=", ".join(MACHINES))
    parser.add_argument("--envs", default="addition")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=150, help="0: the warm-up alone")
    parser.add_argument("--out", type=Path, default=Path("runs/first_run"))
    args, args.flags = parser.parse_known_args(argv)  # the rest are flags of train.py
    todo = list(product(range(args.seeds), args.machines.split(","), args.envs.split(",")))
    results = []
    for number, (seed, machine, env) in enumerate(todo, 1):
        out = args.out / f"{env}-{machine}-{seed}"
        if not (out / "result.json").exists():
            print(f"[{number}/{len(todo)}] {out.name}", file=sys.stderr, flush=True)
            try:
                code = go(args, out, machine, env, seed)
            except ValueError as error:
                parser.error(str(error))
            except KeyboardInterrupt:
                code = 130
            if code:
                print(f"{out}: ended with {code}", file=sys.stderr)
                return code
        results.append(json.loads((out / "result.json").read_text()))
    print(table := summary(results))
    (args.out / "table.md").write_text(table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
