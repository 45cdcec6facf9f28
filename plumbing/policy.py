"""The model as the trainer needs it: log-probabilities of chosen tokens, never all logits."""

import sys

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

import algos
from plumbing.checks import refuse_broken_weights, refuse_changed_logits
from plumbing.models import one_line_if_broken
from plumbing.packing import Packed
from plumbing.ranks import Ranks


class Policy(nn.Module):
    """A causal language model that returns log-probabilities of the tokens that are trained on."""

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
        # Several samples may follow one position. The gradient of indexing would add theirs up in
        # the order in which threads come by; that of index_select keeps to one order.
        chosen = hidden.index_select(0, packed.predictors)  # [T, D]
        return algos.token_logprobs(
            chosen, head, packed.targets, temperature,
            entropy_gradient=entropy_gradient,
        )  # fmt: skip

    @torch.no_grad()
    def score(self, ids: list[int], device: torch.device) -> Tensor:
        """Raw log-probabilities (T = 1) of ids[1:], for the probe. Called on every rank."""
        row, count = torch.tensor([ids]), len(ids)  # [1, L]
        positions = torch.arange(count)
        packed = Packed(row, positions[None], None, positions[:-1], row[0, 1:], row, row, row)
        logp, _ = self(packed.to(device), 1.0)
        if isinstance(self, FSDPModule):
            # Else the outermost parameters stay gathered copies, in low precision and without
            # moments, until the next backward pass; a checkpoint would take those for the masters.
            self.reshard()
        return logp


def checkpoint_activations(model: nn.Module) -> None:
    """Keep the input of each layer only, and compute the rest again in the backward pass: a third
    more work for a fraction of the memory (16,384 packed tokens of Qwen2.5-7B would take some
    100 GiB). Raises ValueError for a model with dropout, which that mode would turn on."""
    if rates := {k: v for k, v in model.config.to_dict().items() if "dropout" in k and v}:
        raise ValueError(f"the model has dropout ({rates}): set it to 0 in its config.json")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})


def load_policy(
    path: str, ranks: Ranks, dtype: torch.dtype, probe: list[int] | None = None
) -> Policy:
    """Read a model; its masters are float32 also where the forward pass is not. Raises ValueError
    for one whose weights are not whole, or whose probabilities of the `probe` are not its own."""
    with one_line_if_broken(path):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )  # those are refused below, by their names
    for note in refuse_broken_weights(path, model, loaded):
        if ranks.rank == 0:
            print(f"note: {note}", file=sys.stderr)
    if ranks.device.type == "cuda":
        checkpoint_activations(model)
    policy = Policy(model)
    if probe:
        refuse_changed_logits(path, policy, probe)
    return ranks.shard(policy, dtype)
