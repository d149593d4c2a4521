"""Two profiles, manifests, locks or runs are compared by meaning, in what both hold."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchrepro
from torchrepro.application.planner import plan
from torchrepro.ground import console
from torchrepro.ground.errors import shown
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import MissingState
from torchrepro.lock.diff import Impact, compare, effective, of_contents, of_profile, snapshot_of
from torchrepro.manifest.contents import as_text, manifest
from torchrepro.manifest.environment import software
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import DEFAULTS
from torchrepro.reporting.process_state import HARDWARE, NOT_HERE, absent_hardware
from torchrepro.trace import store

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
    """Return a profile and the manifest of a run of it, as read from a file."""
    resolved = torchrepro.load("seed-only", overrides).resolved
    text = as_text(manifest(resolved, plan(resolved).report))
    return of_profile("profile", resolved), of_contents("manifest", "manifest", json.loads(text))


@pytest.mark.slow
@given(left=OVERRIDES, right=OVERRIDES)
def test_diff_is_symmetric(left, right):
    """diff(a, a) is empty for every profile and its manifest. diff(a, b) is diff(b, a) with the
    sides exchanged, and empty only for equal profiles. What follows from a value of the profile,
    such as its knobs, is not shown beside it.
    """
    profile, one = _both(left)
    again, same_one = _both(left)
    two = _both(right)[1]
    there, back = compare(one, two), compare(two, one)
    same = torchrepro.load("seed-only", left).digest == torchrepro.load("seed-only", right).digest
    keys = [difference.key for difference in there.differences]

    assert [(d.key, d.left, d.right) for d in there.differences] == [
        (d.key, d.right, d.left) for d in back.differences
    ]
    assert there.same == same
    assert len(keys) == len(set(keys))
    assert "seed.torch" not in keys
    for a, b in ((profile, again), (one, same_one), (profile, one)):
        assert compare(a, b).differences == ()
    assert compare(one, one).gaps == ()


@pytest.fixture
def five(job, command, monkeypatch):
    """Change to the folder of a job, with a lock next to it."""
    monkeypatch.chdir(job)
    if not (job / "repro.lock").exists():
        command("lock", "debug-strict", "seed=7")
    return job


@pytest.mark.parametrize(
    ("left", "right"), [(a, b) for a in KINDS for b in KINDS if a == b or "seed-only" not in (a, b)]
)
def test_lock_manifest_folder_and_recording_of_one_run_are_equal(five, answer, left, right):
    """The lock, the manifest, the folder and the recording of one profile on one machine do not
    differ; each is the same as itself, and so is a profile.
    """
    status, found = answer("diff", left, right)

    assert (status, found["same"], found["differences"]) == (0, True, [])
    assert left != right or "not_compared" not in found


def test_a_section_that_one_snapshot_lacks_is_reported_as_not_compared(five, answer):
    """A profile has only values: the rest of a manifest is named as not compared."""
    status, found = answer("diff", "debug-strict", "out")
    lacking = {row["what"] for row in found["not_compared"] if row["side"] == "debug-strict"}

    assert (status, [row["key"] for row in found["differences"]]) == (1, ["seed"])
    assert {"knobs", "versions", "hardware", "environment"} <= lacking


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
    """A folder means its only manifest; if it has several, all are named and it is refused."""
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
def test_an_unknown_name_is_refused_with_the_reason(command, tmp_path, monkeypatch, name):
    """A name of no profile, manifest, lock or run ends with status 2 and a reason."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.json").write_text('{"a": 1}', encoding="utf-8")
    status, out, err = command("diff", name, "seed-only")

    assert (status, out) == (2, "")
    assert name in err
    assert "Traceback" not in err


def test_a_profile_takes_precedence_over_a_folder_of_its_name(tmp_path, monkeypatch):
    """A folder called like a profile is read as a folder only with its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed-only").mkdir()

    assert snapshot_of("seed-only").kind == "profile"


@pytest.mark.parametrize("absent", ["", NOT_HERE])
def test_an_unset_knob_is_listed_unless_its_hardware_is_absent(absent):
    """A knob that torch lacks stays in the table; knobs without hardware are only counted."""
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


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Record a run of several ranks; for each rank what its ``versions`` change."""

    def ranks(name, *changes, size=None):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("WORLD_SIZE", str(size or len(changes)))
        for rank, versions in enumerate(changes):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setattr(store, "software", {**software(), **versions}.copy)
            with torchrepro.record(tmp_path / name / "new"):
                torch.ones(1)
            (file,) = (tmp_path / name / "new").iterdir()
            file.rename(tmp_path / name / file.name)
            file.parent.rmdir()
        return tmp_path / name

    return ranks


def test_another_version_on_one_rank_names_the_rank(ranks, job, command, answer):
    """What differs on some ranks names them, what differs on all of them is shown once.

    A manifest is compared with every rank of a recording.
    """
    usual = ranks("usual", {}, {}, {})
    other = ranks(
        "other", {"torch": "2.5.0"}, {"torch": "2.5.0", "numpy": "1.0"}, {"torch": "2.5.0"}
    )
    status, found = answer("diff", usual, other)
    rows = [(row["key"], row["right"], row.get("ranks")) for row in found["differences"]]
    of_manifest = answer("diff", job / "out", other)[1]["differences"]

    assert [(row["key"], row["right"], row.get("ranks")) for row in of_manifest] == rows
    assert answer("diff", usual, usual) == (0, {"same": True, "differences": []})
    assert (status, rows) == (1, [("torch", "2.5.0", None), ("numpy", "1.0", ["rank 1"])])
    assert "rank 1: version of numpy" in command("diff", usual, other)[1]


def test_ranks_that_only_one_run_has_are_reported(ranks, command, answer):
    """Another number of ranks is a difference; a rank without a recording is not compared."""
    two, three = ranks("two", {}, {}), ranks("three", {}, {}, {})
    part = ranks("part", {}, size=2)
    status, found = answer("diff", two, three)

    assert (status, [row["key"] for row in found["differences"]]) == (1, ["world size"])
    assert {"side": str(two), "what": "rank 2"} in found["not_compared"]
    assert answer("diff", part, two) == (
        0,
        {"same": True, "differences": [], "not_compared": [{"side": str(part), "what": "rank 1"}]},
    )
    (part / "rank0.sqlite").rename(part / "rank7.sqlite")
    refused = command("diff", part, two)
    assert (refused[0], refused[1]) == (2, "")
    assert "have no rank in common" in refused[2]


ALGORITHMS = "backends.torch.deterministic_algorithms"
LATCHES = ("cuda", "communicator", "npu", "torch_npu", "transformer_engine")
"""The doors of variables that only an accelerator's libraries read."""


def _difference(*overrides):
    """Return the differences that these overrides make to a profile, by key."""
    base = {"seed": 1, "backends": {"torch": {"deterministic_algorithms": "error"}}}
    sides = [resolve(base, chosen) for chosen in (overrides, ())]
    found = effective(compare(*(of_profile(str(n), side) for n, side in enumerate(sides))))
    return {each.key: each for each in found.differences}


def _settings():
    """Yield each knob with its own profile key, and its current value in this process."""
    for knob in CATALOGUE:
        if knob.profile_key != knob.name or knob.changes_with_use or knob.variable:
            continue
        with suppress(MissingState):
            now = knob.access.read()
            legal = isinstance(now, bool | int | str) and not knob.legal.complaint(now)
            if legal and knob.name != ALGORITHMS:
                yield knob.name, (knob, now)


def test_an_explicit_default_makes_no_difference():
    """A profile that sets a default value does not differ; another value does."""
    settings = dict(_settings())
    spelt_out = [f"{name}={shown(now)}" for name, (_, now) in settings.items()]
    flipped = {name: not now for name, (_, now) in settings.items() if isinstance(now, bool)}
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items()]
    others = ("dropout=zero", "device.rng=host", "guard=warn", "on_late=error")

    assert len(settings) > 15
    assert not _difference(*spelt_out, *defaults)
    assert _difference(*(f"{n}={shown(v)}" for n, v in flipped.items())).keys() == flipped.keys()
    assert _difference(*others).keys() == {each.partition("=")[0] for each in others}


def test_a_setting_for_absent_hardware_is_rated_as_read_by_nothing():
    """A setting of a backend has no impact on this machine only if its hardware is absent."""
    flags = {name: its for name, its in _settings() if isinstance(its[1], bool)}
    found = _difference(*(f"{name}={shown(not now)}" for name, (_, now) in flags.items()))

    assert {"CUDA", ""} <= {knob.hardware for knob, _ in flags.values()}
    for name, (knob, _) in flags.items():
        is_absent = knob.hardware in absent_hardware()
        assert (found[name].impact is Impact.NOTHING_HERE) == is_absent, name


def test_each_knob_of_an_accelerator_names_its_hardware():
    """A knob that only an accelerator's libraries read names its hardware; every name is used."""
    for knob in CATALOGUE:
        is_section = {"cuda", "cudnn", "npu"} & {*knob.name.split(".")}
        if (knob.variable and knob.door in LATCHES) or is_section:
            assert knob.hardware, knob.name
    assert {knob.hardware for knob in CATALOGUE} == {"", *HARDWARE}


def test_the_impact_follows_from_the_purpose_of_a_setting():
    """A seed changes results, a kernel may, a guarantee does not."""
    found = _difference(
        "seed=7", "backends.torch.deterministic_algorithms=warn", "on_late=error", "dropout=zero"
    )

    assert {key: each.impact for key, each in found.items()} == {
        "seed": Impact.CHANGES,
        "dropout": Impact.CHANGES,
        "backends.torch.deterministic_algorithms": Impact.MAY,
        "on_late": Impact.SHOULD_NOT,
    }


def test_an_impact_shared_by_all_rows_is_one_line_instead_of_a_column(command, answer, tmp_path):
    """`how likely` is a column if its rows differ, and otherwise one line."""
    paths = []
    for name, more in (("one", "seed: 1\n"), ("two", "seed: 2\ndropout: zero\n")):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(more, encoding="utf-8")
    _, found = answer("diff", *paths)
    lines = command("diff", *paths)[1].splitlines()
    _, varied = answer("diff", "debug-strict", "seed-only")

    assert [row["rank"] for row in found["differences"]] == ["changes numbers"] * 2
    assert lines[0].split()[:2] == ["what", "differs"]
    assert lines[-1] == "each of these: changes numbers"
    assert len({row["rank"] for row in varied["differences"]}) > 1
    assert command("diff", "debug-strict", "seed-only")[1].startswith("how likely")
