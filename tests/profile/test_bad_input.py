"""Every bad request, by `torchrepro show` and by `+repro=`: one readable message and no harm."""

from __future__ import annotations

import subprocess
import sys

import pytest

EVIL = """
from pathlib import Path
MARKER = Path(__file__).with_name("marker")
MARKER.write_text("imported")

class Evil:
    def __init__(self, *args, **kwargs):
        MARKER.write_text("made")

def touch(*args, **kwargs):
    MARKER.write_text("called")
"""
GLOBAL = "# @package _global_\nhydra: {callbacks: {evil: {_target_: evil.Evil}}}\n"
FILES = {  # what the file says, words of the message
    "an unknown key": ("sede: 7\n", ("bad.yaml:1", "sede = 7", "did you mean: seed")),
    "a knob in the wrong place": (
        "benchmark: true\n",
        ("bad.yaml:1", "benchmark = true", "did you mean: backends.cudnn.benchmark"),
    ),
    "a wrong type": ("seed: seven\n", ("bad.yaml:1", "seed = seven", "0 to 4294967295")),
    "a near miss": ("dropout: zeor\n", ("bad.yaml:1", "zeor", "legal: keep, zero", "mean: zero")),
    "out of range": ("seed: 4294967296\n", ("bad.yaml:1", "4294967296", "0 to 4294967295")),
    "a truth as a seed": ("seed: true\n", ("bad.yaml:1", "seed = true", "0 to 4294967295")),
    "a YAML syntax error": ("name: a\nseed: [1\n", ("bad.yaml:3", "YAML syntax error")),
    "an unresolved interpolation": ("seed: ${nope}\n", ("bad.yaml:1", "${nope}")),
    "an empty file": ("", ("bad.yaml", "empty")),
    "binary junk": (bytes(range(256)) * 4, ("bad.yaml", "not UTF-8")),
    "ten megabytes": (b"#" * 10_000_000, ("bad.yaml", "10,000,000 bytes", "262,144")),
    "a python object": ("seed: !!python/object:evil.Evil {}\n", ("bad.yaml:1", "tags")),
    "a python call": ("seed: !!python/object/apply:evil.touch []\n", ("bad.yaml:1", "tags")),
    "a target": ("env:\n  _target_: evil.touch\n", ("bad.yaml:2", "_target_")),
    "a target for everyone": (GLOBAL, ("bad.yaml:1", "# @package _global_")),
    "a target in Hydra's part": (GLOBAL.partition("\n")[2], ("bad.yaml:1", "_target_")),
    "a target in a base": ("defaults: [evil]\n", ("evil.yaml:1", "# @package _global_")),
    "a base of Hydra's": ("defaults: [/hydra/callbacks: evil]\n", ("bad.yaml:1", "names of")),
    "a secret": ("name: ${oc.env:SECRET}\n", ("bad.yaml:1", "${oc.env:SECRET}")),
    "a dangerous variable": ("env: {LD_PRELOAD: /x.so}\n", ("bad.yaml:1", "/x.so", "dangerous")),
    "a credential": ("env_extra: {AWS_SECRET_KEY: x}\n", ("bad.yaml:1", "dangerous")),
    "a contradiction": (
        "guarantee: repeatable\nbackends: {cudnn: {benchmark: true}}\n",
        ("bad.yaml:2", "backends.cudnn.benchmark = true", "timing"),
    ),
}
OVERRIDES = {  # what the override says, words of the message
    "out of range": ("seed=-1", ("0 to 4294967295",)),
    "a wrong type": ("backends.cudnn.benchmark=maybe", ("true or false",)),
    "an unknown key": ("sede=7", ("did you mean: seed",)),
    "an interpolation": ("seed=${nope}", ()),
    "a secret": ("description=${oc.env:SECRET}", ()),
    "a dangerous variable": ("env.LD_PRELOAD=/x.so", ("dangerous",)),
    "a target": ("_target_=evil.touch", ()),
    "a free target": ("env_extra._target_=evil.touch", ()),
}
HYDRAS_OWN = {  # requests that Hydra itself refuses before it asks for a profile
    "two values": (["+repro=seed-only", "repro.seed=1,2"], "repro.seed=1,2"),
    "a bracket left open": (["+repro=seed-only", "repro.seed=["], "'['"),
    "two values for the profile": (["+repro=seed-only,train-fast"], "seed-only,train-fast"),
}


def _was_refused(ended, status, words):
    assert status == ended.status, ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert "the secret" not in ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err


@pytest.fixture
def marker(write, monkeypatch, tmp_path):
    """The file that exists once a module ran that profiles name as a target."""
    write(EVIL, "evil.py")
    write(GLOBAL, "conf/repro/evil.yaml")
    (tmp_path / "conf/repro/folder.yaml").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SECRET", "the secret")
    return tmp_path / "marker"


def test_the_evil_module_would_leave_its_mark(marker):
    """The marker is left by whatever imports the module that the evil profiles name."""
    subprocess.run([sys.executable, "-c", "import evil"], cwd=marker.parent, check=True)

    assert marker.exists()


@pytest.mark.parametrize("case", FILES.values(), ids=FILES)
def test_show_refuses_a_bad_file(show, write, marker, case):
    """`show` ends with status 2 and one message naming file, line, value and what is legal."""
    content, words = case

    _was_refused(show(write(content, "conf/repro/bad.yaml")), 2, words)
    assert not marker.exists()


@pytest.mark.parametrize("case", OVERRIDES.values(), ids=OVERRIDES)
def test_show_refuses_a_bad_override(show, marker, case):
    """`show` ends with status 2 and one message naming the override and what is legal."""
    override, words = case

    _was_refused(show("seed-only", override), 2, (f"override {override}", *words))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["debug-strikt"], ("unknown profile 'debug-strikt'", "did you mean: debug-strict")),
        (["./nope.yaml"], ("./nope.yaml", "no such file")),
        (["../../etc/passwd"], ("etc/passwd",)),
        (["pkg://nope/strict"], ("no such package",)),
        (["seed-only", "train-fast"], ("train-fast", "one profile at a time", "defaults: [seed")),
        (["[seed-only,train-fast]"], ("[seed-only,train-fast]",)),
        (["seed-only", "seed=1,2"], ("override seed=1,2", "sweep")),
        (["seed-only", "seed=["], ("override seed=[", "not an override")),
        (["seed-only", "seed=7", "+seed=x"], ("override +seed=x", "0 to 4294967295")),
    ],
)
def test_show_refuses_a_bad_request(show, arguments, words):
    """`show` ends with status 2 and a readable message for whatever names no one profile."""
    _was_refused(show(*arguments), 2, words)


def test_show_refuses_a_directory(show, tmp_path):
    """`show` ends with status 2 for a directory and names it."""
    _was_refused(show(tmp_path), 2, (tmp_path.name, "is a directory"))


def test_the_command_itself_refuses_a_bad_file(write):
    """The console command ends with the status and the message that the function has."""
    path = write("sede: 7\n")
    program = "from torchrepro.cli import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", program, "show", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.yaml:1: sede = 7" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", FILES.values(), ids=FILES)
def test_hydra_refuses_a_bad_file(hydra_app, write, marker, case):
    """`+repro=` ends with status 3 and the same message, and the task does not run."""
    content, words = case
    write(content, "conf/repro/bad.yaml")

    _was_refused(hydra_app("+repro=bad"), 3, words)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("case", OVERRIDES.values(), ids=OVERRIDES)
def test_hydra_refuses_a_bad_override(hydra_app, marker, case):
    """`+repro=` with a bad override ends with status 3 and names the override; no task runs."""
    override, words = case

    ended = hydra_app("+repro=seed-only", f"++repro.{override}")

    _was_refused(ended, 3, (f"override ++repro.{override}", *words))
    assert not marker.exists()


@pytest.mark.slow
def test_hydra_refuses_a_mistyped_profile(hydra_app, marker):
    """A name that is nearly a profile's ends with status 3 and the near match; no task runs."""
    _was_refused(hydra_app("+repro=debug-strikt"), 3, ("did you mean: debug-strict",))
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing-like-it", "folder"])
def test_hydra_refuses_a_name_that_no_profile_has(hydra_app, marker, name):
    """A name that is like no profile's ends with status 3 and the profiles that there are."""
    words = (f"unknown profile '{name}'", "legal: ", "debug-strict", "seed-only")
    _was_refused(hydra_app(f"+repro={name}"), 3, words)
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("case", HYDRAS_OWN.values(), ids=HYDRAS_OWN)
def test_hydra_itself_refuses_what_names_no_profile(hydra_app, marker, case):
    """A request that Hydra cannot compose ends with Hydra's own status 1; no task runs."""
    arguments, word = case

    _was_refused(hydra_app(*arguments), 1, (word,))
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["+repro=[seed-only,train-fast]"],
        ["+repro=seed-only", "+repro@other=train-fast"],
    ],
    ids=" ".join,
)
def test_hydra_refuses_two_profiles_at_once(hydra_app, arguments):
    """Two choices of a profile end with status 3 rather than with a mixture of both."""
    _was_refused(hydra_app(*arguments), 3, ("two profiles at once", "seed-only"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"), [("seed-only", "other"), ("evil", "other"), ("evil", "_global_")]
)
def test_hydra_refuses_a_profile_in_another_place(hydra_app, marker, name, place):
    """A profile put elsewhere than in `repro` ends with status 3: it would not be in force."""
    _was_refused(hydra_app(f"+repro@{place}={name}"), 3, (name,))
    assert not marker.exists()


@pytest.mark.slow
def test_hydra_refuses_a_directory_by_its_path(hydra_app, marker, tmp_path):
    """`+repro=` with the path of a directory ends with status 3 and names it; no task runs."""
    path = tmp_path / "conf/repro/folder.yaml"

    _was_refused(hydra_app(f"+repro={path}"), 3, ("folder.yaml", "is a directory"))
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["+repro=seed-only"]], ids=["without", "with"])
def test_the_app_runs_when_nothing_is_wrong(hydra_app, arguments):
    """The app of these tests runs its task with a good profile and without one."""
    ended = hydra_app(*arguments)

    assert (ended.status, ended.out) == (0, "RAN\n")


def test_a_refused_secret_is_not_shown(refusal):
    """A value whose key sounds secret is left out of the message that refuses it."""
    in_a_file = refusal("env_extra: {MY_API_KEY: hunter8}\n")
    in_an_override = refusal("seed: 1\n", "env_extra.MY_API_KEY=hunter8")

    for words in (in_a_file, in_an_override):
        assert "MY_API_KEY" in words
        assert "hunter8" not in words
