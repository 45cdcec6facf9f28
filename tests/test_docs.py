"""The documents say what the code is: what they name exists, and every link leads somewhere."""

import ast
import importlib.util
import random
import re
from functools import cache
from pathlib import Path

import pytest

import algos
from envs import Row
from plumbing.settings import Settings
from tasks.find import make_task

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPLAIN = (  # these explain functions, each with a figure, in the order in which README lists them
    "why", "life_of_a_sample", "staleness", "weights_in_flight", "agentic", "algorithms",
    "when_it_pays", "reading_a_trace",
)  # fmt: skip


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what is named exists --------------------------------------------------------------------------


@cache
def defined(file: str) -> set[str]:
    """The functions, classes and methods (as Class.method) that a file defines, nested ones too."""

    def walk(node: ast.AST, inside: str):
        for child in ast.iter_child_nodes(node):
            known = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if known:
                yield inside + child.name
            yield from walk(child, f"{inside}{child.name}." if known else inside)

    return set(walk(ast.parse((ROOT / file).read_text()), ""))


def references(text: str) -> list[tuple[str, str]]:
    """Of the form `file.py: function` or `file.py: Class.method`."""
    return re.findall(r"`([\w/.]+\.py): ([\w.]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_function_that_a_page_names_is_defined_in_its_file(page):
    named = references(page.read_text())
    absent = [file for file, _ in named if not (ROOT / file).exists()]
    assert not absent
    assert not [(file, name) for file, name in named if name not in defined(file)]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_functions_are_named_in_the_one_form_that_is_held(page):
    """Written as `f` in `file.py`, or `file.py:f`, a reference would be looked up by nobody."""
    text = page.read_text()
    assert not re.findall(r"`[\w.]+`,? in `[\w/]+\.py`", text)
    assert not re.findall(r"`[\w/.]+\.py(?::|: {2,})[a-z_]\w*`", text)


@pytest.mark.parametrize("name", EXPLAIN)
def test_a_page_that_explains_names_its_functions_and_has_a_figure_with_its_command(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert len(set(references(text))) >= 3 and re.search(r"^!\[", text, re.MULTILINE)
    assert re.search(r"bash launch\.sh |python docs/|-m experiments", text)


def test_files_that_the_pages_name_are_there():
    folders = r"`((?:docs|tests|plumbing|tasks|report|experiments|requirements)/[\w./]+\w)[`:]"
    named = {path for page in PAGES for path in re.findall(folders, page.read_text())}
    assert len(named) > 20 and not [path for path in named if not (ROOT / path).exists()]


def commands() -> set[str]:
    """What `launch.sh` dispatches on."""
    (cases,) = re.findall(
        r"^case \$\{1-\} in\n(.*?)^esac", (ROOT / "launch.sh").read_text(), re.M | re.S
    )
    patterns = re.findall(r"^  ([\w |*.'-]+)\)", cases, re.MULTILINE)
    return {name for pattern in patterns for name in pattern.replace(" ", "").split("|")}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_command_on_a_page_exists(page):
    text = page.read_text()
    said = set(re.findall(r"bash launch\.sh +(\w[\w-]*)(?![\w.-])", text))
    assert "plot" in commands() and said <= commands()
    modules = set(re.findall(r"python -m ((?:experiments|report|plumbing)\.\w+)", text))
    scripts = set(re.findall(r"python ((?:docs|experiments)/\w+\.py)", text))
    files = scripts | {name.replace(".", "/") + ".py" for name in modules}
    assert not [file for file in files if not (ROOT / file).exists()]


def from_page(kind: str, tmp_path):
    """The task or environment of that name in docs/tasks.md, as `--env FILE.py:KIND` finds it."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/tasks.md").read_text(), re.M | re.S)
    (code,) = [block for block in blocks if f"class {kind}(" in block]
    (tmp_path / "mine.py").write_text(code)
    return make_task(Settings(env=f"{tmp_path / 'mine.py'}:{kind}"))


def test_the_task_of_the_page_scores_its_own_answers(tmp_path):
    task = from_page("Reverse", tmp_path)
    assert len(task.train) > 1000 and not set(task.train) & set(task.test)
    assert {task.reward(row, row.prompt[::-1]) for row in task.test} == {1.0}
    prompt, answer = task.warmup(random.Random(0))[0]
    assert task.reward(Row(prompt, answer), answer) == 1.0 != task.reward(Row(prompt, answer), "")


def test_the_environment_of_the_page_is_solved_by_its_own_warmup(tmp_path):
    env = from_page("Echo", tmp_path).make_env()
    said, _ = env.reset(7)
    steps = [env.step(said.removeprefix("say ")) for _ in range(3)]
    assert sum(step[1] for step in steps) == pytest.approx(1) and steps[-1][2]
    assert not any(step[2] for step in steps[:2])


# -- where a page links there is something ---------------------------------------------------------


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Those that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_readme_is_a_page_and_leads_to_every_other_one():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1300
    listed = re.findall(r"\]\(docs/(\w+)\.md", text)
    assert set(listed) == {page.stem for page in PAGES if page.parent.name == "docs"}
    (order,) = re.findall(r"^1\. .*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"^\d+\. .*?\(docs/(\w+)\.md", order, re.MULTILINE))[:8] == EXPLAIN


# -- what is written there is what the code would say ----------------------------------------------


@pytest.mark.parametrize("kind", sorted(algos.KINDS))
def test_the_page_of_algorithms_has_a_row_for_each_function_that_is_registered(kind):
    (table,) = re.findall(rf"^\| {kind} \|.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(algos.KINDS[kind])


def test_the_table_of_flags_is_as_the_code_would_write_it_now():
    assert load(ROOT / "docs" / "draw_algorithms.py").page(PAGE) == PAGE


def test_what_a_publish_takes_and_its_share_go_with_the_step_beside_them():
    text = (ROOT / "docs" / "results.md").read_text()
    found = re.search(r"trainer ([\d.]+) s, ([\d.]+) % of the median step of ([\d.]+) s", text)
    seconds, share, step = map(float, found.groups())
    assert share == pytest.approx(100 * seconds / step, rel=0.03)


def test_the_example_that_is_worked_by_hand_is_what_the_simulator_measures():
    text, draw = (ROOT / "docs" / "why.md").read_text(), load(ROOT / "docs" / "draw_pages.py")
    rows = re.findall(r"^\| (\d) \| ([\d.]+) s \| ([\d.]+) s \|", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2", "4"]
    for alpha, measured, bound in rows:
        result, _, promised = draw.by_hand(int(alpha))
        assert float(measured) == pytest.approx(result.step_seconds(12), abs=0.005)
        assert float(bound) == pytest.approx(promised, abs=0.005)
