"""Run by test_engine.py in a process of its own (vLLM reads its settings from the environment).

Drives one `engine.Engine` by hand, with the trainer's end of the weight group in a thread, and
prints what it saw as JSON: argument 1 is a model directory, 2 the folder of a second one of the
same shape, 3 the number of tensor-parallel workers.
"""

import asyncio
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from envs import Limits, Turn
from plumbing import engine as module
from plumbing.engine import Engine
from plumbing.settings import Settings, WorkerSpec
from plumbing.weights import Manifest, Wire, checksum, open_store

BUCKET = 2**18  # several buckets, also for the tiny model


def manifest_of(model) -> Manifest:
    named = dict(model.named_parameters())
    return Manifest(list(named), [list(p.shape) for p in named.values()], "float32", BUCKET)


def send(group, model) -> None:
    parameters = [p.detach() for p in model.parameters()]
    for bucket in manifest_of(model).buckets():
        group.broadcast(torch.cat([parameters[i].flatten() for i in bucket]), 0).wait()


class Driver:
    def __init__(self, models: list, path: str, ranks: int):
        settings = Settings(max_num_seqs=16, tensor_parallel=ranks)
        spec = WorkerSpec(
            model=path, settings=settings, limits=Limits(40, 1, 128), dtype="float32",
            prefix_caching=True, gpu_share=0.3,
        )  # fmt: skip
        self.models, self.sums = models, []
        self.engine = Engine(spec)
        store = open_store(1 + ranks, 60, "127.0.0.1")
        wire = Wire("127.0.0.1", store.port, 1, 1 + ranks, "gloo", 60.0)
        join = threading.Thread(
            target=self.engine.core.collective_rpc,
            args=("init_weight_transfer_engine",),
            kwargs={"args": (asdict(wire),)},
        )
        join.start()
        self.group = wire.join(0, store)
        join.join()

    def load(self, which: int, version: int, restart: bool = False) -> list[float]:
        """Publish model `which`; returns the probe's scores."""
        model = self.models[which]
        thread = threading.Thread(target=send, args=(self.group, model))
        thread.start()
        sums = self.engine.load_weights(asdict(manifest_of(model)), restart)
        thread.join()
        self.sums.append((sum(map(checksum, model.parameters())), sums))
        waiting = {request: len(running.turn.ids) for request, running in self.engine.turns.items()}
        scores = self.engine.probe(PROBE)
        assert waiting == {r: len(running.turn.ids) for r, running in self.engine.turns.items()}
        self.engine.version = version
        return scores

    async def generate(self, temperature: float, update=None, prompts=None) -> list[dict]:
        """8 turns of up to 40 tokens; `update()` is called once, between two steps."""
        self.engine.temperature = temperature
        prompts = prompts or [[1, 40 + i, 50 + 2 * i, 60] for i in range(8)]
        turns = [Turn(prompt, 40, i, []) for i, prompt in enumerate(prompts)]
        running = [asyncio.create_task(self.engine.generate(turn)) for turn in turns]
        await asyncio.sleep(0)
        steps = 0
        while self.engine.turns:
            self.engine.step()
            steps += 1
            if update and steps == 12:
                update()
            await asyncio.sleep(0)
        await asyncio.gather(*running)
        return [
            {"prompt": t.context, "ids": t.ids, "logprobs": t.logprobs, "versions": t.versions}
            for t in turns
        ]


def lose(driver: Driver) -> list:
    """The sums of a publish without its first tensor, of one of which each last tensor of a bucket
    came and was not loaded, and of a whole one."""
    receive = module.receive

    def without_first(*args):
        for number, named in enumerate(receive(*args)):
            yield named[number == 0 :]

    module.receive = without_first
    driver.load(1, 8)
    module.receive = receive
    worker = driver.engine.core.engine_core.model_executor.driver_worker.worker
    model = worker.weight_transfer_engine.model
    load = model.load_weights
    model.load_weights = lambda named: load(named[:-1])
    driver.load(0, 9)
    del model.load_weights
    driver.load(1, 10)
    return driver.sums[-3:]


async def two_updates(driver: Driver) -> int:
    """Two publishes with a new turn in between and no decoding: how many of 3 turns end."""
    def start(i: int) -> asyncio.Task:
        return asyncio.create_task(driver.engine.generate(Turn([1, 9, i], 20, i, [])))

    turns = [start(7), start(8)]
    await asyncio.sleep(0)
    for _ in range(3):
        driver.engine.step()
    driver.load(0, 6)
    turns.append(start(9))
    await asyncio.sleep(0)
    driver.load(1, 7)
    for _ in range(40):
        driver.engine.step()
        await asyncio.sleep(0)
    return sum(turn.done() for turn in turns)


def linear_by_rows(worker) -> dict:
    """Which function multiplies, and the layers and numbers of rows for which the first rows come
    out otherwise than among 2,000."""
    layers = worker.model_runner.model.named_modules()
    layers = {name: layer for name, layer in layers if hasattr(layer, "cpu_linear")}
    differ = []
    for name, layer in layers.items():
        width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
        x = torch.randn(2000, width)
        whole = layer.cpu_linear(x, layer.weight, None)
        for rows in (*range(1, 70), 127, 128, 129, 255, 256, 300, 511, 1000, 1999):
            part = layer.cpu_linear(x[:rows].clone(), layer.weight, None)
            if not torch.equal(part, whole[:rows]):
                differ.append((name, rows))
    names = {layer.cpu_linear.__name__ for layer in layers.values()}
    return {"functions": sorted(names), "layers": len(layers), "differ": differ}


PROBE = list(range(3, 40))


async def main() -> dict:
    paths, ranks = sys.argv[1:3], int(sys.argv[3])
    module.SMALL = int(sys.argv[5])
    models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in paths]
    driver = Driver(models, paths[0], ranks)
    seen = {"probe_1": driver.load(1, 0), "probe_0": driver.load(0, 1)}
    seen["greedy"] = await driver.generate(0.0)
    seen["greedy_cut"] = await driver.generate(0.0, lambda: driver.load(0, 2))
    seen["spanning"] = await driver.generate(1.0, lambda: driver.load(1, 3))
    driver.load(0, 4)
    seen["restarted"] = await driver.generate(1.0, lambda: driver.load(1, 5, restart=True))
    turn = asyncio.create_task(driver.engine.generate(Turn([1, 5, 6], 40, 0, [])))
    await asyncio.sleep(0)
    driver.engine.step()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    seen["two_updates"] = await two_updates(driver)
    scheduler = driver.engine.core.engine_core.scheduler
    seen["after_abort"] = [len(driver.engine.turns), scheduler.has_unfinished_requests()]
    seen["refused"] = []
    for prompt in ([], [1, driver.engine.vocabulary], [-1, 1]):
        try:
            await driver.engine.generate(Turn(prompt, 4, 0, []))
        except ValueError as error:
            seen["refused"].append(str(error))
    seen["sums"] = driver.sums[:]
    seen["lost"] = lose(driver) if ranks == 1 else []
    seen["linear"] = driver.engine.core.collective_rpc(linear_by_rows)[0]
    return seen


if __name__ == "__main__":  # tensor-parallel workers import this file
    Path(sys.argv[4]).write_text(json.dumps(asyncio.run(main())))
