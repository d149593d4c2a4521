"""`.ci/suites` finds each test of another project that fails only with torchrepro."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
LISTED = tomllib.loads((ROOT / ".ci" / "suites.toml").read_text(encoding="utf-8"))

TESTS = """
import os
import pytest

under_profile = os.environ.get("PYTHONHASHSEED") == "0"

class TestHash:
    @pytest.mark.parametrize("word", ["a.b", "c::d"])
    def test_seed(self, word):
        assert not under_profile

def test_skipped_under_a_profile():
    if under_profile:
        pytest.skip("as the profile is active")

def test_always_fails():
    assert False

def test_passes():
    assert True
"""
SEED = [f"tests/test_hash.py::TestHash::test_seed[{word}]" for word in ("a.b", "c::d")]
SKIPPED = "tests/test_hash.py::test_skipped_under_a_profile"
PASSING = "tests/test_hash.py::test_passes"


@pytest.fixture
def compare_ways(tmp_path):
    """Return a function that runs a small suite without and with a profile."""
    checkout = tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "tests" / "test_hash.py").write_text(TESTS, encoding="utf-8")

    def run(excused, files=("tests",)):
        suites = tmp_path / "suites.toml"
        suites.write_text(
            f"""
[projects.made-up]
[[suites]]
name = "made-up"
project = "made-up"
copied = ["tests"]
start = "."
ways = ["seed-only"]
minutes = 1
files = {list(files)}
[[suites.excused]]
reason = "the profile sets the hash seed"
ways = ["seed-only"]
ids = {excused}
""",
            encoding="utf-8",
        )
        words = ["--bare", sys.executable, "--installed", sys.executable]
        words += ["--suites", suites, "--keep", tmp_path / "reports", f"made-up={checkout}"]
        return subprocess.run(
            [sys.executable, ROOT / ".ci" / "suites", *words],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.slow
def test_the_list_of_excused_tests_is_exact(compare_ways):
    """A test that fails or is skipped only under a profile has to be listed, and no other."""
    exact = compare_ways([*SEED, SKIPPED])
    inexact = compare_ways([SEED[0], PASSING])

    assert exact.returncode == 0, exact.stdout
    assert exact.stdout.endswith("\n5 passed, 0 failed\n")
    assert inexact.returncode == 1
    assert f"  fails only seed-only: {SEED[1]}\n" in inexact.stdout
    assert f"  fails only seed-only: {SKIPPED}\n" in inexact.stdout
    assert f"  is excused, but does not fail: {PASSING}\n" in inexact.stdout
    assert inexact.stdout.endswith("\n5 passed, 3 failed\n")


@pytest.mark.slow
def test_a_suite_that_does_not_start_fails(compare_ways):
    """A suite of which pytest finds no file fails the run, in each way."""
    done = compare_ways([], files=["tests/no_such_file.py"])

    assert done.returncode == 1
    assert done.stdout.count("pytest did not run all tests (status: 4)") == 2


def test_the_weekly_job_checks_out_what_is_listed():
    """Each project is a job of the workflow, at the repository and tag that the list names."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "suites.yml").read_text("utf-8"))
    rows = workflow["jobs"]["suites"]["strategy"]["matrix"]["include"]

    assert {row["project"]: (row["repository"], row["tag"]) for row in rows} == {
        name: (project["repository"], project["tag"])
        for name, project in LISTED["projects"].items()
    }


@pytest.mark.parametrize("suite", LISTED["suites"], ids=lambda suite: suite["name"])
def test_each_excuse_has_a_reason_and_is_for_a_test_that_runs(suite):
    """A listed test is in a file and a way that run, is listed once, and has a reason."""
    files = [str(Path(suite["start"], file)) for file in suite["files"]]
    for row in (*suite.get("excused", ()), *suite.get("omitted", ())):
        assert len(row["reason"].split()) > 3
        assert set(row.get("ways", ())) <= set(suite["ways"])
        assert all(name.startswith(tuple(files)) for name in row["ids"])
    ids = [
        (way, name)
        for row in suite.get("excused", ())
        for way in row["ways"]
        for name in row["ids"]
    ]
    assert len(ids) == len(set(ids))
