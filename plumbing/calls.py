"""How a user's code is called: environments and rewards, beside the loop that steps the engine.

*Asynchronous reward*: a sample is scored as soon as it ends, in a thread or on a loop of its own,
so that a slow reward never stalls decoding, and goes on during a weight update.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from plumbing.spans import spans

UNTAMED = (SystemExit, KeyboardInterrupt, StopIteration, StopAsyncIteration)


def tame(call: Callable, *args):
    """call(*args), where what would end an event loop or a thread becomes an ordinary error."""
    try:
        return call(*args)
    except UNTAMED as error:
        raise RuntimeError(repr(error)) from error


class EnvCalls:
    """Calls environments and rewards apart from the event loop that steps the engine: on a loop of
    their own, in a thread, so that they go on during an engine step and a weight update. Blocking
    ones run in a pool of threads from there."""

    def __init__(self, timeout: float, threads: int):
        self.timeout = timeout  # seconds that one call may take
        self.pool = ThreadPoolExecutor(threads)
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
        work = spans.around(self._work(call, args, blocking, wait), what, lane)
        work = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            async with asyncio.timeout(None if own_clock else self.timeout) as clock:
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if not clock.expired():
                raise  # its own
            raise TimeoutError(f"took longer than {self.timeout:g} s (--env_timeout)") from None

    async def _work(self, call: Callable, args: tuple, blocking: bool, wait: float):
        if wait:
            await asyncio.sleep(wait)
        if blocking and not inspect.iscoroutinefunction(call):
            result = await self.loop.run_in_executor(self.pool, tame, call, *args)
        else:
            result = tame(call, *args)
        try:
            return await result if inspect.isawaitable(result) else result
        except UNTAMED as error:
            raise RuntimeError(repr(error)) from error

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
        raise ValueError(" ".join(f"{what}: {type(error).__name__}: {error}".split())) from error
