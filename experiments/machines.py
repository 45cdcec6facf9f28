"""Runs a command as on other machines: other instruction sets, one core, busy neighbours.

    bash launch.sh machines avx2,baseline -- bash launch.sh test
    bash launch.sh machines -- .venv/bin/python -m pytest -q tests/test_loop.py      (on all)

Floating-point sums come out in another order on another instruction set, and processes take turns
in another order on another number of cores: what a test or a figure claims should hold on all. Ends
with a line for each machine; the exit code is 1 if the command failed on one.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",  # kernels of torch, and which build of its kernels vLLM loads
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
MACHINES: dict[str, dict[str, str]] = {  # the environment that makes this machine that one
    "native": {},
    "avx2": AVX2,
    "baseline": {"ATEN_CPU_CAPABILITY": "default"},  # what every x86-64 has
    "one-core": {},
    "busy": {},
}
BUSY_LOOPS = 4


@contextlib.contextmanager
def as_machine(name: str) -> Iterator[dict[str, str]]:
    """Make this process and those it starts see the machine; yields the environment to start them
    with. Raises ValueError for a name that is none."""
    if name not in MACHINES:
        raise ValueError(f"no machine {name!r}; there are: {', '.join(MACHINES)}")
    cores = os.sched_getaffinity(0)
    loops = []
    try:
        if name == "one-core":
            os.sched_setaffinity(0, {min(cores)})
        if name == "busy":
            loop = [sys.executable, "-c", "while True: pass"]
            loops = [subprocess.Popen(loop, start_new_session=True) for _ in range(BUSY_LOOPS)]
        yield os.environ | MACHINES[name]
    finally:
        os.sched_setaffinity(0, cores)
        for process in loops:
            process.kill()
            process.wait()


def main() -> int:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    names, command = given[:at], given[at + 1 :]
    if len(names) > 1 or not command:
        print(__doc__, file=sys.stderr)
        return 2
    names = names[0].split(",") if names else list(MACHINES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lines, failed = [], False
    for name in names:
        print(f"== {name}: {' '.join(command)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            with as_machine(name) as environment:
                code = subprocess.run(command, env=environment, check=False).returncode
        except ValueError as error:
            print(f"machines: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
        ended = f"FAILED ({code})" if code else "passed"
        lines.append(f"{name:10} {ended} {time.monotonic() - start:7.0f} s")
        failed |= code != 0
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
