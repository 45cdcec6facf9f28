"""Single-turn tasks that make their own rows: addition, max3, countdown."""

import ast
import operator
import random
import re
from fractions import Fraction
from itertools import combinations

from envs import Row, Task, split
from tasks.rows import countdown_row, load


class Addition(Task):
    """Sum of two 2-digit numbers, all 8,100 of them: `12+34=` → `46`. Made for the model `tiny`."""

    blocking = False

    def __init__(self, config, seed: int = 0):
        super().__init__(config, seed)
        pairs = ((a, b) for a in range(10, 100) for b in range(10, 100))
        self.train, self.test = split((Row(f"{a}+{b}=", str(a + b)) for a, b in pairs), seed, 512)

    def reward(self, row: Row, response: str) -> float:
        return float(response == row.answer)

    def warmup(self, rng: random.Random) -> list[tuple[str, str]]:
        return [tuple(rng.choice(self.train))]


class Max3(Task):
    """Largest of three 2-digit numbers, after two examples. Made for SmolLM2-135M."""

    blocking = False
    chat = False  # a 135M model continues a pattern better than it follows an instruction
    stop = "\n"
    max_tokens = 4  # a space, two digits, the line break
    shots = "max(24, 71, 53) = 71\nmax(17, 35, 64) = 64\n"

    def __init__(self, config, seed: int = 0):
        super().__init__(config, seed)
        rng = random.Random(f"max3 {seed}")
        # Distinct as sets, so that no order of a held-out triple is trained on.
        triples = rng.sample(list(combinations(range(10, 100), 3)), 8704)
        self.train, self.test = split((self.row(*rng.sample(t, 3)) for t in triples), seed, 512)

    def row(self, a: int, b: int, c: int) -> Row:
        return Row(f"{self.shots}max({a}, {b}, {c}) =", str(max(a, b, c)))

    def reward(self, row: Row, response: str) -> float:
        return float(response.removesuffix(self.stop) == f" {row.answer}")


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """Value of an expression of whole numbers, + - * / and brackets, and the numbers in it.

    Raises ValueError if the text is anything else, and ZeroDivisionError.
    """
    # These characters leave nothing to call, and the length no deep nesting.
    if not re.fullmatch(r"[0-9 +*/()-]{1,200}", text):
        raise ValueError(f"not an arithmetic expression: {text[:80]!r}")
    numbers = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant):
            numbers.append(node.value)
            return Fraction(node.value)
        raise ValueError(f"only whole numbers and + - * / are allowed: {text!r}")

    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError) as error:  # MemoryError: too many brackets for the parser
        raise ValueError(f"not an arithmetic expression: {text!r}") from error
    return value(tree.body), numbers


class Countdown(Task):
    """Reach a target from four numbers with + - * /, each number used at most once.

    The answer of a row holds the puzzle: `3 7 25 50 = 93`. With --data, rows are of a file or data
    set with columns `target` and `nums`.
    """

    blocking = False
    max_tokens = 512

    def __init__(self, config, seed: int = 0):
        super().__init__(config, seed)
        if config.data:
            self.train, self.test, self.notes = load(config.data, seed, self.row_of)
            return
        rng = random.Random(f"countdown {seed}")
        puzzles: dict[str, None] = {}  # in the order made: a set of texts has another in each run
        while len(puzzles) < 4608:
            total, *rest = numbers = rng.choices(range(1, 100), k=4)
            for n in rest:  # combined in this order they make the target, so there is a solution
                exact = [total + n, total - n, total * n] + [total // n] * (total % n == 0)
                total = rng.choice(exact)
            if 10 <= total <= 99:
                puzzles[f"{' '.join(map(str, sorted(numbers)))} = {total}"] = None
        self.train, self.test = split(map(self.row, puzzles), seed, 512)

    def row_of(self, record: object, where: str) -> Row:
        return self.row(countdown_row(record, where))

    @staticmethod
    def row(puzzle: str) -> Row:
        numbers, target = puzzle.split(" = ")
        prompt = (
            f"Make {target} from the numbers {numbers.replace(' ', ', ')}. Use + - * / and "
            "brackets, and each number at most once. Think first, then write the expression, "
            "without the result, like this: <answer>(1 + 2) * 3</answer>"
        )
        return Row(prompt, puzzle)

    def reward(self, row: Row, response: str) -> float:
        numbers, target = row.answer.split(" = ")
        given = [int(n) for n in numbers.split()]
        answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        try:
            total, used = arithmetic(answers[-1].strip() if answers else "")
        except (ValueError, ZeroDivisionError):  # no fault: the response is just not a solution
            return 0.0
        return float(total == int(target) and all(used.count(n) <= given.count(n) for n in used))
