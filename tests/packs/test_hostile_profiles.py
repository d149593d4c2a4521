"""A pack is data from others: whatever it holds, it is refused in words, quickly, without harm."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

import torchrepro

from .conftest import Link, install
from .hostile_profiles import HOSTILE, LEAVES_A_MARK

DOORS = ("load", "show", "hydra")
SECRETS = ("the-secret-of-a-variable", "the-secret-of-a-file")
OURS = Path(torchrepro.__file__).parent
PYTHONS = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, *site.getsitepackages())]
PYTHONS += [
    Path(sysconfig.get_path("stdlib")).resolve(),
    OURS.resolve(),
    OURS.parent.parent.resolve(),
]
SECONDS = 1.0
MEGABYTES = 100
GOOD = "defaults: [base]\nseed: 3\n"


def _at(folder, content):
    """Let a link lead to what lies in `folder`."""
    return (
        replace(content, to=content.to.format(folder=folder))
        if isinstance(content, Link)
        else content
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Ask for every hostile profile, and a good one, by all doors of one process.

    Returns, by case and door, what was answered, and the folder of each case.
    """
    root = tmp_path_factory.mktemp("hostile")
    folder = root / "at_hand"
    (folder / "secrets_here").mkdir(parents=True)
    (folder / "secrets_here" / "creds.yaml").write_text(
        f"password: {SECRETS[1]}\n", encoding="utf-8"
    )
    requests = []
    for number, (case, hostile) in enumerate(HOSTILE.items()):
        files = {path: _at(folder, content) for path, content in hostile.files.items()}
        install(
            root / str(number),
            "acme-pack",
            {"__init__.py": LEAVES_A_MARK, "/evil_code.py": LEAVES_A_MARK, **files},
            entry_points=hostile.entry_points,
            metadata=hostile.metadata,
        )
        requests.append({"case": case, "site": str(root / str(number)), "named": hostile.named})
    install(root / "good", "acme-pack", {"good.yaml": GOOD, "base.yaml": "dropout: zero\n"})
    good = {"case": "good", "site": str(root / "good"), "named": "team/good"}
    requests = [{**each, "folder": str(folder)} for each in (good, *requests)]
    (root / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            Path(__file__).with_name("three_doors.py"),
            "requests.json",
            root / "answers",
        ],
        cwd=root,
        env={**os.environ, "SECRET": SECRETS[0], "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = (root / "answers").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(requests), done.stderr
    sites = {request["case"]: Path(request["site"]) for request in requests}
    return {case: (answer, sites[case]) for case, answer in map(json.loads, lines)}


def _may_be_opened(path, site):
    at = Path(path)
    if not at.is_absolute() or path.startswith(("/dev/null", "/proc/self")):
        return True  # of the folder at hand: see the test
    whole = at.resolve()
    return whole.is_relative_to(site) or any(whole.is_relative_to(python) for python in PYTHONS)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_profile_is_refused_by_every_door(asked, case):
    """Each is refused with its status and a message that says why; no door falls over."""
    answers, _ = asked[case]
    statuses = {"load": 2, "show": 2, "hydra": 3}

    assert statuses == {door: answers[door]["status"] for door in DOORS}, answers
    for door in DOORS:
        said = answers[door]["err"]
        assert answers[door]["out"] == ""
        assert "Traceback" not in said
        assert [word for word in HOSTILE[case].words if word not in said] == [], said
        assert len(said) < 6000
        assert all(letter.isprintable() or letter == "\n" for letter in said)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_profile_does_nothing(asked, case):
    """None runs code, is told a secret, opens what is not its own, starts or reaches anything."""
    answers, site = asked[case]

    assert list(site.rglob("marker")) == []
    for door in DOORS:
        answer = answers[door]
        assert answer["environment"]
        assert answer["acts"] == []
        assert [m for m in answer["imported"] if m.startswith(("acme_pack", "evil_code"))] == []
        assert [secret for secret in SECRETS if secret in answer["err"]] == []
        assert [path for path in answer["opened"] if not _may_be_opened(path, site)] == []
        assert [path for path in answer["opened"] if "secrets_here" in path] == []


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_profile_is_refused_at_once(asked, case):
    """Each refusal takes less than a second and a hundred megabytes."""
    answers, _ = asked[case]

    for door in DOORS:
        assert answers[door]["seconds"] < SECONDS, door
        assert answers[door]["memory"] < MEGABYTES * 1024, door


def test_the_doors_are_open_to_a_good_profile(asked):
    """The very same doors load, show and run a profile of a pack that is in order."""
    answers, _ = asked["good"]

    assert {answers[door]["status"] for door in DOORS} == {0}, answers
    assert "'seed': 3" in answers["load"]["out"]
    assert "seed: 3" in answers["show"]["out"]
    assert answers["hydra"]["out"] == "RAN\n"
