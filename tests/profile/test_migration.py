"""Profiles of another schema: an older one is read and said so, a newer one is refused."""

import pytest

import torchrepro
from torchrepro import ProfileError
from torchrepro.knobs.catalogue import CATALOGUE, other_names
from torchrepro.profile.migration import MIGRATIONS, NEWEST

PASTED = """schema: 0
seed: 3
torch.backends.cudnn.benchmark: false
torch.use_deterministic_algorithms: true
torch.backends.cudnn.allow_tf32: false
CUBLAS_WORKSPACE_CONFIG: ":4096:8"
dropout: zero
env: {NCCL_ALGO: Ring}
"""


def test_every_older_schema_has_a_way_to_the_newest():
    """There is one step for each schema before the newest."""
    assert sorted(MIGRATIONS) == list(range(NEWEST))


def test_a_list_of_settings_as_they_are_written_in_code_is_a_profile(load_text):
    """Schema 0 means what the same settings mean under their present names, and a note says so."""
    with pytest.warns(UserWarning, match="schema 0 is read as schema 1") as notes:
        old = load_text(PASTED, name="old.yaml")
    new = load_text(
        "seed: 3\ndropout: zero\n"
        "env: {CUBLAS_WORKSPACE_CONFIG: ':4096:8', NCCL_ALGO: Ring}\n"
        "backends:\n"
        "  torch: {deterministic_algorithms: error}\n"
        "  cudnn: {benchmark: false, conv_fp32_precision: ieee, rnn_fp32_precision: ieee}\n",
        name="new.yaml",
    )

    assert old.digest == new.digest
    assert len(notes) == 1
    assert "torch.backends.cudnn.benchmark is now backends.cudnn.benchmark" in str(notes[0].message)
    origin = old.resolved.origins["backends.cudnn.benchmark"]
    assert origin.set_by.endswith("old.yaml:3")


@pytest.mark.parametrize("name", sorted(other_names()))
def test_every_other_name_of_a_knob_leads_to_it(load_text, name):
    """A profile of schema 0 may use any name by which the catalogue knows a piece of state."""
    text = f"schema: 0\n{name}: [no, legal, value]\n"
    with pytest.warns(UserWarning, match="schema 0"), pytest.raises(ProfileError) as caught:
        load_text(text)

    keys = {problem.key for problem in caught.value.problems}
    assert keys == {knob.profile_key for knob in other_names()[name]}


@pytest.mark.parametrize("knob", [k for k in CATALOGUE if k.variable], ids=lambda k: k.variable)
def test_every_known_variable_leads_to_its_knob(load_text, knob):
    """A variable of the catalogue on the top level of schema 0 is a value of `env`."""
    text = f"schema: 0\n{knob.variable}: [no, legal, value]\n"
    note = f"{knob.variable} is now {knob.name}"
    with pytest.warns(UserWarning, match=note), pytest.raises(ProfileError) as caught:
        load_text(text)

    assert {problem.key for problem in caught.value.problems} == {knob.name}


def test_a_value_that_is_set_twice_is_refused(refusal):
    """Two names of one piece of state must not disagree."""
    words = refusal(
        "schema: 0\ntorch.backends.cudnn.benchmark: true\nbackends: {cudnn: {benchmark: false}}\n"
    )

    assert "set twice" in words
    assert "bad.yaml:3" in words


def test_a_newer_schema_is_refused_with_what_to_upgrade(refusal):
    """A profile for a torchrepro that does not exist yet says what to install."""
    words = refusal(f"schema: {NEWEST + 1}\nseed: 1\nsomething: new\n")

    assert f"bad.yaml:1: schema = {NEWEST + 1}: written for a newer torchrepro" in words
    assert "pip install --upgrade torchrepro" in words
    assert f"torchrepro {torchrepro.__version__}" in words


def test_an_older_base_of_a_profile_is_migrated_by_itself(write):
    """Each file of a defaults list is read by its own schema, and each says so."""
    write("schema: 0\ntorch.backends.cudnn.deterministic: true\n", "base.yaml")
    path = write("schema: 1\ndefaults: [base, _self_]\nseed: 1\n", "mine.yaml")

    with pytest.warns(UserWarning, match="base.yaml:1"):
        profile = torchrepro.load(str(path))

    assert profile.backends.cudnn.deterministic is True
    assert len(profile.resolved.notes) == 1


def test_the_command_line_says_it_on_standard_error(write, show):
    """`show` prints the profile in the newest schema, and the note beside it."""
    ended = show(write(PASTED, "old.yaml"))

    assert ended.status == 0
    assert f"schema: {NEWEST}" in ended.out
    assert "torchrepro: note: " in ended.err
    assert "schema 0 is read as schema 1" in ended.err
