"""Time per train step of this project and of TRL's GRPOTrainer, on the same work, in pairs.

    python experiments/vs_trl.py --pairs 3 --steps 40 --skip 10

Run it with the Python of the project (.venv/bin/python), on a machine with nothing else to do. TRL
lives in an environment of its own, because its requirements need not agree with vLLM's:

    python3 -m venv .cache/trl
    .cache/trl/bin/pip install "trl==1.16.*" torch==2.13.0 transformers==5.19.0

(torch and transformers as in requirements.txt, so that both sides compute with the same kernels;
any build of torch will do, the one for CPUs is the smallest). `--trl_python` names another one.

The work of a step: 16 prompts x 8 samples of at most 8 tokens from the model `tiny` on the task
`addition`, an exact-match reward, group-normalised advantages, and one AdamW update, in float32 on
the CPU. Both sides get the same model directory and the same prompts in the same order. Ours is
`train.py`: asynchronous, alpha 1, one trainer and `--rollout_workers` rollout processes, each with
one thread; a weight update waits for running sequences (`--on_update drain`), since to finish four
tokens costs less than to compute their KV cache again. TRL generates with transformers, trains on
all 128 samples in one pass, and has `--threads` threads (2 cores for either side: on a larger
machine, run this under `taskset -c 0,1`). Gradient checkpointing, which it has on by default, is
off: that would only slow it down here.

Other programs on the machine spoil the comparison, and not evenly: OpenMP threads that spin while
they wait, which is the default and so what TRL gets, can become several times slower beside a busy
neighbour. What others used meanwhile is therefore measured, and printed. OMP_WAIT_POLICY=PASSIVE
before the command keeps TRL's threads from spinning, as train.py does for its own: try both, and
compare with the faster TRL.

Our step time is the time between the beginnings of two steps (in trace.json), with all that is
logged between them, TRL's the time between two `on_step_end`. The first `--skip` steps
are warm-up; the last one is left out too, because nothing is generated beside it in ours. A run's
number is the median of the rest.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS, GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 16, 8, 8, 3e-4
BATCH = GROUPS * GROUP_SIZE
QUIET = 0.1  # cores that other programs may use before a run counts as disturbed
PARTS = {"wait": "t_wait", "train": "t_train", "publish": "t_publish"}  # of the trainer's step
WORKER_PARTS = {"decode": "t_worker_decode", "load": "t_worker_load"}  # of the rollout worker's
RUN_TIMEOUT = 1800.0  # seconds


class BenchmarkError(Exception):
    """What went wrong, in one line."""


# -- TRL, in its own environment: vs_trl.py --trl-worker JOB.json RESULT.json ----------------------


def trl_worker(job_path: Path, result_path: Path) -> None:
    """Train with GRPOTrainer as the job says; write when each step ended, and what was done."""
    import torch

    job = json.loads(job_path.read_text())
    torch.set_num_threads(job["threads"])
    seen: list[dict] = []  # of each step: what came to the reward function
    ends: list[float] = []

    def exact_match(prompts, completions, completion_ids, answer, **_) -> list[float]:
        """TRL gives completions as text without special tokens, and the data's columns by name."""
        rewards = [float(c == a) for c, a in zip(completions, answer, strict=True)]
        lengths = [len(ids) for ids in completion_ids]
        seen.append(
            {
                "prompts": len(set(prompts)),
                "samples": len(completions),
                "tokens": sum(lengths),
                "longest": max(lengths),
                "reward": statistics.fmean(rewards),
            }
        )
        return rewards

    trainer = make_trainer(job, exact_match, ends)
    check_tokens(job, trainer.processing_class)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    after = trainer.model.parameters()
    moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
    log = next(row for row in reversed(trainer.state.log_history) if "grad_norm" in row)
    result = {"ends": ends, "seen": seen, "moved": moved, "threads": torch.get_num_threads()}
    result |= {key: float(log[key]) for key in ("loss", "grad_norm", "reward")}
    result_path.write_text(json.dumps(result))


def make_trainer(job: dict, reward, ends: list[float]):
    """A GRPOTrainer for the job. The time is appended to `ends` at the end of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=job["output_dir"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        steps_per_generation=1,  # each step has fresh samples
        num_iterations=1,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,  # as ours
        max_steps=job["steps"],
        shuffle_dataset=False,
        seed=job["seed"],
        logging_steps=job["steps"],  # once, at the end
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return GRPOTrainer(
        model=job["model"],
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(job["rows"]).select_columns(["prompt", "answer"]),
        callbacks=[Clock()],
    )


def check_tokens(job: dict, tokenizer) -> None:
    """TRL gets prompts as text: its tokens have to be the ones that this project trains on."""
    for row in job["rows"]:
        if tokenizer(row["prompt"])["input_ids"] != row["ids"]:
            raise BenchmarkError(f"other tokens in TRL for the prompt {row['prompt']!r}")


# -- the two sides ---------------------------------------------------------------------------------


def make_job(steps: int, seed: int, threads: int) -> dict:
    """The model directory and the prompts of a run, in the order in which train.py takes them."""
    sys.path.insert(0, str(ROOT))
    from transformers import AutoTokenizer

    from envs import prompt_order
    from plumbing.chat import encode_prompt
    from plumbing.devices import usable_gpus
    from plumbing.models import resolve_model
    from plumbing.settings import Settings
    from tasks.find import make_task

    if usable_gpus():
        raise BenchmarkError("this compares the two on the CPU; here train.py would use the GPU")
    task = make_task(Settings(env="addition"), seed)
    model = resolve_model("tiny", task, "addition")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for index in range(steps * GROUPS):
        row = task.train[prompt_order(len(task.train), seed, index)]
        ids = list(encode_prompt(task, task.first_text(row), tokenizer))
        rows.append({"prompt": tokenizer.decode(ids), "ids": ids, "answer": row.answer})
    return {"model": model, "rows": rows, "steps": steps, "seed": seed, "threads": threads}


def run_ours(job: dict, workers: int, on_update: str, skip: int, directory: Path) -> dict:
    """One run of train.py: seconds a step and their parts."""
    run_dir = directory / "run"
    flags = {
        "--mode": "async", "--alpha": 1, "--model": "tiny", "--env": "addition",
        "--steps": job["steps"], "--batch_size": GROUPS, "--group_size": GROUP_SIZE,
        "--max_tokens": MAX_TOKENS, "--learning_rate": LEARNING_RATE, "--temperature": 1.0,
        "--rollout_workers": workers, "--on_update": on_update, "--eval_every": 0,
        "--seed": job["seed"], "--run_dir": run_dir, "--max_restarts": 0,
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    run([sys.executable, str(ROOT / "train.py"), *words], directory / "ours.log", {})
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step" in row]
    check_work("train.py", job["steps"], [row["samples"] for row in rows])
    kept = rows[skip:-1]
    from report.timeline import read_trace  # `make_job` has told where it is

    steps = [event for event in read_trace(run_dir / "trace.json") if event["name"] == "step"]
    result = summarize([event["ts"] / 1e6 for event in steps], skip)
    for name, key in (PARTS | WORKER_PARTS).items():
        result[name] = statistics.fmean(row.get(key, 0.0) for row in kept)
    result["tokens"] = statistics.fmean(row["tokens"] for row in kept)
    result["reward"] = statistics.fmean(row["reward_mean"] for row in kept)
    return result


def run_trl(python: str, job: dict, skip: int, directory: Path) -> dict:
    """One run of TRL: seconds a step, and what shows that it did the work."""
    job_path, result_path = directory / "job.json", directory / "result.json"
    job_path.write_text(json.dumps(job | {"output_dir": str(directory / "trl")}))
    threads = str(job["threads"])
    env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--trl-worker", str(job_path), str(result_path)]
    run(command, directory / "trl.log", env)
    found = json.loads(result_path.read_text())
    seen = found["seen"]
    check_work("TRL", job["steps"], [step["samples"] for step in seen])
    if max(step["longest"] for step in seen) > MAX_TOKENS or not (found["loss"] and found["moved"]):
        raise BenchmarkError("TRL made longer responses, or its loss or update was 0")
    if {step["prompts"] for step in seen} != {GROUPS}:
        raise BenchmarkError(f"TRL did not take {GROUPS} prompts a step")
    kept = seen[skip:-1]
    return summarize(found["ends"], skip) | {
        "tokens": statistics.fmean(step["tokens"] for step in kept),
        "reward": statistics.fmean(step["reward"] for step in kept),
        **{key: found[key] for key in ("loss", "grad_norm", "moved", "threads")},
    }


def check_work(name: str, steps: int, samples: list[int]) -> None:
    """Every step has to be there, with all its samples."""
    if samples != [BATCH] * steps:
        raise BenchmarkError(f"{name} did not train {steps} steps of {BATCH} samples: {samples}")


def summarize(ends: list[float], skip: int) -> dict:
    """Median and mean seconds a step, from the time at which each one ended."""
    ends = ends[skip - 1 : -1]
    each = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return {"median": statistics.median(each), "mean": statistics.fmean(each)}


def run(command: list[str], log: Path, env: dict[str, str]) -> None:
    """Run a command to its end, with its output in a file that is shown if it fails."""
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=os.environ | env, timeout=RUN_TIMEOUT,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"none within {RUN_TIMEOUT:g} s"
    if code != 0:
        say("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        raise BenchmarkError(f"exit code {code} of {' '.join(command[:3])} ... (output above)")


# -- the comparison --------------------------------------------------------------------------------


def cpu_seconds_of_others() -> float:
    """CPU time that the machine has spent, less that of our finished children; for differences."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - children.ru_utime - children.ru_stime


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def trl_version(python: str) -> str:
    """Version of TRL in that environment. Raises BenchmarkError, with how to install it."""
    ask = "from importlib.metadata import version as v; print(v('trl'), v('torch'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    except OSError:
        done = None
    if done is None or done.returncode:
        raise BenchmarkError(
            f"no TRL with {python}: python3 -m venv .cache/trl && .cache/trl/bin/pip install "
            "'trl==1.16.*' torch==2.13.0 transformers==5.19.0, or name another --trl_python"
        )
    trl, torch = done.stdout.split()
    return f"trl {trl}, torch {torch}"


def compare(args: argparse.Namespace, job: dict) -> list[tuple[dict, dict]]:
    """Run the pairs; the side that begins alternates."""
    pairs = []
    ours = job, args.rollout_workers, args.on_update, args.skip
    sides = {
        "ours": lambda directory: run_ours(*ours, directory),
        "TRL": lambda directory: run_trl(args.trl_python, job, args.skip, directory),
    }
    for number in range(args.pairs):
        results = {}
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            say(f"pair {number + 1} of {args.pairs}: {name}, {args.steps} steps ...")
            start, others = time.perf_counter(), cpu_seconds_of_others()
            with tempfile.TemporaryDirectory(prefix="vs_trl-") as directory:
                results[name] = sides[name](Path(directory))
            took = time.perf_counter() - start
            results[name]["others"] = (cpu_seconds_of_others() - others) / took
            say(f"    {results[name]['median']:.3f} s a step ({took:.0f} s with start and end)")
        pairs.append((results["ours"], results["TRL"]))
    return pairs


def spread(values: list[float]) -> str:
    """The median, and the range beside it."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(pairs: list[tuple[dict, dict]]) -> str:
    """The result: pair by pair, the ratios, where our time goes, and that the work was the same."""
    lines = ["pair   ours s/step   TRL s/step   TRL/ours   by means   cores used by others"]
    ratios, by_means = [], []
    for number, (ours, trl) in enumerate(pairs, start=1):
        ratios.append(trl["median"] / ours["median"])
        by_means.append(trl["mean"] / ours["mean"])
        lines.append(
            f"{number:4}   {ours['median']:11.3f}   {trl['median']:10.3f}   {ratios[-1]:8.2f}   "
            f"{by_means[-1]:8.2f}   {ours['others']:.2f}, {trl['others']:.2f}"
        )
    lines += [
        f"\nTRL/ours, median (min to max); above 1 ours is faster: {spread(ratios)}; "
        f"by mean step times: {spread(by_means)}",
    ]
    if max(side["others"] for pair in pairs for side in pair) > QUIET:
        lines.append("NOT A RESULT: other programs were running; repeat it on a quiet machine")
    lines += [
        "\nWhere our step goes, mean s/step (the worker decodes beside the trainer):",
        "pair   trainer: wait   train   publish   | worker: decode    load",
    ]
    for number, (ours, _) in enumerate(pairs, start=1):
        lines.append(
            f"{number:4}   {ours['wait']:13.3f}   {ours['train']:5.3f}   {ours['publish']:7.3f}   "
            f"| {ours['decode']:14.3f}   {ours['load']:5.3f}"
        )
    lines.append("\nThe work: response tokens a step, mean reward; TRL's last update")
    for number, (ours, trl) in enumerate(pairs, start=1):
        lines.append(
            f"{number:4}   tokens {ours['tokens']:.0f}, {trl['tokens']:.0f}; reward "
            f"{ours['reward']:.3f}, {trl['reward']:.3f}; TRL: loss {trl['loss']:.2g}, gradient "
            f"norm {trl['grad_norm']:.2f}, weights moved by up to {trl['moved']:.3g}"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--steps", type=int, default=40, help="train steps a run (default 40)")
    parser.add_argument("--skip", type=int, default=10, help="warm-up steps (default 10)")
    parser.add_argument("--threads", type=int, default=2, help="of TRL (default 2)")
    parser.add_argument(
        "--rollout_workers", type=int, default=1, help="of ours, a thread each (default 1)"
    )
    parser.add_argument(
        "--on_update", choices=("resume", "restart", "drain"), default="drain",
        help="what ours does with running sequences at a weight update (default drain)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, help="of prompts, sampling and model (default 0)"
    )
    parser.add_argument(
        "--trl_python",
        default=str(ROOT / ".cache/trl/bin/python"),
        help="Python of the environment with TRL (default .cache/trl/bin/python)",
    )
    parser.add_argument("--trl-worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    counts = args.pairs, args.skip, args.threads, args.rollout_workers
    if min(counts) < 1 or args.steps < args.skip + 2:
        parser.error(
            "--pairs, --skip, --threads, --rollout_workers: at least 1; "
            "--steps: at least --skip + 2"
        )
    return args


def main() -> int:
    args = parse()
    try:
        if args.trl_worker:
            trl_worker(*args.trl_worker)
            return 0
        say(trl_version(args.trl_python))
        job = make_job(args.steps, args.seed, args.threads)
        print(table(compare(args, job)))
    except BenchmarkError as error:
        say(f"vs_trl.py: {error}")
        return 1
    except KeyboardInterrupt:
        say("vs_trl.py: interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
