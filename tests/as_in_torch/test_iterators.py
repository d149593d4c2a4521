"""The iterator of a loader under a profile looks to a program like torch's own."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("iterator_facts_program.py")


@pytest.fixture
def facts(fork_python):
    """Return the observations of the program that these arguments start."""

    def facts(*words):
        done = fork_python(*words, PROGRAM)

        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return facts


def test_an_iterator_under_a_profile_looks_like_torchs_own(facts):
    """Class, identity, attributes, length, references, pickling, and overrides of subclasses."""
    plain = facts()
    under = {
        name: facts("-m", "torchrepro", "run", name, "--", "python")
        for name in ("seed-only", "debug-strict", "train-fast", "npu-align")
    }

    assert len(plain) >= 60
    assert plain["its class"] == "torch.utils.data.dataloader._SingleProcessDataLoaderIter"
    assert not [text for text in plain.values() if str(text).startswith("raised")]
    for name, seen in under.items():
        differing = {fact: (plain[fact], seen[fact]) for fact in plain if seen[fact] != plain[fact]}
        assert not differing, name
