"""A worker that dies or hangs is replaced. What else goes wrong ends the run soon, says why in one
line, and leaves no process behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import same

pytestmark = pytest.mark.timeout(400)  # most of it the start of vLLM, on a busy machine
ROOT = Path(__file__).resolve().parent.parent.parent


def state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return "zombie" if letter == "Z" else "alive"


class Cli:
    """`python train.py` in a process of its own, as a user has it."""

    def __init__(self, tmp: Path, *flags: str, script: str = "train.py", ranks: int = 1):
        self.out, self.run_dir = tmp / "out.txt", tmp / "run"
        tmp.mkdir()
        torchrun = ["-m", "plumbing.torchrun", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *torchrun, script, "--eval_every", "0", "--steps", "5000"]
        command += ["--batch_size", "2", "--group_size", "2", "--max_model_len", "128"]
        command += ["--learning_rate", "3e-4", "--run_dir", str(self.run_dir), *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.out.open("w"), stderr=subprocess.STDOUT,
            start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def wait_for_step(self, timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        metrics = self.run_dir / "metrics.jsonl"
        while not (metrics.exists() and '"step"' in metrics.read_text()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.2)

    def ends(self, timeout: float = 60, started: list[int] = ()) -> int:
        """Exit code; of the run, and of all that it has started, nothing may stay."""
        deadline, left = time.monotonic() + timeout, set(started)
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            left.update(self.family())
            time.sleep(0.1)
        while left and time.monotonic() < deadline + 60:
            left = {pid for pid in left if state(pid) not in ("gone", "zombie")}
            time.sleep(0.1)
        assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        return self.process.returncode

    def family(self) -> list[int]:
        """The run's process and all that descend from it."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")")[-1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
        family = [self.process.pid]
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        return family

    def worker(self) -> int:
        """The rollout process: the one that was spawned, in a process group of its own."""
        return next(
            pid
            for pid in self.family()[1:]
            if os.getpgid(pid) == pid
            and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def text(self) -> str:
        return self.out.read_text()

    def last_line(self) -> str:
        return self.text().strip().splitlines()[-1]


@pytest.fixture
def start(tmp_path, tiny, tasks):
    """Start a run on a task; it is killed at the end of the test, whatever happens."""
    started = []

    def starting(task: str, *flags: str, **kwargs) -> Cli:
        flags = "--model", tiny, "--env", f"{tasks}:{task}", *flags
        run = Cli(tmp_path / str(len(started)), *flags, **kwargs)
        started.append(run)
        return run

    yield starting
    for run in started:
        for pid in run.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def steps_of(run: Cli) -> list[dict]:
    rows = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "step" in row]


# -- workers that are replaced ---------------------------------------------------------------------


def went_on(run: Cli, steps: int, restarts: int) -> list[dict]:
    """The rows of a run that ended well although its workers did not, with all prompts in it once:
    trained on, or dropped with a reason."""
    assert run.ends(300) == 0, run.text()
    rows = steps_of(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert sum(row["restarts"] for row in rows) == restarts
    assert run.text().count("a new one starts") == run.text().count("is back after") == restarts
    assert all(row["staleness_max"] <= 1 and row["mismatch_max"] < 1e-3 for row in rows)
    trained = [prompt for row in rows for prompt in row["prompt_ids"]]
    dropped = [prompt for row in rows for _, prompt in row["dropped_prompts"]]
    assert len(trained) == 2 * steps and len({*trained, *dropped}) == len(trained) + len(dropped)
    return rows


def test_a_killed_worker_is_replaced_and_nothing_is_lost(start):
    run = start("DiesOnce", "--steps", "30")
    rows = went_on(run, steps=30, restarts=1)
    assert "rollout process 0 died (killed by SIGKILL): a new one starts" in run.text()
    assert not any(row["dropped_prompts"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [["sync"], ["async", "--alpha", "0"]])
def test_with_a_fault_in_it_a_run_without_staleness_stays_equal_bit_for_bit(start, mode):
    flags = ["--steps", "12", "--mode", *mode]
    runs = [start(task, *flags) for task in ("Odd", "DiesOnce")]
    for run in runs:
        assert run.ends(300) == 0, run.text()
    plain, faulty = (list(map(same, steps_of(run))) for run in runs)
    assert sum(row.pop("restarts") for row in plain) == 0
    assert sum(row.pop("restarts") for row in faulty) == 1
    assert plain == faulty
    models = [run.run_dir / "checkpoint-12" / "model.safetensors" for run in runs]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.slow
def test_a_worker_that_no_longer_answers_is_replaced(start):
    run = start("Odd", "--worker_timeout", "8", "--rollout_workers", "2", "--steps", "400")
    run.wait_for_step()
    os.kill(run.worker(), signal.SIGSTOP)
    went_on(run, steps=400, restarts=1)
    assert "has not answered for" in run.text() and "--worker_timeout 8" in run.text()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_receives_weights_is_replaced(start):
    """The new process dies at its third update, too: at versions 2 and 4. Without staleness no step
    can end before it is back."""
    run = start("DiesInUpdate", "--alpha", "0", "--steps", "5")
    went_on(run, steps=5, restarts=2)


@pytest.mark.slow
def test_workers_that_were_receiving_with_one_that_died_are_replaced_as_well(start):
    run = start("DiesInUpdate", "--rollout_workers", "2", "--steps", "5")
    assert run.ends(300) == 0, run.text()
    rows = steps_of(run)
    assert len(rows) == 5 and all(row["mismatch_max"] < 1e-3 for row in rows)
    assert sum(row["restarts"] for row in rows) >= 2  # one may not be back before the end


@pytest.mark.slow
def test_a_worker_that_dies_at_its_start_is_replaced(start):
    run = start("DiesAtStart", "--rollout_workers", "2", "--steps", "5")
    assert run.ends(300) == 0, run.text()
    assert len(steps_of(run)) == 5 and run.text().count("a new one starts") == 1


@pytest.mark.slow
def test_one_prompt_that_kills_workers_is_dropped_and_the_run_goes_on(start):
    run = start("Poison", "--steps", "8")
    rows = went_on(run, steps=8, restarts=3)
    poison = sum((row["dropped_prompts"] for row in rows), [])
    assert [reason for reason, _ in poison] == ["killed"]
    assert rows[-1]["dropped_killed"] == 1
    assert "three rollout processes died with it in hand" in run.text()


# -- what ends a run -------------------------------------------------------------------------------

AS_BEFORE = ["--max_restarts", "0"]


def silent(run: Cli) -> int:
    """Seconds without a word from worker 0 that a run with --worker_timeout 8 ended after."""
    said = r"rollout process 0 has not answered for (\d+) s \(it holds .*; --worker_timeout 8\)"
    return int(re.search(said, run.last_line())[1])


def test_without_restarts_a_killed_worker_ends_the_run(start):
    run = start("Odd", *AS_BEFORE)
    run.wait_for_step()
    os.kill(run.worker(), signal.SIGKILL)
    assert run.ends() == 1
    died = "train.py: rollout process 0 died (killed by SIGKILL); "
    assert run.last_line() == died + saved(run)


@pytest.mark.slow
def test_without_restarts_a_worker_that_never_answers_ends_the_run(start):
    run = start("Odd", *AS_BEFORE, "--worker_timeout", "8")
    run.wait_for_step()
    os.kill(run.worker(), signal.SIGSTOP)
    assert run.ends() == 1
    assert silent(run) >= 8


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(start):
    run = start("Broken")
    assert run.ends(240) == 1  # start-up included
    assert "groups failed" in run.last_line() and "no gold answer" in run.last_line()
    assert "Traceback" in run.text() and "in reward" in run.text()


@pytest.mark.slow
def test_a_reward_that_hangs_ends_the_run(start):
    run = start("Hanging", "--env_timeout", "2")
    assert run.ends(240) == 1
    assert "the reward: TimeoutError: took longer than 2 s" in run.last_line()


def saved(run: Cli) -> str:
    """What the last line says of the last checkpoint, which is of the last step."""
    step = steps_of(run)[-1]["step"]
    assert (run.run_dir / f"checkpoint-{step}" / "model.safetensors").exists()
    return f"checkpoint-{step} is written, go on with --resume {run.run_dir}"


def goes_on(start, run: Cli, **kwargs) -> None:
    """The run is resumed for two more steps, and trains on no prompt twice."""
    done = len(steps_of(run))
    again = start("Odd", "--run_dir", str(run.run_dir), "--resume", str(run.run_dir),
                  "--steps", str(done + 2), **kwargs)  # fmt: skip
    again.run_dir = run.run_dir
    assert again.ends(240) == 0, again.text()
    rows = steps_of(again)
    assert [row["step"] for row in rows] == list(range(1, done + 3))
    prompts = [prompt for row in rows for prompt in row["prompt_ids"]]
    assert len(set(prompts)) == len(prompts) == 2 * len(rows)


def test_ctrl_c_ends_the_run_with_code_130(start):
    run = start("Odd", "--rollout_workers", "2")
    run.wait_for_step()
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal sends it, to the whole group
    assert run.ends() == 130
    assert run.last_line() == f"train.py: interrupted; {saved(run)}"


@pytest.mark.slow
def test_two_ctrl_c_in_a_row_end_the_run_at_once_and_without_a_traceback(start):
    run = start("Odd", "--rollout_workers", "2")
    run.wait_for_step()
    for _ in range(2):
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(0.1)
    assert run.ends(20) == 130
    assert "Traceback" not in run.text()


def test_sigterm_says_what_it_did_and_the_run_goes_on_from_there(start):
    run = start("Odd")
    run.wait_for_step()
    run.process.terminate()
    assert run.ends(20) == 143
    assert run.last_line() == f"train.py: terminated (SIGTERM); {saved(run)}"
    goes_on(start, run)


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["SIGTERM", "SIGINT", "a worker"])
def test_two_ranks_save_together_and_say_why_once(start, cause):
    run = start("Odd", "--max_restarts", "0", ranks=2)
    run.wait_for_step()
    if cause == "a worker":
        os.kill(run.worker(), signal.SIGKILL)
    else:
        run.process.send_signal(getattr(signal, cause))
    code, why = {
        "SIGTERM": (143, "terminated (SIGTERM)"),
        "SIGINT": (130, "interrupted"),
        "a worker": (1, "rollout process 0 died (killed by SIGKILL)"),
    }[cause]
    assert run.ends() == code
    assert run.last_line() == f"train.py: {why}; {saved(run)}"
    assert "Traceback" not in run.text()
    goes_on(start, run, ranks=2)


@pytest.mark.slow
def test_the_rank_that_was_killed_is_named_last(start):
    run = start("Odd", ranks=2)
    run.wait_for_step()
    environ = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in run.family()[1:]}
    rank = next(pid for pid, text in environ.items() if b"LOCAL_RANK=1\0" in text)
    os.kill(rank, signal.SIGKILL)
    assert run.ends() == 128 + signal.SIGKILL
    assert run.last_line() == "train.py: trainer rank 1 died (killed by SIGKILL)"


@pytest.mark.slow
def test_a_run_that_was_ended_before_its_first_step_begins_at_0(start):
    run = start("Hanging")
    while "ready" not in run.text():
        time.sleep(0.1)
    run.process.terminate()
    assert run.ends(30) == 143
    assert run.last_line() == "train.py: terminated (SIGTERM); nothing was trained yet"
    again = start("Hanging", "--run_dir", str(run.run_dir), "--resume", str(run.run_dir))
    while "ready" not in again.text():
        assert again.process.poll() is None, again.text()
        time.sleep(0.1)
    assert "begins at step 0" in again.text()


@pytest.mark.slow
def test_a_killed_trainer_loses_what_came_after_its_last_checkpoint_and_trains_on_none_twice(start):
    run = start("Odd", "--save_every", "3")
    while not list(run.run_dir.glob("checkpoint-*")):
        assert run.process.poll() is None, run.text()
        time.sleep(0.1)
    run.process.kill()
    assert run.ends() == -signal.SIGKILL
    goes_on(start, run)


@pytest.mark.slow
def test_a_killed_trainer_takes_its_workers_along(start):
    run = start("Odd")
    run.wait_for_step()
    started = run.family()  # they have another parent as soon as it is gone
    run.process.kill()
    assert len(started) > 1 and run.ends(started=started) == -signal.SIGKILL


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(start):
    run = start("DiesInUpdate", "--max_restarts", "1")
    assert run.ends(240) == 1
    often = "rollout process 0 died (killed by SIGKILL); 1 were replaced within 10 minutes"
    assert run.last_line() == f"train.py: {often}, --max_restarts; {saved(run)}"


@pytest.mark.slow
def test_a_worker_that_hangs_while_it_receives_weights_ends_the_run(start):
    run = start("HangsInUpdate", *AS_BEFORE, "--worker_timeout", "8")
    assert run.ends(240) == 1
    assert silent(run) >= 8


BREAK_ONE_TENSOR = '''
import sys
import train
from plumbing.weights import Sender

send = Sender.send
def corrupted(self, *publish):
    """The publish of version 2 sends one bias that is not the trainer's."""
    self.sends = getattr(self, "sends", -1) + 1
    if self.sends == 2:
        bias = self.parameters[self.manifest.names.index("model.layers.1.self_attn.v_proj.bias")]
        bias.data += 0.1
        done = send(self, *publish)
        bias.data -= 0.1
        return done
    return send(self, *publish)
Sender.send = corrupted
if __name__ == "__main__":
    sys.exit(train.main())
'''


def test_one_wrong_tensor_in_a_publish_ends_the_run(start, tmp_path):
    script = tmp_path / "break_one_tensor.py"
    script.write_text(BREAK_ONE_TENSOR)
    run = start("Odd", script=str(script))
    assert run.ends(240) == 1
    assert "trainer and engine disagree after the publish of version 2" in run.last_line()
