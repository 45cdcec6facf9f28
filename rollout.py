"""Both ends of the pipe between the trainer and a rollout process.

    Scheduler (in the trainer)                           Worker (a process)
    ────────────────────────────────────                 ─────────────────────────────────
    buffer.admit() ─▶ queue ─ ticket to a worker with room ─▶ episode coroutine ⇄ engine.step()
    buffer.add()   ◀──────────── finished samples ────── reward, as each sample ends
    publish: "update" ─▶ "paused" ─▶ broadcast ─▶ load, probe ─▶ "loaded" ─▶ "commit"

*Queue scheduling*: tickets wait in one deque, and the worker that has the fewest is sent the next
one, as long as it has room. A worker has a few more tickets than its engine decodes sequences, so
that when one ends the next is there. Each of the n samples of a group has a ticket of its own
(*prompt replication*).

*Pause-update-resume*: a weight update happens between two engine steps. Running sequences keep
their tokens; their KV cache is recomputed under the new weights and decoding goes on, so a sample
may span versions, and each token carries the version and the log-probability that made it.

Paper: ROLL Flash (arXiv 2510.11345): LLMProxy, queue scheduling, prompt replication. Departure: the
paper aborts and re-submits running requests at an update, here the engine keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import logging
import math
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

import torch.multiprocessing as mp
from tqdm import tqdm

from buffer import Sample, SampleBuffer, Ticket
from envs import Episode, Unwanted, run_episode
from plumbing.calls import EnvCalls, history
from plumbing.processes import (
    Processes,
    RolloutError,
    cause,
    die_with_parent,
    say,
    show_stacks,
)
from plumbing.publish import Publisher, Update
from plumbing.settings import Settings, WorkerSpec
from plumbing.spans import MAIN, STEP_LIMIT, Span, spans
from plumbing.weights import Manifest
from tasks.find import make_task


class Dispatcher:
    """Queue scheduling: one queue, and the emptiest worker takes the next ticket."""

    message = "tickets"  # what a worker is told to do with them

    def __init__(self, workers: int, places: int, fixed: int = 0):
        """`places`: sequences that a worker's engine decodes at once. `fixed`: tickets that it has
        in hand; 0: an eighth more than places, and more if those do not suffice."""
        self.queue: deque[Ticket] = deque()
        self.held: list[set[Ticket]] = [set() for _ in range(workers)]
        self.in_hand = fixed or places + max(1, places // 8)  # when one ends, the next is there
        self._most = fixed or 4 * places
        self._ended: set[int] = set()  # groups whose queued tickets are skipped
        self.away: set[int] = set()  # workers that were replaced and hold no weights yet
        self.deaths: Counter[Ticket] = Counter()  # of workers that had it in hand

    def assign(self) -> dict[int, list[Ticket]]:
        """Hand queued tickets to workers with room; returns the new tickets of each worker."""
        given: dict[int, list[Ticket]] = {}
        if not self.queue:
            return given
        taken = [math.inf if w in self.away else len(held) for w, held in enumerate(self.held)]
        apart = []
        while self.queue and min(taken) < self.in_hand:
            worker = taken.index(min(taken))
            ticket = self.queue.popleft()
            if ticket.group in self._ended:
                continue
            if self.suspect(ticket) and any(map(self.suspect, self.held[worker])):
                apart.append(ticket)  # one at a time: the next death tells which of them it is
                continue
            self.held[worker].add(ticket)
            taken[worker] += 1
            given.setdefault(worker, []).append(ticket)
        self.queue.extendleft(reversed(apart))
        return given

    def suspect(self, ticket: Ticket) -> bool:
        return self.deaths[ticket] >= 2

    def lose(self, worker: int, fault: bool = True) -> list[Ticket]:
        """A worker is gone: its tickets go to the front of the queue. Returns those that have now
        been in hand at three deaths; they are not queued again. `fault`: whether it counts."""
        self.away.add(worker)
        held, self.held[worker] = sorted(self.held[worker]), set()
        self.deaths.update(held if fault else ())
        self.queue.extendleft(t for t in reversed(held) if self.deaths[t] < 3)
        return [ticket for ticket in held if self.deaths[ticket] >= 3]

    def widen(self) -> None:
        """An engine had places free while tickets were waiting here: its episodes end too fast, or
        are at their environments. Few tickets at a time balance workers better, so not before."""
        self.in_hand = min(self._most, self.in_hand + max(1, self.in_hand // 4))

    def cancel(self, group: int) -> dict[int, list[Ticket]]:
        """Forget the tickets of a group; returns those that workers still have to stop."""
        self._ended.add(group)  # whoever takes them from the queue looks: no search through it here
        stop = {}
        for worker, held in enumerate(self.held):
            if mine := [ticket for ticket in held if ticket.group == group]:
                held.difference_update(mine)
                stop[worker] = mine
        return stop


# -- in the trainer: what is generated, and under which weights ----------------------------------


class Scheduler:
    """Feeds this node's workers from the buffer, and leads them through each publish.

    `workers` (`processes.Processes`) carry what is said to them, wait, and call `hear` in a thread
    with what they say: so results get into the buffer and tickets out of it also during a train
    step. All state is behind their one lock.
    """

    def __init__(
        self,
        workers: Processes,
        settings: Settings,
        buffer: SampleBuffer,
        make_ticket: Callable[[int, int], Ticket],
        dispatcher: type[Dispatcher] = Dispatcher,
        dtype: str = "float32",
    ):
        """`make_ticket(admission index, sample)`; `dtype`: of the weights that workers are sent."""
        self.workers, self.settings, self.buffer = workers, settings, buffer
        self.make_ticket = make_ticket
        places = settings.max_num_seqs, settings.tasks_per_worker
        self.dispatcher = dispatcher(settings.rollout_workers, *places)
        self.decoding = False  # not before the first commit
        self.publisher = Publisher(workers, settings.start_timeout, dtype, self.committed)
        self.counts: Counter[str] = Counter()  # the workers': seconds by kind, tokens, ...
        self._lost_at: dict[int, float] = {}  # of the workers that are being replaced
        self._spans: list[deque[Span]] = [deque(maxlen=STEP_LIMIT) for _ in self.dispatcher.held]
        self._evaluating: dict[Ticket, Sample | None] = {}
        self._eval_failures: Counter[Ticket] = Counter()
        self.progress = buffer.progress()  # where a run would go on that is resumed after this row

    def feed(self) -> None:
        """Admit what the buffer allows, and hand tickets to workers with room. Under the lock."""
        if not self.decoding:
            return
        for group in self.buffer.admit():
            samples = range(self.buffer.group_size + self.buffer.redundant_samples)
            with spans("admit", 1, group=group.index, version=self.buffer.version):
                self.dispatcher.queue.extend(self.make_ticket(group.index, i) for i in samples)
        for worker, tickets in self.dispatcher.assign().items():
            self.workers.send(worker, self.dispatcher.message, tickets)

    # -- what workers say ------------------------------------------------------------------------

    def hear(self, worker: int, kind: str, *args) -> None:
        """Take one message of a worker. Under the lock."""
        if kind == "results":
            self._take_results(worker, *args)
        else:
            self.publisher.hear(worker, kind, *args)
        if kind == "lost":
            self._lose(worker, *args)
        elif kind == "ready" and worker in self._lost_at:
            restart = "restart", MAIN, self._lost_at[worker], spans.clock(), {}
            self._spans[worker].append(restart)

    def _lose(self, worker: int, why: RolloutError, fault: bool) -> None:
        """Another process takes this worker's number: others go on with what it had in hand."""
        self.counts["restarts"] += 1
        self._lost_at[worker] = spans.clock()
        tasks = len(self.dispatcher.held[worker])
        say(f"{why}: a new one starts, its {tasks} tasks are queued again")
        if why.details:
            say(why.details)
        for ticket in self.dispatcher.lose(worker, fault):
            say(f"dropped prompt {ticket.prompt_id}: three rollout processes died with it in hand")
            if ticket.eval:
                self._leave_out(ticket, str(why), why.details)
            else:
                self.buffer.drop_if_open(ticket.group, "killed")
        self._stop_closed()
        self.feed()

    def holds(self, worker: int) -> str:
        """What a worker has in hand, for messages."""
        return f"{len(self.dispatcher.held[worker])} tasks"

    def _take_results(
        self, worker: int, samples: list, failures: list, too_old: list, counts, done
    ) -> None:
        self.counts.update(counts)
        self._spans[worker].extend(done)
        if counts.get("steps_below_cap") and self.dispatcher.queue:
            self.counts["steps_starved"] += counts["steps_below_cap"]
            self.dispatcher.widen()
        held = self.dispatcher.held[worker]
        for sample in samples:
            held.discard(sample.ticket)
            if sample.ticket in self._evaluating:
                self._evaluating[sample.ticket] = sample
            else:
                self.buffer.add(sample)
        for ticket, details in failures:
            held.discard(ticket)
            self._take_failure(ticket, details)
        for ticket in too_old:
            held.discard(ticket)
            self.buffer.drop_if_open(ticket.group, "stale")
        if self.buffer.hopeless():
            count = self.buffer.dropped_for["filtered"]
            raise RolloutError(
                f"filtering found no signal: {count} groups dropped, --filter_limit "
                f"{self.buffer.filter_limit:g} batches' worth of them since the last batch "
                "(the task is too easy or too hard for the model)"
            )
        self._stop_closed()
        self.feed()

    def _stop_closed(self) -> None:
        """Cancel what is still running for groups that have ended: losers of a race, and the rest
        of dropped groups. Under the lock."""
        for group in self.buffer.take_closed():
            for worker, tickets in self.dispatcher.cancel(group).items():
                self.workers.send(worker, "cancel", tickets)

    def _take_failure(self, ticket: Ticket, details: str) -> None:
        """Try it once more, ahead of the queue, with the same seed; then do without it."""
        last, before = cause(details), self.buffer.dropped_for["failed"]
        self.counts["failed_samples"] += 1
        if ticket.eval:
            self._eval_failures[ticket] += 1
            again = self._eval_failures[ticket] < 2
        else:
            again = self.buffer.fail(ticket)
        if again:
            self.dispatcher.queue.appendleft(ticket)
        elif ticket.eval:
            self._leave_out(ticket, last, details)
        dropped = self.buffer.dropped_for["failed"]
        if dropped > before and dropped <= 5:  # the first few say enough; metrics have the count
            say(f"dropped prompt {ticket.prompt_id}, which failed twice: {last}")
        if dropped > before and self.buffer.too_many_failed():
            raise RolloutError(
                f"{dropped} groups failed, more than half of those that ended; the last, "
                f"prompt {ticket.prompt_id}: {last}",
                details,
            )

    def _leave_out(self, ticket: Ticket, last: str, details: str) -> None:
        """Do without a held-out prompt; too many of those end the run."""
        self._evaluating.pop(ticket, None)
        left_out = sum(count > 1 for count in self._eval_failures.values())
        if left_out > len(self._evaluating):
            raise RolloutError(
                f"evaluation: {left_out} held-out prompts failed, more than half; the last, "
                f"prompt {ticket.prompt_id}: {last}",
                details,
            )

    # -- a publish: see `plumbing/publish.py` ----------------------------------------------------

    def pause(self, version: int, manifest: Manifest, probe_ids: list[int], reference) -> list[int]:
        """Stop the workers that do not hold `version` between two engine steps, and have them
        expect it. Returns which, when all have paused. They load, are probed and go on to decode
        while the caller trains: see `wait_committed`."""
        self.publisher.wait_committed()
        with self.workers.changed:
            self.buffer.expect(version)
            self._stop_closed()
        return self.publisher.pause(version, manifest, probe_ids, reference)

    def committed(self, update: Update) -> None:
        """All members hold these weights: decoding and admission go on. Under the lock."""
        self.buffer.commit(update.version)
        for worker in self.dispatcher.away & update.members:
            after = spans.clock() - self._lost_at.pop(worker)
            say(f"rollout process {worker} is back after {after:.1f} s")
        self.dispatcher.away -= update.members
        self.decoding = True
        self.feed()

    def wait_committed(self) -> None:
        self.publisher.wait_committed()

    # -- for the training loops ------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], what: Callable[[], str], timeout: float) -> bool:
        """Wait until it is `ready`. False: a worker that was replaced has to be published to."""
        self.workers.wait(lambda: ready() or self.publisher.behind, what, timeout)
        with self.workers.changed:
            return ready()

    def get_batch(self, timeout: float) -> list[Sample] | None:
        """The next batch; waits for it while workers generate. None: publish, and ask again."""
        if not self.wait(self.buffer.batch_ready, self.buffer.pending, timeout):
            return None
        with self.workers.changed:
            batch = self.buffer.pop_batch()
            self._stop_closed()
            return batch

    def begin_evaluation(self, tickets: Iterable[Ticket]) -> None:
        """Run evaluation tickets past admission and ahead of training, under one version."""
        self.wait_committed()
        with self.workers.changed:
            self._evaluating, self._eval_failures = dict.fromkeys(tickets), Counter()
            self.dispatcher.queue.extendleft(reversed(self._evaluating))
            self.feed()

    def evaluated(self, timeout: float) -> list[Sample] | None:
        """Their samples, without those that failed twice. None: publish, and ask again."""

        def missing() -> int:
            return list(self._evaluating.values()).count(None)

        if not self.wait(lambda: not missing(), lambda: f"{missing()} evaluation samples", timeout):
            return None
        with self.workers.changed:  # what it took is not part of the next step's
            self.counts = Counter(restarts=self.counts["restarts"])
            return list(self._evaluating.values())

    def news(self) -> dict:
        """Since the last call: `counts` of the workers, with what the buffer threw away, and
        `dropped_prompts` and `dropped_groups` as (reason, which). `dropped`: so far, by reason."""
        with self.workers.changed:
            counts, self.counts = self.counts, Counter()
            lost, self.buffer.lost = self.buffer.lost, Counter()
            new, self.buffer.newly_dropped = self.buffer.newly_dropped, []
            dropped = Counter(self.buffer.dropped_for)
            reasons = [self.buffer.dropped[index] for index in new]
            self.progress = self.buffer.progress()  # exactly what rows have told of by now
        counts.update({f"lost_{what}": value for what, value in lost.items()})
        prompts = [self.make_ticket(index, 0).prompt_id for index in new]
        named = {"dropped_prompts": prompts, "dropped_groups": new}
        named = {key: list(zip(reasons, of, strict=True)) for key, of in named.items()}
        return {"counts": counts, "dropped": dropped} | named

    def mismatch(self, version: int) -> tuple[float, float]:
        """Largest and mean |logprob difference| of trainer and engines, of a version's probe."""
        none = 0.0, 0.0  # no worker ever held it, so nothing was made under it
        return self.publisher.proof.mismatches.get(version, none)

    def take_spans(self) -> list[list[Span]]:
        """What each worker has done since the last call."""
        with self.workers.changed:
            taken = [list(recorded) for recorded in self._spans]
            for recorded in self._spans:
                recorded.clear()
        return taken


# -- in a rollout process: an event loop that steps the engine, one coroutine an episode ---------


class Worker:
    """The event loop of a rollout process: messages in, engine steps, finished samples out."""

    def __init__(self, conn: Connection, spec: WorkerSpec):
        from transformers import AutoTokenizer

        from plumbing.engine import Engine  # vLLM: ten seconds, and in this process only

        conn.send(("stage", "vLLM is imported, it loads the model"))
        self.conn, self.spec = conn, spec
        self.engine = Engine(spec)
        self.task = make_task(spec.settings, spec.settings.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(spec.model)
        self.calls = EnvCalls(spec.settings.env_timeout, spec.threads)
        self.episodes: dict[Ticket, tuple[Episode, asyncio.Task]] = {}
        self.clear_results()
        self.new_lanes()
        self.update = None  # a weight update that is waiting for its turn
        self.stopping = False
        self.sent_at = time.monotonic()

    def new_lanes(self) -> None:
        """Rows of the timeline, one an episode in progress: the lowest that is free."""
        self.lanes, self.free_lanes = itertools.count(1), []

    def clear_results(self) -> None:
        """What there is to report, from now on."""
        self.finished: list[Sample] = []
        self.failed: list[tuple[Ticket, str]] = []
        self.too_old: list[Ticket] = []
        self.counts: Counter[str] = Counter()  # seconds by kind, tokens, ..., since the last report

    async def serve(self) -> None:
        """Step the engine while there is something to step, wait while there is not."""
        self.wake = self.engine.wake
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.read_messages, args=(loop,), daemon=True).start()
        self.conn.send(("ready",))
        while not self.stopping:
            with spans("episodes"):
                await asyncio.sleep(0)  # let messages in and episodes go on
                self.report()
            draining = self.spec.settings.on_update == "drain" and self.engine.turns
            if self.update and not draining:
                await self.load_update(*self.update)
            elif self.engine.turns:
                with spans("decode", steps=1) as args:
                    args["tokens"] = self.engine.step()
            else:
                with spans("idle"):
                    await self.sleep()

    async def sleep(self) -> None:
        """Until a message comes or an episode goes on; now and then to report."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), 2.0)
        self.wake.clear()

    async def load_update(self, version: int, manifest: dict, probe_ids: list[int]) -> None:
        """Pause, load, probe; then decode nothing until every worker has the new weights.
        Environments and rewards go on throughout."""
        self.update = None
        if version < self.engine.version:
            raise ValueError(f"asked to load version {version}, holds {self.engine.version}")
        self.arriving = False
        self.conn.send(("paused", version))
        with spans("load"):
            await self.sleep_until(lambda: self.arriving)  # until all have paused
            if self.stopping:
                return
            restart = self.spec.settings.on_update == "restart"
            sums = self.engine.load_weights(manifest, restart)
        with spans("probe"):
            self.conn.send(("loaded", version, self.engine.probe(probe_ids), sums))
        with spans("commit", version=version):
            await self.sleep_until(lambda: self.engine.version == version)

    async def sleep_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.stopping:
            await self.sleep()
            self.report()

    def report(self) -> None:
        """Send what has finished since the last engine step, or a sign of life now and then."""
        now = time.monotonic()
        if self.finished or self.failed or self.too_old or now - self.sent_at > 2.0:
            self.counts += self.engine.take_counts() + spans.seconds
            self.counts["env_cpu"] += self.calls.take_cpu()
            results = self.finished, self.failed, self.too_old, dict(self.counts)
            self.conn.send(("results", *results, spans.take()))
            spans.seconds.clear()
            self.clear_results()
            self.sent_at = now

    # -- messages of the scheduler ---------------------------------------------------------------

    def on_message(self, kind: str, *args) -> None:
        getattr(self, f"on_{kind}")(*args)
        self.wake.set()

    def on_tickets(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            episode = self.open(ticket)
            self.start(self.run(episode), [episode])

    def on_cancel(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.cancel(ticket)

    def on_join(self, wire: dict) -> None:
        self.engine.core.collective_rpc("init_weight_transfer_engine", args=(wire,))
        self.conn.send(("joined",))

    def on_update(self, *update) -> None:
        self.update = update
        if self.spec.settings.on_update == "drain":
            self.engine.gate.clear()

    def on_receive(self) -> None:
        self.arriving = True

    def on_commit(self, version: int) -> None:
        """Decode under these weights from now on; stop what they have made too old."""
        self.engine.version = version
        self.engine.gate.set()
        for ticket, (episode, _) in self.episodes.items():
            if episode.too_old(version):
                self.cancel(ticket)
                self.too_old.append(ticket)

    def on_begin(self, spec: WorkerSpec) -> None:
        """Another run with this engine: drop what is in progress, and hold no version."""
        for _, running in self.episodes.values():
            running.cancel()
        self.task.close()
        self.task = make_task(spec.settings, spec.settings.seed)
        self.calls.timeout = spec.settings.env_timeout
        self.spec, self.engine.version = spec, -1
        self.engine.temperature = spec.settings.temperature
        self.clear_results()
        spans.clear()
        self.conn.send(("begun",))

    def on_stop(self) -> None:
        self.stopping = True

    def read_messages(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own, so that the scheduler's sends never wait for an engine step."""
        while True:
            try:
                message = self.conn.recv()
            except (EOFError, ConnectionResetError):
                os.killpg(0, signal.SIGKILL)  # the trainer is gone: leave nothing behind
            loop.call_soon_threadsafe(self.take, *message)

    def take(self, *message) -> None:
        """What cannot be dealt with ends the run: the scheduler would wait for an answer."""
        try:
            self.on_message(*message)
        except Exception:
            self.conn.send(("fatal", traceback.format_exc()))
            os.killpg(0, signal.SIGKILL)

    # -- episodes --------------------------------------------------------------------------------

    def open(self, ticket: Ticket) -> Episode:
        limits = self.spec.limits_of(ticket)
        episode = Episode(ticket, self.task, self.engine, self.tokenizer, self.calls, limits)
        episode.lane = heapq.heappop(self.free_lanes) if self.free_lanes else next(self.lanes)
        return episode

    async def run(self, episode: Episode) -> None:
        """An episode to its end, whatever that is."""
        try:
            sample = await run_episode(episode)
            self.finished.append(sample)  # a new list by now: looked up after the await
        except Unwanted:
            self.too_old.append(episode.ticket)
        except BaseException as error:  # of whatever kind: the scheduler counts it and decides
            if asyncio.current_task().cancelling():
                raise  # we did it
            self.failed.append((episode.ticket, history(error)))

    def start(self, work, episodes: list[Episode]) -> None:
        """Run it, and forget the episodes when it ends: also if it is cancelled before it began."""
        running = asyncio.create_task(work)
        self.episodes |= {episode.ticket: (episode, running) for episode in episodes}

        def ended(_) -> None:
            for episode in episodes:
                episode.close()
                heapq.heappush(self.free_lanes, episode.lane)
                self.episodes.pop(episode.ticket, None)
            self.wake.set()

        running.add_done_callback(ended)

    def cancel(self, ticket: Ticket) -> None:
        """Stop an episode at once, in the engine and in its environment; count what it had made."""
        if ticket in self.episodes:
            episode, running = self.episodes[ticket]
            running.cancel()
            self.counts.update(lost_samples=1, lost_tokens=episode.tokens)


def worker_main(conn: Connection, spec: WorkerSpec, kind: type[Worker] = Worker) -> None:
    """Entry point of a rollout process."""
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it misses triton on a CPU
    os.setpgid(0, 0)  # a group of its own, to be killed as one; Ctrl-C is for the trainer alone
    die_with_parent(mp.parent_process().pid)
    if spec.stacks:
        show_stacks(spec.stacks)
    tqdm.set_lock(threading.RLock())  # its default, shared between processes, outlives a kill
    try:
        worker = kind(conn, spec)
        gc.freeze()  # what exists by now stays: the collector need not walk it again and again
        asyncio.run(worker.serve())
    except Exception:  # the process ends here: hand the traceback to the trainer first
        conn.send(("fatal", traceback.format_exc()))
        conn.close()
        os.killpg(0, signal.SIGKILL)
    worker.task.close()
    os._exit(0)  # vLLM's and torch's exit handlers have nothing left to save
