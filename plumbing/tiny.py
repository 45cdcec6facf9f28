"""The model `tiny`: a byte-level Qwen2 of 525,824 parameters, and the warm-up that it is made with.

The warm-up has a target, not a length. The model is taught with episodes of `task.warmup` until it
has learnt the task: sampled at T = 1, it solves most held-out rows. Then it is made as unsure as a
pretrained model is: its logits are divided by the temperature at which a quarter is solved. What is
right is still its likeliest answer, by far not its only one, and RL has this to sharpen.
"""

import asyncio
import copy
import inspect
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from buffer import Ticket
from envs import Episode, Limits, Task, Turn, run_episode
from plumbing.calls import EnvCalls
from plumbing.chat import encode_prompt, encode_reply

PAD, START, END = SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (  # as short as can be: at this size every token of a prompt costs time
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
LEARNT, BEGINS = 0.5, 0.25  # solved of the held-out rows: after the warm-up, and where RL begins
PLAYED = 256  # rows that tell how much that is
EVERY = 25  # steps between two looks


def byte_tokenizer():
    """Tokenizer with one id a byte and three special ones: 259, and no text is unknown."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer  # what AutoTokenizer loads beside a Qwen2 model

    tokens = (*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,  # never used, but its default would add a 260th id
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
    )


def recipe(task: Task) -> str:
    """All that the model depends on, besides its seed: how it is made, and what it is taught. An
    edit of a reward, or of a comment, leaves it as it is."""
    rng = random.Random("recipe")
    taught = [task.warmup(rng) for _ in range(64)]
    made = [inspect.getsource(part) for part in (byte_tokenizer, make_tiny, warm_up, learn, unsure)]
    return repr((LEARNT, BEGINS, PLAYED, EVERY, made, taught, task.chat, task.stop, task.max_turns))


def make_tiny(path: Path, task: Task, tied: bool, steps: int | None = None) -> None:
    """Write the model, warmed up for a task; with `steps`, by so many and without a target."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    task.warmup(random.Random(0))  # raises at once if the task has none
    tokenizer = byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32, the smallest head that vLLM's CPU attention takes
        num_key_value_heads=2,
        intermediate_size=512,
        initializer_range=0.06,  # three times the default: it learns to add in half the steps
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(), all_cores():
        torch.manual_seed(task.seed)
        model = Qwen2ForCausalLM(config)
        if steps is None:
            warm_up(model, tokenizer, task)
        else:
            for _ in learn(model, tokenizer, task, steps):
                pass
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def warm_up(model, tokenizer, task: Task) -> None:
    """Teach the model until it has learnt the task, then make it unsure of it; with no steps at
    most, leave it as random as it is."""
    if not task.warmup_steps:
        return
    play = Play(model, tokenizer, task)
    what, shown = f"warm-up of the model `tiny`, once: solved, of {LEARNT:.0%}", sys.stderr.isatty()
    bar = tqdm(
        total=100,
        desc=what,
        bar_format="{l_bar}{bar}| {elapsed}{postfix}",
        disable=not shown,  # a file is no place for a bar in motion
    )
    if not shown:
        print("warm-up of the model `tiny`, once (half a minute or so)", file=sys.stderr)
    with bar:
        for step in learn(model, tokenizer, task, task.warmup_steps):
            if step % EVERY and step != task.warmup_steps:
                continue
            solved = play.solved(1.0)
            bar.set_postfix_str(f"step {step}: {solved:.0%}", refresh=False)
            bar.update(max(0, round(100 * min(1.0, solved / LEARNT)) - bar.n))
            if solved >= LEARNT:
                break
    if solved < BEGINS:
        print(
            f"note: after {step} steps of warm-up (`warmup_steps`) the model `tiny` solves "
            f"{solved:.1%} of the held-out rows; RL begins there",
            file=sys.stderr,
        )
    else:
        unsure(model, play)


def learn(model, tokenizer, task: Task, steps: int):
    """Supervised training on task.warmup(); the loss is on the responses and their EOS only. Yields
    the number of the step after each."""
    rng = random.Random(f"warm-up {task.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    pad = torch.nn.utils.rnn.pad_sequence

    def example() -> tuple[list[int], list[int]]:
        """Ids of an episode, and its labels: -100 for what the model does not say."""
        ids, labels = [], []
        for text, answer in task.warmup(rng):
            if ids:
                said = encode_reply(task, text, tokenizer, ids[-1])
            else:
                said = encode_prompt(task, text, tokenizer)
            answer = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            ids += [*said, *answer]
            labels += [-100] * len(said) + answer
        return ids, labels

    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 50)
        batch = [example()]
        while len(batch) < 64 and sum(len(row) for row, _ in batch) < 2048:
            batch.append(example())
        ids = pad([torch.tensor(row) for row, _ in batch], True, tokenizer.pad_token_id)  # [64, L]
        labels = pad([torch.tensor(row) for _, row in batch], True, -100)
        # No attention mask: the padding is on the right, where causal attention does not look.
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step


@torch.no_grad()
def unsure(model, play) -> None:
    """Divide the logits by the temperature at which a quarter of the rows is solved: the final norm
    does it, whether embeddings are tied or not."""
    low, high = 1.0, 3.0
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if play.solved(middle) > BEGINS else (low, middle)
    model.model.norm.weight /= low


class Play:
    """Held-out episodes of a task, decoded with torch; all that wait for a turn get it at once. It
    has what an `Episode` asks of an engine: `version` and `generate`."""

    version = 0

    def __init__(self, model, tokenizer, task: Task):
        self.model, self.tokenizer = model, tokenizer
        self.task = copy.copy(task)
        self.task.config = replace(task.config, env_latency="")  # nobody learns from the waiting
        self.calls = EnvCalls(task.config.env_timeout, PLAYED)
        self.asked: list[tuple[Turn, asyncio.Future]] = []

    async def generate(self, turn: Turn) -> None:
        done = asyncio.get_running_loop().create_future()
        self.asked.append((turn, done))
        await done

    def solved(self, temperature: float) -> float:
        """The share of the rows that is solved. Raises ValueError if none comes to its end."""
        torch.manual_seed(0)  # the same draws for every temperature (its caller keeps the state)
        return asyncio.run(self._solved(temperature))

    async def _solved(self, temperature: float) -> float:
        task = self.task
        limits = Limits(task.max_tokens, task.max_turns, max_model_len=1024)
        tickets = [Ticket(-1, 0, i, i, eval=True) for i in range(min(PLAYED, len(task.test)))]
        episodes = [Episode(t, task, self, self.tokenizer, self.calls, limits) for t in tickets]
        running = [asyncio.create_task(run_episode(episode)) for episode in episodes]
        while left := sum(not one.done() for one in running):
            if len(self.asked) == left:  # all others have ended
                self._decode(temperature)
            await asyncio.sleep(0 if not task.blocking else 1e-3)
        for episode in episodes:
            episode.close()
        failed = [one.exception() for one in running if one.exception()]
        if len(failed) == len(running):
            raise ValueError(f"warm-up: {failed[0]}")
        return sum(one.result().solved for one in running if not one.exception()) / len(running)

    @torch.no_grad()
    def _decode(self, temperature: float) -> None:
        """One turn for each that waits, from the full distribution."""
        asked, self.asked = self.asked, []
        turns = [turn for turn, _ in asked]
        longest = max(len(turn.context) for turn in turns)
        ids = torch.full((len(turns), longest), self.tokenizer.pad_token_id)  # [N, L]
        mask = torch.zeros_like(ids)
        for i, turn in enumerate(turns):
            ids[i, longest - len(turn.context) :] = torch.tensor(turn.context)
            mask[i, longest - len(turn.context) :] = 1
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=max(turn.max_tokens for turn in turns),
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            eos_token_id=turns[0].stop_ids, pad_token_id=self.tokenizer.pad_token_id,
        )[:, longest:].tolist()  # fmt: skip
        for (turn, done), new in zip(asked, out, strict=True):
            stops = [i for i, token in enumerate(new) if token in turn.stop_ids]
            turn.ids = new[: (stops or [len(new)])[0] + 1][: turn.max_tokens]
            turn.truncated = turn.ids[-1] not in turn.stop_ids
            turn.logprobs, turn.versions = [0.0] * len(turn.ids), [0] * len(turn.ids)
            done.set_result(None)


@contextmanager
def all_cores():
    """Compute on every core for a while; a trainer or a rollout worker may be set to one."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
