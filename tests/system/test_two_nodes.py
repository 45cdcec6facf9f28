"""Two nodes on one machine: network namespaces joined by a veth pair, with torchrun in each.

As on Debian, the host's own name resolves to 127.0.1.1 in both, and each has a second interface.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def own_network() -> str:
    """Why there can be no namespaces here; "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not shutil.which("ip"):
        return "needs the command ip (iproute2)"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"cannot make network namespaces: {made.stderr.strip()}"
    ip("netns", "del", name)
    return ""


class Nodes:
    """Two namespaces, 10.14.0.1 and 10.14.0.2; `run` starts train.py by torchrun in both."""

    def __init__(self, tmp: Path):
        self.tmp, self.names = tmp, [f"rf{os.getpid()}{end}" for end in "ab"]
        self.processes: list[subprocess.Popen] = []
        self.outputs: list[Path] = []
        for name in self.names:
            ip("netns", "add", name)
            hosts = Path("/etc/netns", name, "hosts")
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
        ends = [f"veth{name[-6:]}" for name in self.names]
        ip("link", "add", ends[0], "netns", self.names[0], "type", "veth",
           "peer", "name", ends[1], "netns", self.names[1])  # fmt: skip
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True), 1):
            inside = ["-n", name]
            ip(*inside, "addr", "add", f"10.14.0.{number}/24", "dev", end)
            ip(*inside, "link", "add", "other0", "type", "veth", "peer", "name", "other1")
            ip(*inside, "addr", "add", f"10.99.{number}.1/24", "dev", "other0")
            for device in ("lo", end, "other0", "other1"):
                ip(*inside, "link", "set", device, "up")
        self.link = ends

    def run(self, *flags: str, ranks: int = 1) -> None:
        self.processes, self.outputs = [], []
        # Not the interface that a run within this process chose for itself.
        here = {key: v for key, v in os.environ.items() if "SOCKET_IFNAME" not in key}
        for number, name in enumerate(self.names):
            out = self.tmp / f"node{number}-{time.monotonic_ns()}.txt"
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "plumbing.torchrun"]
            command += ["--nnodes", "2", "--node_rank", str(number), "--nproc_per_node", str(ranks)]
            command += ["--master_addr", "10.14.0.1", "--master_port", "29514"]
            self.processes.append(
                subprocess.Popen(
                    [*command, "train.py", *flags],
                    cwd=ROOT,
                    stdout=out.open("w"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**here, "TQDM_DISABLE": "1"},
                )  # fmt: skip
            )
            self.outputs.append(out)

    def texts(self) -> str:
        return "\n".join(out.read_text() for out in self.outputs)

    def ended(self, number: int, timeout: float) -> int:
        try:
            return self.processes[number].wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"node {number} goes on after {timeout} s:\n{self.texts()}")

    def inside(self, number: int) -> list[int]:
        """All processes in a node's namespace."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.names[number]], capture_output=True, text=True
        )
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, number: int) -> None:
        for _ in range(3):  # what is being started meanwhile as well
            for pid in self.inside(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def close(self) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
        for process in self.processes:
            process.wait()


@pytest.fixture
def nodes(tmp_path):
    if why := own_network():
        pytest.skip(why)
    both = Nodes(tmp_path)
    yield both
    both.close()


def rows(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "step" in row]


def flags(tiny: str, tasks: Path, run_dir: Path, steps: int, *more: str) -> list[str]:
    return [
        *("--model", tiny, "--env", f"{tasks}:Odd", "--steps", str(steps), "--eval_every", "0"),
        *("--batch_size", "4", "--group_size", "4", "--max_model_len", "128"),
        *("--learning_rate", "3e-4", "--run_dir", str(run_dir), *more),
    ]


def test_two_nodes_train_as_one_node_with_as_many_workers(nodes, tmp_path, tiny, tasks):
    one = tmp_path / "one"
    command = [sys.executable, "-m", "plumbing.torchrun", "--nproc_per_node", "2", "train.py"]
    command += flags(tiny, tasks, one, 5, "--mode", "sync", "--rollout_workers", "2")
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"TQDM_DISABLE": "1"})
    two = tmp_path / "two"
    nodes.run(*flags(tiny, tasks, two, 5, "--mode", "sync"))
    assert [nodes.ended(number, 400) for number in range(2)] == [0, 0], nodes.texts()
    alone, apart = rows(one), rows(two)
    print(
        *(f"{a['loss']:.9f} {b['loss']:.9f}" for a, b in zip(alone, apart, strict=True)), sep="\n"
    )
    assert [row["samples"] for row in apart] == [16] * 5
    for a, b in zip(alone, apart, strict=True):
        assert sorted(a["prompt_ids"]) == sorted(b["prompt_ids"])
        for key in ("loss", "grad_norm", "reward_mean", "entropy", "mismatch_mean"):
            # In float32: sums over ranks have another order.
            assert abs(a[key] - b[key]) < 1e-6 * max(1, abs(a[key])), (key, a[key], b[key])


def wait_for_step(nodes: Nodes, run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + 300
    while len(rows(run_dir)) < steps:
        assert all(process.poll() is None for process in nodes.processes), nodes.texts()
        assert time.monotonic() < deadline, nodes.texts()
        time.sleep(0.2)


def only_cause(out: Path) -> str:
    """What train.py says of the end; torchrun's own report comes after it."""
    lines = [x for x in out.read_text().splitlines() if x.startswith("train.py: ")]
    assert len(lines) == 1, out.read_text()
    return lines[0]


def test_a_node_that_is_killed_ends_the_run_which_resumes(nodes, tmp_path, tiny, tasks):
    run_dir = tmp_path / "run"
    nodes.run(*flags(tiny, tasks, run_dir, 5000, "--save_every", "2"))
    wait_for_step(nodes, run_dir, 3)
    killed = time.monotonic()
    nodes.kill(1)
    assert nodes.ended(0, 60) == 1
    print(f"killed: the other node ended after {time.monotonic() - killed:.1f} s")
    assert only_cause(nodes.outputs[0]) == (
        "train.py: trainer rank 1 (node 1, 10.14.0.2) is lost: its connection closed"
    )
    assert nodes.inside(0) == []
    done = max(int(path.name.split("-")[1]) for path in run_dir.glob("checkpoint-*"))
    nodes.run(*flags(tiny, tasks, run_dir, done + 2, "--resume", str(run_dir)))
    assert [nodes.ended(number, 400) for number in range(2)] == [0, 0], nodes.texts()
    assert rows(run_dir)[-1]["step"] == done + 2


def test_a_link_that_goes_down_ends_both_nodes(nodes, tmp_path, tiny, tasks):
    run_dir = tmp_path / "run"
    nodes.run(*flags(tiny, tasks, run_dir, 5000))
    wait_for_step(nodes, run_dir, 1)
    down = time.monotonic()
    ip("-n", nodes.names[1], "link", "set", nodes.link[1], "down")
    assert [nodes.ended(number, 60) for number in range(2)] == [1, 1]
    print(f"link down: both nodes ended after {time.monotonic() - down:.1f} s")
    for number, other in enumerate(("rank 1 (node 1, 10.14.0.2)", "rank 0 (node 0, 10.14.0.1)")):
        cause = only_cause(nodes.outputs[number])
        assert cause.startswith(f"train.py: trainer {other} is lost: not a word for "), cause
        assert nodes.inside(number) == []


def test_a_fault_on_one_node_of_two_ranks_is_said_once_on_each(nodes, tmp_path, tiny, tasks):
    run_dir = tmp_path / "run"
    nodes.run(*flags(tiny, tasks, run_dir, 5000, "--max_restarts", "0"), ranks=2)
    wait_for_step(nodes, run_dir, 1)
    worker = next(pid for pid in nodes.inside(1) if "spawn_main" in command_of(pid))
    os.kill(worker, signal.SIGKILL)
    assert [nodes.ended(number, 60) for number in range(2)] == [1, 1]
    what = "train.py: node 1: rollout process 0 died (killed by SIGKILL)"
    done = len(rows(run_dir))
    kept = f"; checkpoint-{done} is written, go on with --resume {run_dir}"
    assert [only_cause(out) for out in nodes.outputs] == [what + kept, what]


def command_of(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
