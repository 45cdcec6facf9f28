"""vLLM, as this project uses it; imported in rollout processes only.

`Engine` decodes turns and stamps every token with its version. Around it, what plugs into vLLM:
the receiving half of a weight publish (`weights.Sender` is the sending half), and a scheduler that
can score one sequence alone. Tested with vLLM 0.32.0; the core's client and the choice
of a matmul on the CPU are its internals, everything else is a public extension point.

vLLM imports this module in every tensor-parallel worker because `WorkerExtension` is named as its
`worker_extension_cls`; importing it registers the receiver under the backend name "broadcast".
"""

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass

import torch
import vllm._custom_ops
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import AutoConfig
from vllm import EngineArgs, SamplingParams
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor

from envs import Turn
from plumbing.devices import usable_gpus
from plumbing.weights import Manifest, Wire, checksum, receive

PROBE = "probe"  # request ids that start with this are scored alone
SMALL = 256  # hidden size up to which torch's matmul beats vLLM's own on the CPU
ROWS = 16  # with fewer (three, here) torch's matmul may sum in another order than with many


@dataclass
class GroupInfo(Wire, WeightTransferInitInfo):
    """As vLLM wants it: made of the dict that came over the pipe."""


@dataclass
class UpdateInfo(Manifest, WeightTransferUpdateInfo):
    """The same."""


class BroadcastReceiver(WeightTransferEngine[GroupInfo, UpdateInfo]):
    """Receives the buckets that the trainer broadcasts and loads them as a checkpoint."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, info: GroupInfo) -> None:
        self.wire = torch.device("cpu") if info.backend == "gloo" else self.device
        self.group = info.join(info.first_rank + self.parallel_config.rank)
        # Weights that are used as they were loaded can be copied over. Where vLLM has turned them
        # into a form of its own (on the CPU the original is empty then) it has to load them anew.
        self.originals = all(weight.numel() for weight in self.model.parameters())
        self.in_place = self.device.type == "cpu" and self.originals

    def start_weight_update(self) -> None:
        if not self.in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, info: UpdateInfo) -> None:
        self.arrived = 0
        for named in receive(self.group, info, self.wire, self.device):
            self.arrived += sum(checksum(tensor) for _, tensor in named)
            self.model.load_weights(named)

    def finish_weight_update(self) -> None:
        if self.in_place:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if self.model_config.hf_config.tie_word_embeddings and head is not None:
            # On the CPU a tied head keeps a packed copy of the old embedding: without this line
            # the engine goes on sampling from the old weights and nothing says so.
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self.group = None


class ProbeScheduler(Scheduler):
    """vLLM's scheduler, except that a probe has the engine to itself.

    When the probe is added nothing may be running (`reset_prefix_cache(reset_running_requests=
    True)` has sent every sequence back to waiting). Waiting sequences are set aside until the
    probe has finished, so that none decodes a token before the new version is committed.
    """

    _held = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not self.kv_cache_manager.enable_caching:
            # Nothing to reset, but it would walk all blocks at every update: 3 ms for 1 GiB.
            self.kv_cache_manager.reset_prefix_cache = lambda: True

    def add_request(self, request) -> None:
        if request.request_id.startswith(PROBE):
            assert not self.running, "a probe needs an engine without running sequences"
            self._held, self.waiting = self.waiting, create_request_queue(self.policy)
        super().add_request(request)

    def update_from_output(self, *args, **kwargs):
        outputs = super().update_from_output(*args, **kwargs)
        if self._held is not None and not self.running:  # the probe, of one token, has finished
            self.waiting, self._held = self._held, None
        return outputs


class WorkerExtension:
    """Mixed into vLLM's worker class: naming it makes every worker import this module."""

    def use_torch_linear(self) -> None:
        for layer in self.model_runner.model.modules():
            if hasattr(layer, "cpu_linear"):
                layer.cpu_linear = invariant_linear

    def checksums(self) -> tuple[int, int | None]:
        """Of the weights that came last, and of the model's own; None where it keeps them in a form
        of its own, or only a shard of them."""
        receiver, weights = self.weight_transfer_engine, list(self.model_runner.model.parameters())
        shard = receiver.parallel_config.world_size > 1
        own = None if shard or not receiver.originals else sum(map(checksum, weights))
        return receiver.arrived, own


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, in] to [T, out]; what comes out of a row does not depend on the others, to the last bit.

    For torch's matmul that holds with one thread and enough rows (tests/plumbing/test_engine.py).
    """
    rows = len(x)
    if rows < ROWS:
        x = pad(x, (0, 0, 0, ROWS - rows))
    return linear(x, weight, bias)[:rows]


WeightTransferEngineFactory.register_engine("broadcast", BroadcastReceiver)


@dataclass(eq=False)
class Running:
    """A turn in the engine."""

    turn: Turn
    params: SamplingParams
    done: asyncio.Future
    request: str = ""


class Engine:
    """vLLM in this process, stepped by `Worker.serve`; every token is stamped as it is made.
    `spec` is a `settings.WorkerSpec`."""

    def __init__(self, spec):
        on_cpu = not usable_gpus()
        # After an update everything that runs is recomputed: prompts go in as many as there is
        # memory for, not the 2,048 tokens a step that vLLM takes for an engine of its core alone.
        tokens = max(8192, spec.limits.max_model_len)
        limits = {"gpu_memory_utilization": spec.gpu_share, "max_num_batched_tokens": tokens}
        if on_cpu:
            # vLLM's matmul, oneDNN's, compiles for every new number of tokens, 1 ms a matrix, and
            # packs all matrices again at every publish. From hidden size 576 on it makes up for
            # both (8 to 40 % faster). Torch's does not depend on the batch, with one thread, and
            # small models are not slower with one.
            hidden = AutoConfig.from_pretrained(spec.model).get_text_config().hidden_size
            small = hidden <= SMALL and spec.settings.tensor_parallel == 1
            if small:
                torch.set_num_threads(1)
            vllm._custom_ops._supports_onednn &= not small
            # A prompt cut into chunks throws a sampled token away and rewinds the request's
            # generator, which CPU generators cannot do: let every prompt go in whole.
            limits = {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(4096, spec.limits.max_model_len),
                "block_size": 32,
            }
        args = EngineArgs(
            model=spec.model,
            skip_tokenizer_init=True,  # ids in, ids out: the stop ids of a turn include EOS
            load_format="dummy",  # random: a first publish that brings nothing shows
            dtype=spec.dtype,
            seed=spec.settings.seed,
            max_model_len=spec.limits.max_model_len,
            max_num_seqs=spec.settings.max_num_seqs,
            tensor_parallel_size=spec.settings.tensor_parallel,
            enforce_eager=on_cpu,
            enable_prefix_caching=spec.prefix_caching,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled: after / T
            async_scheduling=False,  # a step in flight at an update would get the wrong version
            disable_log_stats=True,
            use_tqdm_on_load=False,
            generation_config="vllm",  # not the model's own top_p, top_k: full support
            weight_transfer_config={"backend": "broadcast"},
            worker_extension_cls="plumbing.engine.WorkerExtension",
            scheduler_cls="plumbing.engine.ProbeScheduler",
            **limits,
        )
        config = args.create_engine_config()
        assert not config.scheduler_config.async_scheduling
        # vLLM's core without the LLMEngine around it, which makes several objects of each token.
        self.core = InprocClient(config, Executor.get_class(config), log_stats=False)
        if on_cpu and small:
            self.core.collective_rpc("use_torch_linear")
        self.vocabulary = config.model_config.get_vocab_size()
        self._ids = itertools.count()
        self.turns: dict[str, Running] = {}
        self.version = -1  # none until the first publish is committed
        self.temperature = spec.settings.temperature
        self.places = spec.settings.max_num_seqs
        self.counts: Counter[str] = Counter()
        self.wake = asyncio.Event()  # something to step has come, perhaps while the loop sleeps
        self.gate = asyncio.Event()  # closed while an update drains: no new turn starts
        self.gate.set()

    async def generate(self, turn: Turn) -> None:
        """Decode one turn; survives weight updates, aborts when cancelled.

        Raises ValueError without tokens, or for one that the model has no embedding of."""
        if not turn.context:
            raise ValueError("the prompt has no tokens")
        if min(turn.context) < 0 or max(turn.context) >= self.vocabulary:
            raise ValueError(f"the prompt has tokens outside the model's {self.vocabulary}")
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=turn.max_tokens,
            seed=turn.seed,
            stop_token_ids=turn.stop_ids,
            logprobs=0,
        )
        await self.gate.wait()
        running = Running(turn, params, asyncio.get_running_loop().create_future())
        self._submit(running)
        try:
            await running.done
        except asyncio.CancelledError:
            self._forget(running)
            raise

    def _submit(self, running: Running) -> None:
        running.request = str(next(self._ids))
        self._add(running.request, running.turn.context, running.params)
        self.turns[running.request] = running
        self.wake.set()

    def _add(self, request: str, prompt: list[int], params: SamplingParams) -> None:
        self.core.add_request(
            EngineCoreRequest(
                request_id=request,
                prompt_token_ids=prompt,
                sampling_params=params,
                arrival_time=time.time(),
                mm_features=None,
                pooling_params=None,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def _forget(self, running: Running) -> None:
        if self.turns.pop(running.request, None):
            self.core.abort_requests([running.request])

    def step(self) -> int:
        """One prefill or decode step of all running sequences; returns how many tokens it made."""
        made = 0
        self.counts["engine_steps"] += 1
        self.counts["steps_below_cap"] += len(self.turns) < self.places
        self.counts["slots_used"] += min(len(self.turns), self.places)
        for output in self.core.get_output().outputs:
            running = self.turns.get(output.request_id)
            if running is None or running.done.done():  # the probe's, or cancelled a moment ago
                continue
            turn = running.turn
            turn.ids += output.new_token_ids
            turn.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # column 0: the sampled
            turn.versions += [self.version] * len(output.new_token_ids)
            made += len(output.new_token_ids)
            if output.finished:
                turn.truncated = output.finish_reason == FinishReason.LENGTH
                del self.turns[output.request_id]
                running.done.set_result(None)
        self.counts["tokens"] += made
        return made

    def take_counts(self) -> Counter:
        counts, self.counts = self.counts, Counter()
        return counts

    def load_weights(self, manifest: dict, restart: bool) -> list:
        """Receive and load the weights that the trainer is broadcasting. Running sequences go back
        to waiting with their tokens: their next step recomputes their KV cache. With `restart`
        the tokens of the turn in progress are dropped instead, and it starts again. Returns
        `WorkerExtension.checksums` of each tensor-parallel rank."""
        self.core.collective_rpc("start_weight_update")
        self.core.collective_rpc("update_weights", args=(manifest,))
        self.core.collective_rpc("finish_weight_update")
        if restart:
            for running in [running for running in self.turns.values() if running.turn.ids]:
                turn = running.turn
                self._forget(running)
                del turn.ids[:], turn.logprobs[:], turn.versions[:]
                self._submit(running)
        self.core.reset_prefix_cache(reset_running_requests=True)
        return self.core.collective_rpc("checksums")

    def probe(self, ids: list[int]) -> list[float]:
        """Log-probabilities (raw, T = 1) of ids[1:] under the weights just loaded."""
        self._add(PROBE, ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        while True:
            for output in self.core.get_output().outputs:
                if output.finished:
                    return output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
