"""The page of a run: its data, and what a browser makes of it."""

import re
import shutil
import subprocess

import pytest

from report.page import SIZE_LIMIT, fate, run_data, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def run(worker):
    return worker.train("--alpha", "1", steps=3).log.dir


@pytest.fixture
def page(run, tmp_path):
    """The text of the page's document as a browser has drawn it, for what follows the #."""
    if not BROWSER:
        pytest.skip("no chromium on this machine (on Debian: apt install chromium)")
    target = write_page([run, run], tmp_path / "run.html")

    def draw(place: str = "") -> str:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
        home = f"--user-data-dir={tmp_path / 'home'}"
        found = subprocess.run(
            [BROWSER, *flags, home, "--dump-dom", f"file://{target}#{place}"],
            capture_output=True,
            text=True,
        )
        return found.stdout

    return draw


def test_each_turn_of_training_is_there_with_its_version_and_fate(run):
    data = run_data(run)
    assert {turn[7] for turn in data["turns"]} == {"trained"}
    assert {f"{turn[4]}:{turn[5]}" for turn in data["turns"]} == {s[0] for s in data["samples"]}
    of = {sample[0]: sample for sample in data["samples"]}
    for turn in data["turns"]:
        assert turn[6] == sorted(set(of[f"{turn[4]}:{turn[5]}"][6]))  # versions of its tokens
    assert min(turn[2] for turn in data["turns"]) == 0
    assert [step[0] for step in data["steps"]] == [1, 2, 3]


def test_what_became_of_a_turn():
    samples = {(1, 0): {}}

    def of(group, sample):
        return fate({"args": {"group": group, "sample": sample}}, samples, {2: "stale"})

    assert [of(1, 0), of(2, 0), of(1, 1), of(3, 0)] == ["trained", "stale", "lost", "unfinished"]


def test_the_page_is_one_file_that_asks_for_no_other(run, tmp_path):
    text = write_page([run], tmp_path / "run.html").read_text()
    assert len(text) < SIZE_LIMIT
    outside = re.sub(r"http://www.w3.org/2000/svg", "", text)  # a name, nothing is fetched
    assert not re.search(r"https?://|src=|<link|@import|fetch\(", outside)


def test_a_browser_draws_every_run_without_an_error(page, run):
    text, count = page(), len(run_data(run)["turns"])
    assert f'data-drawn="{count} {count}"' in text
    assert '<div id="error"></div>' in text
    assert text.count("<polyline") == 2 * 8  # curves of both runs


def test_a_turn_that_is_chosen_shows_its_tokens(page, run):
    sample = run_data(run)["samples"][-1]
    text = page(f"turn=1:{sample[0]}")
    group, number = sample[0].split(":")
    assert f"Sample {number} of group {group}" in text
    assert f"trained on in step {sample[1]} at version {sample[1] - 1}" in text
    assert text.count('<td class="sampled">') == len(sample[6])
