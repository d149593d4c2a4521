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
FILES = {  # what the file says, words of the message; what a pack may say is in tests/packs
    "an unknown key": ("sede: 7\n", ("bad.yaml:1", "sede = 7", "did you mean: seed")),
    "a knob in the wrong place": (
        "benchmark: true\n",
        ("bad.yaml:1", "benchmark = true", "did you mean: backends.cudnn.benchmark"),
    ),
    "a near miss": ("dropout: zeor\n", ("bad.yaml:1", "zeor", "legal: keep, zero", "mean: zero")),
    "a YAML syntax error": ("name: a\nseed: [1\n", ("bad.yaml:3", "YAML syntax error")),
    "an empty file": ("", ("bad.yaml", "empty")),
    "a target in a base": ("defaults: [evil]\n", ("evil.yaml:1", "# @package _global_")),
    "a contradiction": (
        "guarantee: repeatable\nbackends: {cudnn: {benchmark: true}}\n",
        ("bad.yaml:2", "backends.cudnn.benchmark = true", "timing"),
    ),
}
OVERRIDES = {  # what the override says, words of the message
    "seed=-1": ("0 to 4294967295",),
    "backends.cudnn.benchmark=maybe": ("true or false",),
    "sede=7": ("did you mean: seed",),
    "seed=${nope}": (),
    "description=${oc.env:SECRET}": (),
    "env.LD_PRELOAD=/x.so": ("dangerous",),
    "_target_=evil.touch": (),
    "env_extra._target_=evil.touch": (),
}
HYDRAS_OWN = {  # requests that Hydra itself refuses before it asks for a profile
    "+repro=seed-only repro.seed=1,2": "repro.seed=1,2",
    "+repro=seed-only repro.seed=[": "'['",
    "+repro=seed-only,train-fast": "seed-only,train-fast",
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


REQUESTS = {  # words of the command line, words of the message
    **{f"seed-only {o}": (f"override {o}", *words) for o, words in OVERRIDES.items()},
    "debug-strikt": ("unknown profile 'debug-strikt'", "did you mean: debug-strict"),
    "./nope.yaml": ("./nope.yaml", "no such file"),
    "../../etc/passwd": ("etc/passwd",),
    "pkg://nope/strict": ("no such package",),
    "seed-only train-fast": ("train-fast", "one profile at a time", "defaults: [seed"),
    "[seed-only,train-fast]": ("[seed-only,train-fast]",),
    "seed-only seed=1,2": ("override seed=1,2", "sweep"),
    "seed-only seed=[": ("override seed=[", "not an override"),
    "seed-only seed=7 +seed=x": ("override +seed=x", "0 to 4294967295"),
}


def _shows():
    """Return requests to `show`: what the file says or None, the words, words of the message."""
    yield from ((content, ["conf/repro/bad.yaml"], words) for content, words in FILES.values())
    yield from ((None, words.split(), said) for words, said in REQUESTS.items())


@pytest.mark.parametrize(
    "case", [*_shows()], ids=lambda case: f"{case[0]!r} {' '.join(case[1])}"[:60]
)
def test_show_refuses_a_bad_request(show, write, marker, monkeypatch, case):
    """`show` ends with status 2 and one readable message: where, the value, and what is legal."""
    content, arguments, words = case
    monkeypatch.chdir(marker.parent)
    if content is not None:
        write(content, "conf/repro/bad.yaml")

    _was_refused(show(*arguments), 2, words)
    assert not marker.exists()


def _hydras():
    """Return requests to Hydra: the words, the status, words of the message."""
    yield from ((["+repro=bad"], content, 3, words) for content, words in FILES.values())
    for override, words in OVERRIDES.items():
        given = f"++repro.{override}"
        yield ["+repro=seed-only", given], None, 3, (f"override {given}", *words)
    for words, its in HYDRAS_OWN.items():
        yield words.split(), None, 1, (its,)
    yield ["+repro=debug-strikt"], None, 3, ("did you mean: debug-strict",)
    for name in ("nothing-like-it", "folder"):  # what there is instead
        yield [f"+repro={name}"], None, 3, (f"unknown profile '{name}'", "legal: ", "seed-only")
    for words in (["+repro=[seed-only,train-fast]"], ["+repro=seed-only", "+repro@o=train-fast"]):
        yield words, None, 3, ("two profiles at once", "seed-only")
    # A profile elsewhere than in `repro` would not be in force.
    for name, place in (("seed-only", "other"), ("evil", "other"), ("evil", "_global_")):
        yield [f"+repro@{place}={name}"], None, 3, (name,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", _hydras(), ids=lambda case: f"{' '.join(case[0])} {case[1]!r}"[:60]
)
def test_hydra_refuses_a_bad_request(hydra_app, write, marker, case):
    """`+repro=` ends with status 3 and the same message, or Hydra with its own; no task runs."""
    arguments, content, status, words = case
    write("seed: 1\n" if content is None else content, "conf/repro/bad.yaml")

    _was_refused(hydra_app(*arguments), status, words)
    assert not marker.exists()


@pytest.mark.slow
def test_hydra_refuses_a_directory_by_its_path(hydra_app, marker, tmp_path):
    """`+repro=` with the path of a directory ends with status 3 and names it; no task runs."""
    path = tmp_path / "conf/repro/folder.yaml"

    _was_refused(hydra_app(f"+repro={path}"), 3, ("folder.yaml", "is a directory"))
    assert not marker.exists()


def test_a_refused_secret_is_not_shown(refusal):
    """A value whose key sounds secret is left out of the message that refuses it."""
    in_a_file = refusal("env_extra: {MY_API_KEY: hunter8}\n")
    in_an_override = refusal("seed: 1\n", "env_extra.MY_API_KEY=hunter8")

    for words in (in_a_file, in_an_override):
        assert "MY_API_KEY" in words
        assert "hunter8" not in words
