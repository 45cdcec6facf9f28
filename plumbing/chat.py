"""From text to token ids: a first prompt, what an environment replies, what ends a turn.

`task` is whatever has `chat` and `stop` (`envs.Task`).
"""

from functools import lru_cache

# -- text to ids ---------------------------------------------------------------------------------

SAID = "@what-the-model-said@"  # stands for a turn while a chat template is rendered around it


def templated(task, tokenizer) -> bool:
    return bool(task.chat and tokenizer.chat_template)


@lru_cache(maxsize=8192)  # the samples of a group render the template once between them
def encode_prompt(task, text: str, tokenizer) -> tuple[int, ...]:
    """Token ids of a prompt, in the chat template if the task wants it and the model has one."""
    if not templated(task, tokenizer):
        return tuple(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    # return_dict, since its default differs between versions of transformers.
    out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return tuple(out["input_ids"])


@lru_cache(maxsize=8192)
def encode_reply(task, text: str, tokenizer, last: int | None = None) -> tuple[int, ...]:
    """Token ids of what follows a sampled turn: its end (unless that is `last`, the last token
    sampled), what the environment says, and the opening of the next turn. They do not depend on
    what else was sampled, so no template can rewrite that."""
    if not templated(task, tokenizer):
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    roles = [("user", "-"), ("assistant", SAID), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in roles]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if SAID not in rendered:
        raise ValueError("the chat template changes what the model said: use a task without chat")
    ids = tokenizer(rendered.partition(SAID)[2], add_special_tokens=False)["input_ids"]
    return tuple(ids[1:] if ids[:1] == [last] else ids)


@lru_cache(maxsize=16)
def stop_ids(task, tokenizer) -> list[int]:
    stop = [] if task.stop is None else tokenizer.encode(task.stop, add_special_tokens=False)
    return [*stop] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id, *stop]
