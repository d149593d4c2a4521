"""`apply` and `plan` take a name, a path, a profile, a config or a dict, and mean the same."""

import copy
import pickle

import pytest
from omegaconf import OmegaConf

import torchrepro

VALUES = {"name": "given", "seed": 3, "backends": {"cudnn": {"deterministic": True}}}


@pytest.fixture
def sources(tmp_path):
    """The same profile in every form that is taken."""
    path = tmp_path / "given.yaml"
    path.write_text("seed: 3\nbackends: {cudnn: {deterministic: true}}\n", encoding="utf-8")
    return {
        "path": path,
        "path as text": str(path),
        "dict": VALUES,
        "config": OmegaConf.create(VALUES),
        "profile": torchrepro.load(str(path)),
    }


def test_every_form_of_a_profile_asks_for_the_same(sources):
    """The digest does not depend on the form in which a profile is given."""
    digests = {form: torchrepro.plan(source).resolved.digest for form, source in sources.items()}

    assert len(set(digests.values())) == 1, digests


def test_overrides_reach_every_form_of_a_profile(sources):
    """An override changes what is asked for, whatever form the profile is given in."""
    for form, source in sources.items():
        assert torchrepro.plan(source, ["seed=4"]).resolved.values["seed"] == 4, form


def test_a_dict_may_inherit():
    """A defaults list in a dict means what it means in a file."""
    plan = torchrepro.plan({"defaults": ["debug-strict", "_self_"], "seed": 9})

    assert plan.resolved.values["seed"] == 9
    assert plan.resolved.guarantee == "repeatable"


def test_a_config_may_refer_to_itself_but_call_no_resolver():
    """A reference inside a DictConfig is resolved; a resolver call is refused."""
    config = OmegaConf.create({"lr": 5, "repro": {"seed": "${lr}"}})

    assert torchrepro.plan(config.repro).resolved.values["seed"] == 5
    with pytest.raises(torchrepro.ProfileError, match="resolver"):
        torchrepro.plan(OmegaConf.create({"description": "${oc.env:HOME}"}))


@pytest.mark.parametrize("nonsense", [None, 3, "", object()])
def test_anything_else_is_refused(nonsense):
    """What is no profile in any form is a `ProfileError`, never another exception."""
    with pytest.raises(torchrepro.ProfileError):
        torchrepro.plan(nonsense)


def test_a_profile_and_its_errors_survive_pickling():
    """What crosses to another process arrives as what it was."""
    profile = torchrepro.load("npu-align", ["seed=5"])
    with pytest.raises(torchrepro.ProfileError) as caught:
        torchrepro.load("seed-only", ["seed=-1"])

    assert pickle.loads(pickle.dumps(profile)) == profile
    assert copy.deepcopy(profile) == profile
    assert len({profile, torchrepro.load("npu-align", ["seed=5"])}) == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_control_characters_of_a_file_never_reach_the_terminal(tmp_path):
    """A message shows a hostile value escaped."""
    path = tmp_path / "loud.yaml"
    path.write_text('seed: "\\e[31mred\\a"\n', encoding="utf-8")

    with pytest.raises(torchrepro.ProfileError) as caught:
        torchrepro.load(str(path))

    assert all(character.isprintable() or character == "\n" for character in str(caught.value))
