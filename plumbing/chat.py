"""From text to token ids: a first prompt, what an environment replies, what ends a turn.

`task` is whatever has `chat` and `stop` (`envs.Task`). A special token that a text happens to spell
(`<|im_end|>` in a data set, or in what an environment says) stays text: it is no control token.
"""

from functools import lru_cache
from threading import RLock

from cachetools import LRUCache, cached
from cachetools.keys import hashkey

KEPT = 32 * 2**20  # bytes of texts and their ids that are remembered
LONG = 4000  # characters from which on tokenising is no work for an event loop

SAID = "@what-the-model-said@"  # stands for a turn while a chat template is rendered around it
ASKED = "@what-it-is-asked@"  # the same, for a text that spells special tokens


def templated(task, tokenizer) -> bool:
    return bool(task.chat and tokenizer.chat_template)


def _bytes(ids: tuple[int, ...]) -> int:
    """Of an entry, roughly: a token, a place in its tuple, and the characters that it is of."""
    return 500 + 50 * len(ids)


_lock = RLock()  # long texts are encoded in threads
remembered = LRUCache(KEPT, _bytes)  # the samples of a group render the template once between them


def remember(call):
    return cached(remembered, key=lambda *args: hashkey(call.__name__, *args), lock=_lock)(call)


@remember
def encode_prompt(task, text: str, tokenizer) -> tuple[int, ...]:
    """Token ids of a prompt, in the chat template if the task wants it and the model has one."""
    if not templated(task, tokenizer):
        return as_text(text, tokenizer)
    if spells_special_tokens(text, tokenizer):
        return around(render(tokenizer, ("user", ASKED)), text, tokenizer)
    messages = [{"role": "user", "content": text}]
    # return_dict, since its default differs between versions of transformers.
    out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return tuple(out["input_ids"])


@remember
def encode_reply(task, text: str, tokenizer, last: int | None = None) -> tuple[int, ...]:
    """Token ids of what follows a sampled turn: its end (unless that is `last`, the last token
    sampled), what the environment says, and the opening of the next turn. They do not depend on
    what else was sampled, so no template can rewrite that."""
    if not templated(task, tokenizer):
        return as_text(text, tokenizer, add_special_tokens=False)
    special = spells_special_tokens(text, tokenizer)
    said = ASKED if special else text
    rest = render(tokenizer, ("user", "-"), ("assistant", SAID), ("user", said))
    if SAID not in rest:
        raise ValueError("the chat template changes what the model said: use a task without chat")
    rest = rest.partition(SAID)[2]
    ids = around(rest, text, tokenizer) if special else encode(rest, tokenizer)
    return ids[1:] if ids[:1] == (last,) else ids


def cut(text: str, room: int, tokenizer) -> str:
    """No more of a text than can matter: what is left of a longer one still does not fit into
    `room` tokens."""
    return text[: (room + 1) * longest_token(tokenizer)]


@lru_cache(maxsize=16)
def longest_token(tokenizer) -> int:
    """Characters that one token may stand for."""
    return max(map(len, tokenizer.get_vocab()))


def stop_ids(task, tokenizer, declared: tuple[int, ...] = ()) -> list[int]:
    """Any of these tokens ends a turn: EOS, what the task stops at, and what is `declared`."""
    stop = () if task.stop is None else tokenizer.encode(task.stop, add_special_tokens=False)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return list(dict.fromkeys([*eos, *stop, *declared]))


def end_of_turn(task, tokenizer) -> tuple[int, ...]:
    """The special token with which the chat template closes what the model said, if it does."""
    if not templated(task, tokenizer):
        return ()
    after = render(tokenizer, ("user", "-"), ("assistant", SAID), ("user", "-")).partition(SAID)[2]
    first = encode(after, tokenizer)[:1]
    return first if first and first[0] in special_tokens(tokenizer).values() else ()


# -- texts that spell special tokens -------------------------------------------------------------


def render(tokenizer, *turns: tuple[str, str]) -> str:
    """A conversation as text, with the opening of the next turn of the model."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def encode(rendered: str, tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def as_text(text: str, tokenizer, **how) -> tuple[int, ...]:
    """Ids of a text in which nothing is a control token."""
    if spells_special_tokens(text, tokenizer):
        how["split_special_tokens"] = True
    return tuple(tokenizer(text, **how)["input_ids"])


def around(rendered: str, text: str, tokenizer) -> tuple[int, ...]:
    """Ids of a rendered template in which ASKED stands for a text that is to stay text."""
    before, found, after = rendered.partition(ASKED)
    if not found:
        raise ValueError("the chat template changes what it is asked: use a task without chat")
    middle = as_text(text, tokenizer, add_special_tokens=False)
    return encode(before, tokenizer) + middle + encode(after, tokenizer)


@lru_cache(maxsize=16)
def special_tokens(tokenizer) -> dict[str, int]:
    """The control tokens of a model, by what they look like."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): number for number, token in added.items() if token.special}


def spells_special_tokens(text: str, tokenizer) -> bool:
    return any(token in text for token in special_tokens(tokenizer))
