"""The plugin in real pytest runs: applied in time, the same for every test, with clear output."""

import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from torchrepro.integrations.pytest_plugin import header_lines
from torchrepro.reporting.outcomes import Guarantee, KnobRow, Lowered, Outcome
from torchrepro.reporting.report import Report

pytest_plugins = ("pytester",)

TIMEOUT = 600
CONSOLE_SCRIPT = Path(sysconfig.get_path("scripts")) / "torchrepro"
CONFTEST = """
import random, numpy, pytest, torch

FOUND = torch.are_deterministic_algorithms_enabled(), torch.initial_seed()

def pytest_report_header():
    return f"conftest found {FOUND}"

def draw():
    return random.random() + numpy.random.rand() + torch.rand(()).item()

@pytest.fixture(scope="session")
def shared():
    torch.use_deterministic_algorithms(False)
    return draw()

@pytest.fixture
def own():
    return draw()
"""
DRAWING = """
import os, random, torch
from conftest import draw

def said(name, *values):
    flags = torch.are_deterministic_algorithms_enabled(), os.environ["NCCL_ALGO"]
    print("drew", name, *flags, *values, draw())

def test_first(shared, own):
    said("first", shared, own)
    torch.use_deterministic_algorithms(False)
    os.environ["NCCL_ALGO"] = "Tree"
    torch.manual_seed(5), random.seed(5)

def test_second(own, shared):
    said("second", own, shared)

def test_third():
    said("third")
"""
MARKED = """
import pytest, torch

pytestmark = pytest.mark.repro("seed-only", seed=4)

@pytest.fixture
def number():
    return torch.rand(()).item()

@pytest.mark.repro("seed-only", seed=3, **{"backends.cudnn.benchmark": True, "dropout": "zero"})
def test_of_its_own(number, repro):
    print("own", number, torch.backends.cudnn.benchmark, repro.resolved.values["dropout"])
    assert number == torch.rand((), generator=torch.Generator().manual_seed(3)).item()
    assert 0, "on purpose"

def test_of_its_module(number, repro):
    print("module", torch.initial_seed(), torch.backends.cudnn.benchmark, repro.digest)

@pytest.mark.repro("seed-onli")
def test_unknown(): pass

@pytest.mark.repro("seed-only", sead=3)
def test_unknown_key(): pass

@pytest.mark.repro("seed-only", "train-fast")
def test_two_profiles(): pass

@pytest.mark.repro("seed-only", overrides="seed=3")
def test_no_list(): pass

@pytest.mark.repro(seed=3)
def test_no_profile(): pass

@pytest.mark.repro(profile="debug-strict", guard="error")
def test_that_drifts():
    torch.use_deterministic_algorithms(False)
"""
UNMARKED = """
import torch

def test_after():
    print("after", torch.initial_seed() in (3, 4), torch.backends.cudnn.benchmark)

def test_fixture(repro): pass
"""


SEEDING = """
import random, pytest, torch

torch.manual_seed(0)
random.seed(1)
FIRST = torch.rand(()).item()

def draw():
    return torch.rand(()).item()

@pytest.fixture
def seeded():
    torch.manual_seed(0)

def test_of_its_module():
    print("drew module", draw())

def test_that_seeds():
    torch.manual_seed(0)
    print("drew test", draw() == FIRST)

def test_of_a_fixture(seeded):
    print("drew fixture", draw() == FIRST)
"""


@pytest.fixture
def run(pytester):
    """Return a function that runs pytest in another process, by default without pytest-randomly."""

    def run(*words, randomly=False):
        chosen = words if randomly else ("-p", "no:randomly", *words)
        return pytester.runpytest_subprocess("-rA", "--strict-markers", *chosen, timeout=TIMEOUT)

    return run


def _drawn(result):
    lines = (line.partition("drew ")[2].split() for line in result.outlines)
    return {words[0]: words[1:] for words in lines if words}


@pytest.mark.slow
def test_the_profile_is_applied_before_conftest_and_every_test_starts_from_its_seed(pytester, run):
    """Conftest files see the active profile; a test draws the same numbers alone and after others.

    The header names late settings and the plugin that imported torch. No flag or variable leaks
    from one test into the next, also in a worker of xdist, and pytest-randomly seeds no test.
    """
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_drawing=DRAWING, innocent="", culprit="import torch", later="")
    pytester.makefile(".yaml", team="defaults: [debug-strict, _self_]\nname: team\nseed: 11\n")
    pytester.makeini("[pytest]\nrepro = team.yaml\nrepro_set = dropout=zero\n")
    pytester.syspathinsert()
    shuffled = ("-p", "randomly", "--randomly-seed=7", "-n", "1", "-k", "second")

    together = run("-p", "innocent", "-p", "culprit", "-p", "later")
    alone = _drawn(run("--repro=debug-strict", "--repro-set=seed=11", *shuffled, randomly=True))

    together.assert_outcomes(passed=3)
    together.stdout.fnmatch_lines(
        [
            "torchrepro: team is active: repeatable, except the order of sets; * 1 too_late",
            "  lowered  the order of sets: PYTHONHASHSEED is late: *",
            "  imported too early: torch, by the pytest plugin culprit (*culprit.py)*",
            "  to set everything in time: torchrepro run *team.yaml dropout=zero -- pytest ...",
        ]
    )
    together.stdout.no_fnmatch_line("  sha256:*")
    together.stdout.fnmatch_lines(["conftest found (True, 11)"])
    drawn = _drawn(together)
    assert {tuple(seen[:2]) for seen in drawn.values()} == {("True", "Ring")}
    assert alone == {"second": drawn["second"]}
    shared, own, _ = drawn["first"][2:]
    assert drawn["second"][2:4] == [own, shared]
    assert shared != own, "a shared fixture has its own stream"


@pytest.mark.slow
def test_a_seed_at_the_import_of_a_test_module_has_no_effect_and_is_reported(pytester, run):
    """Each test starts from the profile's seed; a warning names the line and what to do.

    It fails no test under -W error. Seeds in a test or in its fixture take effect. There is no
    warning under a profile without a seed, nor without a profile.
    """
    pytester.makepyfile(test_seeding=SEEDING, test_plain="def test_of_nothing(): pass")
    named = [
        f"*test_seeding.py:{line}: PytestWarning: {call} does not affect the random numbers of "
        "tests: each test starts from the seed of seed-only. Seed in the test or in a fixture"
        for line, call in ((3, "torch.manual_seed(0)"), (4, "random.seed(1)"))
    ]

    own = torch.rand((), generator=torch.Generator().manual_seed(1234)).item()
    for words in ((), ("-n", "2"), ("-W", "error")):
        result = run("--repro=seed-only", *words)
        result.assert_outcomes(passed=4)
        assert _drawn(result) == {"module": [str(own)], "test": ["True"], "fixture": ["True"]}
        result.stdout.fnmatch_lines(named)
    for words in ((), ("--repro=seed-only", "--repro-set=seed=null")):
        assert "does not affect" not in run(*words).stdout.str()


def test_the_header_has_conflicts_and_all_reasons_of_a_lowered_guarantee(monkeypatch):
    """It is the same if quiet; the digest is shown only if verbose."""
    lowered = tuple(Lowered(f"knob.{i}", f"what {i} does", f"reason {i}") for i in range(5))
    rows = (KnobRow("env.OMP_DYNAMIC", Outcome.CONFLICT, "true", "false", "exported"),)

    def said(*lowered, verbosity=""):
        with monkeypatch.context() as patch:
            if verbosity:
                patch.setenv(f"TORCHREPRO_{verbosity}", "1")
            guarantee = Guarantee("repeatable", "none" if lowered else "repeatable", lowered)
            report = Report("team", guarantee, "sha256:0", rows)
            return "\n".join(header_lines(report, ("imported too early: torch",), "run"))

    assert all(reason.because in said(*lowered) for reason in lowered)
    for text in (said(*lowered), said(*lowered, verbosity="QUIET"), said()):
        assert "conflict" in text.partition("\n")[2]
        assert "imported too early: torch" in text
        assert "sha256:0" not in text
    assert "sha256:0" in said(verbosity="VERBOSE")
    assert said(verbosity="QUIET") == ""


@pytest.mark.slow
def test_a_marker_applies_its_profile_to_one_test_and_a_wrong_marker_is_an_error(pytester, run):
    """The profile of the nearest marker is active from before the fixtures to the test's end."""
    pytester.makepyfile(test_a_marked=MARKED, test_b_unmarked=UNMARKED)

    result = run("--import-mode=importlib")

    result.assert_outcomes(passed=3, failed=1, errors=7)
    result.stdout.fnmatch_lines(["own 0.* True zero", "module 4 False sha256:*"])
    result.stdout.fnmatch_lines(["after False False"])
    for message in (
        "torchrepro: unknown profile 'seed-onli'",
        "*did you mean: seed-only",
        "torchrepro: override sead=3: unknown key",
        "torchrepro: @pytest.mark.repro: seed-only, train-fast: the marker takes one profile",
        "torchrepro: @pytest.mark.repro: seed=3: `overrides` must be a list of texts",
        "seed-only (seeded) sha256:*",
        "to repeat: pytest test_a_marked.py::test_of_its_own",
        "no torchrepro profile is active in this test: name one with --repro=PROFILE*",
    ):
        result.stdout.fnmatch_lines([message])
    result.stdout.fnmatch_lines(
        ["*test_a_marked.py:*: backends.torch.deterministic_algorithms = none: the profile had *"]
    )
    for unwanted in ("*INTERNALERROR*", "*contextlib*"):
        result.stdout.no_fnmatch_line(unwanted)


@pytest.mark.slow
def test_a_refused_option_is_a_usage_error(pytester, run):
    """This covers an unknown profile, a wrong value, and values without a profile."""
    for words, message in (
        (["--repro=debug-strct"], "ERROR: torchrepro: unknown profile 'debug-strct'"),
        (["--repro=seed-only", "--repro-set=sead=1"], "ERROR: torchrepro: override sead=1: *"),
        (["--repro-set=seed=1"], "ERROR: --repro-set needs a profile: *"),
    ):
        result = run(*words)

        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([message])
        result.stderr.no_fnmatch_line("*Traceback*")


@pytest.mark.slow
def test_under_torchrepro_run_only_the_same_profile_is_accepted(pytester):
    """Then no setting is late and there is no warning; other values are an error."""
    pytester.makepyfile("def test(repro): print('late', repro.report.counts.get('too_late'))")
    pytester.makefile(".ini", pytest="[pytest]\naddopts = -p no:randomly --repro=seed-only\n")

    def under(*profile):
        words = (CONSOLE_SCRIPT, "run", *profile, "--", sys.executable, "-m", "pytest")
        return pytester.run(*words, "-W", "error", "-rA", timeout=TIMEOUT)

    same, different = under("seed-only"), under("seed-only", "seed=8")

    same.assert_outcomes(passed=1)
    same.stdout.fnmatch_lines(["late None"])
    same.stdout.no_fnmatch_line("*too late*")
    same.stdout.no_fnmatch_line("*too early*")
    assert different.ret == pytest.ExitCode.USAGE_ERROR
    different.stderr.fnmatch_lines(
        ["*run seed-only*--repro asks for*", "  seed: run 8, --repro 1234"]
    )


def test_without_a_profile_the_plugin_imports_nothing(pytester):
    """Every pytest run loads only the plugin's file: not torch, nor the rest of torchrepro."""
    code = (
        "import pytest, sys; before = set(sys.modules)\n"
        "import torchrepro.integrations.pytest_plugin\n"
        "print('loaded', *sorted(set(sys.modules) - before))"
    )

    result = pytester.run(sys.executable, "-c", code, timeout=TIMEOUT)

    plugin = "torchrepro.integrations torchrepro.integrations.pytest_plugin"
    loaded = f"torchrepro torchrepro.ground torchrepro.ground.fork_safety {plugin}"
    assert result.outlines == [f"loaded {loaded}"]
