"""Ctrl-C and SIGTERM: the first one ends a run in order, the second at once.

    interrupts.install()
    with interrupts.held():         the first one waits until this is done: a step, a file
        ...
        with interrupts.released(): here it does not, although this is inside of what holds it

"In order": KeyboardInterrupt, or SystemExit with the code that a shell gives a process that SIGTERM
has ended, is raised in the main thread.
"""

import contextlib
import signal

from plumbing.processes import kill_children_and_exit


class Interrupts:
    def __init__(self):
        self.came: BaseException | None = None  # what the first one raises
        self._raised = False
        self._holding = False

    def install(self) -> None:
        """From now on. Set here also for SIGINT: a shell's background jobs ignore it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        self.__init__()

    def _hear(self, number: int, _) -> None:
        if self.came:
            return kill_children_and_exit(128 + number)
        sigint = number == signal.SIGINT
        self.came = KeyboardInterrupt() if sigint else SystemExit(128 + number)
        self._check()

    def _check(self) -> None:
        if self.came and not self._raised and not self._holding:
            self._raised = True
            raise self.came

    def last(self) -> None:
        """The run is ending: whatever comes now ends it at once."""
        self.came, self._raised = self.came or KeyboardInterrupt(), True

    @contextlib.contextmanager
    def _set(self, holding: bool):
        before, self._holding = self._holding, holding
        try:
            self._check()
            yield
        finally:
            self._holding = before
        self._check()

    def held(self, wanted: bool = True):
        return self._set(wanted or self._holding)

    def released(self):
        return self._set(False)


interrupts = Interrupts()
