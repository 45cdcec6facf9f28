"""The rewards of docs/rewards.md, as they stand there."""

import asyncio
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envs import Row
from plumbing.calls import EnvCalls
from plumbing.settings import Settings
from tasks.find import make_task

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CODE = {re.search(r"class (\w+)", code)[1]: code for code in BLOCKS}


class Server:
    """A judge that scores an answer by its length, fails every third call, and counts those that
    are in flight together."""

    def __init__(self, fails: int = 3, wish: str = "0.01"):
        self.seen, self.flying, self.most, lock = Counter(), 0, 0, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                with lock:
                    server.flying += 1
                    server.most = max(server.most, server.flying)
                    number = server.seen.total()
                    size = int(self.headers["Content-Length"])
                body = self.rfile.read(size).decode()
                answer = re.search(r'"answer": "(.*?)"', body)[1]
                with lock:
                    status = 503 if fails and number % fails == 0 else 200
                    server.seen[status] += 1
                self.send_response(status)
                if status == 503:
                    self.send_header("Retry-After", wish)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(f'{{"score": {len(answer)}}}'.encode())
                with lock:
                    server.flying -= 1

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/score"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def judge(tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "judge.py").write_text(CODE["Judge"])
    task = make_task(Settings(env=f"{tmp_path / 'judge.py'}:Judge"), 0)
    yield task
    if task.session:
        asyncio.run_coroutine_threadsafe(task.session.close(), task.loop).result(10)


def ask(task, answers: list[str]) -> list:
    """Rewards of these answers, all asked for at once, as episodes do; an exception in place of a
    reward that raised."""
    calls = EnvCalls(60.0, threads=8)
    task.loop = calls.loop

    async def one(answer):
        env = task.make_env()
        env.reset(Row("?", ""))
        return (await calls(env.step, answer, blocking=task.blocking))[1]

    async def everything():
        return await asyncio.gather(*map(one, answers), return_exceptions=True)

    return asyncio.run(everything())


def test_a_judge_over_http_scores_all_answers_though_the_server_fails_now_and_then(judge):
    server = Server()
    judge.url, judge.calls, judge.tries = server.url, 4, 50
    answers = ["x" * (i % 9) for i in range(40)]
    assert ask(judge, answers) == [float(len(answer)) for answer in answers]
    assert server.seen[200] == 40 and server.seen[503] >= 10 and server.most <= 4


def test_a_judge_is_asked_again_when_it_wishes(judge, monkeypatch):
    server, sleep, slept = Server(fails=1, wish="0.3"), asyncio.sleep, []
    judge.url, judge.tries = server.url, 2

    async def recorded(seconds, *args):
        slept.append(seconds)
        await sleep(seconds, *args)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    assert isinstance(ask(judge, ["x"])[0], RuntimeError)
    assert [seconds for seconds in slept if seconds] == [0.3, 0.3]


def test_a_judge_that_refuses_for_good_fails_the_sample(judge):
    server = Server(fails=1)
    judge.url, judge.tries = server.url, 3
    (failure,) = ask(judge, ["x"])
    assert isinstance(failure, RuntimeError)
    assert "refused 3 times, the last with 503" in str(failure)
    assert server.seen == {503: 3}


def test_a_reward_may_use_processes_that_it_spawns_in_its_constructor(tmp_path, monkeypatch):
    code = CODE["Pooled"]
    function = re.search(r"def slow_score.*?\n\n\n", code, re.S)[0]
    (tmp_path / "scores.py").write_text(function)
    (tmp_path / "pooled.py").write_text(
        "from scores import slow_score\n" + code.replace(function, "")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = make_task(Settings(env=f"{tmp_path / 'pooled.py'}:Pooled"), 0)
    try:
        assert ask(task, ["ab", "h"]) == [float((97 + 98) % 7 == 0), float(104 % 7 == 0)]
    finally:
        task.close()
