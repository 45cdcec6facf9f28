"""What only a GPU can tell, as one table: `bash launch.sh gpu-check`, minutes on what there is.

Every step runs in a process of its own, with a time limit: one that fails, hangs or runs out of
memory is a line of the table, and the next one has a clean device. Models have random weights, so
nothing is downloaded: Qwen2-0.5B's shape on a GPU, a small one on the CPU, where the same steps run
over gloo and show that the command itself works.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see train.py: before torch is imported

import argparse
import contextlib
import json
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from plumbing.devices import usable_gpus
from plumbing.processes import child_environment
from plumbing.ranks import cores

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # as config.json of Qwen2-0.5B has them
    "cuda": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    },
    "cpu": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
DEVICE = "cuda" if usable_gpus() else "cpu"
DEVICES = None  # those that a step sees; on the CPU nothing is said of any
if DEVICE == "cuda":
    every = ",".join(map(str, range(usable_gpus())))
    DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES") or every
DTYPE = torch.bfloat16
SAMPLES, LENGTH, PROMPT = {"cuda": (64, 1024, 256), "cpu": (16, 96, 32)}[DEVICE]  # of a train step
LIMIT = 300  # seconds a step


class Skipped(Exception):
    """This machine, or this version, has not what the step needs."""


def main(argv: list[str] | None = None, prepare: Callable | None = None) -> int:
    """Returns 0, or 1 if a step failed, 130 after Ctrl-C. `prepare(folder)` makes the models."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=STEPS, help="these steps alone")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.step:
        return alone(args.step, args.model)
    lines = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            (prepare or make_models)(folder)
            for step in args.only or STEPS:
                print(f"gpu-check: {STEPS[step].__doc__.splitlines()[0]} ...", file=sys.stderr)
                lines += supervise(step, folder)
    except KeyboardInterrupt:
        return 130
    print(table(lines))
    return int(any(state.startswith("FAILED") for _, state in lines))


def supervise(step: str, folder: str) -> list[tuple[str, str]]:
    """The lines of a step that runs in a process group of its own, which is ended with it."""
    command = [sys.executable, "-m", "experiments.gpu_check", "--step", step, "--model", folder]
    title, began = STEPS[step].__doc__.splitlines()[0].rstrip("."), time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        with child_environment(DEVICES, threads=1):
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True,
                start_new_session=True,
            )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return [(title, f"FAILED: not done after {LIMIT} s")]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what a step that is over has left
            process.wait()
        said.seek(0)
        words = [line.strip() for line in said.read().splitlines() if line.strip()]
    found = [json.loads(line[1:]) for line in out.splitlines() if line.startswith("\0")]
    if process.returncode:
        causes = [word for word in words if "Error" in word and "root cause" not in word] or words
        cause = causes[-1] if causes else f"exit code {process.returncode}"
        return [*found, (title, f"FAILED: {cause[:160]}")]
    print(f"gpu-check: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return found


def alone(step: str, folder: str) -> int:
    """Run one step in this process; its lines go to the parent as JSON."""
    title = STEPS[step].__doc__.splitlines()[0].rstrip(".")

    def say(state: str, what: str = title) -> None:
        print("\0" + json.dumps([what, state]), flush=True)

    try:
        STEPS[step](folder, say)
    except Skipped as why:
        say(f"skipped: {why}")
    sys.stdout.flush()
    os._exit(0)  # engines and groups have nothing to save, and may wait for each other


def table(lines: list) -> str:
    """Markdown, to be pasted into docs/results.md."""
    where = f"{usable_gpus()} x {torch.cuda.get_device_name(0)}" if DEVICE == "cuda" \
        else f"no GPU ({os.cpu_count()} CPU cores, gloo, small shapes)"  # fmt: skip
    head = f"| {where}, torch {torch.__version__}, Python {platform.python_version()} | |"
    rows = [f"| {what} | {state.replace('|', '/')} |" for what, state in lines]
    return "\n".join([head, "|---|---|", *rows])


# -- what the steps work on ----------------------------------------------------------------------


def make_models(folder: str) -> None:
    """Two models, 0 and 1, with weights so large that their outputs differ by more than noise."""
    from plumbing.tiny import byte_tokenizer

    config = Qwen2Config(
        **SHAPES[DEVICE], tie_word_embeddings=True, max_position_embeddings=4096,
        initializer_range=0.05,
    )  # fmt: skip
    for number in range(2):
        torch.manual_seed(number)
        with torch.device(DEVICE):
            model = Qwen2ForCausalLM(config)
        model.to(torch.float32).save_pretrained(Path(folder) / str(number))
        byte_tokenizer().save_pretrained(Path(folder) / str(number))


def settings_of(**chosen):
    from plumbing.settings import Settings

    return Settings(max_num_seqs=32, max_model_len=2048, group_size=4, **chosen)


class Driven:
    """An engine on the first GPU, and two policies beside it whose weights it can be sent."""

    def __init__(self, folder: str, bucket_bytes: int = 0):
        from envs import Limits
        from plumbing.engine import Engine
        from plumbing.policy import load_policy
        from plumbing.ranks import Ranks
        from plumbing.settings import WorkerSpec
        from plumbing.weights import Sender, Wire, open_store

        self.ranks = Ranks()
        self.policies = [load_policy(f"{folder}/{i}", self.ranks, DTYPE) for i in range(2)]
        self.senders = [Sender(self.ranks, p.model, DTYPE, bucket_mb=256) for p in self.policies]
        limits = Limits(64, 1, 2048)
        self.engine = Engine(
            WorkerSpec(
                model=f"{folder}/0", settings=settings_of(), limits=limits, dtype="bfloat16",
                prefix_caching=True, gpu_share=0.4 if DEVICE == "cuda" else 0.0,
            )
        )  # fmt: skip
        # Trainer and engine share a GPU here: NCCL refuses that, so weights go over gloo.
        self.ranks.wire = "gloo"
        store = open_store(2, 60, "127.0.0.1")
        wire = Wire("127.0.0.1", store.port, 1, 2, "gloo", 60.0)
        join = {"args": (asdict(wire),)}
        rpc = self.engine.core.collective_rpc
        joining = threading.Thread(target=rpc, args=("init_weight_transfer_engine",), kwargs=join)
        joining.start()
        group = wire.join(0, store)
        joining.join()
        for sender in self.senders:
            sender.group = group
            sender.manifest.bucket_bytes = bucket_bytes or sender.manifest.bucket_bytes
        self.version = 0

    def publish(self, which: int) -> float:
        """Send the weights of policy `which`; returns the seconds until they are loaded. Raises
        RuntimeError for any that did not arrive."""
        sender, began = self.senders[which], time.perf_counter()
        sending = threading.Thread(target=sender.broadcast, args=(lambda **_: None,))
        sending.start()
        ((came, _),) = self.engine.load_weights(asdict(sender.manifest), restart=False)
        sending.join()
        if came != sender.checksum:
            raise RuntimeError("what arrived at the engine is not what was sent")
        self.version += 1
        self.engine.version = self.version
        return time.perf_counter() - began

    def gaps(self, which: int, ids: list[int]) -> np.ndarray:
        """|Δlogprob| of engine and policy `which` on a sequence, [P - 1]."""
        mine = self.policies[which].score(ids, self.ranks.device).float().cpu().numpy()
        return np.abs(np.asarray(self.engine.probe(ids)) - mine)

    def greedy(self) -> list[list[int]]:
        """What the engine decodes for eight prompts, 32 tokens each."""
        import asyncio

        from envs import Turn

        async def decode() -> list[list[int]]:
            turns = [Turn([1, 40 + i, 50 + 2 * i, 60], 32, i, []) for i in range(8)]
            running = [asyncio.create_task(self.engine.generate(turn)) for turn in turns]
            await asyncio.sleep(0)
            while self.engine.turns:
                self.engine.step()
                await asyncio.sleep(0)
            await asyncio.gather(*running)
            return [turn.ids for turn in turns]

        self.engine.temperature = 0.0
        return asyncio.run(decode())


def sequence(seed: int, length: int = 64) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def takes_in_place(worker) -> bool:
    return worker.weight_transfer_engine.in_place


def set_form(worker, in_place: bool) -> None:
    worker.weight_transfer_engine.in_place = in_place


# -- the steps -----------------------------------------------------------------------------------


def group(folder: str, say: Callable) -> None:
    """Weight group made, used and aborted."""
    from plumbing.weights import Wire, open_store

    gpus = usable_gpus()
    backend, world = ("nccl", min(2, gpus)) if gpus else ("gloo", 2)
    store = open_store(world, 60, "127.0.0.1")
    wire = Wire("127.0.0.1", store.port, 1, world, backend, 60.0)
    groups = [None] * world

    def take(rank: int) -> None:
        device = torch.device("cuda", rank) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        groups[rank] = wire.join(rank, store if rank == 0 else None)
        flat = torch.full((2**20,), float(rank == 0), device=device)
        groups[rank].broadcast(flat, 0).wait()
        sums[rank] = float(flat.sum())

    sums, began = [0.0] * world, time.perf_counter()
    threads = [threading.Thread(target=take, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sums != [float(2**20)] * world:
        raise RuntimeError(f"a broadcast over {backend} came out as {sums}")
    made = time.perf_counter() - began
    began = time.perf_counter()
    if world > 1:  # nobody answers this one: it has to end with the group
        waiting = groups[0].broadcast(torch.ones(2**24, device="cuda:0" if gpus else "cpu"), 0)
        del waiting
    for one in groups:
        one.abort()
    took = time.perf_counter() - began
    how = f"made and used in {made:.2f} s, aborted in {took:.2f} s"
    say(f"measured: {backend}, {world} rank(s): {how}")


def publish(folder: str, say: Callable) -> None:
    """Publish of each form."""
    driven, which = Driven(folder), 0
    rpc = driven.engine.core.collective_rpc
    # A reload leaves parameters that cannot be loaded in place any more: that form comes first.
    for form, parts in (("in place", 1), ("in place", 8), ("reload", 1), ("reload", 8)):
        title = f"publish, {form}, {'several buckets' if parts > 1 else 'one bucket'}"
        if form == "in place" and not all(rpc(takes_in_place)):
            say("skipped: an engine on a GPU, or with weights in a form of its own, reloads", title)
            continue
        rpc(set_form, args=(form == "in place",))
        which = 1 - which
        for sender in driven.senders:
            total = sum(p.numel() for p in sender.parameters) * DTYPE.itemsize
            sender.manifest.bucket_bytes = total // parts + 1
        seconds = driven.publish(which)
        own, other = (float(driven.gaps(i, sequence(0)).mean()) for i in (which, 1 - which))
        if not own < other / 4:  # the engine has to be nearer to what it was sent
            raise RuntimeError(f"{title}: off by {own:.2g} from it, {other:.2g} from the other one")
        buckets = len(list(driven.senders[which].manifest.buckets()))
        say(
            f"measured: {buckets} bucket(s) in {seconds:.2f} s, off by {own:.2g} (other "
            f"weights: {other:.2g})",
            title,
        )


def noise(folder: str, say: Callable) -> None:
    """Probe noise in bf16."""
    driven = Driven(folder)
    driven.publish(0)
    length = 1024 if DEVICE == "cuda" else 256
    gaps = np.stack([driven.gaps(0, sequence(seed, length)) for seed in range(8)])
    first, last = gaps[:, : length // 4].mean(), gaps[:, -length // 4 :].mean()
    say(
        f"measured: |logprob difference| mean {gaps.mean():.2g}, max {gaps.max():.2g} over "
        f"8 x {length} tokens; first quarter {first:.2g}, last {last:.2g}"
    )


def decode(folder: str, say: Callable) -> None:
    """Decoding after a publish, with graphs where there are any."""
    driven = Driven(folder)
    driven.publish(0)
    before = driven.greedy()
    driven.publish(1)
    other = driven.greedy()
    driven.publish(0)
    again, graphs = driven.greedy(), "captured graphs" if DEVICE == "cuda" else "no graphs (CPU)"
    same = sum(a == b for a, b in zip(before, again, strict=True))
    if other == before or same < len(before) // 2:
        changed = "nothing" if other == before else "them"
        raise RuntimeError(
            f"{graphs}: {same} of {len(before)} greedy responses came back, other weights changed "
            f"{changed}"
        )
    began = time.perf_counter()
    tokens = sum(map(len, driven.greedy()))
    rate = tokens / (time.perf_counter() - began)
    say(
        f"measured: {graphs}: {same} of {len(before)} greedy responses as before, "
        f"{rate:.0f} tokens/s at 8 sequences"
    )


def sleep(folder: str, say: Callable) -> None:
    """Sleep and wake of the engine."""
    if DEVICE == "cpu":
        raise Skipped("vLLM's sleep needs a GPU")
    from plumbing import engine

    engine.EngineArgs = partial(engine.EngineArgs, enable_sleep_mode=True)
    driven = Driven(folder)
    driven.publish(0)
    before, held = driven.greedy(), torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    driven.engine.core.sleep(2)  # weights and cache are thrown away: a publish brings them back
    asleep, freed = time.perf_counter() - began, torch.cuda.mem_get_info()[0] - held
    began = time.perf_counter()
    driven.engine.core.wake_up(["weights"])
    driven.publish(0)
    driven.engine.core.wake_up(["kv_cache"])
    awake = time.perf_counter() - began
    same = sum(a == b for a, b in zip(before, driven.greedy(), strict=True))
    if same < len(before) // 2:
        raise RuntimeError(f"awake again, {same} of {len(before)} greedy responses came back")
    say(
        f"measured: asleep in {asleep:.2f} s, {freed / 2**30:.1f} GiB freed, awake with weights in "
        f"{awake:.2f} s, {same} of {len(before)} greedy responses as before"
    )


def matmul_rate(device) -> float:
    """Floating-point operations a second of a large matmul, in the trainer's precision."""
    size = 8192 if DEVICE == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=DTYPE if DEVICE == "cuda" else torch.float32)
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(4):
            a @ a
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        best = max(best, 4 * 2 * size**3 / (time.perf_counter() - began))
    return best


def random_samples(count: int, length: int, prompt: int) -> list:
    """Samples as an engine would send them, of random tokens, whose rewards differ."""
    from buffer import Sample, Ticket

    rng, samples = np.random.default_rng(0), []
    for i in range(count):
        ids = rng.integers(3, 250, length).astype(np.int32)
        mask = np.arange(length) >= prompt
        logprobs = np.where(mask, -5.0, 0.0).astype(np.float32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        ticket = Ticket(i // 4, i % 4, i // 4, i)
        samples.append(Sample(ticket, ids, mask, logprobs, versions, float(i % 2)))
    return samples


def trainer(folder: str, say: Callable) -> None:
    """Trainer alone: tokens/s, MFU and memory."""
    from plumbing.ranks import Ranks
    from train import Trainer

    ranks = Ranks()
    torch.set_num_threads(cores())
    one = Trainer(ranks, settings_of(learning_rate=1e-6), f"{folder}/0", "", "bfloat16")
    samples = random_samples(SAMPLES, LENGTH, PROMPT)
    one.step(samples)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began, steps = time.perf_counter(), 3
    for _ in range(steps):
        one.step(samples)
    seconds = (time.perf_counter() - began) / steps  # a step's metrics wait for the device
    count, tokens = sum(p.numel() for p in one.policy.parameters()), SAMPLES * LENGTH
    top = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    peak, precision = matmul_rate(ranks.device), "bf16" if DEVICE == "cuda" else "fp32"
    share = 6 * count * tokens / seconds / peak
    say(
        f"measured: {tokens / seconds:,.0f} tokens/s, MFU {share:.0%} of the {peak / 1e12:.1f} "
        f"TFLOP/s that a large {precision} matmul reaches here ({count / 1e6:.1f}M parameters)",
        "trainer, tokens/s and MFU",
    )
    memory = "trainer, memory peak against the estimate"
    states = 4 * 4 * count  # masters, gradients and two moments, in fp32
    if DEVICE == "cpu":
        say("skipped: device memory needs a GPU", memory)
        return
    say(
        f"measured: {top:.1f} GiB at micro_tokens {one.settings.micro_tokens}; "
        f"{states / 2**30:.1f} GiB of that are parameters, gradients and moments",
        memory,
    )


def run(mode: str, processes: int, folder: str, say: Callable) -> None:
    """Train for three steps as a user would, and say how fast."""
    if DEVICE == "cuda" and usable_gpus() < processes:
        raise Skipped(f"{usable_gpus()} GPU here")
    out = Path(folder) / f"{mode}-{processes}"
    flags = ["--mode", mode, "--model", f"{folder}/0", "--env", "addition", "--steps", "3"]
    flags += ["--eval_every", "0", "--batch_size", "8", "--group_size", "4", "--max_tokens", "64"]
    flags += ["--max_model_len", "256", "--learning_rate", "1e-6", "--run_dir", str(out)]
    env = dict(os.environ, TQDM_DISABLE="1")
    if DEVICE == "cuda":
        names = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = names or [str(i) for i in range(processes)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[:processes])
    else:
        flags += ["--rollout_workers", str(processes)]
    ended = subprocess.run(
        [sys.executable, "train.py", *flags], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["no word"])[-1])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row["tokens"] for row in rows[1:])
    seconds = rows[-1]["wall_s"] - rows[0]["wall_s"]
    worst = max(row["mismatch_max"] for row in rows)
    say(
        f"measured: {tokens / seconds:,.0f} trained tokens/s over 2 steps after the first, "
        f"mismatch at most {worst:.2g}"
    )


def named(mode: str, processes: int) -> Callable:
    def step(folder: str, say: Callable) -> None:
        run(mode, processes, folder, say)

    on = f"{processes} GPU(s)" if DEVICE == "cuda" else f"the CPU, {processes} worker(s)"
    step.__doc__ = f"A run in {mode} on {on}."
    return step


STEPS = {
    "group": group, "publish": publish, "noise": noise, "decode": decode, "sleep": sleep,
    "trainer": trainer,
    "sync1": named("sync", 1), "async1": named("async", 1),
    "sync2": named("sync", 2), "async2": named("async", 2),
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
