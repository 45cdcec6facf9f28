"""The rollout processes of this node: how they start, are spoken to, are replaced, and end.

Each has a pipe of its own, so no lock is shared and a killed one leaves nothing locked. One that
died, or does not answer, is killed with all that it started, and another takes its number. What is
said over the pipes is not known here: see `rollout.Scheduler` and `rollout.Worker`.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch.multiprocessing as mp
from tqdm import tqdm

STALL = 60.0  # seconds until a wait says what it is for; then after as many again, doubled
LOADING = 4.0  # times as long as else a worker may be silent while it receives and loads weights
WINDOW = 600.0  # seconds that --max_restarts counts over


class RolloutError(RuntimeError):
    """The rollout side failed. `details` is the child's traceback, if there is one."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


def cause(details: str) -> str:
    """The exception of a traceback, in one line."""
    return [line for line in details.splitlines() if line[:1].strip()][-1]


def say(line: str) -> None:
    """To stderr, whatever bar is drawn there."""
    with tqdm.external_write_mode(file=sys.stderr):
        print(line, file=sys.stderr)


class Patience:
    """A wait that is not over soon says what it is for, less and less often."""

    def __init__(self):
        self.began = time.monotonic()
        self._next = self.began + STALL

    def say(self, what: Callable[[], str]) -> None:
        if (now := time.monotonic()) > self._next:
            self._next = now + (now - self.began)
            say(f"waiting for {now - self.began:.0f} s by now: {what()}")


class Processes:
    """A process and a pipe for every worker, and a thread that hears what they say.

    They may serve several runs, one after the other: `listen` says whose they are. What goes wrong
    with one of them is raised by whoever waits.
    """

    def __init__(self):
        self.processes: list[mp.Process] = []
        self.pipes: list[Connection] = []
        self.lives: Counter[int] = Counter()  # how often each was replaced
        self.faults: list[float] = []  # when one ended that should not have, within the WINDOW
        # Kept here by `weights.Sender`, since it lives as long as they do: of which (worker, life).
        self.weight_group: tuple[list | None, object] = None, None
        self.changed = threading.Condition()  # the one lock, and the word that there is news
        self.error: RolloutError | None = None
        self.slack: dict[int, float] = {}  # these may be silent for so many times as long
        self.starting: Callable[[int, str], None] = lambda worker, stage: None  # told how far it is
        self.heard: list[float] = []
        self.stacks = ""  # the file for the stacks of all processes; empty: none
        self._said: list[set[str]] = []
        self._wake_reader, self._wake_writer = mp.Pipe(duplex=False)
        self._sending = threading.Lock()  # trainer and thread both do
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name="scheduler", daemon=True)

    @property
    def count(self) -> int:
        return len(self.pipes)

    def start(self, main: Callable, specs: list, devices: list[str | None], threads: int) -> None:
        """Spawn a process for each spec, which runs main(pipe, spec)."""
        self._main, self.specs, self._devices, self._threads = main, specs, devices, threads
        for worker in range(len(specs)):
            process, pipe = self._spawn(worker)
            self.processes.append(process)
            self.pipes.append(pipe)

    def _spawn(self, worker: int) -> tuple[mp.Process, Connection]:
        context = mp.get_context("spawn")
        mine, theirs = context.Pipe()
        arguments, name = (theirs, self.specs[worker]), f"rollout-{worker}"
        process = context.Process(target=self._main, args=arguments, name=name, daemon=False)
        # Ctrl-C reaches the whole terminal group; what it means is for this process to say.
        # Blocked, as the child inherits it, and not ignored: one that comes now is not lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with child_environment(self._devices[worker], self._threads):
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()  # so that the worker's death reads as the end of the pipe
        return process, mine

    def listen(self, owner, settings) -> None:
        """From now on call owner.hear(worker, kind, *args) for all that is said, under the lock;
        what was said before its "ready" or "begun" is of an earlier run. `owner.holds(worker)`: for
        messages. `settings` have the patience with workers, and how many may be replaced."""
        with self.changed:
            self.owner, self.settings = owner, settings
            self.heard = [time.monotonic()] * self.count
            self._said = [set() for _ in self.pipes]
            self.slack.clear()
        if not self._thread.is_alive():
            self._thread.start()

    def begin(self, specs: list) -> None:
        """Another run: tell all workers, which answer "begun"."""
        self.specs = specs
        for worker, spec in enumerate(specs):
            self.send(worker, "begin", spec)

    def send(self, worker: int, *message) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipes[worker].send(message)  # that it is dead is noticed where it is listened to

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: Callable[[], str], timeout: float) -> None:
        """Wait for `condition`; raise what went wrong, or say `what` did not come."""
        deadline, patience = time.monotonic() + timeout, Patience()
        with self.changed:
            while not condition():
                if self.error:
                    raise self.error
                if time.monotonic() > deadline:
                    stacks = self._stacks(range(self.count))
                    raise RolloutError(f"waited {timeout:.0f} s for {what()}{stacks}")
                patience.say(lambda: f"for {what()}; {self._state()}")
                self.changed.wait(1.0)
            if self.error:
                raise self.error

    def check(self, within: float, news: Callable[[], bool]) -> None:
        """Raise what went wrong; wait so many seconds for that, or for `news`."""
        deadline = time.monotonic() + within
        with self.changed:
            while not self.error and not news() and time.monotonic() < deadline:
                self.changed.wait(0.1)
            if self.error:
                raise self.error

    def await_word(self, word: str, timeout: float) -> None:
        """Wait until every worker has said this."""
        self.wait(
            lambda: all(word in said for said in self._said),
            lambda: f"{sum(word not in said for said in self._said)} workers to be {word}",
            timeout,
        )

    def _state(self) -> str:
        """What each worker has in hand, and when it was heard last, for messages."""
        now = time.monotonic()
        said = (
            f"rollout process {worker} has {self.owner.holds(worker)}, was heard {now - heard:.0f} "
            "s ago"
            for worker, heard in enumerate(self.heard)
        )
        return ", ".join(said)

    def _stacks(self, workers: Iterable[int]) -> str:
        """Where all threads of this process and of these workers are, to a file; returns the part
        of a message that names it."""
        if not self.stacks:
            return ""
        with Path(self.stacks).open("a") as file:
            file.write(f"== {time.strftime('%H:%M:%S')}, the trainer\n")
            file.flush()
            faulthandler.dump_traceback(file)
            for worker in workers:
                if self._said[worker]:  # it has told Python what to do with the signal
                    file.write(f"\n== rollout process {worker}\n")
                    file.flush()
                    os.kill(self.processes[worker].pid, signal.SIGUSR1)
                    time.sleep(0.3)  # it writes there itself: see `show_stacks`
        return f"; stacks: {self.stacks}"

    # -- the thread ------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._ending:
                for pipe in wait([*self.pipes, self._wake_reader], timeout=1.0):
                    if pipe is self._wake_reader:
                        pipe.recv_bytes()
                    elif pipe in self.pipes:  # else it was replaced a moment ago
                        self.receive(self.pipes.index(pipe))
                self.check_alive()
        except RolloutError as error:
            self.fail(error)
        except Exception as error:  # a bug in here must reach the trainer, not die in a thread
            self.fail(RolloutError(f"scheduler thread: {error!r}", traceback.format_exc()))

    def fail(self, error: RolloutError) -> None:
        """Have whoever waits next raise this: there is no way on."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def receive(self, worker: int) -> None:
        """Take the next message of a worker, and replace one that is gone. Raises RolloutError for
        a failure at its start, which others would have too."""
        try:
            kind, *args = self.pipes[worker].recv()
        except (EOFError, ConnectionResetError):
            died = RolloutError(f"rollout process {worker} died ({self._end(worker)})")
            return self.replace(worker, died)
        with self.changed:
            self.heard[worker] = time.monotonic()
            if kind == "stage" and not self.lives[worker]:
                self.starting(worker, *args)
            if kind == "fatal":
                failed = f"rollout process {worker} failed: {cause(args[0])}"
                error = RolloutError(failed, args[0])
                if not self._said[worker]:
                    raise error
                self.replace(worker, error)
            elif self._said[worker] or kind in ("ready", "begun"):
                self._said[worker].add(kind)
                self.owner.hear(worker, kind, *args)
            self.changed.notify_all()

    def check_alive(self) -> None:
        """Replace workers that have been silent for too long."""
        for worker, heard in enumerate(self.heard):
            slack, patience = self.slack.get(worker, 1.0), self.settings.worker_timeout
            limit = slack * patience if self._said[worker] else self.settings.start_timeout
            if (silent := time.monotonic() - heard) > limit:
                more = f", {slack:g} times while it loads" if slack > 1 else ""
                waited = f"--worker_timeout {patience:g}"
                if not self._said[worker]:
                    waited = f"--start_timeout {limit:g}"
                error = RolloutError(
                    f"rollout process {worker} has not answered for {silent:.0f} s (it holds "
                    f"{self.owner.holds(worker)}{more}; {waited}){self._stacks([worker])}"
                )
                self.replace(worker, error)

    def replace(self, worker: int, error: RolloutError, fault: bool = True) -> None:
        """Kill what is left of a worker and start another in its place. Raises `error` instead if
        that has been done too often. `fault`: whether it counts."""
        most = self.settings.max_restarts
        with self.changed:
            if fault:
                now = time.monotonic()
                self.faults = [t for t in self.faults if now - t < WINDOW] + [now]
                if len(self.faults) > most:
                    often = f"; {most} were replaced within {WINDOW / 60:g} minutes, --max_restarts"
                    raise RolloutError(f"{error}{often if most else ''}", error.details)
            self._kill(self.processes[worker])
            old = self.pipes[worker]
            self.processes[worker], self.pipes[worker] = self._spawn(worker)
            old.close()
            self.lives[worker] += 1
            self.heard[worker], self._said[worker] = time.monotonic(), set()
            self.slack.pop(worker, None)
            self.owner.hear(worker, "lost", error, fault)
            self.changed.notify_all()

    def _end(self, worker: int) -> str:
        self.processes[worker].join(5)
        code = self.processes[worker].exitcode
        return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit {code}"

    def close(self) -> None:
        """End every worker and its children; also when one no longer answers."""
        self._ending = True
        self._wake_writer.send_bytes(b"x")
        if self._thread.is_alive():
            self._thread.join(10.0)  # it may be replacing one
        for worker in range(self.count):
            self.send(worker, "stop")
        deadline = time.monotonic() + (0.0 if self.error else 3.0)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            self._kill(process)

    def _kill(self, process: mp.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the worker and all that it started
        process.kill()  # one that was only starting has no group of its own yet
        process.join()


# -- what a child starts with --------------------------------------------------------------------

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "LOCAL_WORLD", "TORCHELASTIC_")


@contextlib.contextmanager
def child_environment(devices: str | None, threads: int):
    """The environment that children start with; this process's own is put back afterwards."""
    saved = dict(os.environ)
    for name in saved:
        if name in TORCHRUN_VARIABLES or name.startswith(TORCHRUN_PREFIXES):
            del os.environ[name]
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    else:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # one helper of vLLM is compiled: 2-20 s a start
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process: the step loop is ours
        OMP_NUM_THREADS=str(threads),
        OMP_WAIT_POLICY="PASSIVE",  # spinning threads beside a busy process cost a factor of ten
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL=saved.get("VLLM_LOGGING_LEVEL", "ERROR"),
        VLLM_CPU_KVCACHE_SPACE=saved.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        TOKENIZERS_PARALLELISM="false",
        TQDM_DISABLE="1",  # the engine's own bars and warnings; errors do come through
        PYTHONWARNINGS="ignore",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def show_stacks(path: str) -> None:
    """Have this process write the stacks of its threads there whenever it gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, Path(path).open("a"), all_threads=True)  # noqa: SIM115


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the one that started it dies, however it dies."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before we asked


@contextlib.contextmanager
def ends_within(seconds: float, line: str):
    """End this process and all rollout processes, with this line, unless it is done by then."""

    def late() -> None:
        print(line, file=sys.stderr, flush=True)
        kill_children_and_exit(1)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def kill_children_and_exit(code: int) -> None:
    """End this process and all rollout processes at once, without a word."""
    for child in mp.active_children():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
    os._exit(code)
