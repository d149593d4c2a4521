"""Which apps request a profile: the others are left alone, and a typo is refused."""

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
    """An app, the words it is started with, and what it is to come to."""

    config: str
    expected: object
    files: dict[str, str] = {}  # noqa: RUF012 - never changed
    words: tuple[str, ...] = ()


OWN = [  # with what stands under `repro` in the config that the task gets
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
WISHES = [  # with the word that the refusal has to show
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
        Case(PLAIN, said, words=tuple(words.split()))
        for words, said in {
            # Hydra would end in its own traceback, or show a config without calling anybody.
            "+repro=null": "null is not a profile",
            "repro=null": "null is not a profile",
            "-m +repro=debug-strict,null": "null is not a profile",
            "+repro=[seed-only,train-fast]": "two profiles at once",
            "--cfg job +repro=debug-strickt": "did you mean: debug-strict",
            "--cfg=all +repro=debug-strickt": "did you mean: debug-strict",
            # A name that is like no other gets all that there are.
            "+repro=xyz": "legal: debug-strict, npu-align, seed-only, train-fast",
            "-m +repro=xyz,seed-only": "legal: debug-strict, npu-align, seed-only, train-fast",
            # A sweep whose callback was taken away stops before its first job.
            "-m +repro=debug-strict ~hydra.callbacks.torchrepro": "keep torchrepro's callback",
        }.items()
    ),
]
ASKED = [  # with the seed that the task starts from; the daily first one has all kinds of words
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
def became(request, tmp_path_factory):
    """What became of every case that is asked for, by its place in the lists above."""
    here = (item for item in request.session.items if item.path == request.path)
    cases = [item.callspec.params["case"] for item in here]
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
    found = json.loads(done.stdout.splitlines()[-1])
    return {id(case): answer for case, answer in zip(cases, found, strict=True)}


def _id(case):
    return " ".join((case.config.strip(), *case.words))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", OWN, ids=_id)
def test_what_is_the_apps_own_is_left_alone(became, case):
    """An app's own `repro` reaches the task as written, and no knob is moved.

    One line is said where it names a profile of ours, and nothing where it does not.
    """
    named = any(name in str(case.expected) for name in ("debug-strict", "seed-only"))

    ended = became[id(case)]

    assert ended["status"] == 0, ended["said"]
    assert ended["config"]["repro"] == case.expected
    assert (ended["deterministic"], ended["seed"]) == (False, 99)
    assert ended["said"].count("requests no profile") == len(ended["said"].splitlines()) == named


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", WISHES, ids=_id)
def test_what_was_meant_as_a_profile_is_refused(became, case):
    """A profile that cannot be in force stops with status 3, the near match and what to do."""
    ended = became[id(case)]

    assert (ended["status"], "config" in ended) == (3, False), ended["said"]
    assert case.expected in ended["said"]
    assert [
        each for each in ("Traceback", "%20", "Config search path") if each in ended["said"]
    ] == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", ASKED, ids=_id)
def test_what_was_requested_is_in_force(became, case):
    """A profile that was typed, chosen on the search path, or inherits one of ours is in force."""
    ended = became[id(case)]

    assert (ended["status"], ended["seed"]) == (0, case.expected), ended["said"]
