"""Asynchronous RL for language models: the entry point, the two training loops, and one update.

    bash launch.sh                                        quick run for this machine, with set-up
    python train.py --mode async --alpha 1                one trainer rank, one rollout process
    python train.py --mode sync                           the same, generation and training in turn
    python train.py settings.yaml --steps 50              flags from a file, then from here
    torchrun --nproc_per_node 2 train.py                  two trainer ranks (FSDP2) on this machine
    torchrun --nnodes 2 --nproc_per_node 8 ... train.py   two machines; each feeds its own ranks

`buffer.py` has the rule that bounds staleness, `rollout.py` what goes on in the other processes,
`envs.py` what they play, `algos.py` the mathematics. Paper: ROLL Flash (arXiv 2510.11345).
"""

import os

# Threads that spin while they wait starve a busy neighbour; has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import algos
from buffer import Sample, SampleBuffer, Ticket, derive_seed
from envs import Limits, prompt_order
from plumbing import checkpoint, replay
from plumbing.files import WriteError
from plumbing.interrupts import interrupts
from plumbing.packing import Piece, cut
from plumbing.policy import load_policy
from plumbing.processes import Processes, RolloutError, ends_within
from plumbing.ranks import Ranks, whole
from plumbing.replay import NonFiniteError
from plumbing.settings import Settings, WorkerSpec, notes, parse
from plumbing.spans import spans
from plumbing.start import Start, prepare
from plumbing.weights import Sender
from report.log import Log
from report.metrics import batch_metrics, update_metrics
from rollout import Dispatcher, Scheduler, worker_main


def train_sync(run: "Run") -> None:
    """Generate a batch, train on it, publish: each phase has the machine to itself."""
    while run.version < run.settings.steps:
        batch = run.get_batch()  # alpha is 0: nothing more has been admitted, the workers now wait
        run.train_on(batch)
        run.publish(run.version + 1)
        run.wait_committed()  # all workers hold the new weights, and begin on the next batch
        run.finish_step()


def train_async(run: "Run") -> None:
    """The same steps while generation goes on: the workers are up to alpha batches ahead."""
    while run.version < run.settings.steps:
        batch = run.get_batch()  # with luck it is there already
        run.train_on(batch)  # meanwhile the workers decode and compute rewards
        run.publish(run.version + 1)  # they pause and receive; they load while the next step begins
        run.finish_step()


# -- one update: advantages, loss, step ----------------------------------------------------------


class Trainer:
    """The policy, its optimiser, and one update a batch. With one rank on a CPU it is plain
    PyTorch; with several, or on a GPU, FSDP2 shards the same module, and the result is the same:
    every denominator is global, so it does not matter how a batch is cut."""

    def __init__(
        self, ranks: Ranks, settings: Settings, model: str, reference: str, dtype: str, probe=None
    ):
        self.ranks, self.settings, self.dtype = ranks, settings, getattr(torch, dtype)
        self.policy = load_policy(model, ranks, self.dtype, probe)
        self.reference = None
        if settings.kl_coef:
            self.reference = load_policy(reference, ranks, self.dtype).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.seen: list[dict] = []  # what is known of each token of the last step, a micro-batch

    def step(self, samples: list[Sample], version: int = 0) -> dict[str, float]:
        """Train on this node's part of a batch (all of it goes to every rank of the node, each
        takes its share), in `minibatches` optimiser steps. `version` is what the trainer holds.
        Returns metrics of the whole batch."""
        rise = min(1.0, (version + 1) / max(1, self.settings.lr_warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rise
        samples, advantages, rewards = self._judge(samples)
        minibatches = self._minibatches(samples)
        self._anchor(minibatches)
        seen, losses, norms = [], [], []
        for pieces in minibatches:
            sizes = self._sizes(pieces, len(samples))
            stats = [self._backward(piece, advantages, rewards, sizes) for piece in pieces]
            loss, norm = self._optimise(stats, samples)
            seen += stats
            losses.append(loss)
            norms.append(norm)
        self.seen = seen
        means = {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}
        with spans("diagnostics"):
            return means | update_metrics(seen, version, self.ranks)

    def _judge(self, samples: list[Sample]) -> tuple[list[Sample], Tensor, Tensor]:
        """Samples as they are to be trained on, their advantages [S], and their rewards [S]."""
        settings, ranks = self.settings, self.ranks
        if settings.truncated == "mask":
            samples = [replace(s, mask=s.mask & (not s.truncated)) for s in samples]
        rewards = [s.penalised(settings.penalty) for s in samples]
        rewards = torch.tensor(rewards, dtype=torch.float64)  # [S]
        # Some advantages are normalised over the whole batch, which is spread over nodes.
        everyone = ranks.gather_nodes(rewards) if ranks.nodes > 1 else [rewards]
        before = sum(map(len, everyone[: ranks.node]))
        grouped = torch.cat(everyone).view(-1, settings.group_size)  # [G, n]
        advantages = algos.ADVANTAGES[settings.advantage](grouped, settings).flatten()
        mine = advantages[before : before + len(rewards)]
        return samples, mine.to(ranks.device), rewards.to(ranks.device)

    @spans("pack")
    def _minibatches(self, samples: list[Sample]) -> list[list[Piece]]:
        """This rank's micro-batches of each optimiser step; groups are dealt out in turn."""
        n, parts = self.settings.group_size, self.settings.minibatches
        groups = len(samples) // n
        return [
            cut(
                samples,
                [g * n + i for g in range(part, groups, parts) for i in range(n)],
                self.ranks,
                self.settings.micro_tokens,
            )
            for part in range(min(parts, groups))
        ]

    @torch.no_grad()
    def _anchor(self, minibatches: list[list[Piece]]) -> None:
        """Score every token under the policy as it is now, pi_prox, where that is needed: with one
        optimiser step it is the policy itself."""
        later = len(minibatches) > 1 and algos.LOSSES[self.settings.loss].proximal
        if not later and self.settings.correction == "none":
            return
        for piece in (piece for pieces in minibatches for piece in pieces):
            packed = piece.packed
            with spans("forward"):
                piece.proximal, _ = self.policy(packed, self.settings.temperature)
            piece.factor, piece.keep = algos.correct(
                piece.proximal, packed.behaviour, packed.sample, self.settings
            )

    def _sizes(self, pieces: list[Piece], count: int) -> tuple[Tensor, float, float]:
        """Trained tokens of each sample here [S], and of all; and samples that have any. All under
        the one mask: what a correction leaves out is in no denominator."""
        lengths = torch.zeros(count, device=self.ranks.device)
        for piece in pieces:
            if piece.counts:
                kept = torch.ones_like(piece.packed.behaviour)
                kept = kept if piece.keep is None else kept * piece.keep
                lengths.index_add_(0, piece.packed.sample, kept)
        tokens, samples = float(lengths.sum()), float((lengths > 0).sum())
        return lengths, self.ranks.sum(tokens), self.ranks.sum(samples)

    def _backward(self, piece: Piece, advantages, rewards, sizes) -> dict[str, Tensor]:
        """Loss and gradient of one micro-batch; returns what is to be known of its tokens, [T]."""
        packed, settings = piece.packed, self.settings
        with spans("forward"):
            of_entropy = bool(settings.entropy_coef)
            logp, entropy = self.policy(packed, settings.temperature, of_entropy)  # [T]
        # What a correction leaves out is gone before a loss sees it: some average over a sample.
        keep = slice(None) if piece.keep is None else piece.keep.nonzero().flatten()  # [K]
        proximal = logp.detach() if piece.proximal is None else piece.proximal
        of_sample = advantages[packed.sample], rewards[packed.sample], packed.sample
        tokens = (logp, packed.behaviour, proximal, *of_sample)  # [T] each
        tokens = algos.Tokens(*(value[keep] for value in tokens))  # [K] each
        loss, acts = algos.LOSSES[settings.loss](tokens, settings)
        weight = piece.counts * algos.token_weights(tokens.sample, *sizes, settings).to(loss)
        if piece.factor is not None:
            loss = loss * piece.factor[keep]
        if self.reference is not None:
            with spans("forward"), torch.no_grad():
                reference, _ = self.reference(packed, settings.temperature)
            kl = algos.kl_penalty(tokens.logp, reference[keep])
            if settings.kl_correction == "ratio":
                kl = kl * algos.ratio(tokens.logp, tokens.behaviour)
            loss = loss + settings.kl_coef * kl
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * entropy[keep]
        # FSDP averages gradients over ranks; the weights already carry the global denominator.
        with spans("backward"):
            ((loss * weight).sum() * self.ranks.world).backward()

        def spread(values: Tensor) -> Tensor:  # [K] -> [T]
            everywhere = torch.zeros_like(packed.behaviour)
            everywhere[keep] = values
            return everywhere

        return {
            "counts": torch.full_like(packed.behaviour, piece.counts),
            "weighted_loss": spread((loss * weight).detach()),
            "entropy": entropy.detach(),
            "log_ratio": (logp - packed.behaviour).detach(),
            "clip": spread(acts),
            "masked": 1 - spread(torch.ones_like(acts)),
            "cut": algos.corrected(piece.factor, packed.behaviour, settings),
            "advantage": of_sample[0],
            "version": packed.versions,
            "sample": packed.sample,
        }

    @spans("optimiser")
    def _optimise(self, stats: list[dict], samples: list[Sample]) -> tuple[float, float]:
        """Clip, check, step. Returns loss and gradient norm of the minibatch."""
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.grad_clip)
        norm = float(whole(norm))
        loss = self.ranks.sum(float(sum(part["weighted_loss"].sum() for part in stats)))
        # Ratios are bounded: without this, an engine's log-probability of -inf passes unnoticed.
        drift = self.ranks.sum(float(sum(part["log_ratio"].sum() for part in stats)))
        if not all(map(math.isfinite, (loss, norm, drift))):
            raise NonFiniteError(f"loss {loss}, gradient norm {norm}", samples)
        if norm:  # without a signal Adam's momentum would still move the weights
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @spans("probe")
    def score(self, ids: list[int]) -> np.ndarray:
        """Raw log-probabilities (T = 1) of ids[1:], for the probe. Called on every rank."""
        scores = self.policy.score(ids, self.ranks.device).cpu().numpy()
        if not np.isfinite(scores).all():
            raise NonFiniteError("the weights are not finite (is --learning_rate too high?)")
        return scores


# -- one run -------------------------------------------------------------------------------------


# What ends a run early, and may leave whole weights behind.
ENDS = RolloutError, WriteError, KeyboardInterrupt, SystemExit
LAST_SAVE = 120.0  # seconds that saving them may take then


class Run:
    """What the two loops work on: the parts of a run, and its clock."""

    worker_main = staticmethod(worker_main)  # what a rollout process runs

    def __init__(self, settings: Settings):
        """Check everything and load the model. Raises ValueError, with one line, for bad input."""
        start: Start = prepare(settings)
        self.settings, self.ranks, self.task = start.settings, start.ranks, start.task
        self.tokenizer, self.worker_threads = start.tokenizer, start.worker_threads
        self.rows, self.held_out = start.rows, start.held_out  # those of the task's that are used
        models = start.resumed_from or start.base, start.base
        self.trainer = Trainer(self.ranks, self.settings, *models, start.dtype, start.probe)
        if self.ranks.rank == 0:  # not before: what is refused is one line
            for note in (*notes(settings), *start.notes):
                print(f"note: {note}", file=sys.stderr)
        state = start.state
        if state:
            checkpoint.restore(self.trainer, state)
        self.version = state.get("version", 0)  # what has been published: batches trained on
        self.trained = self.booked = self.saved = self.version  # ahead of it for a moment each
        self.wall = state.get("wall", 0.0)  # seconds, without evaluations
        self.log = self.workers = self.scheduler = None
        if self.ranks.rank == 0:
            resumed_at = self.version if settings.resume else None
            self.log = Log(self.settings, self.ranks.world, resumed_at)
            if self.settings.model.startswith("tiny"):
                checkpoint.keep_base(start.base, self.log.dir)
        self.saved_at = time.monotonic()
        self.save_cost = checkpoint.expected_cost(self.trainer.policy.model)  # seconds
        self.sender = Sender(
            self.ranks,
            self.trainer.policy.model,
            self.trainer.dtype,
            self.settings.bucket_mb,
            self.settings.tensor_parallel,
            self.settings.start_timeout,
        )
        self.probe = start.probe
        self.buffer = self._buffer(state)
        self.spec = self._spec(start)

    def _buffer(self, state: dict) -> SampleBuffer:
        """This node's share: a part of every batch, and every nodes-th prompt."""
        settings, nodes = self.settings, self.ranks.nodes
        mine = settings.pick(SampleBuffer)
        mine["batch_size"] //= nodes
        mine["redundant_groups"] //= nodes
        progress = state["nodes"][self.ranks.node] if state else {}
        mine["penalty"] = settings.penalty
        return SampleBuffer(**mine, version=self.version, **progress)

    def _spec(self, start: Start) -> WorkerSpec:
        settings = self.settings
        return WorkerSpec(
            model=start.base,
            settings=settings,
            limits=Limits(
                *(settings.max_tokens, settings.max_turns, settings.max_model_len),
                max_staleness=self.buffer.max_staleness,
                stops=start.stops,
            ),
            dtype=start.dtype,
            # The prompts of the tiny model's single-turn tasks are shorter than a block.
            prefix_caching=self.task.max_turns > 1 or not settings.model.startswith("tiny"),
            gpu_share=0.0,  # each worker's: see `_begin`
            stacks=str(self.log.dir / "stacks.txt") if self.log else "",
        )

    def start(
        self, workers: Processes | None = None, dispatcher: type[Dispatcher] = Dispatcher
    ) -> None:
        """Start the workers, or go on with those of an earlier run, and give them their first
        weights: of version 0, or the checkpoint's."""
        settings = self.settings
        if self.ranks.local_rank == 0 and settings.replay_batches:
            self.scheduler = replay.Replay(settings.replay_batches, self.version)
        elif self.ranks.local_rank == 0:
            self.workers = workers or Processes()
            self.scheduler = Scheduler(
                self.workers, settings, self.buffer, self.ticket, dispatcher, self.spec.dtype
            )
            self._begin(new=workers is None)
        self.publish(self.version)
        self.wait_committed()
        if self.log:
            self.log.open()
        if settings.eval_every and self.version == 0:
            self.evaluate()
        if self.log:
            self.log.begin()

    def _begin(self, new: bool) -> None:
        """Have the workers start their engines, or drop what they did for an earlier run."""
        settings, workers = self.settings, self.workers
        plan = self.ranks.plan
        specs = [replace(self.spec, gpu_share=share) for share in plan.shares]
        if new and self.log:
            self.log.greet(self.ranks.plan, torch.get_num_threads(), self.worker_threads)
            workers.starting = self.log.starting
        with spans("start"):
            if new:
                workers.start(self.worker_main, specs, plan.visible(), self.worker_threads)
            workers.stacks = self.spec.stacks
            workers.listen(self.scheduler, settings)
            if not new:
                workers.begin(specs)
            workers.await_word("ready" if new else "begun", settings.start_timeout)
        if new and self.log:
            self.log.starting(0, "ready")

    def close(self, keep_workers: bool = False) -> None:
        if self.workers and not keep_workers:
            self.workers.close()
        self.write_spans()
        if self.log:
            self.log.close()
        self.task.close()

    def ticket(self, index: int, sample: int) -> Ticket:
        """The right to generate one sample. Nodes take turns at the prompts: every nodes-th is this
        one's."""
        place = index * self.ranks.nodes + self.ranks.node
        prompt_id = self.rows[prompt_order(len(self.rows), self.settings.seed, place)]
        return Ticket(index, sample, prompt_id, derive_seed(self.settings.seed, place, sample))

    # -- the verbs of the loops ------------------------------------------------------------------

    def get_batch(self) -> list[Sample]:
        """This node's part of the next batch, on each of its ranks."""
        self.started = time.perf_counter()
        spans.seconds.clear()
        with spans("wait"):
            batch = self._wait_for(lambda: self.scheduler.get_batch(self.settings.batch_timeout))
            if self.log and self.settings.dump_batches:
                replay.dump(self.log.dir / "batches", self.version + 1, batch)
            self.batch = self.ranks.from_local_rank_zero(batch)
        return self.batch

    def _together(self, call: Callable, held: bool = False):
        """Its value, where this node's scheduler or the log is: on local rank 0; None elsewhere.
        What ends the run there ends it on all ranks, at this point: so all of them can save. It is
        a wait, which Ctrl-C ends; or `held`, and finished first."""
        if self.ranks.world == 1:
            return call()
        value = error = None
        if self.ranks.local_rank == 0:
            try:
                with interrupts.held() if held else interrupts.released():
                    value = call()
            except ENDS as end:
                error = end
        for node, end in enumerate(self.ranks.gather_nodes(error)):
            if isinstance(end, RolloutError) and self.ranks.nodes > 1:
                end = RolloutError(f"node {node}: {end}", end.details)
            if end:
                end.agreed = True
                raise end
        return value

    def _wait_for(self, ask: Callable[[], list | None]) -> list | None:
        """What this node's scheduler is asked for, on its local rank 0. While it is None a worker
        that was replaced waits for weights, which takes all ranks."""
        while True:
            answer = self._together(ask)
            if not self.ranks.from_rank_zero(answer is None):
                return answer
            self.publish(self.version)
            self.wait_committed()

    @spans("train")
    def train_on(self, batch: list[Sample]) -> None:
        with interrupts.held():
            self.metrics = self.trainer.step(batch, self.version)
            self.trained = self.version + 1

    @spans("publish")
    def publish(self, version: int) -> None:
        """Send the weights to every worker. Returns when they have left; see wait_committed."""
        reference = self.trainer.score(self.probe)
        update = version, self.sender.manifest, self.probe, reference
        publisher, delivered = self.scheduler and self.scheduler.publisher, False
        while not delivered:  # again, if a worker is lost while weights are on the way to it
            members = self._together(lambda: self.scheduler.pause(*update))  # on every node
            with spans("broadcast"):
                delivered = self.sender.send(publisher, members or [])
        total = self.ranks.from_rank_zero(self.sender.checksum)
        if publisher:
            publisher.sent(total)
        self.version = version

    @spans("publish")
    def wait_committed(self) -> None:
        self._together(lambda: self.scheduler.wait_committed())

    def finish_step(self) -> None:
        """Close the books of a step; now and then evaluate, or save."""
        settings, step = self.settings, self.version
        self._close_books()
        last = step == settings.steps
        if last:
            self.wait_committed()  # what was published last is checked, too
        if settings.eval_every and (last or step % settings.eval_every == 0):
            self.evaluate()
        every = settings.save_every
        if last or (step % every == 0 if every else self._save_is_due()):
            self.save()

    def _close_books(self) -> None:
        """Write down what was trained on, and how."""
        with interrupts.held():
            now, step = time.perf_counter(), self.trained
            self.version = self.booked = step
            self.wall += now - self.started
            spans.add("step", self.started, now, args={"step": step})
            with spans("log"):
                if self.ranks.nodes > 1:  # a row is of the whole batch
                    mine = None if self.ranks.local_rank else self.batch
                    self.batch = sum(self.ranks.gather_nodes(mine), [])
                self._together(self._write_row, held=True)

    def _write_row(self) -> None:
        if self.log:
            row = {"step": self.version, "version": self.version - 1, "wall_s": self.wall}
            row |= self.metrics | batch_metrics(self)
            self.log.step(row, self.batch, self.trainer.seen, self.tokenizer)
        self.write_spans()

    def write_spans(self) -> None:
        """To trace.json: those of trainer rank 0 and its node's workers."""
        mine = spans.take()
        if self.log and self.scheduler:
            self.log.write_trace([mine, *self.scheduler.take_spans()])

    @spans("evaluate")
    def evaluate(self) -> None:
        """Score held-out prompts under the version just published, one sample each."""
        start, ranks = time.perf_counter(), self.ranks
        mine, seed = self.held_out[ranks.node :: ranks.nodes], self.settings.seed
        tickets = [Ticket(-1, 0, i, derive_seed(seed, 2**32, i), eval=True) for i in mine]
        self._together(lambda: self.scheduler.begin_evaluation(tickets))
        patience = self.settings.batch_timeout
        samples = self._wait_for(lambda: self.scheduler.evaluated(patience)) or []
        scored = ranks.sum(float(len(samples)))  # a prompt whose reward failed twice is left out
        mean = ranks.sum(float(sum(s.reward for s in samples))) / scored
        solved = ranks.sum(float(sum(s.solved for s in samples))) / scored
        if self.log:
            seconds = time.perf_counter() - start
            self.log.evaluation(self.version, mean, solved, int(scored), seconds)

    def _save_is_due(self) -> bool:
        due = self.saved_at + checkpoint.interval(self.save_cost)
        return self.ranks.from_rank_zero(time.monotonic() > due)

    @spans("checkpoint")
    def save(self) -> None:
        """Write checkpoint-<step>. Samples in progress are not saved, but generated again."""
        began, settings, keep = time.monotonic(), self.settings, self.settings.keep_checkpoints
        batch = settings.batch_size, settings.group_size
        state = {"version": self.version, "wall": self.wall, "batch": batch}
        with interrupts.held():
            state["nodes"] = self.ranks.gather_nodes(self.scheduler and self.scheduler.progress)
            weights, state = checkpoint.gather(self.trainer, state)

            def write() -> None:
                if self.log:
                    path = self.log.dir / f"checkpoint-{self.version}"
                    checkpoint.write(path, self.trainer, self.tokenizer, weights, state, keep)

            self._together(write, held=True)
            self.saved = self.version
        self.saved_at = time.monotonic()
        self.save_cost = self.saved_at - began

    def rescue(self, error: BaseException) -> str:
        """Before a run ends early: save what was trained on since the last checkpoint. Says what
        was done. Ranks that do not know of the end could not take part."""
        if self.trained == 0:
            return "nothing was trained yet"
        if self.saved < self.trained and self.ranks.world > 1 and not hasattr(error, "agreed"):
            return "not all ranks could save together"
        with ends_within(LAST_SAVE, "train.py: the last checkpoint takes too long"):
            try:
                if self.booked < self.trained:
                    self._close_books()
                if self.saved < self.trained:
                    self.save()
            except WriteError as again:
                return str(again)
        where = self.log and self.log.dir
        return f"checkpoint-{self.saved} is written, go on with --resume {where}" if where else ""


def end_of(error: BaseException, run: Run | None) -> tuple[int, str]:
    """Exit code and last line of a run that something has ended; its weights are saved before."""
    interrupts.last()  # the next one waits for nothing
    code, message = 1, str(error)
    if isinstance(error, KeyboardInterrupt):
        code, message = 130, "interrupted"
    elif isinstance(error, SystemExit):
        code, message = error.code, "terminated (SIGTERM)"
    elif isinstance(error, RolloutError) and error.details:
        print(error.details, file=sys.stderr)
    if run and (done := run.rescue(error)):
        message = f"{message}; {done}"
    return code, message


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a failure, 2 for bad input, 130 after Ctrl-C."""
    settings = parse(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that has no arrows gets question marks
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it warns of is checked here
    interrupts.install()
    run, code, message, why = None, 0, "", ""  # `why`: what other nodes have to be told
    try:
        run = Run(settings)
        run.start()
        with interrupts.held(run.ranks.world > 1):  # else one rank would leave a collective
            (train_sync if settings.mode == "sync" else train_async)(run)
        if run.log:
            run.log.summary()
    except ValueError as error:
        if run is not None:
            raise  # not bad input, which the constructor finds, but a bug: show where
        code, message = 2, str(error)
    except NonFiniteError as error:
        batch = error.samples or run.batch
        code, message = 1, f"{error}; the batch is in {run.log and run.log.dump(batch)}"
    except ENDS as error:
        code, message = end_of(error, run)
        why = "" if hasattr(error, "agreed") else message
    finally:
        if run is not None:
            bug = sys.exc_info()[1]
            run.ranks.leave(repr(bug) if bug else why)
            run.close()
            if not (bug or message):
                run.ranks.end()
    if run and run.ranks.local_rank:
        return code if why else 0  # an end that the ranks agreed on: local rank 0 says which
    if message:  # after everything that closing may print: the last line says what happened
        print(f"train.py: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
