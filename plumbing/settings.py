"""Every setting of a run, once: name, type, default, help and bounds, on a line or two.

    settings = parse(["--alpha", "2"])      # from flags; the first argument may be a file of them
    settings = Settings(alpha=2)            # the same, in Python; also raises for a wrong value
    settings.pick(SampleBuffer)             # those that a function has parameters for

Losses, advantages and aggregations bring flags of their own: they are declared beside them in
`algos.py`, and are part of `Settings` too. `check` refuses what no machine, model or data could
make right; what depends on those is in `plumbing/start.py`.
"""

import argparse
import inspect
import math
import os
import sys
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, make_dataclass
from pathlib import Path

import yaml

import algos
from buffer import CONSUMPTION, Ticket
from envs import Latency, Limits
from plumbing.flags import flag, refusal

# -- flags that a loss, an advantage or an aggregation brings along ------------------------------


def owners() -> dict[str, tuple[str, list[str]]]:
    """For every flag of the functions above: its kind (`loss`, ...) and the names that have it."""
    found: dict[str, tuple[str, list[str]]] = {}
    for kind, functions in algos.KINDS.items():
        for name, function in functions.items():
            for own in function.flags:
                found.setdefault(own, (kind, []))[1].append(name)
    return found


def own_flags() -> list[tuple[str, type, Field]]:
    """Name, type and field of each of those flags; its help begins with whose it is."""
    found = []
    for name, (kind, names) in owners().items():
        own = algos.KINDS[kind][names[0]].flags[name]
        text = f"{', '.join(names)}: {own.metadata['help']}"
        found.append((name, type(own.default), flag(own.default, text, **own.metadata["bounds"])))
    return found


OfAlgorithms = make_dataclass("OfAlgorithms", own_flags())


@dataclass
class Settings(OfAlgorithms):
    # the run
    mode: str = flag(
        "async",
        "async: train while generation goes on; sync: in turn (alpha is 0)",
        choices=("sync", "async"),
    )
    model: str = flag(
        "",
        "tiny, smollm2, a directory or a hub name; default: tiny, on a GPU "
        "Qwen/Qwen2.5-0.5B-Instruct"
    )
    steps: int = flag(150, "train steps, one batch each", above=0)
    seed: int = flag(0, "of data order, sampling and the tiny model", least=0, most=2**32 - 1)
    eval_every: int = flag(50, "versions between evaluations; 0: no evaluation at all", least=0)
    eval_prompts: int = flag(0, "held-out prompts an evaluation; 0: the model's preset", least=0)
    save_every: int = flag(
        0,
        "steps between checkpoints; 0: by time, a minute or more, at most 2 % of a run's",
        least=0,
    )
    keep_checkpoints: int = flag(2, "the last checkpoints that stay; 0: all of them", least=0)
    run_dir: str = flag("", "where the run writes; default runs/<time>-<mode>-<env>")
    resume: str = flag(
        "",
        "run directory to go on with, from its last checkpoint and its settings; at 0 if it has "
        "none yet (nor any run, if it is the --run_dir too)",
    )
    report_to: str = flag("", "tensorboard, wandb or both by comma: metrics go there too")
    dump_batches: bool = flag(False, "write every batch to <run_dir>/batches, for a replay")
    replay_batches: str = flag("", "directory of such batches: train on them, without an engine")
    batch_timeout: float = flag(1800.0, "seconds that a batch or an evaluation may take", above=0)

    # batches: how far generation may be ahead, and which groups are trained on
    batch_size: int = flag(0, "groups (prompts) a training batch; 0: the model's preset", least=0)
    group_size: int = flag(8, "samples a group, all of one prompt", least=1)
    alpha: float = flag(
        1.0, "asynchronous ratio: batches that generation may be ahead; 0 is sync", least=0
    )
    consume: str = flag(
        "fifo",
        "fifo: batches in order of admission, nothing is too old or passed over; ready: whatever "
        "has finished, what gets too old is dropped",
        choices=CONSUMPTION,
    )
    redundant_samples: int = flag(
        0, "more samples a group than needed: the first to finish win", least=0
    )
    redundant_groups: int = flag(0, "more groups than needed (with --consume ready)", least=0)
    filter_groups: bool = flag(
        False, "drop groups whose rewards are all equal, and generate others at once"
    )
    filter_limit: float = flag(
        10.0, "the run ends when so many batches' worth is filtered out for one batch", above=0
    )

    # generation
    rollout_workers: int = flag(
        1, "vLLM processes a node; 0: on GPUs one for each that is free, else 1", least=0
    )
    tensor_parallel: int = flag(1, "GPUs a rollout process", least=1)
    max_num_seqs: int = flag(256, "sequences a worker decodes at once", least=1)
    tasks_per_worker: int = flag(
        0,
        "episodes a worker has in hand; 0: an eighth more than max_num_seqs, and up to four "
        "times as many as long as its engine has free places while tickets are waiting",
        least=0
    )
    max_tokens: int = flag(0, "tokens of a response or turn; 0: the task's default", least=0)
    max_turns: int = flag(0, "turns of an episode; 0: the environment's default", least=0)
    max_model_len: int = flag(0, "tokens of a whole sample; 0: the model's preset", least=0)
    temperature: float = flag(1.0, "sampling temperature in training", above=0)
    on_update: str = flag(
        "resume",
        "what a weight update does to running sequences: resume (keep the tokens, recompute the "
        "KV cache), restart (that turn again), drain (finish them first)",
        choices=("resume", "restart", "drain"),
    )
    worker_timeout: float = flag(
        45.0, "seconds without a word from a worker before it is replaced", above=0
    )
    max_restarts: int = flag(
        5,
        "workers that died and are replaced within ten minutes; one more ends the run",
        least=0,
    )
    start_timeout: float = flag(600.0, "seconds that the start of a worker may take", above=0)

    # the task
    env: str = flag(
        "addition",
        "addition, max3, countdown, gsm8k, math, rg:TASK; of several turns: grid, frozenlake, "
        "guess, gem:ID, textarena:ID, textworld; or FILE.py:CLASS",
    )
    data: str | None = flag(
        None, "rows for gsm8k, math, countdown: JSONL, JSON or parquet file, or hub data set"
    )
    question_key: str = flag(
        "", "column of the question, with dots for nested ones; default: the names that are known"
    )
    answer_key: str = flag("", "column of the right answer, such as reward_model.ground_truth")
    long_prompts: str = flag(
        "refuse",
        "prompts that leave no room for a response: refuse the run, or drop them",
        choices=("refuse", "drop"),
    )
    env_timeout: float = flag(30.0, "seconds that one reward or one env step may take", above=0)
    reward_procs: int = flag(
        1, "processes that check math answers, for each rollout worker", least=1
    )
    env_latency: str = flag(
        "",
        "MEAN,STD: every env step takes max(0, N(mean, std)) seconds longer; with two more "
        "numbers SHARE,FACTOR that share of the episodes is slower by that factor"
    )

    # the update
    learning_rate: float = flag(0.0, "AdamW; 0: the model's preset", least=0)
    lr_warmup: int = flag(0, "steps over which the rate rises linearly", least=0)
    grad_clip: float = flag(1.0, "largest norm of the gradient", above=0)
    minibatches: int = flag(1, "optimiser steps a batch, each on a part of its groups", above=0)
    micro_tokens: int = flag(16384, "tokens (padding included) a forward pass", above=0)
    bucket_mb: int = flag(256, "weights are sent in buckets this large", above=0)
    loss: str = flag("ppo", "policy loss", choices=algos.LOSSES)
    advantage: str = flag("grpo", "advantage", choices=algos.ADVANTAGES)
    aggregation: str = flag(
        "token_mean",
        "token_mean: all tokens count the same; sequence_mean: all samples do; constant: tokens "
        "are summed and divided by a fixed length",
        choices=algos.AGGREGATIONS,
    )
    correction: str = flag(
        "none",
        "on pi_prox / pi_b, with any loss: token_mask or sequence_mask (leave out what lies "
        "outside of low..high), token_truncate or sequence_truncate (as a weight, cut)",
        choices=algos.CORRECTIONS,
    )
    correction_low: float = flag(0.5, "lower bound of the correction", least=0)
    correction_high: float = flag(2.0, "upper bound of the correction", above=0)
    truncated: str = flag(
        "train",
        "samples that a limit on tokens or turns has ended: train on them, mask their tokens (the "
        "reward still counts for the others of the group), or penalise: less reward",
        choices=("train", "mask", "penalise"),
    )
    truncated_penalty: float = flag(
        0.5, "taken from the reward of truncated samples, if penalised", least=0
    )
    kl_coef: float = flag(0.0, "weight of the KL to the initial model; 0: no such model", least=0)
    kl_correction: str = flag(
        "ratio",
        "the KL of a token: ratio (times pi / pi_b, unbiased at any age) or none (as it is)",
        choices=("ratio", "none"),
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", least=0)

    def __post_init__(self):
        check(self)

    @property
    def penalty(self) -> float:
        """What is taken from the reward of a truncated sample."""
        return self.truncated_penalty if self.truncated == "penalise" else 0.0

    def pick(self, call: Callable) -> dict:
        """The settings that `call` has parameters for, by name."""
        mine = vars(self)
        return {name: mine[name] for name in inspect.signature(call).parameters if name in mine}


@dataclass
class WorkerSpec:
    """All that a rollout process is told at its start (it is pickled: plain values only)."""

    model: str
    settings: Settings
    limits: Limits
    dtype: str
    prefix_caching: bool
    gpu_share: float  # of a GPU's memory, for this worker's engine
    stacks: str = ""  # the file for the stacks of its threads

    @property
    def threads(self) -> int:
        """Of blocking calls: as many as there may be episodes, and some for those that hang."""
        return 2 * max(self.settings.tasks_per_worker, 4 * self.settings.max_num_seqs)

    def limits_of(self, ticket: Ticket) -> Limits:
        return self.limits._replace(max_staleness=math.inf) if ticket.eval else self.limits


def check(settings: Settings) -> None:
    """Raise ValueError, with one line, for a value out of its bounds and for flags that exclude
    each other. Changes nothing."""
    s = settings
    for f in fields(s):
        if why := refusal(f.name, getattr(s, f.name), f.metadata["bounds"], f.metadata["choices"]):
            raise ValueError(why)
    for low, high in (("correction_low", "correction_high"), ("tis_low", "tis_high")):
        if not getattr(s, low) < getattr(s, high):
            raise ValueError(f"--{low} must be below --{high} (got {getattr(s, low)})")
    alone = s.group_size == 1
    latency, compares = Latency.parse(s.env_latency), s.advantage not in algos.ACROSS_PROMPTS
    for wrong, why in (
        (0 < s.dual_clip <= 1, f"--dual_clip is 0 (off) or above 1 (got {s.dual_clip})"),
        (
            latency.mean >= s.env_timeout,
            f"--env_latency {s.env_latency}: most steps would take longer than --env_timeout "
            f"{s.env_timeout:g} allows",
        ),
        (
            alone and compares,
            f"--advantage {s.advantage} compares samples of a group: --group_size 2 or more",
        ),
        (alone and s.batch_size == 1, "one sample a batch cannot be compared with any other"),
        (
            alone and s.filter_groups,
            "--filter_groups compares samples of a group: --group_size 2 or more",
        ),
        (
            s.redundant_groups and not CONSUMPTION[s.consume].expires,
            "--redundant_groups is a race between groups: add --consume ready",
        ),
    ):
        if wrong:
            raise ValueError(why)


def reads_math(env: str) -> bool:
    return env in ("gsm8k", "math") or ".py:" in env


NEEDS = (  # flags that do nothing unless another one has a value like this
    ("alpha", "mode", lambda value: value == "async"),
    ("on_update", "mode", lambda value: value == "async"),
    ("eval_prompts", "eval_every", bool),
    ("question_key", "env", reads_math),
    ("answer_key", "env", reads_math),
    ("reward_procs", "env", reads_math),
    ("correction_low", "correction", lambda value: value.endswith("mask")),
    ("correction_high", "correction", lambda value: value != "none"),
    ("truncated_penalty", "truncated", lambda value: value == "penalise"),
    ("filter_limit", "filter_groups", bool),
    ("kl_correction", "kl_coef", bool),
)


def notes(settings) -> list[str]:
    """What is allowed, and probably not meant: flags that do nothing, a ratio that counts twice."""
    said = []
    for name, (kind, names) in owners().items():
        default = algos.KINDS[kind][names[0]].flags[name].default
        chosen = getattr(settings, kind)
        if getattr(settings, name) != default and chosen not in names:
            said.append(f"--{name} does nothing with --{kind} {chosen}")
    default = {f.name: f.default for f in fields(settings)}
    for name, other, does in NEEDS:
        value = getattr(settings, other)
        if getattr(settings, name) != default[name] and not does(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            said.append(f"--{name} does nothing with --{other} {shown}")
    if settings.correction.endswith("truncate") and settings.loss not in ("pg", "kimi"):
        said.append(
            f"--correction {settings.correction} and --loss {settings.loss} both weigh by the age "
            "of a token: together they correct twice"
        )
    return said


# -- from the command line -----------------------------------------------------------------------


def truth(text: str) -> bool:
    """A yes or no as people write it."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"true or false is expected (got {text})")
    return known[text.lower()]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="train.py [SETTINGS.yaml] [flags]",
        description="Asynchronous RL for language models (ROLL Flash, arXiv 2510.11345).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for f in sorted(fields(Settings), key=lambda f: f.name in owners()):  # those come last
        text, names = f.metadata["help"], ", ".join(f.metadata["choices"])
        if f.name in algos.KINDS:
            text = f"{text}: {names}" if names not in text else text
        how = {"type": {int: int, float: float}.get(f.type, str)}
        if f.type is bool:  # --flag is short for --flag true
            how = {"type": truth, "nargs": "?", "const": True}
        parser.add_argument(f"--{f.name}", default=f.default, help=text.replace("%", "%%"), **how)
    return parser


def as_flags(values: dict) -> list[str]:
    """A mapping of names to values as a command line."""
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def parse(argv: list[str], program: str = "train.py") -> Settings:
    """Flags as `Settings`. Those of a file (first argument) or of a run that is resumed come first,
    so that flags override them. Exits with code 2 and one line for what is wrong."""

    def fail(message: str):
        if os.environ.get("RANK", "0") == "0":  # under torchrun one of them says it
            print(f"{program}: {message:.500}", file=sys.stderr)
        raise SystemExit(2)

    def flags_of(path: Path) -> list[str]:
        try:
            values = yaml.safe_load(path.read_text())  # JSON is YAML too
        except FileNotFoundError:
            fail(f"no such file: {path}")
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            fail(f"{path}: {' '.join(str(error).split())}")  # ValueError: bytes, 5,000 digits
        if not isinstance(values, dict):
            fail(f"{path}: a mapping of flags to values is expected")
        values.pop("trainers", None)  # in a run's config.json, and no flag
        return as_flags({k: v for k, v in values.items() if v not in (None, "")})

    parser = make_parser()
    parser.error = fail
    if argv and not argv[0].startswith("-"):
        argv = flags_of(Path(argv[0])) + argv[1:]
    asked = parser.parse_known_args(argv)[0]
    if directory := asked.resume:
        config, same = Path(directory) / "config.json", Path(asked.run_dir) == Path(directory)
        if asked.run_dir and not same:
            fail(f"--resume {directory} goes on there: without --run_dir {asked.run_dir}")
        # The same command can be given again and again, the first time too: then both say where.
        before = [] if same and not config.exists() else flags_of(config)
        argv = before + argv + ["--run_dir", directory]
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        fail(f"unknown flag {unknown[0]} (--help lists all)")
    try:
        return Settings(**vars(known))
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    parse(sys.argv[1:])  # launch.sh asks before it starts ranks on several machines
