"""What a flag is: a dataclass field with its default, its help and its bounds, on a line or two.

    alpha: float = flag(1.0, "asynchronous ratio: batches that generation may be ahead", least=0)

Bounds are refused with NaN and infinity: a comparison with NaN is never true.
"""

import math
from collections.abc import Iterable
from dataclasses import field


def flag(default, help: str, *, least=None, above=None, most=None, below=None, choices=()):
    """A setting. Numbers may have bounds, texts a list of `choices`."""
    bounds = {"least": least, "above": above, "most": most, "below": below}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    return field(default=default, metadata={"help": help, "bounds": bounds, "choices": choices})


def refusal(name: str, value, bounds: dict, choices: Iterable[str]) -> str:
    """Why a flag cannot have this value, in one line; empty if it can.

    >>> refusal("alpha", -1.0, {"least": 0}, ())
    '--alpha must be 0 or more (got -1.0)'
    >>> refusal("clip_low", 2.0, {"above": 0, "below": 1}, ())
    '--clip_low must be above 0 and below 1 (got 2.0)'
    >>> refusal("mode", "foo", {}, ("sync", "async"))
    '--mode is one of sync, async (got foo)'
    """
    if choices and value not in choices:
        return f"--{name} is one of {', '.join(choices)} (got {value})"
    holds = {
        "least": lambda limit: value >= limit,
        "above": lambda limit: value > limit,
        "most": lambda limit: value <= limit,
        "below": lambda limit: value < limit,
    }
    words = {"least": "{} or more", "above": "above {}", "most": "at most {}", "below": "below {}"}
    if bounds and not (math.isfinite(value) and all(holds[b](x) for b, x in bounds.items())):
        must = " and ".join(words[bound].format(limit) for bound, limit in bounds.items())
        return f"--{name} must be {must} (got {value})"
    return ""
