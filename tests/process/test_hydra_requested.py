"""Apps that request a profile get it, typos are refused, and all other apps stay unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from .conftest import DEPRECATED

MANY_APPS = Path(__file__).with_name("many_apps.py")
PLAIN = "size: 3\n"
AUTHOR = {"repro/paper1.yaml": "author: me\nseed: 3\n", "repro/paper2.yaml": "author: you\n"}
SEEDED = {"repro/mine.yaml": "seed: 9\n"}
CHOSEN = "defaults: [{{repro: {}}}, _self_]\n"


class Case(NamedTuple):
    """The config and files of an app, its command line, and the expected result."""

    config: str
    expected: object
    files: dict[str, str] = {}  # noqa: RUF012 - never changed
    words: tuple[str, ...] = ()


NOT_REQUESTED = [  # with the expected value of `repro` in the config of the task
    Case("repro: true\n", True),
    Case("repro: true\n", False, words=("repro=false",)),
    Case("repro: 1\n", 1),
    Case("repro: paper1\n", "paper1"),
    Case("repro: [a, b]\n", ["a", "b"]),
    Case("repro: ${oc.env:NOWHERE}\n", "${oc.env:NOWHERE}"),
    Case("repro: {author: me}\n", {"author": "me"}),
    Case("repro: {author: me}\n", {"author": "you"}, words=("repro.author=you",)),
    Case("repro: {name: paper1, seed: 3}\n", {"name": "paper1", "seed": 3}),
    Case("repro: {device: cuda, seeds: [1, 2]}\n", {"device": "cuda", "seeds": [1, 2]}),
    Case(CHOSEN.format("paper1"), {"author": "me", "seed": 3}, AUTHOR),
    Case(CHOSEN.format("paper1"), {"author": "you"}, AUTHOR, ("repro=paper2",)),
    Case(CHOSEN.format("mine"), {"seed": 9}, SEEDED),
    Case("repro: [debug-strict]\n", ["debug-strict"]),
    Case("repro: {profile: none}\n", {"profile": "seed-only"}, words=("repro.profile=seed-only",)),
    Case("repro: {sead: 3}\n", {"sead": 3}),
    Case("repro: {seed: 3, guarantee: repeatable}\n", {"seed": 3, "guarantee": "repeatable"}),
    Case(
        CHOSEN.format("acme"),
        {"seed": 5, "dropout": "zero"},
        {"repro/acme.yaml": "seed: 5\ndropout: zero\n"},
    ),
    Case(
        CHOSEN.format("lr"),
        {"author": "me", "seed": 3, "home": "${size}"},
        {**AUTHOR, "repro/lr.yaml": "defaults: [paper1, _self_]\nhome: ${size}\n"},
    ),
    Case(
        CHOSEN.format("_own"),
        {"lr": 1},
        {
            "repro/_own.yaml": "# @package repro\ndefaults: [/opt@_here_: sgd]\n",
            "opt/sgd.yaml": "lr: 1\n",
        },
    ),
]
REFUSED = [  # with words of the expected message
    Case("repro: debug-strict\n", "- repro: debug-strict"),
    Case("repro: debug-strct\n", "did you mean: debug-strict"),
    Case("p: debug-strict\nrepro: ${p}\n", "- repro: debug-strict"),
    Case(CHOSEN.format("debug-strct"), "did you mean: debug-strict"),
    Case("defaults: [{optional repro: debug-strct}, _self_]\n", "did you mean: debug-strict"),
    Case(
        CHOSEN.format("acme"),
        "acme.yaml:1",
        {"repro/acme.yaml": "defaults: [debug-strct, _self_]\nseed: 5\n"},
    ),
    Case(
        CHOSEN.format("acme"),
        "did you mean: seed",
        {"repro/acme.yaml": "defaults: [seed-only, _self_]\nsead: 1\n"},
    ),
    Case(
        CHOSEN.format("debug-strict"),
        "two profiles",
        {"repro/debug-strict.yaml": "author: me\n"},
    ),
    Case(PLAIN, "did you mean: seed", words=("+repro={sead: 7}",)),
    Case(PLAIN, "author", words=("+repro={author: me}",)),
    Case(PLAIN, "did you mean: debug-strict", words=("+repro=debug-strct",)),
    Case(PLAIN, "in the app's defaults list", AUTHOR, ("+repro=paper1",)),
    Case(PLAIN, "acme.yaml", {"repro/acme.yaml": "guarantee: {\n"}, ("+repro=acme",)),
    Case("repro: {author: me}\n", "torchrepro run debug-strict", words=("+repro=debug-strict",)),
    Case(
        PLAIN, "broken.yaml:3", {"repro/broken.yaml": "seed: 9\n\ndropout: x\n"}, ("+repro=broken",)
    ),
    *(
        Case(PLAIN, message, words=tuple(words.split()))
        for words, message in {
            # Without us Hydra would print a traceback, or show a config without calling callbacks.
            "+repro=null": "null is not a profile",
            "repro=null": "null is not a profile",
            "-m +repro=debug-strict,null": "null is not a profile",
            "+repro=[seed-only,train-fast]": "two profiles at once",
            "--cfg job +repro=debug-strickt": "did you mean: debug-strict",
            "--cfg=all +repro=debug-strickt": "did you mean: debug-strict",
            # If no name is close, the message lists all names.
            "+repro=xyz": "legal: debug-strict, npu-align, seed-only, train-fast",
            "-m +repro=xyz,seed-only": "legal: debug-strict, npu-align, seed-only, train-fast",
            # A sweep without our callback stops before its first job.
            "-m +repro=debug-strict ~hydra.callbacks.torchrepro": "keep torchrepro's callback",
        }.items()
    ),
]
APPLIED = [  # with the expected seed; the first, which runs daily, has all kinds of words
    Case(CHOSEN.format("seed-only") + "repro: {seed: 4}\n", 4, words=("repro=train-fast",)),
    Case(PLAIN, 7, words=("+repro={seed: 7}",)),
    Case(PLAIN, 7, words=("+repro.seed=7",)),
    Case(PLAIN, 9, SEEDED, ("+repro=mine",)),
    Case("repro: true\n", 1234, words=("+repro=seed-only",)),
    Case(CHOSEN.format("seed-only") + "repro: {seed: 4}\n", 4),
    Case(CHOSEN.format("seed-only") + "repro: {seed: 4}\n", 5, words=("repro.seed=5",)),
    Case(CHOSEN.format("acme"), 5, {"repro/acme.yaml": "defaults: [seed-only, _self_]\nseed: 5\n"}),
    Case(
        CHOSEN.format("deep"),
        6,
        {
            "repro/deep.yaml": "defaults: [acme, _self_]\nseed: 6\n",
            "repro/acme.yaml": "defaults: [seed-only, _self_]\nseed: 5\n",
        },
    ),
]


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """Run the app of every selected case in one process; returns the answers by id of the case."""
    tests = (test for test in request.session.items if test.path == request.path)
    cases = [test.callspec.params["case"] for test in tests]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHREPRO")}
    done = subprocess.run(
        [sys.executable, MANY_APPS],
        input=json.dumps([(case.config, case.files, case.words) for case in cases]),
        cwd=tmp_path_factory.mktemp("apps"),
        env={**kept, **DEPRECATED},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    in_order = json.loads(done.stdout.splitlines()[-1])
    return {id(case): answer for case, answer in zip(cases, in_order, strict=True)}


def _id(case):
    return " ".join((case.config.strip(), *case.words))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", NOT_REQUESTED, ids=_id)
def test_an_apps_own_repro_is_left_alone(answers, case):
    """It reaches the task as written, and no knob is set.

    A line is printed only if the value names one of our profiles.
    """
    named = any(name in str(case.expected) for name in ("debug-strict", "seed-only"))

    ended = answers[id(case)]

    assert ended["status"] == 0, ended["said"]
    assert ended["config"]["repro"] == case.expected
    assert (ended["deterministic"], ended["seed"]) == (False, 99)
    assert ended["said"].count("requests no profile") == len(ended["said"].splitlines()) == named


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", REFUSED, ids=_id)
def test_a_wrong_request_is_refused(answers, case):
    """The app stops with status 3, a near match and what to do, before its task."""
    ended = answers[id(case)]

    assert (ended["status"], "config" in ended) == (3, False), ended["said"]
    assert case.expected in ended["said"]
    unwanted = ("Traceback", "%20", "Config search path")
    assert [text for text in unwanted if text in ended["said"]] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", APPLIED, ids=_id)
def test_a_requested_profile_is_applied(answers, case):
    """Requests are words of the command line, choices of our names, and files that inherit ours."""
    ended = answers[id(case)]

    assert (ended["status"], ended["seed"]) == (0, case.expected), ended["said"]
