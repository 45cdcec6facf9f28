"""The trainer ranks: where each stands, the policy and its update, and the sending of weights.

`Trainer.step` is one optimiser step on one batch. With one rank on a CPU it is plain PyTorch; with
several ranks, or on a GPU, FSDP2 shards the same module, and the result is the same: every
denominator is global, so it does not matter how a batch is cut.
"""

import math
import os
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

import algos
from buffer import Sample
from plumbing.models import one_line_if_missing
from plumbing.packing import Packed, cut_micro_batches, pack, row_length, share_prompts
from report.timeline import spans
from rollout import (
    RolloutConfig,
    Rollouts,
    cut_buckets,
    join_weight_group,
    open_store,
    place_workers,
)

STATE_FILE = "trainer.pt"  # in a checkpoint, beside the model


@dataclass
class TrainerConfig:
    learning_rate: float = field(default=0.0, metadata={"help": "AdamW; 0: the model's preset"})
    lr_warmup: int = field(default=0, metadata={"help": "steps over which the rate rises linearly"})
    grad_clip: float = field(default=1.0, metadata={"help": "largest norm of the gradient"})
    minibatches: int = field(
        default=1, metadata={"help": "optimiser steps a batch, each on a part of its groups"}
    )
    micro_tokens: int = field(
        default=16384, metadata={"help": "tokens (padding included) a forward pass"}
    )
    bucket_mb: int = field(default=256, metadata={"help": "weights are sent in buckets this large"})

    def __post_init__(self):
        for name in ("learning_rate", "lr_warmup"):
            if not 0 <= getattr(self, name) < math.inf:  # also true of NaN
                raise ValueError(f"--{name} must be 0 or more (got {getattr(self, name)})")
        for name in ("grad_clip", "micro_tokens", "bucket_mb", "minibatches"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be above 0 (got {getattr(self, name)})")


# -- where this rank stands, and what it says to the others --------------------------------------


class Cell:
    """This process among the trainer ranks. A node is a cell: its local rank 0 owns the rollout
    processes and the buffer of that node, and only the collectives below cross nodes."""

    def __init__(self, rollout: RolloutConfig):
        self.rollout = rollout
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self.nodes, self.node = self.world // self.local_world, self.rank // self.local_world
        gpus = torch.cuda.device_count()
        self.device = torch.device("cuda", self.local_rank % gpus) if gpus else torch.device("cpu")
        self.worker_devices, self.wire, self.gpu_share = place_workers(
            gpus, self.local_world, rollout.rollout_workers, rollout.tensor_parallel
        )
        if self.nodes == 1 and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the host name resolves to
        if self.world > 1 or gpus:
            backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
            store = None if self.world > 1 else dist.HashStore()
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(minutes=60),  # other ranks wait in here while a batch is made
            )
        # Objects (batches) travel within a node only.
        self.node_group = None
        for node in range(self.nodes if self.world > 1 else 0):
            first = node * self.local_world
            group = dist.new_group(list(range(first, first + self.local_world)), backend="gloo")
            self.node_group = group if node == self.node else self.node_group

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

    def gather_cells(self, value) -> list:
        """What local rank 0 of each node has, in the order of nodes, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values[:: self.local_world]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


# -- the update ---------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model that returns log-probabilities of chosen tokens, never all logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, packed: Packed, temperature: float, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the T trained tokens, each [T]."""
        # Without a mask attention is causal, and padding on the right is never looked at.
        hidden = self.model.base_model(
            input_ids=packed.ids,
            position_ids=packed.positions,
            attention_mask=packed.attention,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)  # [N * L, D]
        head = self.model.get_output_embeddings()
        return algos.token_logprobs(
            hidden[packed.predictors], head, packed.targets, temperature,
            entropy_gradient=entropy_gradient,
        )  # fmt: skip


@dataclass
class Piece:
    """A micro-batch, whether it counts, and how its tokens stand to the policy before the step."""

    packed: Packed
    counts: bool
    proximal: Tensor | None = None  # [T] log-probability
    factor: Tensor | None = None  # [T] of the correction
    keep: Tensor | None = None  # bool [T], what it does not leave out


class Trainer:
    """The policy, its optimiser, and one update a batch; sharded by FSDP2 when there are ranks."""

    def __init__(
        self,
        cell: Cell,
        config: TrainerConfig,
        algo: algos.AlgoConfig,
        model: str,
        reference: str,
        group_size: int,
        temperature: float,
        dtype: str,
    ):
        self.cell, self.config, self.algo = cell, config, algo
        self.group_size, self.temperature = group_size, temperature
        self.dtype = getattr(torch, dtype)
        self.policy = self._load(model)
        self.reference = self._load(reference).requires_grad_(False) if algo.kl_coef else None
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        warmup = max(1, config.lr_warmup)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )

    def _load(self, path: str) -> Policy:
        # Masters are float32 also where the forward pass is not.
        with one_line_if_missing(path):
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

    def step(self, samples: list[Sample], version: int = 0) -> dict[str, float]:
        """Train on this node's part of a batch (all of it goes to every rank of the node, each
        takes its share), in `minibatches` optimiser steps. `version` is what the trainer holds,
        for the diagnostics by age. Returns metrics of the whole batch."""
        samples, advantages, rewards = self._judge(samples)
        groups, parts = len(samples) // self.group_size, self.config.minibatches
        dealt = [range(part, groups, parts) for part in range(min(parts, groups))]
        minibatches = [self._pieces(samples, list(part)) for part in dealt]
        self._anchor(minibatches)
        seen, losses, norms = [], [], []
        for pieces in minibatches:
            sizes = self._sizes(pieces, len(samples))
            stats = [self._backward(piece, advantages, rewards, sizes) for piece in pieces]
            loss, norm = self._update(stats, samples)
            seen += stats
            losses.append(loss)
            norms.append(norm)
        self.scheduler.step()
        means = {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}
        return means | self._diagnostics(seen, version)

    def _judge(self, samples: list[Sample]) -> tuple[list[Sample], Tensor, Tensor]:
        """Samples as they are to be trained on, their advantages [S], and their rewards [S]."""
        how, cell = self.algo.truncated, self.cell
        if how == "mask":
            samples = [replace(s, mask=s.mask & (not s.truncated)) for s in samples]
        penalty = self.algo.truncated_penalty * (how == "penalise")
        rewards = [s.reward - penalty * s.truncated for s in samples]
        rewards = torch.tensor(rewards, dtype=torch.float64)  # [S]
        # Some advantages are normalised over the whole batch, which is spread over nodes.
        everyone = cell.gather_cells(rewards) if cell.nodes > 1 else [rewards]
        before = sum(map(len, everyone[: cell.node]))
        grouped = torch.cat(everyone).view(-1, self.group_size)  # [G, n]
        advantages = algos.ADVANTAGES[self.algo.advantage](grouped).flatten()
        mine = advantages[before : before + len(rewards)]
        return samples, mine.to(cell.device), rewards.to(cell.device)

    @spans("pack")
    def _pieces(self, samples: list[Sample], groups: list[int]) -> list[Piece]:
        """This rank's share of some groups in micro-batches. FSDP's collectives need as many
        forward passes on every rank, so a rank with fewer repeats one, without counting it."""
        cell, n = self.cell, self.group_size
        chosen = [g * n + i for g in groups for i in range(n)]
        rows = [[chosen[i] for i in row] for row in share_prompts([samples[i] for i in chosen])]
        rows.sort(key=lambda row: row_length(samples, row))
        mine = rows[cell.local_rank :: cell.local_world] or rows[:1]
        counts = len(rows) > cell.local_rank
        lengths = [row_length(samples, row) for row in mine]
        pieces = cut_micro_batches(lengths, self.config.micro_tokens)
        spare = int(cell.max(len(pieces))) - len(pieces)
        return [
            Piece(
                pack(samples, [mine[i] for i in piece]).to(cell.device),
                counts and number < len(pieces),
            )
            for number, piece in enumerate(pieces + pieces[:1] * spare)
        ]

    @torch.no_grad()
    def _anchor(self, minibatches: list[list[Piece]]) -> None:
        """Score every token under the policy as it is now, pi_prox, where that is needed: with one
        optimiser step it is the policy itself."""
        later = len(minibatches) > 1 and self.algo.loss == "decoupled_ppo"
        if not later and self.algo.correction == "none":
            return
        for piece in (piece for pieces in minibatches for piece in pieces):
            packed = piece.packed
            with spans("forward"):
                piece.proximal, _ = self.policy(packed, self.temperature)
            piece.factor, piece.keep = algos.correct(
                piece.proximal, packed.behaviour, packed.sample, self.algo
            )

    def _sizes(self, pieces: list[Piece], count: int) -> tuple[Tensor, float, float]:
        """Trained tokens of each sample here [S], and of all; and samples that have any. All under
        the one mask: what a correction leaves out is in no denominator."""
        lengths = torch.zeros(count, device=self.cell.device)
        for piece in pieces:
            if piece.counts:
                kept = torch.ones_like(piece.packed.behaviour)
                kept = kept if piece.keep is None else kept * piece.keep
                lengths.index_add_(0, piece.packed.sample, kept)
        tokens, samples = float(lengths.sum()), float((lengths > 0).sum())
        return lengths, self.cell.sum(tokens), self.cell.sum(samples)

    def _backward(self, piece: Piece, advantages, rewards, sizes) -> dict[str, Tensor]:
        """Loss and gradient of one micro-batch; returns what is to be known of its tokens, [T]."""
        packed, algo = piece.packed, self.algo
        with spans("forward"):
            logp, entropy = self.policy(packed, self.temperature, bool(algo.entropy_coef))  # [T]
        # What a correction leaves out is gone before a loss sees it: some average over a sample.
        keep = slice(None) if piece.keep is None else piece.keep.nonzero().flatten()  # [K]
        proximal = logp.detach() if piece.proximal is None else piece.proximal
        of_sample = advantages[packed.sample], rewards[packed.sample], packed.sample
        tokens = (logp, packed.behaviour, proximal, *of_sample)  # [T] each
        tokens = algos.Tokens(*(value[keep] for value in tokens))  # [K] each
        loss, cut = algos.LOSSES[algo.loss](tokens, algo)
        weight = piece.counts * algos.token_weights(tokens.sample, *sizes, algo).to(loss)
        if piece.factor is not None:
            loss = loss * piece.factor[keep]
        if self.reference is not None:
            with spans("forward"), torch.no_grad():
                reference, _ = self.reference(packed, self.temperature)
            loss = loss + algo.kl_coef * algos.kl_penalty(tokens.logp, reference[keep])
        if algo.entropy_coef:
            loss = loss - algo.entropy_coef * entropy[keep]
        # FSDP averages gradients over ranks; the weights already carry the global denominator.
        with spans("backward"):
            ((loss * weight).sum() * self.cell.world).backward()

        def spread(values: Tensor) -> Tensor:  # [K] -> [T]
            everywhere = torch.zeros_like(packed.behaviour)
            everywhere[keep] = values
            return everywhere

        return {
            "counts": torch.full_like(packed.behaviour, piece.counts),
            "weighted_loss": spread((loss * weight).detach()),
            "entropy": entropy.detach(),
            "log_ratio": (logp - packed.behaviour).detach(),
            "clip": spread(cut),
            "masked": 1 - spread(torch.ones_like(cut)),
            "truncated": self._truncated(piece),
            "advantage": of_sample[0],
            "version": packed.versions,
        }

    def _truncated(self, piece: Piece) -> Tensor:
        """Whether the correction cut a token's weight, [T]."""
        if piece.factor is None or not self.algo.correction.endswith("truncate"):
            return torch.zeros_like(piece.packed.behaviour)
        return (piece.factor >= self.algo.correction_high).float()

    @spans("optimiser")
    def _update(self, stats: list[dict], samples: list[Sample]) -> tuple[float, float]:
        """Clip, check, step. Returns loss and gradient norm of the minibatch."""
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.grad_clip)
        norm = float(whole(norm))
        loss = self.cell.sum(float(sum(part["weighted_loss"].sum() for part in stats)))
        # Ratios are bounded: without this, an engine's log-probability of -inf passes unnoticed.
        drift = self.cell.sum(float(sum(part["log_ratio"].sum() for part in stats)))
        if not all(map(math.isfinite, (loss, norm, drift))):
            raise NonFiniteError(loss, norm, samples)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    @spans("diagnostics")
    def _diagnostics(self, stats: list[dict], version: int) -> dict[str, float]:
        """Means over the trained tokens of the whole batch. `log_ratio` is log pi - log pi_b, when
        each token is trained on."""
        cell = self.cell
        tokens = {key: torch.cat([part[key] for part in stats]) for key in stats[0]}  # [T] each
        counts = tokens.pop("counts") > 0
        tokens = {key: value[counts].double() for key, value in tokens.items()}
        count = max(cell.sum(float(counts.sum())), 1.0)
        log_ratio = tokens["log_ratio"].clamp(-20, 20)
        ratio, ages = log_ratio.exp(), version - tokens["version"]

        def mean(values: Tensor) -> float:
            return cell.sum(float(values.sum())) / count

        def most(values: Tensor) -> float:
            return cell.max(float(values.max()) if len(values) else 0.0)

        ratio_mean, second_moment = mean(ratio), mean(ratio.square())
        by_age = {}
        for age in range(int(most(ages)) + 1):
            of_age = cell.sum(float((ages == age).sum()))
            total = cell.sum(float(log_ratio[ages == age].abs().sum()))
            if of_age:
                by_age[str(age)] = total / of_age
        return {
            "entropy": mean(tokens["entropy"]),
            "ratio_mean": ratio_mean,
            "ratio_max": most(ratio),
            "ratio_ess": ratio_mean**2 / max(second_moment, 1e-12),  # effective sample size, share
            "clip_frac": mean(tokens["clip"]),
            "masked_frac": mean(tokens["masked"]),
            "truncated_frac": mean(tokens["truncated"]),
            "kl_behaviour": mean(ratio - 1 - log_ratio),  # KL(pi_b || pi), "k3"
            "advantage_std": math.sqrt(mean(tokens["advantage"].square())),
            "advantage_max": most(tokens["advantage"].abs()),
            # With one update a batch, age 0 is the mismatch of trainer and engine alone.
            "abs_log_ratio_by_age": by_age,
        }

    @spans("probe")
    @torch.no_grad()
    def score(self, ids: list[int]) -> np.ndarray:
        """Raw log-probabilities (T = 1) of ids[1:], for the probe. Called on every rank."""
        row, count = torch.tensor([ids]), len(ids)  # [1, L]
        positions = torch.arange(count)
        packed = Packed(row, positions[None], None, positions[:-1], row[0, 1:], row, row, row)
        logp, _ = self.policy(packed.to(self.cell.device), 1.0)
        if isinstance(self.policy, FSDPModule):
            # Else the outermost parameters stay gathered copies, in `dtype` and without moments,
            # until the next backward pass; `save` would take those for the masters.
            self.policy.reshard()
        return logp.cpu().numpy()

    def save(self, path: Path, tokenizer, progress: dict) -> None:
        """Write model and tokenizer in Hugging Face format, and what a resumed run needs. Every
        rank takes part (shards are gathered); rank 0 writes, to a temporary name first."""
        weights = {name: whole(p).cpu() for name, p in self.policy.model.named_parameters()}
        moments = [
            {name: whole(value).cpu() for name, value in self.optimizer.state[p].items()}
            for p in self.policy.parameters()
        ]
        if self.cell.rank == 0:
            temporary = path.with_name(f".{path.name}")
            self.policy.model.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
            state = {"moments": moments, "scheduler": self.scheduler.state_dict()}
            torch.save(state | {"rng": torch.get_rng_state()} | progress, temporary / STATE_FILE)
            temporary.rename(path)

    def restore(self, state: dict) -> None:
        """Put back what `save` wrote beside the model (which `model` already names)."""
        for p, moments in zip(self.policy.parameters(), state["moments"], strict=True):
            self.optimizer.state[p] = {
                name: distribute_tensor(value.to(p.device), p.device_mesh, p.placements)
                if isinstance(p, DTensor) and value.shape == p.shape
                else value.to(p.device if value.dim() else "cpu")
                for name, value in moments.items()
            }
        self.scheduler.load_state_dict(state["scheduler"])
        for group, rate in zip(
            self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate  # the scheduler sets it when it steps, not when it is loaded
        torch.set_rng_state(state["rng"])


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, in one piece on every rank (a collective, if it is)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


# -- weights to the rollout processes ------------------------------------------------------------


class Publisher:
    """The sending half of a publish; `engine.BroadcastReceiver` is the other."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        # Tied embeddings are one parameter and appear once; the engine ties its own.
        named = dict(trainer.policy.model.named_parameters())
        self.parameters = list(named.values())
        self.info = {
            "names": list(named),
            "shapes": [list(p.shape) for p in self.parameters],
            "dtype": str(trainer.dtype).removeprefix("torch."),
            "bucket_bytes": trainer.config.bucket_mb * 2**20,
        }
        self.group, self.rollouts = None, None  # trainer rank 0 has both

    def connect(self, rollouts: Rollouts | None, timeout: float) -> None:
        """Join trainer rank 0 and every rollout rank of every node in one process group."""
        self.rollouts = rollouts
        if rollouts is not None and rollouts.weight_group is not None:
            self.group = rollouts.weight_group  # the workers of an earlier run
            return
        cell, limit = self.trainer.cell, timedelta(seconds=timeout)
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
            rollouts.weight_group = self.group

    def send(self) -> None:
        """Gather a bucket on all trainer ranks, then broadcast it, then the next: two communicators
        are never in flight together."""
        dtype, cell = self.trainer.dtype, self.trainer.cell
        for bucket in cut_buckets(self.info["shapes"], dtype.itemsize, self.info["bucket_bytes"]):
            parts = []
            for i in bucket:
                part = whole(self.parameters[i])
                if cell.rank == 0:
                    parts.append(part.to(dtype).flatten())
            if self.group is not None:
                flat = torch.cat(parts).to("cpu" if cell.wire == "gloo" else cell.device)
                self._broadcast(flat)

    def _broadcast(self, flat: Tensor) -> None:
        """Send one bucket; polled, so that Ctrl-C and a worker that is gone are noticed in time."""
        work = self.group.broadcast(flat, 0)
        while not work.is_completed():
            self.rollouts.raise_error()
            time.sleep(1e-4)
        try:
            work.wait()
        except RuntimeError:  # a receiver is gone: its owner is about to know which, and why
            self.rollouts.raise_error(within=6.0)
            raise
