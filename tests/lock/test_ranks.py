"""Runs of several ranks: every rank takes part in a comparison."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing

import pytest

from torchrepro.trace.format import digest_of


@pytest.fixture
def ranks(job, tmp_path):
    """Make the recording of a run of several ranks; for each rank what its ``versions`` change."""

    def ranks(name, *changes, size=None):
        folder = tmp_path / name
        folder.mkdir()
        for rank, versions in enumerate(changes):
            path = folder / f"rank{rank}.sqlite"
            shutil.copy(job / "recorded" / "rank0.sqlite", path)
            with closing(sqlite3.connect(path)) as connection, connection:
                meta = {
                    key: json.loads(its) for key, its in connection.execute("select * from meta")
                }
                new = {
                    "rank": rank,
                    "world_size": size or len(changes),
                    "versions": {**meta["versions"], **versions},
                }
                del meta["seal"]
                meta = {key: json.dumps(its) for key, its in {**meta, **new}.items()}
                meta["seal"] = json.dumps(digest_of(sorted(meta.items())).hex())
                connection.executemany("insert or replace into meta values (?, ?)", meta.items())
        return folder

    return ranks


def test_another_version_on_one_rank_is_shown_with_the_rank(ranks, command, answer):
    """What differs on some ranks names them, what differs on all of them is shown once."""
    usual = ranks("usual", {}, {}, {})
    other = ranks(
        "other", {"torch": "2.5.0"}, {"torch": "2.5.0", "numpy": "1.0"}, {"torch": "2.5.0"}
    )
    status, found = answer("diff", usual, other)
    rows = [(row["key"], row["right"], row.get("ranks")) for row in found["differences"]]

    assert answer("diff", usual, usual) == (0, {"same": True, "differences": []})
    assert (status, rows) == (1, [("torch", "2.5.0", None), ("numpy", "1.0", ["rank 1"])])
    assert "rank 1: version of numpy" in command("diff", usual, other)[1]


def test_ranks_that_disagree_are_not_the_same_as_a_run_of_one_description(ranks, job, answer):
    """A manifest is compared with every rank of a recording."""
    mixed = ranks("mixed", {}, {"torch": "2.5.0"})
    status, found = answer("diff", job / "out", mixed)

    assert (status, [(row["key"], row["ranks"]) for row in found["differences"]]) == (
        1,
        [("torch", ["rank 1"])],
    )


def test_ranks_that_only_one_run_has_are_said(ranks, command, answer):
    """Another number of ranks differs; a rank whose recording is not there is not compared."""
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
