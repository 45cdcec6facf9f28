"""The documents say what the code is."""

import importlib.util
import re
from pathlib import Path

import pytest

import algos

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", sorted(algos.KINDS))
def test_the_page_of_algorithms_has_a_row_for_each_function_that_is_registered(kind):
    (table,) = re.findall(rf"^\| {kind} \|.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(algos.KINDS[kind])


def test_the_table_of_flags_is_as_the_code_would_write_it_now():
    assert load(ROOT / "docs" / "draw_algorithms.py").page(PAGE) == PAGE


def test_files_that_the_readme_names_are_there():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:docs|tests|plumbing|tasks|report|experiments)/[\w./]+)`", text))
    named |= set(re.findall(r"\]\(((?:docs|tests)/[\w./]+)", text))
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_what_a_publish_takes_and_its_share_go_with_the_step_beside_them():
    text = (ROOT / "docs" / "results.md").read_text()
    found = re.search(r"trainer ([\d.]+) s, ([\d.]+) % of the median step of ([\d.]+) s", text)
    seconds, share, step = map(float, found.groups())
    assert share == pytest.approx(100 * seconds / step, rel=0.03)
