"""The order of the house: five files hold the ideas, and what a file uses lies below it."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IDEAS = {"train.py", "rollout.py", "buffer.py", "envs.py", "algos.py"}
FOLDERS = {"plumbing", "tasks", "report", "experiments", "docs", "tests", "requirements", ".ci"}
LEAVES = [
    *("flags", "packages", "spans", "nodes", "devices", "ranks", "weights", "processes"),
    *("calls", "chat", "files", "interrupts", "torchrun"),
]
FLOORS = [  # from the top down: a file may import what lies on its own floor, or below
    ["experiments/"],
    ["train.py"],
    ["rollout.py"],
    ["report/"],
    ["plumbing/", "tasks/"],  # what knows tasks, models or all settings
    ["envs.py"],
    ["buffer.py", "algos.py"],
    [f"plumbing/{name}.py" for name in LEAVES],  # what knows nothing of this project
]
LONGEST_FILE, LONGEST_FUNCTION = 600, 60  # lines


def sources() -> dict[str, ast.Module]:
    """Every Python file outside of tests and docs, by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    files = [f for f in listed if not f.startswith(("tests/", "docs/")) and (ROOT / f).exists()]
    return {file: ast.parse((ROOT / file).read_text()) for file in files}


SOURCES = sources()
MODULES = {file.removesuffix(".py").replace("/", "."): file for file in SOURCES}


def imports(tree: ast.Module) -> set[str]:
    """The files of this project that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {MODULES[name] for name in names if name in MODULES}


IMPORTS = {file: imports(tree) - {file} for file, tree in SOURCES.items()}


def floor(file: str) -> int:
    exact = [i for i, rooms in enumerate(FLOORS) if file in rooms]
    inside = [i for i, rooms in enumerate(FLOORS) if file.split("/")[0] + "/" in rooms]
    return (exact or inside)[0]


def test_only_the_five_files_of_ideas_lie_at_the_top():
    assert {file for file in SOURCES if "/" not in file} == IDEAS
    assert {file.split("/")[0] for file in SOURCES if "/" in file} <= FOLDERS


def test_arrows_go_down():
    upwards = [(a, b) for a, below in IMPORTS.items() for b in below if floor(b) < floor(a)]
    assert not upwards


def test_no_two_files_import_each_other():
    reached = {file: set(below) for file, below in IMPORTS.items()}
    for _ in SOURCES:  # long enough for the longest chain
        reached = {a: b.union(*(reached[c] for c in b)) for a, b in reached.items()}
    assert not [file for file, below in reached.items() if file in below]


def test_the_trainer_imports_neither_vllm_nor_what_does():
    wants_vllm = {
        file
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and "vllm" in ast.unparse(node)
    }
    assert wants_vllm == {"plumbing/engine.py"}
    at_once = {
        file
        for file, tree in SOURCES.items()
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "plumbing/engine.py" in imports(ast.Module([node], []))
    }
    assert not at_once  # a rollout process imports it, in a function


def private_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names with an underscore that a file defines, and those that it uses of something."""
    defined, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    return tuple({n for n in names if n[0] == "_" != n[1:2]} for names in (defined, used))


def test_no_private_name_is_used_in_another_file():
    names = {file: private_names(tree) for file, tree in SOURCES.items()}
    ours = set().union(*(defined for defined, _ in names.values()))
    across = {file: (used & ours) - defined for file, (defined, used) in names.items()}
    assert not {file: used for file, used in across.items() if used}


def test_files_and_functions_are_short():
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in SOURCES}
    functions = {
        f"{file}:{node.name}": node.end_lineno - node.lineno + 1
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {file: n for file, n in lengths.items() if n > LONGEST_FILE}
    assert not {name: n for name, n in functions.items() if n > LONGEST_FUNCTION}


def test_the_idea_of_a_file_stands_in_its_first_screen():
    ideas = {
        "train.py": ("def train_sync", "def train_async"),
        "rollout.py": ("def assign",),
        "buffer.py": ("def admission_limit",),
        "envs.py": ("async def run_episode",),
        "algos.py": ("def ppo_loss",),
    }
    for file, marks in ideas.items():
        screen = "\n".join((ROOT / file).read_text().splitlines()[:85])
        assert all(mark in screen for mark in marks), file
