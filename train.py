"""Asynchronous RL for language models: the trainer, and the entry point.

    bash launch.sh                                        quick run for this machine, with set-up
    python train.py --mode async --alpha 1                one trainer rank, one rollout process
    python train.py --mode sync                           the same, generation and training in turn
    torchrun --nproc_per_node 2 train.py                  two trainer ranks (FSDP2) on this machine
    torchrun --nnodes 2 --nproc_per_node 8 ... train.py   two machines; each feeds its own ranks

Read `train_sync` and `train_async` first: the two loops, side by side. `rollout.py` has what goes
on in the other processes, `buffer.py` the rule that bounds staleness, `algos.py` the mathematics.

Paper: ROLL Flash (arXiv 2510.11345), rollout-train decoupling.
"""

import os

# Threads that spin while they wait starve a busy neighbour; has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
import math
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

import algos
import report
from buffer import BufferConfig, RolloutTask, Sample, SampleBuffer
from envs import EnvConfig, encode_prompt, make_task, prompt_order
from models import PRESETS, resolve_model
from rollout import (
    RolloutConfig,
    RolloutError,
    Rollouts,
    WorkerSpec,
    cut_buckets,
    join_weight_group,
    open_store,
    place_workers,
)


@dataclass
class TrainConfig:
    mode: str = field(
        default="async",
        metadata={
            "help": "async: train while generation goes on; sync: in turn (alpha 0)",
            "choices": ["sync", "async"],
        },
    )
    model: str = field(
        default="",
        metadata={
            "help": "tiny, smollm2, a directory or a hub name; default: tiny, "
            "on a GPU Qwen/Qwen2.5-0.5B-Instruct"
        },
    )
    steps: int = field(default=100, metadata={"help": "train steps, one batch each"})
    learning_rate: float = field(default=0.0, metadata={"help": "AdamW; 0: the model's preset"})
    lr_warmup: int = field(default=0, metadata={"help": "steps over which the rate rises linearly"})
    grad_clip: float = field(default=1.0, metadata={"help": "largest norm of the gradient"})
    micro_tokens: int = field(
        default=16384, metadata={"help": "tokens (padding included) a forward pass"}
    )
    max_model_len: int = field(
        default=0, metadata={"help": "tokens of a whole sample; 0: the model's preset"}
    )
    eval_every: int = field(default=25, metadata={"help": "versions between evaluations; 0: none"})
    eval_prompts: int = field(default=512, metadata={"help": "held-out prompts an evaluation"})
    save_every: int = field(default=0, metadata={"help": "steps between checkpoints; 0: at the end"})
    seed: int = field(default=0, metadata={"help": "of data order, sampling and the tiny model"})
    run_dir: str = field(
        default="", metadata={"help": "where the run writes; default runs/<time>-<mode>-<env>"}
    )
    resume: str = field(
        default="", metadata={"help": "run directory to go on with, from its last checkpoint"}
    )
    report_to: str = field(
        default="", metadata={"help": "tensorboard and/or wandb, by comma: the metrics go there too"}
    )
    batch_timeout: float = field(
        default=1800.0, metadata={"help": "seconds that a batch or an evaluation may take"}
    )
    bucket_mb: int = field(default=256, metadata={"help": "weights are sent in buckets this large"})

    def __post_init__(self):
        if self.mode not in ("sync", "async"):
            raise ValueError(f"--mode is sync or async (got {self.mode})")
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1 (got {self.steps})")
        for name in ("learning_rate", "lr_warmup", "max_model_len", "eval_every", "save_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must be 0 or more (got {getattr(self, name)})")
        for name in ("grad_clip", "micro_tokens", "eval_prompts", "bucket_mb", "batch_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be above 0 (got {getattr(self, name)})")
        unknown = set(filter(None, self.report_to.split(","))) - {"tensorboard", "wandb"}
        if unknown:
            raise ValueError(f"--report_to takes tensorboard, wandb (got {', '.join(unknown)})")


# -- the two loops -------------------------------------------------------------------------------


def train_sync(run: "Run") -> None:
    """Generate a batch, train on it, publish: each phase has the machine to itself."""
    for step in range(run.version + 1, run.train.steps + 1):
        batch = run.get_batch()  # alpha is 0: nothing more has been admitted, workers now wait
        run.train_on(batch)
        run.publish(step)
        run.wait_committed()  # all workers hold the new weights: the next batch is being generated
        run.finish_step(step)


def train_async(run: "Run") -> None:
    """The same steps while generation goes on: the workers are up to alpha batches ahead."""
    for step in range(run.version + 1, run.train.steps + 1):
        batch = run.get_batch()  # with luck it is there already
        run.train_on(batch)  # meanwhile the workers decode, step environments, compute rewards
        run.publish(step)  # they pause, receive; they load while the next step begins
        run.finish_step(step)


# -- the trainer ---------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model that returns log-probabilities of chosen tokens, never all logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """ids [N, L] padded on the right, mask [N, L] true on trained tokens, never on the first.
        Returns log-probability and entropy of those tokens, [T] in row-major order."""
        # No attention mask: padding is on the right, where causal attention never looks.
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [N,L,D]
        predicts = mask[:, 1:]  # position t - 1 predicts token t
        head = self.model.get_output_embeddings()
        return algos.token_logprobs(
            hidden[:, :-1][predicts], head, ids[:, 1:][predicts], temperature
        )


class Trainer:
    """The policy, its optimiser, and one update a batch; sharded by FSDP2 when there are ranks."""

    def __init__(self, run: "Run", model_path: str, learning_rate: float, dtype: str):
        self.algo, self.train, self.cell = run.algo, run.train, run.cell
        self.temperature, self.group_size = run.rollout.temperature, run.buffer.group_size
        self.dtype = getattr(torch, dtype)
        self.policy = self._load(model_path)
        self.reference = self._load(model_path).requires_grad_(False) if run.algo.kl_coef else None
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        warmup = max(1, run.train.lr_warmup)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )

    def _load(self, path: str) -> Policy:
        # Masters are float32 also where the forward pass is not.
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        policy = Policy(model).to(self.cell.device)
        if self.cell.world > 1 or self.cell.device.type == "cuda":
            mixed = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
            for module in policy.modules():
                if isinstance(module, nn.ModuleList):  # the decoder layers
                    for layer in module:
                        fully_shard(layer, mp_policy=mixed)
            fully_shard(policy, mp_policy=mixed)
        return policy

    def logprobs(self, policy: Policy, ids: Tensor, mask: Tensor, temperature: float | None = None):
        return policy(ids, mask, temperature or self.temperature)

    def step(self, samples: list[Sample]) -> dict[str, float]:
        """One optimiser step on this node's part of the batch (all of it goes to every rank of the
        node, each takes its share). Returns metrics of the whole batch."""
        cell, device = self.cell, self.cell.device
        rewards = torch.tensor([s.reward for s in samples]).view(-1, self.group_size)  # [G, n]
        advantages = algos.ADVANTAGES[self.algo.advantage](rewards).flatten()  # [G * n]
        lengths = torch.tensor([int(s.mask.sum()) for s in samples])
        total = cell.sum(float(lengths.sum())) / cell.local_world  # trained tokens of all nodes
        by_length = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
        mine = by_length[cell.local_rank :: cell.local_world]
        pieces = cut_micro_batches([len(samples[i].ids) for i in mine], self.train.micro_tokens)
        # FSDP's collectives need as many forward passes on every rank: short ranks repeat their
        # first piece, counting nothing.
        spare = int(cell.max(len(pieces))) - len(pieces)
        seen: list[dict[str, Tensor]] = []
        for number, piece in enumerate(pieces + pieces[:1] * spare):
            rows = [samples[mine[i]] for i in piece]
            where = torch.tensor([mine[i] for i in piece])
            ids, mask, behaviour = (x.to(device) for x in pad_samples(rows))
            weight = algos.token_weights(lengths[where], total).to(device)  # [T]
            weight *= number < len(pieces)
            advantage = advantages[where].repeat_interleave(lengths[where]).to(device)  # [T]
            logp, entropy = self.logprobs(self.policy, ids, mask)  # [T]
            loss, stats = algos.LOSSES[self.algo.loss](logp, behaviour, advantage, self.algo)
            if self.reference is not None:
                with torch.no_grad():
                    reference, _ = self.logprobs(self.reference, ids, mask)
                loss = loss + self.algo.kl_coef * algos.kl_penalty(logp, reference)
            objective = (loss * weight).sum()
            # FSDP averages gradients over ranks; the weights already carry the global denominator.
            (objective * cell.world).backward()
            stats |= {"loss": loss.detach(), "entropy": entropy}
            seen.append({"weight": weight, **stats})
        return self._update(seen, samples)

    def _update(self, seen: list[dict[str, Tensor]], samples: list[Sample]) -> dict[str, float]:
        """Clip, check, step; and reduce the per-token statistics over pieces and ranks."""
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.train.grad_clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        tokens = {key: torch.cat([piece[key] for piece in seen]) for key in seen[0]}  # [T] each
        weight = tokens.pop("weight")
        mean = {key: self.cell.sum(float((value * weight).sum())) for key, value in tokens.items()}
        if not math.isfinite(mean["loss"]) or not math.isfinite(float(norm)):
            raise NonFiniteError(mean["loss"], float(norm), samples)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        counted = tokens["ratio"][weight > 0]
        return {
            "loss": mean["loss"],
            "grad_norm": float(norm),
            "entropy": mean["entropy"],
            "ratio_mean": mean["ratio"],
            "ratio_max": self.cell.max(float(counted.max()) if len(counted) else 0.0),
            "clip_frac": mean["clip"],
        }

    @torch.no_grad()
    def score(self, ids: list[int]) -> np.ndarray:
        """Raw log-probabilities (T = 1) of ids[1:], for the probe. Called on every rank."""
        row = torch.tensor([ids], device=self.cell.device)  # [1, L]
        mask = torch.ones_like(row, dtype=torch.bool)
        return self.logprobs(self.policy, row, mask, 1.0)[0].cpu().numpy()


class NonFiniteError(RuntimeError):
    """Loss or gradient is NaN or infinite; carries the batch, so that it can be looked at."""

    def __init__(self, loss: float, norm: float, samples: list[Sample]):
        at_fault = [
            f"{s.task.group}:{s.task.sample}"
            for s in samples
            if not (np.isfinite(s.logprobs).all() and math.isfinite(s.reward))
        ]
        of = ", ".join(at_fault[:8]) or "none (all their log-probabilities and rewards are finite)"
        super().__init__(f"loss {loss}, gradient norm {norm}; samples at fault: {of}")
        self.samples = samples


def cut_micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Cut sorted rows into runs whose padded size stays within max_tokens (or one row).

    >>> cut_micro_batches([2, 3, 3, 9], max_tokens=9)
    [[0, 1, 2], [3]]
    """
    pieces: list[list[int]] = []
    for i, length in enumerate(lengths):
        if pieces and (len(pieces[-1]) + 1) * length <= max_tokens:
            pieces[-1].append(i)
        else:
            pieces.append([i])
    return pieces


def pad_samples(samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Samples as ids [N, L] and mask [N, L], padded on the right, and the behaviour
    log-probabilities of the masked tokens, flat: [T]. Padding is 0, whatever token that is: it is
    never attended to and never in the mask."""
    longest = max(len(s.ids) for s in samples)
    ids = np.zeros((len(samples), longest), np.int64)
    mask = np.zeros((len(samples), longest), bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        mask[row, : len(sample.ids)] = sample.mask
    behaviour = np.concatenate([s.logprobs[s.mask] for s in samples])
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(behaviour)


# -- weights to the rollout processes ------------------------------------------------------------


class Publisher:
    """The sending half of a publish; `engine.BroadcastReceiver` is the other."""

    def __init__(self, trainer: Trainer, bucket_mb: int):
        self.trainer = trainer
        # Tied embeddings are one parameter and appear once; the engine ties its own.
        named = dict(trainer.policy.model.named_parameters())
        self.parameters = list(named.values())
        self.info = {
            "names": list(named),
            "shapes": [list(p.shape) for p in self.parameters],
            "dtype": str(trainer.dtype).removeprefix("torch."),
            "bucket_bytes": bucket_mb * 2**20,
        }
        self.group = None  # rank 0 has one

    def connect(self, cell: "Cell", rollouts: Rollouts | None, timeout: float) -> None:
        """Join trainer rank 0 and every rollout rank of every node in one process group."""
        limit = timedelta(seconds=timeout)
        workers = cell.rollout.rollout_workers * cell.rollout.tensor_parallel  # ranks a node
        world = 1 + cell.nodes * workers
        host = "127.0.0.1" if cell.nodes == 1 else socket.gethostbyname(socket.gethostname())
        store = open_store(world, limit, host) if cell.rank == 0 else None
        host, port, backend = cell.from_rank_zero(
            (host, store.port, cell.wire) if store is not None else None
        )
        if rollouts is not None:
            rollouts.join(host, port, 1 + cell.node * workers, world, backend, timeout)
        if store is not None:
            self.group = join_weight_group(host, port, 0, world, backend, limit, store)
        if rollouts is not None:
            rollouts.joined()

    def send(self) -> None:
        """Gather a bucket on all trainer ranks, then broadcast it, then the next: two communicators
        are never in flight together."""
        dtype, cell = self.trainer.dtype, self.trainer.cell
        for bucket in cut_buckets(self.info["shapes"], dtype.itemsize, self.info["bucket_bytes"]):
            parts = []
            for i in bucket:
                p = self.parameters[i].detach()
                p = p.full_tensor() if isinstance(p, DTensor) else p
                if cell.rank == 0:
                    parts.append(p.to(dtype).flatten())
            if self.group is not None:
                flat = torch.cat(parts).to("cpu" if cell.wire == "gloo" else cell.device)
                self.group.broadcast(flat, 0).wait()


# -- where this rank stands, and what it says to the others --------------------------------------


class Cell:
    """This process among the trainer ranks. A node is a cell: its local rank 0 owns the rollout
    processes and the buffer of that node, and only the collectives below cross nodes."""

    def __init__(self, rollout: RolloutConfig):
        self.rollout = rollout
        self.rank, self.world = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1)))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.nodes, self.node = self.world // self.local_world, self.rank // self.local_world
        gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", self.local_rank % gpus) if gpus else torch.device("cpu")
        self.worker_devices, self.wire, self.gpu_share = place_workers(
            gpus, self.local_world, rollout.rollout_workers, rollout.tensor_parallel
        )
        if self.world > 1 or gpus:
            backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
            store = None if self.world > 1 else dist.HashStore()
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world,
                timeout=timedelta(minutes=60),  # a rank waits in here while rank 0 waits for a batch
            )
        # Objects (batches) travel within a node only.
        groups = [
            dist.new_group(list(range(n * self.local_world, (n + 1) * self.local_world)), backend="gloo")
            for n in range(self.nodes) if self.world > 1
        ]
        self.node_group = groups[self.node] if groups else None

    def sum(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: float, op) -> float:
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op)
        return float(tensor)

    def from_rank_zero(self, value):
        """The value that rank 0 has, on every rank of every node."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, 0)
        return box[0]

    def from_local_rank_zero(self, value):
        """The value that local rank 0 has, on every rank of this node."""
        box = [value]
        if self.local_world > 1:
            dist.broadcast_object_list(box, self.node * self.local_world, group=self.node_group)
        return box[0]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


# -- one run -------------------------------------------------------------------------------------


class Run:
    """What the two loops work on: the pieces of a run, and its clock."""

    def __init__(self, train, rollout, buffer, env, algo):
        self.train, self.rollout, self.buffer, self.env, self.algo = train, rollout, buffer, env, algo
        self.task = make_task(env, train.seed)
        check(train, rollout, buffer, algo, self.task)
        self.cell = cell = Cell(rollout)
        if buffer.batch_size % cell.nodes:
            raise ValueError(f"--batch_size must divide by the number of nodes ({cell.nodes})")
        preset = PRESETS.get(train.model, PRESETS["default"])
        dtype = preset.dtype if cell.device.type == "cuda" else "float32"
        if cell.rank == 0:
            resolve_model(train.model, self.task, env.env)  # makes it, if it has to be made
        cell.barrier()
        path = resolve_model(train.model, self.task, env.env)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.max_tokens = rollout.max_tokens or self.task.max_tokens
        self.max_model_len = train.max_model_len or preset.max_model_len
        check_prompts(self)
        # Phases that have the machine to themselves use all of it; otherwise a core a process.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        alone = buffer.alpha == 0
        torch.set_num_threads(max(1, cores // cell.local_world) if alone else 1)
        self.version, self.wall, self.prompts_seen = 0, 0.0, {}
        self.log = report.Log(train, [rollout, buffer, env, algo]) if cell.rank == 0 else None
        self.trainer = Trainer(self, path, train.learning_rate or preset.learning_rate, dtype)
        self.publisher = Publisher(self.trainer, train.bucket_mb)
        self.probe = probe_ids(self)
        self.rollouts = None
        if cell.local_rank == 0:
            spec = WorkerSpec(
                0, path, rollout, env, train.seed, self.max_tokens, self.max_model_len, dtype,
                prefix_caching=not train.model.startswith("tiny"), gpu_share=cell.gpu_share,
            )
            share = BufferConfig(buffer.batch_size // cell.nodes, buffer.group_size, buffer.alpha)
            samples = SampleBuffer(share, train.steps)
            self.rollouts = Rollouts(spec, samples, self.rollout_task, dtype == "float32")
            threads = max(1, cores // rollout.rollout_workers) if alone else 1
            self.rollouts.start(cell.worker_devices, threads)
        self.publisher.connect(cell, self.rollouts, rollout.start_timeout)

    def rollout_task(self, index: int, sample: int) -> RolloutTask:
        """The task of one sample. Nodes take turns at the prompts: every nodes-th is this one's."""
        place = index * self.cell.nodes + self.cell.node
        prompt = prompt_order(len(self.task.train), self.train.seed, place)
        return RolloutTask(index, sample, prompt, derive_seed(self.train.seed, place, sample))

    # -- the verbs of the loops ------------------------------------------------------------------

    def get_batch(self) -> list[Sample]:
        """This node's part of the next batch, on each of its ranks."""
        self.started = time.perf_counter()
        batch = self.rollouts and self.rollouts.get_batch(self.train.batch_timeout)
        batch = self.cell.from_local_rank_zero(batch)
        self.t_wait = time.perf_counter() - self.started
        return batch

    def train_on(self, batch: list[Sample]) -> None:
        start = time.perf_counter()
        self.metrics = self.trainer.step(batch)
        self.t_train = time.perf_counter() - start
        self.batch = batch

    def publish(self, version: int) -> None:
        """Send the weights to every worker. Returns when they have left; see wait_committed."""
        start = time.perf_counter()
        reference = self.trainer.score(self.probe)

        def send() -> None:
            self.cell.barrier()  # every node's workers have paused
            self.publisher.send()

        if self.rollouts:
            self.rollouts.publish(version, self.publisher.info, self.probe, reference, send)
        else:
            send()
        self.version, self.t_publish = version, time.perf_counter() - start

    def wait_committed(self) -> None:
        if self.rollouts:
            self.rollouts.wait_committed()

    def finish_step(self, step: int) -> None:
        """Close the books of a step; now and then evaluate, or save."""
        self.wall += time.perf_counter() - self.started
        if self.log:
            row = self.metrics | report.step_row(self)
            self.log.write(row, self.batch, self.tokenizer)
        last = step == self.train.steps
        if self.train.eval_every and (last or step % self.train.eval_every == 0):
            self.evaluate()
        if last or (self.train.save_every and step % self.train.save_every == 0):
            pass

    def evaluate(self) -> None:
        """Score held-out prompts under the version just published, one sample each."""
        start, cell = time.perf_counter(), self.cell
        count = min(self.train.eval_prompts, len(self.task.test))
        rewards: list[float] = []
        if self.rollouts:
            tasks = [
                RolloutTask(-1, 0, i, derive_seed(self.train.seed, 2**32, i), eval=True)
                for i in range(cell.node, count, cell.nodes)
            ]
            rewards = [s.reward for s in self.rollouts.evaluate(tasks, self.train.batch_timeout)]
        mean = cell.sum(sum(rewards)) / count
        solved = cell.sum(float(sum(r >= 1 for r in rewards))) / count
        seconds = time.perf_counter() - start
        if self.log:
            self.log.write_eval(self.version, {"reward_mean": mean, "solve_rate": solved}, seconds)


def derive_seed(*parts: int) -> int:
    """A sampling seed that depends on all parts and on nothing else (31 bits)."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0] >> 1)


def probe_ids(run: Run) -> list[int]:
    """The fixed sequence that trainer and engine both score at every publish: a real prompt, then
    random tokens, so that many rows of the embedding count."""
    prompt = encode_prompt(run.task, run.task.train[0], run.tokenizer)[:32]
    noise = np.random.default_rng(0).integers(len(run.tokenizer), size=32).tolist()
    return (prompt + noise)[: run.max_model_len - 1]


# -- start ---------------------------------------------------------------------------------------


def check(train, rollout, buffer, algo, task) -> None:
    """What no single dataclass can see. Raises ValueError, with one line."""
    if train.mode == "sync":
        buffer.alpha = 0.0
    if buffer.group_size == 1 and algo.advantage == "grpo":
        raise ValueError("--advantage grpo compares samples of a group: --group_size must be >= 2")
    if not train.model:
        train.model = "Qwen/Qwen2.5-0.5B-Instruct" if torch.cuda.is_available() else "tiny"


def check_prompts(run: Run) -> None:
    """Every prompt has to leave room for a response; long data sets are read as far as needed."""
    wanted = run.train.steps * run.buffer.batch_size
    for rows in (run.task.train[:wanted], run.task.test[: run.train.eval_prompts]):
        for row in rows:
            length = len(encode_prompt(run.task, row, run.tokenizer))
            if length + run.max_tokens > run.max_model_len:
                raise ValueError(
                    f"a prompt of {length} tokens and --max_tokens {run.max_tokens} do not fit "
                    f"into --max_model_len {run.max_model_len}: {row.prompt[:60]!r}..."
                )


def parse(argv: list[str]):
    """Flags (and, with --config FILE, a YAML or JSON file of them) as the five dataclasses."""
    parser = HfArgumentParser(
        (TrainConfig, RolloutConfig, BufferConfig, EnvConfig, algos.AlgoConfig),
        description="Asynchronous RL for language models (ROLL Flash).",
    )

    def fail(message: str):
        print(f"train.py: {message}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = fail
    try:
        *configs, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    except ValueError as error:
        fail(str(error))
    if unknown:
        fail(f"unknown flag {unknown[0]} (--help lists them)")
    return configs


def main(argv: list[str] | None = None) -> int:
    configs = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # torchrun ends its ranks with it
    run = Run.__new__(Run)  # so that a start that fails half way is cleaned up too
    try:
        run.__init__(*configs)
        run.publish(0)
        run.wait_committed()
        if run.train.eval_every:
            run.evaluate()
        loop = train_sync if run.train.mode == "sync" else train_async
        loop(run)
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    finally:
        if getattr(run, "rollouts", None):
            run.rollouts.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
