r"""Whether a math answer says what the gold one says.

    verdict(r"\frac{1}{2}", "0.5", algebra)     → True
    verdict("1,2", "12", algebra)               → False: a list is no number

Here is what needs no algebra: text, numbers, units, lists, tuples, intervals, sets, matrices,
equations. They are taken apart until two expressions are left, and those go to `algebra`
(math-verify, in a process of its own: `tasks/math.py`).

The rules are those of math-verify and of the answers of GSM8K and MATH, and where these disagree
or let something wrong pass, the stricter one: a wrong answer that scores 1 teaches a mistake, a
right one that scores 0 only wastes a sample. So the kind of bracket counts, `[0, 1]` is not
`(0, 1)`; only thousands separators are removed from numbers; the order of a bare list or a set
is free and that of a tuple is not; a unit may be left out but not be another one; an equation may
be left out where it only names the value (`x = 5` and `5`).
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from tasks.quantity import equal, explodes, number, quantity, too_deep

Algebra = Callable[[str, str], bool]  # whether two expressions in LaTeX are equal

LONGEST = 1000  # characters of an answer; what is longer is no answer


BOX = re.compile(r"(?P<box>\\boxed\s*\{)|\\[{}]|(?P<open>\{)|\}")


def boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`: `so \boxed{\frac{1}{2}}.` → `\frac{1}{2}`.

    One pass over the text, however many boxes are left open in it.
    """
    opened, last = [], None  # opened: the start of a box for each open brace, or None
    for found in BOX.finditer(text):
        if found["box"]:
            opened.append(found.end())
        elif found["open"]:
            opened.append(None)
        elif found[0] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, found.start()
    return None if last is None else text[last[0] : last[1]].strip()


def verdict(gold: str, answer: str, algebra: Algebra) -> bool:
    """Whether `answer` is right, both in LaTeX or plain text without a box around them.

    `algebra` is asked about pairs that only computing can decide; what it raises is passed on.
    Raises ValueError if the gold answer is empty.
    """
    if not gold.strip():
        raise ValueError("the gold answer is empty")
    if is_hostile(answer) or is_hostile(gold):
        return False
    return same(clean(gold), clean(answer), algebra)


def is_hostile(text: str) -> bool:
    """Whether it is too long, too deep or too large to be looked at."""
    return len(text) > LONGEST or too_deep(text) or explodes(clean(text))


def same(gold: str, text: str, algebra: Algebra) -> bool:
    """`verdict` of two cleaned texts; calls itself for the parts of compound ones."""
    gold, text = MEMBER.sub("", gold), MEMBER.sub("", text)
    if key(gold) == key(text):
        return True
    if not text:
        return False
    for rule in (by_letter, by_words, by_list, by_equation, by_bracket, by_clock):
        known = rule(gold, text, algebra)
        if known is not None:
            return known
    return by_quantity(gold, text, algebra)


# -- one way of writing --------------------------------------------------------------------------

CHARACTERS = {
    "−–—‒‐‑﹣": "-",
    "×✕": r"\times ",
    "·⋅∙": r"\cdot ",
    "÷": r"\div ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤⩽": r"\le ",
    "≥⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "√": r"\sqrt ",
    "∠": r"\angle ",
    "ℝ": r"\mathbb{R}",
    "“”": '"',
    "‘’′": "'",
}
NAMES = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "θ": "theta", "λ": "lambda",
         "μ": "mu", "σ": "sigma", "φ": "phi", "ω": "omega", "Δ": "Delta"}  # fmt: skip
TABLE = {ord(c): to for some, to in CHARACTERS.items() for c in some}
TABLE |= {ord(c): f"\\{name} " for c, name in NAMES.items()}
for _c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞":
    TABLE[ord(_c)] = r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", _c).split("⁄"))
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"

# What LaTeX has several ways to write → the one used here. In this order.
SPELLINGS = [
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
    (r"\\!", ""),
    (r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|\\(?:thin|en)?space(?![A-Za-z])|(?<!\\)~", " "),
    (r"\{\s*,\s*\}", ","),
    (r"\\(?:display|text|script)style(?![A-Za-z])", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\lbrack(?![A-Za-z])", "["),
    (r"\\rbrack(?![A-Za-z])", "]"),
    (r"\\[lr]?vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
    (r"\\leq(?:slant)?(?![A-Za-z])|<=", r"\\le "),
    (r"\\geq(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
    (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\degree(?:s)?(?![A-Za-z])|\^\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])", r"^\\circ "),
    (r"\\ast(?![A-Za-z])|\*\*", lambda m: "^" if m[0] == "**" else "*"),
    (r"\\colon(?![A-Za-z])", ":"),
    (r"\\mathrm\{([eid])\}", r"\1"),
    (r"\\(?:mathbf|mathit|boldsymbol|bm|mathsf)\{([^{}]*)\}", r"{\1}"),
    (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|mathrm|mbox|hbox|emph)\s*\{", r"\\text{"),
    (r"\\text\s*\{\s*(and|or)\s*\}", r" \1 "),
    (r"\\text\s*\{\s*,?\s*\}", " "),
    (r"\\text\s*\{\s*([-+]?[0-9][0-9.,/]*)\s*\}", r"\1"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\?%|\\text\s*\{\s*\\?%\s*\}", "%"),
    (r"\\text\s*\{\s*(?:per\s?cent|pct)\s*\}|(?<![A-Za-z])(?:per\s?cent|pct)(?![A-Za-z])", "%"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
    (r"(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt "),
    (r"\+\s*\\infty", r"\\infty"),
    (r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([0-9A-Za-z])\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
    (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
    (r"\s+", " "),
]
SPELLINGS = [(re.compile(pattern), to) for pattern, to in SPELLINGS]
AROUND = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")]  # signs of math mode
# `x \in [0, 1)` says what `[0, 1)` says.
MEMBER = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?\s*\\in(?![A-Za-z])\s*")


def clean(text: str) -> str:
    r"""The same in one way of writing: `\dfrac12\,\text{cm}.` → `\frac{1}{2} \text{cm}`."""
    text = re.sub(f"[{RAISED}]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = re.sub(f"[{LOWERED}]+", lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(TABLE)).translate(TABLE).strip()
    for start, end in AROUND:
        inside = text[len(start) : -len(end)]
        if text.startswith(start) and text.endswith(end) and inside and start not in inside:
            text = inside.strip()
    text = text.replace(r"\$", "$")
    for pattern, to in SPELLINGS:
        text = pattern.sub(to, text)
    text = root(text).strip()
    if not text.endswith(".."):  # an open end: 1, 2, 3, ...
        text = text.rstrip(" .,;")
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def root(text: str) -> str:
    r"""`\sqrt (x + 1)` → `\sqrt{x + 1}`."""
    parts = []
    while found := re.search(r"\\sqrt\s*\(", text):
        end = closing(text, found.end() - 1)
        if end < 0:
            break
        parts += [text[: found.start()], r"\sqrt{", text[found.end() : end], "}"]
        text = text[end + 1 :]
    return "".join([*parts, text])


def key(text: str) -> str:
    """Texts of one key are equal: blanks do not count, but between two words or two numbers."""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", text)


# -- brackets and parts --------------------------------------------------------------------------

OPEN = r"\\begin\{\w+\*?\}|\\\{|\\langle(?![A-Za-z])|[(\[{]"
CLOSE = r"\\end\{\w+\*?\}|\\\}|\\rangle(?![A-Za-z])|[)\]}]"
BRACKET = re.compile(f"(?P<open>{OPEN})|(?P<close>{CLOSE})")
COMMA = r"[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
EQUALS = r"(?<![<>!:=])=(?!=)"
# An inequality, a union, a condition: only math-verify reads these.
RELATION = re.compile(
    r"[<>|]|\\(?:le|ge|ne|in|notin|subset|subseteq|cup|cap|setminus|approx|equiv|pmod|mathbb)(?![A-Za-z])"
)
THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
BLANK_THOUSANDS = re.compile(r"(?<![0-9.,])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9/])")
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")


def closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed, -1 if it is not."""
    depth = 0
    for found in BRACKET.finditer(text, start):
        depth += 1 if found["open"] else -1
        if depth <= 0:
            return found.start()
    return -1


def cut(text: str, separator: str) -> list[str]:
    """The parts between separators (a pattern) that stand in no bracket."""
    depth, start, parts = 0, 0, []
    for found in re.finditer(f"(?P<open>{OPEN})|(?P<close>{CLOSE})|(?:{separator})", text):
        if found["open"] or found["close"]:
            depth += 1 if found["open"] else -1
        elif depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


def ungroup(text: str) -> str:
    """Numbers without thousands separators: `1,000` → `1000`, but `1,2` and `(1,000)` stay."""
    if re.search(r"[(\[]", text) and not re.search(r",\s|;", text):
        return text
    text = THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    return BLANK_THOUSANDS.sub(lambda m: m[0].replace(" ", ""), text)


class Wrapped(NamedTuple):
    """A text in brackets: `[0, 1)` is Wrapped("[", ["0", "1"], ")")."""

    start: str
    parts: list[str]
    end: str


def wrapped(text: str) -> Wrapped | None:
    """The brackets around a text and what stands between the commas in them, if it is in any."""
    found = BRACKET.match(text)
    if not found or not found["open"] or found["open"] in ("{",) or "begin" in found["open"]:
        return None
    end = closing(text, 0)
    close = BRACKET.match(text, end) if end > 0 else None
    if not close or close.end() != len(text):
        return None
    inside = text[found.end() : end].strip()
    if re.search(r",\s|;", inside):  # else `(1,000)` is a pair
        inside = ungroup(inside)
    return Wrapped(found[0], [part for part in cut(inside, "[,;]") if part], close[0])


def listed(text: str) -> tuple[list[str], bool]:
    r"""The elements of a bare list or a set, and whether it is a set: `1, \pm 2` → 1, 2, -2."""
    around = wrapped(text)
    if around and around.start == r"\{" and not RELATION.search(text) and ":" not in text:
        return [each for part in around.parts for each in both_signs(part)], True
    parts = [part for part in cut(ungroup(text), COMMA) if part]
    return [each for part in parts for each in both_signs(part)], False


def both_signs(text: str) -> list[str]:
    r"""`1 \pm x` → `1 + x` and `1 - x`."""
    if len(PLUS_MINUS.findall(text)) != 1:
        return [text]
    return [PLUS_MINUS.sub("+", text).removeprefix("+"), PLUS_MINUS.sub("-", text)]


# -- the rules: each says True or False, or None where it does not apply -------------------------

LETTER = re.compile(r"(?P<wrap>\\text\s*\{\s*)?\(?(?P<letter>[A-Za-z])[).]?\s*\}?")
WORDS = re.compile(r"[A-Za-z][A-Za-z0-9 '-]*[A-Za-z0-9]")
FUNCTION = re.compile(
    r"\\?(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|exp|mod|max|min|gcd|lcm)[a-z]?(?![A-Za-z])"
)
SHORT = {"no", "yes", "on", "true", "false", "all", "even", "odd", "none", "neither"}


def by_letter(gold: str, text: str, algebra: Algebra) -> bool | None:
    r"""Choices: `(A)`, `\text{A}` and `A` are one; a bare `a` is a variable."""
    ours, theirs = LETTER.fullmatch(gold), LETTER.fullmatch(text)
    if not (ours and theirs):
        return None
    if ours["letter"] == theirs["letter"]:
        return True
    marked = len(gold) > 1 or len(text) > 1
    return marked and ours["letter"].isupper() and ours["letter"] == theirs["letter"].upper()


def spelled(text: str) -> str | None:
    r"""A text of words, in lower case and without LaTeX: `\text{ No}` → `no`; None for others."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    plain = " ".join(plain.replace('"', " ").split()).strip(" .,")
    return plain.lower() if WORDS.fullmatch(plain) and not FUNCTION.match(plain) else None


def words(text: str) -> str | None:
    """`spelled`, but None for what may be a product of variables."""
    plain = spelled(text)
    if plain is None or "\\text" in text or plain in SHORT:
        return plain
    return plain if max(map(len, re.findall("[a-z]+", plain))) > 3 else None


def by_words(gold: str, text: str, algebra: Algebra) -> bool | None:
    if words(gold) is None and words(text) is None:
        return None
    return spelled(gold) is not None and spelled(gold) == spelled(text)


def by_list(gold: str, text: str, algebra: Algebra) -> bool | None:
    """Bare lists and sets: the same elements in any order."""
    (ours, our_set), (theirs, their_set) = listed(gold), listed(text)
    if not (our_set or their_set or len(ours) > 1 or len(theirs) > 1):
        return None
    if len(ours) != len(theirs):
        return bool(RELATION.search(gold) or RELATION.search(text)) and algebra(gold, text)
    left = list(theirs)
    for element in ours:
        for i, other in enumerate(left):
            if same(element, other, algebra):
                del left[i]
                break
        else:
            return False
    return True


NAME = re.compile(
    r"(?:[A-Za-z(){}|', ]|\\(?:text|angle|triangle|overline|vec|operatorname|alpha|beta|gamma|delta"
    r"|theta|lambda|mu|sigma|phi|omega)(?![A-Za-z]))+"
)


def is_name(text: str) -> bool:
    r"""Whether it only names a value: `x`, `f(2)`, `\angle ABC`, `\text{Area}`, `(x, y)`."""
    text = re.sub(r"_\{[^{}]*\}|_\w|(?<=[A-Za-z])\([^()=]*\)", "", text)
    return bool(NAME.fullmatch(text)) and not FUNCTION.match(text)


def by_equation(gold: str, text: str, algebra: Algebra) -> bool | None:
    """`x = 5` and `5`; `2 + 3 = 5` and `5`, if the sum is right; two equations as they are."""
    ours, theirs = cut(gold, EQUALS), cut(text, EQUALS)
    if len(ours) == len(theirs) == 1:
        return None
    if len(theirs) == 1:
        return is_name(ours[0]) and same(ours[-1], text, algebra)
    named = is_name(theirs[0])
    value = chain(theirs[1:] if named else theirs, algebra)
    if len(ours) == 1:
        return value and same(gold, theirs[-1], algebra)
    if named and is_name(ours[0]):
        return key(ours[0]) == key(theirs[0]) and value and same(ours[-1], theirs[-1], algebra)
    return algebra(gold, text)


def chain(parts: list[str], algebra: Algebra) -> bool:
    """Whether what stands between signs of equality is equal."""
    return all(same(parts[-1], part, algebra) for part in parts[:-1])


MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)


def matrix(text: str) -> list[list[str]] | None:
    """The rows of a matrix, whatever its brackets."""
    around = wrapped(text)
    if around and len(around.parts) == 1 and around.start in "([":
        text = around.parts[0]
    found = MATRIX.fullmatch(text)
    if not found:
        return None
    return [cut(row, "&") for row in cut(found[2], r"\\\\") if row]


def by_bracket(gold: str, text: str, algebra: Algebra) -> bool | None:
    """Matrices, tuples and intervals: the same brackets, and in them the same in the same order."""
    rows, other_rows = matrix(gold), matrix(text)
    if rows or other_rows:
        if not (rows and other_rows) or [*map(len, rows)] != [*map(len, other_rows)]:
            return False
        pairs = zip(sum(rows, []), sum(other_rows, []), strict=True)
        return all(same(a, b, algebra) for a, b in pairs)
    inner = ungrouped(gold), ungrouped(text)
    if inner != (gold, text):
        return same(*inner, algebra)
    ours, theirs = wrapped(gold), wrapped(text)
    if not (ours or theirs):
        return None
    if not (ours and theirs):
        return bool(RELATION.search(text if ours else gold)) and algebra(gold, text)
    if (ours.start, ours.end, len(ours.parts)) != (theirs.start, theirs.end, len(theirs.parts)):
        return False
    return all(same(a, b, algebra) for a, b in zip(ours.parts, theirs.parts, strict=True))


def ungrouped(text: str) -> str:
    """`(5)` → `5`; what is no pair or interval needs no brackets around it."""
    around = wrapped(text)
    alone = around and len(around.parts) == 1 and (around.start, around.end) == ("(", ")")
    return around.parts[0] if alone else text


CLOCK = re.compile(r"([0-9]+(?:\s*:\s*[0-9]+)+)\s*(?:\\text\s*\{)?\s*([ap]\.?\s?m)?\.?\s*\}?", re.I)


def by_clock(gold: str, text: str, algebra: Algebra) -> bool | None:
    """Times and ratios: `3:30` is not 3/30, and `3:30 am` is not `3:30 pm`."""
    if ":" not in gold + text:
        return None
    ours, theirs = CLOCK.fullmatch(gold), CLOCK.fullmatch(text)
    if not (ours and theirs):
        return False
    times = [[int(part) for part in found[1].split(":")] for found in (ours, theirs)]
    halves = {found[2][0].lower() for found in (ours, theirs) if found[2]}
    return times[0] == times[1] and len(halves) < 2


BASED = re.compile(r"([0-9A-Za-z]+)_\s*\{?\s*([0-9]{1,2})\s*\}?")
NO_ALGEBRA = re.compile(
    r"%|\\text|(?<![A-Za-z\\])(?!\w*(?:sin|cos|tan|cot|sec|csc|log|exp))[A-Za-z]{4,}"
)


def by_quantity(gold: str, text: str, algebra: Algebra) -> bool:
    r"""Numbers with or without units: `\$5`, `5\%`, `5 \text{ cm}`; and what only algebra knows."""
    ours, theirs = quantity(ungroup(gold)), quantity(ungroup(text))
    if ours.unit and theirs.unit and ours.unit != theirs.unit:
        return False
    one, two = number(ours.text), number(theirs.text)
    if one and two:
        one, two = (x._replace(value=x.value * q.times) for x, q in ((one, ours), (two, theirs)))
        if ours.percent == theirs.percent:
            return equal(one, two)
        # 50% of a question in percent may be said as 50 or 0.5; but 0.5% is not 0.5.
        percent, plain = (one, two) if ours.percent else (two, one)
        as_it_stands = ours.percent or one.value >= 1
        return as_it_stands and equal(one, two) or percent.value / 100 == plain.value
    if ours.times != theirs.times:
        return False
    if BASED.fullmatch(ours.text) or BASED.fullmatch(theirs.text):
        return based(ours.text, theirs.text)
    if NO_ALGEBRA.search(ours.text + " " + theirs.text):
        return False
    if (ours.text, theirs.text) != (ungroup(gold), ungroup(text)):
        return bool(ours.text and theirs.text) and same(ours.text, theirs.text, algebra)
    if any(map(two_cases, (ours.text, theirs.text))):
        return False  # math-verify takes a and A for one
    return algebra(ours.text, theirs.text)


def two_cases(text: str) -> bool:
    """Whether a letter is a variable in both its cases."""
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text))
    return len(letters) > len(set(map(str.lower, letters)))


def based(gold: str, text: str) -> bool | None:
    """Digits in a base, which may be left out where the gold answer names it: `101_2`."""
    ours, theirs = BASED.fullmatch(gold), BASED.fullmatch(text)
    if ours and theirs:
        return ours.groups() == theirs.groups()
    return bool(ours) and ours[1] == text


# -- gold answers --------------------------------------------------------------------------------

NO_ANSWERS = {"proof", "not found", "notfound", "nan", "null", "unknown", "error", "see above"}
MOST_WORDS = 5


def legible(gold: str, reads: Callable[[str], bool]) -> bool:
    """Whether a gold answer can be met by an answer that says it in other letters.

    `reads` is asked whether algebra can read an expression; what it raises is passed on.
    """
    text = "" if is_hostile(gold) else clean(gold)
    return bool(text) and all(leaf_is_legible(leaf, reads) for leaf in leaves(MEMBER.sub("", text)))


def leaves(text: str) -> list[str]:
    """What is compared in the end, when lists, brackets and equations are taken apart."""
    if LETTER.fullmatch(text) or words(text) or RELATION.search(text):
        return [text]
    parts, is_set = listed(text)
    around, rows = wrapped(text), matrix(text)
    if rows:
        parts = sum(rows, [])
    elif len(parts) == 1 and not is_set:
        sides = cut(text, EQUALS)
        parts = sides[1:] if len(sides) > 1 and is_name(sides[0]) else [text]
        if around and len(sides) == 1:
            parts = around.parts
    return parts if parts == [text] else [leaf for part in parts for leaf in leaves(part)]


def leaf_is_legible(text: str, reads: Callable[[str], bool]) -> bool:
    said = words(text)
    if said is not None:
        return said not in NO_ANSWERS and len(said.split()) <= MOST_WORDS
    if LETTER.fullmatch(text) or CLOCK.fullmatch(text):
        return True
    left = quantity(ungroup(text)).text
    if number(left) or BASED.fullmatch(left):
        return True
    return bool(left) and ":" not in left and not NO_ALGEBRA.search(left) and reads(left)
