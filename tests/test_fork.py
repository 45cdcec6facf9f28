"""The forks of docs/fork.md: each applies by itself, and all of them together train."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from plumbing.settings import Settings
from tasks.find import make_task

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "fork.md").read_text()
DIFFS = [found + "\n" for found in re.findall(r"```diff\n(.*?)\n```", PAGE, re.DOTALL)]
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
LIMITS = {"algos.py": 15, "buffer.py": 25, "report/metrics.py": 3, "train.py": 20}


def target(diff: str) -> str:
    return re.search(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)[1]


@pytest.fixture
def copy(tmp_path):
    """The tracked files, as they are now, without history."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if name.endswith((".py", ".toml", ".md")) and (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def apply(diff: str, where: Path) -> None:
    subprocess.run(["git", "apply", "-"], cwd=where, input=diff, text=True, check=True)


def added(diff: str) -> int:
    return len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE))


@pytest.mark.parametrize("diff", DIFFS, ids=target)
def test_a_fork_is_small_touches_the_file_that_the_table_names_and_applies(diff, copy):
    assert added(diff) <= LIMITS[target(diff)]
    assert f"| `{target(diff)}` | {added(diff)} |" in PAGE
    before = (copy / target(diff)).read_text()
    apply(diff, copy)
    assert (copy / target(diff)).read_text() != before


def test_all_forks_together_train(copy, tiny):
    for diff in DIFFS:
        apply(diff, copy)
    flags = f"--model {tiny} --steps 4 --batch_size 8 --group_size 4 --alpha 1 --run_dir run"
    ours = "--loss soft_clip --clip_width 0.3 --consume newest --eval_every 0"
    command = [sys.executable, "train.py", *flags.split(), *ours.split()]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (copy / "run/tokens.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (copy / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(0 <= row["fresh"] <= 1 for row in metrics) and metrics[0]["fresh"] == 1
    assert all(len(row["group"]) == 8 * 4 for row in rows)  # what is replayed is not sampled again


def load(name: str, tmp_path, monkeypatch):
    (tmp_path / name).write_text(FILES[name])
    (kind,) = re.findall(r"^class (\w+)", FILES[name], re.MULTILINE)
    return make_task(Settings(env=f"{tmp_path / name}:{kind}"))


def test_the_judge_is_asked_over_http(tmp_path, monkeypatch):
    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = json.dumps({"score": 0.1 * len(asked["response"])}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE", f"http://127.0.0.1:{server.server_port}/score")
        task = load("judged.py", tmp_path, monkeypatch)
        assert task.reward(task.train[0], "123") == pytest.approx(0.3)
        server.shutdown()


def test_the_tool_is_asked_and_the_answer_ends_the_episode(tmp_path, monkeypatch):
    env = load("tool.py", tmp_path, monkeypatch).make_env()
    prompt, _ = env.reset(7)
    assert env.step("?1+1")[0] == "no"
    said, reward, terminated, *_ = env.step(f"?{prompt}")
    assert (reward, terminated) == (0.0, False)
    assert env.step(said)[1:3] == (1.0, True)
