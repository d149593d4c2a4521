"""What `iter(DataLoader)` gives is torch's own iterator, by all that a program can see of it."""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("iterator_facts_program.py")


@pytest.fixture
def facts(fork_python):
    """Return what the program sees when it is started by these words."""

    def facts(*words):
        done = fork_python(*words, PROGRAM)

        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return facts


def test_a_program_sees_the_same_of_an_iterator_under_a_profile(facts):
    """Class, identity, attributes, length, references, pickling, and what subclasses override."""
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
