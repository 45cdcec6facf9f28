"""What would fail silently: everything runs, and nothing can be learnt.

    bash launch.sh check [flags]      these checks alone, in seconds

Each function looks for one kind. It raises ValueError, in one line, for what cannot be meant, and
returns notes for what a careful colleague would mention. When all is well nothing is said.
"""

from collections.abc import Iterator, Sequence

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PretrainedConfig

from plumbing.chat import encode_prompt, end_of_turn, spells_special_tokens, templated

MOST_BAD_GOLDS = 0.05  # share of rows; with more of them the data is not what was meant
ALL_ROWS = 20_000  # of larger data sets only the first are looked through for special tokens
SPARE = 8  # tokens that a tokenizer may add to the bytes of a prompt


# -- the model -----------------------------------------------------------------------------------


def refuse_other_models(name: str, config: PretrainedConfig) -> None:
    """Raise ValueError for a model that does not continue a text from left to right."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = {cls.__name__ for cls in (known if isinstance(known, tuple) else (known,)) if cls}
    declared = set(config.architectures or names)
    if config.is_encoder_decoder or not names & declared:
        what = ", ".join(sorted(declared)) or config.model_type
        raise ValueError(f"model {name} is no causal language model: {what}")


def refuse_broken_weights(name: str, model: torch.nn.Module, loaded: dict) -> list[str]:
    """Raise ValueError for weights that would be random, of another shape, or not finite. `loaded`:
    what transformers says of loading them. Returns notes."""
    for kind, why in (
        ("missing_keys", "are not in its files, and would be random"),
        ("mismatched_keys", "have another shape in its files"),
        ("error_msgs", "could not be loaded"),
    ):
        found = loaded.get(kind) or ()
        if wrong := sorted(str(x[0] if isinstance(x, tuple) else x) for x in found):
            raise ValueError(f"model {name}: {some(wrong)} {why}")
    broken = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise ValueError(f"model {name}: {some(broken)} have values that are not finite")
    if unexpected := sorted(map(str, loaded.get("unexpected_keys") or ())):
        return [f"model {name} has weights that are not used: {some(unexpected)}"]
    return []


def refuse_changed_logits(name: str, policy, ids: list[int]) -> None:
    """Raise ValueError if the model's own forward changes the logits after its head (a softcap, a
    scale): the trainer would compute other probabilities than the engine samples from."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0, :-1].float()  # [L - 1, V]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        gap = float((own - policy.score(ids, torch.device("cpu"))).abs().max())
    if not gap <= 1e-3:
        raise ValueError(
            f"model {name} changes its logits after the head (log-probabilities by up to "
            f"{gap:.2g}), which the trainer does not do"
        )


def refuse_other_tokenizer(name: str, tokenizer, rows: int) -> None:
    """Raise ValueError for a tokenizer with ids that the embedding, of so many rows, has not."""
    if len(tokenizer) > rows:
        raise ValueError(
            f"model {name}: its tokenizer has {len(tokenizer)} ids, its embedding {rows}"
        )


def declared_stops(model: str, task, tokenizer) -> tuple[int, ...]:
    """The tokens that model and chat template end a turn with, besides the tokenizer's EOS."""
    found: list[int] = []
    try:
        declared = GenerationConfig.from_pretrained(model).eos_token_id
        found += declared if isinstance(declared, list) else [declared]
    except OSError:
        pass  # a model need not have one
    return tuple(i for i in (*found, *end_of_turn(task, tokenizer)) if i is not None)


# -- the task ------------------------------------------------------------------------------------


def refuse_long_stop(env: str, task, tokenizer) -> None:
    """Raise ValueError for a stop that is more than one token: any of them would end a response."""
    if task.stop is not None:
        count = len(tokenizer.encode(task.stop, add_special_tokens=False))
        if count != 1:
            raise ValueError(
                f"env {env}: its stop {task.stop!r} is {count} tokens of this model, not one"
            )


def notes_on_prompts(task, tokenizer) -> Iterator[str]:
    """A template that is missing; special tokens that rows spell."""
    if task.chat and not templated(task, tokenizer):
        yield "the model has no chat template: prompts are plain text"
    if are_there(task.train):
        texts = (task.first_text(row) for row in task.train[:ALL_ROWS])
        if count := sum(spells_special_tokens(text, tokenizer) for text in texts):
            of = f" of the first {ALL_ROWS:,}" if len(task.train) > ALL_ROWS else ""
            yield f"{count} prompts{of} spell special tokens of the model; they are kept as text"


def are_there(rows) -> bool:
    """Whether rows are data. Those that are made when they are asked for may take their time to
    make, and an episode checks its own: of them only one is looked at."""
    return isinstance(rows, list) or hasattr(rows, "where")


def where(rows, i: int) -> str:
    """What a row is called: its file and line, where it has one."""
    return rows.where(i) if hasattr(rows, "where") else f"row {i}"


def usable_rows(settings, task, tokenizer) -> tuple[Sequence[int], Sequence[int], list[str]]:
    """Which rows of `task.train` can be trained on and which of `task.test` are evaluated on, and
    notes on the others. Raises ValueError for prompts that do not fit, and where many gold answers
    can never be met."""
    train, held_out, notes = task.train, range(min(settings.eval_prompts, len(task.test))), []
    if not are_there(train):
        long_prompts(settings, task, tokenizer, train, range(1), notes)
        return range(len(train)), held_out, notes
    notes += notes_on_duplicates(task)
    kept = []
    for rows, numbers in ((train, range(len(train))), (task.test, held_out)):
        left_out = long_prompts(settings, task, tokenizer, rows, numbers, notes)
        left_out |= bad_golds(task, rows, notes)
        kept.append([i for i in numbers if i not in left_out] if left_out else numbers)
        if not kept[-1]:
            raise ValueError("every prompt is too long, or has a gold answer that can never be met")
    return *kept, notes


def bad_golds(task, rows, notes: list[str]) -> set[int]:
    """The rows with gold answers that can never be met, which are noted. Raises ValueError if there
    are too many of them for the data to be what was meant."""
    bad, looked = task.check_golds(rows) if hasattr(task, "check_golds") else ([], 0)
    if len(bad) > MOST_BAD_GOLDS * looked:
        raise ValueError(f"{len(bad)} of {looked} gold answers can never be met: {bad[0].why}")
    if bad:
        notes.append(f"{len(bad)} rows have gold answers that can never be met, and are left out: "
                     + some([row.why for row in bad], 2))  # fmt: skip
    return {row.row for row in bad}


def notes_on_duplicates(task) -> list[str]:
    """Prompts that are both trained on and held out, or trained on twice, apart from blanks and
    case. Rows that know where they are from have been looked through when they were read."""
    if hasattr(task.train, "where"):
        return []

    def normal(row) -> str:
        return " ".join(str(task.first_text(row)).lower().split())

    held_out, seen, both, twice = set(map(normal, task.test)), set(), [], 0
    for i, row in enumerate(task.train):
        prompt = normal(row)
        twice += prompt in seen
        seen.add(prompt)
        if prompt in held_out:
            both.append(f"row {i}")
    notes = [f"{twice} prompts are in the train rows more than once"] if twice else []
    if both:
        notes.append(f"{len(both)} prompts are trained on and held out, too ({some(both)})")
    return notes


def long_prompts(settings, task, tokenizer, rows, numbers, notes: list[str]) -> set[int]:
    """Those of the rows so numbered whose prompts leave no room for a response. Raises ValueError
    for them, unless --long_prompts says that they are left out, which is noted; and for a prompt
    that is no text."""
    room = settings.max_model_len - settings.max_tokens
    # No token is less than a byte, so most prompts fit without being tokenised.
    surely = room - len(encode_prompt(task, "-", tokenizer)) - SPARE
    found: dict[int, int] = {}  # row -> tokens
    for i in numbers:
        text = task.first_text(rows[i])
        try:
            size = len(text.encode())
        except (AttributeError, UnicodeEncodeError) as error:
            raise ValueError(f"{where(rows, i)}: its prompt is no text: {text!r:.80}") from error
        if size > surely and (length := len(encode_prompt(task, text, tokenizer))) > room:
            found[i] = length
    if not found:
        return set()
    names = some([where(rows, i) for i in found])
    if settings.long_prompts == "refuse" or not are_there(rows):
        first, length = next(iter(found.items()))
        which = f" ({len(found)} such prompts: {names})" if are_there(rows) else ""
        raise ValueError(
            f"a prompt of {length} tokens and a response of --max_tokens {settings.max_tokens} do "
            f"not fit into --max_model_len {settings.max_model_len}: "
            f"{task.first_text(rows[first])[:50]!r}...{which}"
        )
    notes.append(f"{len(found)} prompts are too long and left out ({names})")
    return set(found)


# -- the first batch -----------------------------------------------------------------------------


def notes_on_batch(row: dict, settings) -> Iterator[str]:
    """What the metrics of a first batch speak against, and what to do."""
    if row["truncated"] > 0.9:
        yield (
            f"{row['truncated']:.0%} of the first batch was cut off by a limit: raise --max_tokens "
            f"({settings.max_tokens}) or --max_turns ({settings.max_turns}), or the model does not "
            "know how to end (samples.jsonl shows what it says)"
        )
    if not row["groups_with_signal"]:
        yield (
            "no group of the first batch has rewards that differ, so there was nothing to learn "
            f"(mean {row['reward_mean']:.3g}): look at samples.jsonl, and `bash launch.sh check`"
        )
    failed = row["failed_samples"] / (row["failed_samples"] + row["samples"])
    if failed > 0.1:
        yield f"{failed:.0%} of the first batch's rewards or environments failed before a retry"


def some(names: list[str], most: int = 4) -> str:
    """A list in a line, however long it is."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
