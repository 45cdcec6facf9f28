"""How a user's code is called: environments and rewards, beside the loop that steps the engine.

*Asynchronous reward*: a sample is scored as soon as it ends, in a thread or on a loop of its own,
so that a slow reward never stalls decoding, and goes on during a weight update.

Whatever that code raises or says is its sample's failure, and no more: exits and interrupts become
ordinary errors, long texts are clipped, and who takes too long is told where.
"""

import asyncio
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from reprlib import Repr

from plumbing.spans import spans

CLIP = 2000  # characters of what a user's code says in an error
SHORT = Repr()
SHORT.maxstring = SHORT.maxother = 200


def short(value) -> str:
    """A value in an error's text: the repr of a large one is not made whole."""
    return SHORT.repr(value)


def clip(text: str, most: int = CLIP) -> str:
    """Its beginning and its end."""
    left_out = f" [... {len(text) - most} characters ...] "
    return text if len(text) <= most else text[: most // 2] + left_out + text[-most // 2 :]


def said_by(error: BaseException) -> str:
    """What an error is and says, in one line."""
    try:
        text = str(error)
    except Exception as again:  # of whatever kind: it is the user's class
        text = f"its text raises {type(again).__name__}"
    return " ".join(f"{type(error).__name__}: {clip(text)}".split())


def history(error: BaseException) -> str:
    """Where it was raised, and what it came from; the text of each is clipped."""
    parts: list[str] = []
    while error is not None and len(parts) < 4:  # a chain can be a circle
        where = "".join(traceback.format_tb(error.__traceback__, -8))
        parts.insert(0, f"Traceback (most recent call last):\n{where}{said_by(error)}\n")
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def ordinary(error: BaseException) -> bool:
    """Not so: exits, interrupts, the timeouts of some libraries; and what a future cannot hold."""
    return isinstance(error, Exception) and not isinstance(
        error, StopIteration | StopAsyncIteration
    )


def tame(call: Callable, *args):
    """call(*args), where what would end an event loop or a thread becomes an ordinary error."""
    try:
        return call(*args)
    except BaseException as error:
        if ordinary(error):
            raise
        raise RuntimeError(said_by(error)) from error


class Call:
    """One call of the user's code in progress: where it is."""

    def __init__(self):
        self.thread: int | None = None
        self.coroutine = None

    def where(self) -> str:
        """The user's own lines that it stands at; empty if it has not begun."""
        frame = self.thread and sys._current_frames().get(self.thread)
        frames = traceback.extract_stack(frame) if frame else []
        coroutine = self.coroutine
        while coroutine is not None and getattr(coroutine, "cr_frame", None):
            frames.append(traceback.extract_stack(coroutine.cr_frame, 1)[0])
            coroutine = coroutine.cr_await
        inside = [f for f in frames if f.filename != __file__ and "/concurrent/" not in f.filename]
        named = [f"{f.filename}:{f.lineno} {f.name}" for f in inside]
        return " < ".join(reversed(named[-3:]))


class EnvCalls:
    """Calls environments and rewards apart from the event loop that steps the engine: on a loop of
    their own, in a thread, so that they go on during an engine step and a weight update. Blocking
    ones run in a pool of threads from there."""

    def __init__(self, timeout: float, threads: int):
        self.timeout = timeout  # seconds that one call may take
        self.pool = ThreadPoolExecutor(threads)
        self.cpu = 0.0  # seconds of a core that blocking calls took, which decoding did not have
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def __call__(
        self, call: Callable, *args, blocking: bool, own_clock=False, wait=0.0, what="env", lane=1
    ):
        """The value of call(*args), which may be a coroutine; `wait` seconds late, if asked to.
        Raises TimeoutError after --env_timeout seconds, unless the call keeps an `own_clock`.
        `what` and `lane`: of the timeline."""
        if not (blocking or wait or inspect.iscoroutinefunction(call)):
            result = tame(call, *args)  # microseconds: a thread would cost more
            if not inspect.isawaitable(result):
                return result
            call, args = (lambda: result), ()
        this = Call()
        work = spans.around(self._work(this, call, args, blocking, wait), what, lane)
        work = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        try:
            await asyncio.wait([work], timeout=None if own_clock else self.timeout)
            if work.done():
                return work.result()
            # Before it is stopped: afterwards it stands nowhere.
            at = this.where() or "no line: others have all threads"
            raise TimeoutError(f"took longer than {self.timeout:g} s (--env_timeout), at {at}")
        finally:
            work.cancel()  # if it is not done: it took too long, or its episode was stopped

    async def _work(self, this: Call, call: Callable, args: tuple, blocking: bool, wait: float):
        if wait:
            await asyncio.sleep(wait)
        if blocking and not inspect.iscoroutinefunction(call):
            result = await self.loop.run_in_executor(self.pool, self._in_thread, this, call, *args)
        else:
            result = tame(call, *args)
        if not inspect.isawaitable(result):
            return result
        this.coroutine = result
        try:
            return await result
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if ordinary(error):
                raise
            raise RuntimeError(said_by(error)) from error

    def _in_thread(self, this: Call, call: Callable, *args):
        this.thread, before = threading.get_ident(), time.thread_time()
        try:
            return tame(call, *args)
        finally:
            this.thread = None  # the next call here is another one
            self.cpu += time.thread_time() - before

    def take_cpu(self) -> float:
        """Seconds of a core since the last call."""
        taken, self.cpu = self.cpu, 0.0
        return taken

    def later(self, call: Callable) -> None:
        """Have it called in a thread; nobody waits for it."""
        self.pool.submit(call)


def attempt(call, what: str, seconds: float | None) -> None:
    """Call the user's code, for so many seconds at most. Raises ValueError, in one line, for
    whatever it raises; an own ValueError stays as it is."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # it is the user's code: an exit, too, is to be told
            errors.append(error)

    if seconds is None:
        run()
    else:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise ValueError(f"{what}: took longer than {seconds:g} s (--env_timeout)")
    for error in errors:
        if isinstance(error, ValueError | KeyboardInterrupt):
            raise error
        raise ValueError(f"{what}: {said_by(error)}") from error
