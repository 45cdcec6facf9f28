r"""Numbers, units, and what must never be computed: the leaves of `tasks/answers.py`.

    number(r"1\frac{1}{2}")              → 3/2, exactly
    quantity(r"5\,000 \text{ cm}^2")     → text "5000", unit "cm^2"
    explodes("9^{9^{9}}")                → True

Everything here takes text that `answers.clean` has been over.
"""

import math
import re
from fractions import Fraction
from typing import NamedTuple

# -- numbers -------------------------------------------------------------------------------------

LARGEST = 400  # decimal digits of a number that is computed here


class Number(NamedTuple):
    """A number as written: `0.50` is Number(1/2, decimals=2), `1/2` has none."""

    value: Fraction
    decimals: int | None = None


SIGN, WHOLE, PLAIN = r"(?P<sign>[+-]?)\s*", "[0-9]+", r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
SIGNED = rf"[+-]?\s*{PLAIN}"
FRACTION = rf"\\frac\s*\{{\s*(?P<top>{SIGNED})\s*\}}\s*\{{\s*(?P<bottom>{SIGNED})\s*\}}"
POWER = r"\^\s*(?:\{\s*(?P<power>[+-]?[0-9]+)\s*\}|(?P<digit>[0-9]))"
FORMS = [
    rf"{SIGN}(?P<plain>{PLAIN})",
    rf"{SIGN}(?P<whole>{WHOLE})?\s*{FRACTION}",  # mixed, where something stands before it
    rf"{SIGN}(?P<top>{PLAIN})\s*/\s*(?P<bottom>{PLAIN})",
    rf"{SIGN}(?P<whole>{WHOLE})\s+(?P<top>{WHOLE})\s*/\s*(?P<bottom>{WHOLE})",
    rf"{SIGN}(?P<head>[0-9]*\.[0-9]*)\\overline\s*\{{(?P<cycle>[0-9]+)\}}",
    rf"{SIGN}(?P<plain>{PLAIN})\s*(?:\\times|\\cdot|\*)\s*(?P<base>10)\s*{POWER}",
    rf"{SIGN}(?P<plain>{PLAIN})[eE](?P<exponent>[+-]?[0-9]{{1,3}})",
    rf"{SIGN}(?P<base>{WHOLE})\s*{POWER}",
]
FORMS = [re.compile(form) for form in FORMS]


def number(text: str) -> Number | None:
    r"""The exact value of a number in one of the usual forms, None for any other text."""
    text = text.strip()
    if len(text) > LARGEST:
        return None
    found = next(filter(None, (form.fullmatch(text) for form in FORMS)), None)
    if found is None:
        return None
    given = found.groupdict(default="")
    value = magnitude(given)
    if value is None:
        return None
    decimals = None
    if set(filter(given.get, given)) <= {"sign", "plain"}:
        decimals = len(given["plain"].partition(".")[2])
    return Number(-value if given["sign"] == "-" else value, decimals)


def magnitude(given: dict[str, str]) -> Fraction | None:
    """The value of the groups of one of the FORMS, without its sign."""
    value = Fraction(given.get("plain") or given.get("whole") or 0)
    if given.get("top"):
        bottom = exact(given["bottom"])
        if not bottom:
            return None
        value += exact(given["top"]) / bottom
    if given.get("cycle"):
        places, cycle = len(given["head"].partition(".")[2]), given["cycle"]
        value = Fraction(given["head"] + "0") if given["head"] != "." else Fraction(0)
        value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**places)
    power = given.get("power") or given.get("digit") or given.get("exponent")
    if power:
        base = int(given.get("base") or 10)
        if not base or abs(int(power)) * max(1, math.log10(base)) > LARGEST:
            return None
        value = (value if given.get("plain") else 1) * Fraction(base) ** int(power)
    return value


def exact(text: str) -> Fraction:
    return Fraction(text.replace(" ", ""))


def equal(gold: Number, given: Number) -> bool:
    """Whether they are one number; or one a fraction that no decimal can say, and the other its
    decimals, six or more and rounded: 1/3 and 0.333333, but not 0.33."""
    if gold.value == given.value:
        return True
    for fraction, decimal in ((gold, given), (given, gold)):
        if fraction.decimals is None and (decimal.decimals or 0) >= 6 and endless(fraction.value):
            digits = abs(decimal.value) * 10**decimal.decimals  # 0.083333 has five: 83333
            away = abs(fraction.value - decimal.value) * 10**decimal.decimals
            return digits >= 10**4 and away <= Fraction(1, 2)
    return False


def endless(value: Fraction) -> bool:
    """Whether its decimals have no end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest > 1


# -- units ---------------------------------------------------------------------------------------

SAME_UNIT = {
    "$": "dollar dollars usd buck bucks",
    "€": "euro euros eur",
    "£": "gbp",
    "¢": "cent cents",
    "cm": "centimeter centimeters centimetre centimetres",
    "mm": "millimeter millimeters millimetre millimetres",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "g": "gram grams",
    "kg": "kilogram kilograms kgs",
    "lb": "pound pounds lbs",
    "oz": "ounce ounces",
    "l": "liter liters litre litres",
    "ml": "milliliter milliliters millilitre millilitres",
    "s": "second seconds sec secs",
    "min": "minute minutes mins",
    "h": "hour hours hr hrs",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "degree": "degrees deg",
    "am": "a.m",
    "pm": "p.m",
    "mi/h": "mph",
    "km/h": "kmph kph",
    "c": "celsius",
    "f": "fahrenheit",
    "": "unit units",
}
UNITS = {word: unit for unit, some in SAME_UNIT.items() for word in [unit, *some.split()] if word}
TIMES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# What follows is no unit but changes what was said: `5 or more`, `3 mod 7`.
CHANGES = re.compile(
    r"(?:is|are|was|or|and|if|when|where|for|but|not|to|more|less|than|mod|base|at|about|choose|over|times|plus"
    r"|minus|with|remainder|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|factorial)(?![a-z])"
)
CURRENCY = "$€£¥₹"
UNIT_TEXT = re.compile(
    r"\s*\\text\s*\{\s*(?P<word>[^{}]*?)\s*\}\s*(?:\^\s*\{?(?P<power>[23])\}?)?$"
)
UNIT_WORD = re.compile(
    r"(?<=[0-9})\]])(?P<gap>\s*)(?P<word>[A-Za-z]+(?:[ ./]+[A-Za-z]+)*)\s*"
    r"(?:\^\s*\{?(?P<power>[23])\}?)?$"
)
DEGREES = re.compile(r"\s*\^\\circ\s*(?P<scale>[CF]?)$")


class Quantity(NamedTuple):
    """`5 million dollars` is Quantity("5", "$", times=10**6)."""

    text: str  # what is left to be read
    unit: str = ""  # in its one spelling, empty if none is given
    percent: bool = False
    times: int = 1


def quantity(text: str) -> Quantity:
    """Take units, currency and percent off a text."""
    text, unit, times, percent = text.strip(), [], 1, False
    if found := re.match(rf"([+-]?)\s*([{CURRENCY}])\s*(?=[0-9.\\+-])", text):
        text, unit = found[1] + text[found.end() :], [found[2]]
    while True:
        if text.endswith("%") and not percent:
            text, percent = text[:-1].rstrip(), True
        elif len(text) > 1 and text[-1] in CURRENCY:
            text, unit = text[:-1].rstrip(), [text[-1], *unit]
        elif found := DEGREES.search(text):
            text, unit = text[: found.start()], [f"degree{found['scale'].lower()}", *unit]
        elif found := unit_at_end(text):
            text, (words, factor) = text[: found.start()].rstrip(), named(found)
            times, unit = times * factor, [*words, *unit]
        else:
            return Quantity(text, "".join(dict.fromkeys(unit)), percent, times)


def unit_at_end(text: str) -> re.Match | None:
    """Words at the end of a text that are a unit and change nothing else about it."""
    if found := UNIT_TEXT.search(text):
        word = found["word"].lower()
        return found if found.start() > 0 and word and not CHANGES.match(word) else None
    found = UNIT_WORD.search(text)
    if not found:
        return None
    words = re.findall("[a-z]+", found["word"].lower())
    if any(map(CHANGES.match, words)):
        return None
    if all(word in UNITS and len(word) > 1 or word in TIMES for word in words):
        return found
    # `5 red apples`, but neither `2 x` nor `3 ab`.
    plain = number(text[: found.start()]) is not None
    return found if plain and found["gap"] and len(words[-1]) > 2 else None


def named(found: re.Match) -> tuple[list[str], int]:
    """A unit in its one spelling, and the factor where it says `million`."""
    text = found["word"].lower().replace(" per ", "/")
    times, power, parts = 1, found["power"] or "", []
    for word in re.findall(r"[a-z¢°]+(?:\.[a-z])?|/", text):
        if word in TIMES:
            times *= TIMES[word]
        elif word in ("square", "sq", "squared", "cubic", "cu", "cubed"):
            power = "2" if word.startswith("sq") else "3"
        else:
            parts.append(UNITS.get(word, word[:-1] if len(word) > 3 and word[-1] == "s" else word))
    unit = "".join(parts)
    return ([unit + (f"^{power}" if power else "")] if unit else []), times


# -- what must never be computed -----------------------------------------------------------------

DEEPEST = 20  # brackets in brackets
MOST = 9999  # of an exponent
MOST_POWERS = 50
EXPONENT = re.compile(r"\^\s*")
SIMPLE_POWER = re.compile(r"(?P<base>[0-9]+)\s*\^\s*(?P<rest>.+)", re.DOTALL)


def too_deep(text: str) -> bool:
    """Whether brackets stand in brackets in brackets, more than twenty of them."""
    depth = 0
    for bracket in re.findall(r"[({\[\]})]", text):
        depth += 1 if bracket in "({[" else -1
        if depth > DEEPEST:
            return True
    return False


def explodes(text: str) -> bool:
    r"""Whether computing it could take for ever: `9^{9^{9}}`, `(9!)!`, `2^{999999}`.

    A guess from the text that takes microseconds. What it does not see, the clock of a check ends.
    """
    if text.count("^") > MOST_POWERS:
        return True
    if re.search(r"!\s*[!)}]*\s*!", text) or any(int(n) > 1000 for n in FACTORIAL.findall(text)):
        return True
    if re.search(r"[\^!][^!]*[)}]\s*!", text):  # the factorial of a power
        return True
    return any(size(argument(text, m.end())) > MOST for m in EXPONENT.finditer(text))


FACTORIAL = re.compile(r"([0-9]+)[)} ]*!")


def argument(text: str, start: int) -> str:
    """What an exponent sign at the end of text[:start] raises to, and all that is stacked on it."""
    depth = 0
    for found in re.finditer(r"\s*(?:\^\s*)?(-?[0-9]+|\\[A-Za-z]+|.)", text[start:], re.DOTALL):
        depth += (found[1] in "({[") - (found[1] in ")}]")
        if depth <= 0 and not re.match(r"\s*\^", text[start + found.end() :]):
            return text[start : start + found.end()]
    return text[start:]


def size(text: str) -> float:
    """An upper bound of the whole numbers in an exponent, as far as it is made of such."""
    text = text.strip()
    while text[:1] in ("{", "(") and text[-1:] in ("}", ")"):
        text = text[1:-1].strip()
    if found := SIMPLE_POWER.fullmatch(text):
        base, power = int(found["base"][:20]), size(found["rest"])
        return math.inf if power * math.log10(max(base, 1)) > 300 else float(base) ** power
    numbers = [float(n[:20]) for n in re.findall("[0-9]+", text)]
    if "!" in text:
        numbers = [math.inf if n > 7 else n for n in numbers]
    if "^" in text and len(numbers) > 1 and not re.search(r"(?<![\\A-Za-z])[A-Za-z]", text):
        return math.inf if max(numbers) > 3 else math.prod(numbers)
    if re.search(r"\\times|\\cdot|\*", text):
        return math.prod(numbers)
    return max(numbers, default=0.0)
