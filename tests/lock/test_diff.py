"""Two profiles, manifests, locks or runs are compared by meaning, in what both hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrepro
from torchrepro import console
from torchrepro.lock.diff import compare, of_contents, of_profile, snapshot_of
from torchrepro.manifest.contents import as_text, manifest
from torchrepro.planner import plan
from torchrepro.process_state import NOT_HERE

KINDS = ("seed-only", "repro.lock", "out/.hydra/repro.json", "out", "recorded")
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**32 - 1),
        "dropout": st.sampled_from(["keep", "zero"]),
        "backends.cudnn.benchmark": st.sampled_from(["true", "false"]),
        "env.OMP_NUM_THREADS": st.integers(1, 8),
        "streams": st.just("{split: 3, augment: 4}"),
        "description": st.from_regex(r"about [a-z ]{1,9}", fullmatch=True),  # no word of YAML
    },
).map(lambda chosen: [f"{key}={value}" for key, value in chosen.items()])


def _both(overrides):
    """Return a profile and the manifest of a run of it, as it is read from a file."""
    resolved = torchrepro.load("seed-only", overrides).resolved
    text = as_text(manifest(resolved, plan(resolved).report))
    return of_profile("profile", resolved), of_contents("manifest", "manifest", json.loads(text))


@given(left=OVERRIDES, right=OVERRIDES)
def test_a_difference_is_the_same_from_both_sides(left, right):
    """diff(a, a) is empty for every profile and its manifest. diff(a, b) is diff(b, a) with the
    sides exchanged, and empty only for equal profiles.
    """
    profile, one = _both(left)
    again, same_one = _both(left)
    two = _both(right)[1]
    there, back = compare(one, two), compare(two, one)
    same = torchrepro.load("seed-only", left).digest == torchrepro.load("seed-only", right).digest

    assert [(d.key, d.left, d.right) for d in there.differences] == [
        (d.key, d.right, d.left) for d in back.differences
    ]
    assert there.same == same
    for a, b in ((profile, again), (one, same_one), (profile, one)):
        assert compare(a, b).differences == ()
    assert compare(one, one).gaps == ()


@pytest.fixture
def five(job, command, monkeypatch):
    """In the folder of a job, with a lock beside it."""
    monkeypatch.chdir(job)
    if not (job / "repro.lock").exists():
        command("lock", "debug-strict", "seed=7")
    return job


@pytest.mark.parametrize(
    ("left", "right"), [(a, b) for a in KINDS for b in KINDS if a == b or "seed-only" not in (a, b)]
)
def test_one_run_is_the_same_however_it_is_described(five, answer, left, right):
    """The lock, the manifest, the folder and the recording of one profile on one machine do not
    differ; each is the same as itself, and so is a profile.
    """
    status, found = answer("diff", left, right)

    assert (status, found["same"], found["differences"]) == (0, True, [])
    assert left != right or "not_compared" not in found


def test_what_only_one_side_holds_is_named_and_no_difference(five, answer):
    """A profile has only values: the rest of a manifest is named as not compared."""
    status, found = answer("diff", "debug-strict", "out")
    lacking = {row["what"] for row in found["not_compared"] if row["side"] == "debug-strict"}

    assert (status, [row["key"] for row in found["differences"]]) == (1, ["seed"])
    assert {"knobs", "versions", "hardware", "environment"} <= lacking


def test_a_difference_in_the_profile_is_shown_once(five, answer):
    """What follows from a value of the profile, such as its knobs, is not shown beside it."""
    _, found = answer("diff", "repro.lock", "seed-only")
    status, knobs = answer("diff", "recorded", "out")
    keys = [row["key"] for row in found["differences"]]

    assert len(keys) == len(set(keys))
    assert "seed.torch" not in keys
    assert (status, knobs["differences"]) == (0, [])


def test_versions_and_hardware_of_runs_differ_by_meaning(five, answer, edit, tmp_path):
    """Other software or hardware is named with its rank, a changed format of the file is not."""
    path = tmp_path / "other.json"
    text = (five / "out/.hydra/repro.json").read_text(encoding="utf-8")
    path.write_text(json.dumps(json.loads(text)), encoding="utf-8")

    assert answer("diff", "out", path)[1]["same"]
    edit(path, {"versions/torch": "2.5.0", "hardware/cpu": "a CPU", "command_line": ["x"]})
    status, found = answer("diff", "out", path)
    ranks = [(row["section"], row["key"], row["rank"]) for row in found["differences"]]

    assert status == 1
    assert ranks == [
        ("versions", "torch", "changes numbers"),
        ("hardware", "cpu", "changes numbers"),
    ]
    assert [row["key"] for row in found["told"]] == ["command line"]
    assert {row["key"] for row in answer("diff", "recorded", path)[1]["differences"]} == {
        "torch",
        "cpu",
    }


def test_a_folder_with_one_manifest_is_read_and_one_with_several_is_refused(
    five, command, tmp_path
):
    """A folder stands for the only manifest in it; of several, all are named and none is taken."""
    text = (five / "out/.hydra/repro.json").read_text(encoding="utf-8")
    (tmp_path / "repro.json").write_text(text, encoding="utf-8")

    assert command("diff", tmp_path, "out")[0] == 0
    (tmp_path / "y").mkdir()
    (tmp_path / "y/repro.json").write_text(text, encoding="utf-8")
    status, out, err = command("diff", tmp_path, "out")
    assert (status, out) == (2, "")
    assert "several manifests" in err
    assert str(tmp_path / "repro.json") in err
    assert str(tmp_path / "y/repro.json") in err


@pytest.mark.parametrize("name", ["nothing-like-it", "no/such/folder", "empty", "notes.json"])
def test_what_is_none_of_the_four_is_refused_readably(command, tmp_path, monkeypatch, name):
    """A name that is no profile, no manifest, no lock and no run ends with 2 and a reason."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.json").write_text('{"a": 1}', encoding="utf-8")
    status, out, err = command("diff", name, "seed-only")

    assert (status, out) == (2, "")
    assert name in err
    assert "Traceback" not in err


def test_a_profile_is_not_taken_for_a_folder_of_its_name(tmp_path, monkeypatch):
    """A folder called like a profile is read as a folder only with its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed-only").mkdir()

    assert snapshot_of("seed-only").kind == "profile"


@pytest.mark.parametrize("absent", ["", NOT_HERE])
def test_a_knob_is_named_unless_the_side_that_could_not_set_it_lacks_its_hardware(absent):
    """A knob that torch does not have there stays in the table; one without hardware is counted."""
    name = "backends.cudnn.benchmark"
    set_here = {"knob": name, "outcome": "applied", "after": False, "absent": ""}
    not_set = {"knob": name, "outcome": "unsupported", "after": None, "absent": absent}
    sides = [
        of_contents(side, "lock", {"report": {"guarantee": {"held": "seeded"}, "knobs": [row]}})
        for side, row in (("locked", set_here), ("here", not_set))
    ]

    for left, right in (sides, sides[::-1]):
        found = compare(left, right)
        text = console.as_text(*console.parts(found))
        assert [each.key for each in found.differences] == [name]
        assert found.gaps == ()
        assert (name in text) == (not absent)
        assert ("1 setting for CUDA: not on both sides" in text) == bool(absent)
