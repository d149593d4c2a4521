"""Wrong requests for a profile under Hydra: they are refused, and no task runs.

tests/packs has the refusals of profiles with wrong contents, under Hydra, too.
"""

from __future__ import annotations

import pytest

EVIL = "from pathlib import Path\nPath(__file__).with_name('marker').touch()\nEvil = touch = dict\n"
GLOBAL = "# @package _global_\nhydra: {callbacks: {evil: {_target_: evil.Evil}}}\n"
OVERRIDES = {  # what is typed for a value of a profile, words of the message
    "seed=-1": ("0 to 4294967295",),
    "backends.cudnn.benchmark=maybe": ("true or false",),
    "streams.x=-1": ("0 to 4294967295",),
    "sede=7": ("did you mean: seed",),
    "seed=${nope}": (),
    "description=${oc.env:SECRET}": (),
    "env.LD_PRELOAD=/x.so": ("dangerous",),
    "_target_=evil.touch": (),
    "env_extra._target_=evil.touch": (),
}
REFUSED = {  # what is typed, the status (1: Hydra's own), words of the message
    **{
        f"+repro=seed-only ++repro.{override}": (3, f"override ++repro.{override}", *words)
        for override, words in OVERRIDES.items()
    },
    "+repro=seed-only repro.seed=1,2": (1, "repro.seed=1,2"),
    "+repro=seed-only repro.seed=[": (1, "'['"),
    "+repro=seed-only,train-fast": (1, "seed-only,train-fast"),
    "+repro=seed-only +repro@o=train-fast": (3, "two profiles at once", "seed-only"),
    # A profile elsewhere than in `repro` would not be in force.
    "+repro@other=seed-only": (3, "seed-only"),
    "+repro@other=evil": (3, "evil"),
    "+repro@_global_=evil": (3, "evil"),
}


@pytest.fixture
def marker(write, tmp_path):
    """The file that exists once a module was imported that profiles name as a target."""
    write(EVIL, "evil.py")
    write(GLOBAL, "conf/repro/evil.yaml")
    return tmp_path / "marker"


def test_importing_the_evil_module_creates_the_marker(marker, fork_python):
    """The marker exists after an import of the module that the evil profiles name."""
    fork_python("-c", "import evil; evil.Evil()")

    assert marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("typed", REFUSED)
def test_hydra_refuses_a_bad_request(hydra_app, marker, typed):
    """`+repro=` ends with status 3 and the message, or Hydra with its own; no task runs."""
    status, *words = REFUSED[typed]
    ended = hydra_app(*typed.split())

    assert (ended.status, ended.out) == (status, ""), ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err
    assert "Traceback" not in ended.err
    assert "the secret" not in ended.err
    assert not marker.exists()


def test_a_refused_secret_is_not_shown(refusal):
    """The message of a refusal does not contain a value whose key sounds secret."""
    in_a_file = refusal("env_extra: {MY_API_KEY: hunter8}\n")
    in_an_override = refusal("seed: 1\n", "env_extra.MY_API_KEY=hunter8")

    for words in (in_a_file, in_an_override):
        assert "MY_API_KEY" in words
        assert "hunter8" not in words
