"""A publish as the trainer leads it: pause, join, receive, load, probe, commit.

    pause()      every worker that is behind stops between two engine steps        "update" "paused"
    Sender.send  those that are not in the process group yet join it               "join" "joined"
                 all of them receive what trainer rank 0 broadcasts                "receive"
    sent()       the trainer goes on, they load and score the probe                "loaded"
    commit       when all have, and what they have is right, they decode again     "commit"

A worker that is lost in a publish is left out of it, and is published to once another process has
taken its place. While weights move the members depend on each other: then the whole publish is
abandoned and begins again. Requires `processes.Processes`; all state is behind their one lock.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

from plumbing.processes import LOADING, Processes, RolloutError
from plumbing.spans import spans
from plumbing.weights import Broken, Manifest, Proof, Wire


@dataclass(eq=False)
class Update:
    """A publish in progress: which workers have come how far, and what their probes scored."""

    version: int
    reference: np.ndarray  # the trainer's score of the probe, float [P - 1]
    members: set[int]  # the workers that it is for, less those that were lost
    paused: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    loaded: dict[int, np.ndarray] = field(default_factory=dict)
    arrived: dict[int, list] = field(default_factory=dict)  # see `weights.Proof`
    moving: bool = False  # all have paused: from now on they depend on each other
    sent: int | None = None  # the sum of what was broadcast, once it is
    broken: bool = False  # one was lost while weights were moving


class Publisher:
    """Knows which worker holds which version, and leads those that are behind through a publish."""

    def __init__(
        self, workers: Processes, timeout: float, dtype: str, committed: Callable[[Update], None]
    ):
        """`timeout`: seconds for each of the waits. `dtype`: of the weights that workers are sent.
        `committed(update)` is called under the lock; then the workers decode."""
        self.workers, self.timeout, self.committed = workers, timeout, committed
        self.versions: dict[int, int] = {}  # of the workers that are there; -1: it has no weights
        self.proof = Proof(dtype)
        self.update: Update | None = None

    # -- what workers say, under the lock ----------------------------------------------------------

    def hear(self, worker: int, kind: str, *args) -> None:
        """Take a message about a publish, or that a worker is there or is lost."""
        if kind in ("ready", "begun"):
            self.versions[worker] = -1
        elif kind == "paused":
            self.update.paused.add(worker)
        elif kind == "joined":
            self.update.joined.add(worker)
        elif kind == "loaded":
            _, scores, self.update.arrived[worker] = args
            self.update.loaded[worker] = np.asarray(scores)
            self.workers.slack.pop(worker, None)
            self._commit()
        elif kind == "lost":
            self._lose(worker)

    def _lose(self, worker: int) -> None:
        self.versions.pop(worker, None)
        update = self.update
        if update and worker in update.members:
            update.broken |= update.moving and update.sent is None
            update.members.discard(worker)
            update.loaded.pop(worker, None)
            update.arrived.pop(worker, None)
            self._commit()

    def _commit(self) -> None:
        """When every worker has loaded: hold what they have against what was sent; then let them
        go on."""
        update = self.update
        if update.loaded.keys() < update.members or update.sent is None:
            return
        self.update = None
        if not update.members:
            return  # all are lost: whoever takes their places is published to
        self.proof.check(update)
        for worker in sorted(update.members):
            self.workers.send(worker, "commit", update.version)
            self.versions[worker] = update.version
        self.committed(update)

    # -- for the trainer, whose thread these hold up -----------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether a worker waits for its first weights."""
        return -1 in self.versions.values()

    def pause(self, version: int, manifest: Manifest, probe_ids: list[int], reference) -> list[int]:
        """Stop every worker that does not hold `version`, and have it expect those weights. Returns
        which, when all have paused. `reference`: the trainer's own score of the probe."""
        with self.workers.changed:
            members = {worker for worker, held in self.versions.items() if held != version}
            update = self.update = Update(version, np.asarray(reference), members)
            for worker in members:
                self.workers.send(worker, "update", version, asdict(manifest), probe_ids)
        with spans("pause"):
            self.workers.wait(
                lambda: update.paused >= update.members,
                lambda: f"workers {sorted(update.members - update.paused)} to pause",
                self.timeout,
            )
        with self.workers.changed:
            update.moving = True
            return sorted(update.members)

    def join(self, wires: list[Wire]) -> None:
        """Have each member, in their order, take its place in a new process group."""
        self._tell("join", map(asdict, wires))

    def wait_joined(self) -> None:
        update = self.update
        self.workers.wait(
            lambda: update.broken or update.joined >= update.members,
            lambda: f"workers {sorted(update.members - update.joined)} to join",
            self.timeout,
        )
        self.alive()

    def receive(self) -> None:
        """Have the members receive what is about to be broadcast."""
        self._tell("receive")

    def _tell(self, kind: str, *each) -> None:
        """What they do now may take long, and they are silent meanwhile."""
        with self.workers.changed:
            self._check_broken()
            for worker, *args in zip(sorted(self.update.members), *each, strict=True):
                self.workers.slack[worker] = LOADING
                self.workers.send(worker, kind, *args)

    def alive(self, within: float = 0.0) -> None:
        """Raise what went wrong, or Broken if a member was lost while weights move; wait so many
        seconds for either."""
        self.workers.check(within, lambda: self.update.broken)
        self._check_broken()

    def _check_broken(self) -> None:
        if self.update.broken:
            raise Broken

    def sent(self, checksum: int) -> None:
        """The weights have left; the sum of their bits is this."""
        with self.workers.changed:
            self.update.sent = checksum
            self._commit()

    def _abandon(self) -> None:
        """The publish has failed and is repeated. Those that are left may wait for ever for what
        the one that was lost would have passed on: they are replaced as well."""
        self.workers.check(0.0, lambda: True)  # the run may be about to end instead
        with self.workers.changed:
            update, self.update = self.update, None
            for worker in sorted(update.members):
                what = f"rollout process {worker} was receiving weights with one that is gone"
                self.workers.replace(worker, RolloutError(what), fault=False)

    def wait_committed(self) -> None:
        """Wait until the publish in progress, if there is one, is committed on every worker. One
        whose weights did not all leave is abandoned."""
        if self.update and self.update.sent is None:
            self._abandon()
        with spans("acknowledge"):
            self.workers.wait(
                lambda: self.update is None,
                lambda: f"workers to load version {self.update.version}",
                self.timeout,
            )
