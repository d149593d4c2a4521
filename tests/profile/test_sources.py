"""A profile is the same in every accepted form, and has the origin of each of its values."""

import copy
import json
import pickle

import pytest
from omegaconf import OmegaConf

import torchrepro
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import ResolvedProfile, flatten

VALUES = {"name": "given", "seed": 3, "backends": {"cudnn": {"deterministic": True}}}


@pytest.fixture
def sources(tmp_path):
    """The same profile in every accepted form."""
    path = tmp_path / "given.yaml"
    path.write_text("seed: 3\nbackends: {cudnn: {deterministic: true}}\n", encoding="utf-8")
    return {
        "path": path,
        "path as text": str(path),
        "dict": VALUES,
        "config": OmegaConf.create(VALUES),
        "profile": torchrepro.load(str(path)),
    }


@pytest.mark.parametrize("overrides", [[], ["seed=4"]])
def test_every_form_of_a_profile_has_the_same_values(sources, overrides):
    """The form of a profile changes no value; an override works with every form."""
    plans = {form: torchrepro.plan(source, overrides) for form, source in sources.items()}

    assert len({plan.resolved.digest for plan in plans.values()}) == 1, plans
    assert plans["path"].resolved.values["seed"] == (4 if overrides else 3)


def test_a_config_may_refer_to_itself_but_call_no_resolver():
    """A reference inside a DictConfig is resolved; a resolver call is refused."""
    config = OmegaConf.create({"lr": 5, "repro": {"seed": "${lr}"}})

    assert torchrepro.plan(config.repro).resolved.values["seed"] == 5
    with pytest.raises(torchrepro.ProfileError, match="resolver"):
        torchrepro.plan(OmegaConf.create({"description": "${oc.env:HOME}"}))


@pytest.mark.parametrize("nonsense", [None, 3, "", object()])
def test_anything_else_is_refused(nonsense):
    """Any other object is a `ProfileError`, never another exception."""
    with pytest.raises(torchrepro.ProfileError):
        torchrepro.plan(nonsense)


def test_a_profile_and_its_errors_survive_pickling():
    """A profile or an error that is sent to another process arrives unchanged."""
    given = "npu-align", ["seed=5", "device.fallback.ops={cumsum:native,put_:cpu}"]
    profile = torchrepro.load(*given)
    dumped = json.loads(json.dumps(profile.model_dump(mode="json", by_alias=True)))
    with pytest.raises(torchrepro.ProfileError) as caught:
        torchrepro.load("seed-only", ["seed=-1"])

    assert pickle.loads(pickle.dumps(profile)) == profile
    assert copy.deepcopy(profile) == profile
    assert torchrepro.Profile.model_validate(dumped) == profile
    assert len({profile, torchrepro.load(*given)}) == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


TEAM = "defaults: [seed-only, _self_]\nseed: 5\ndropout: zero\n"


def _chain(origin):
    replaced = origin.to_json()["replaced"]
    return [(origin.value, origin.set_by), *((each["value"], each["set_by"]) for each in replaced)]


@pytest.fixture
def team(write):
    """The path of a team's profile."""
    return str(write(TEAM, "team.yaml"))


def test_all_replaced_origins_are_recorded(team, tmp_path):
    """An override on a file on a base: three origins, the latest first."""
    origin = torchrepro.load(team, ["seed=6", "seed=7"]).resolved.origins["seed"]

    assert _chain(origin) == [
        (7, "override seed=7"),
        (6, "override seed=6"),
        (5, f"{tmp_path}/team.yaml:2"),
        (1234, "torchrepro:seed-only.yaml:6"),
    ]


def test_overrides_on_a_loaded_profile_keep_its_origins(team):
    """Overriding a loaded profile gives the same origins as loading it with all overrides."""
    at_once = torchrepro.load(team, ["seed=6", "dropout=keep"])
    later = resolve(torchrepro.load(team, ["seed=6"]), ["dropout=keep"])

    assert later == at_once.resolved
    assert later.origins == at_once.resolved.origins


@pytest.mark.parametrize("form", [dict, OmegaConf.create])
def test_every_leaf_of_a_dict_has_an_origin(form):
    """The origin of values without a file is the object that contained them."""
    given = {"defaults": ["debug-strict", "_self_"], "seed": 3, "env_extra": {"WANDB_NAME": "b"}}
    resolved = resolve(form(given), ["dropout=zero"])

    assert resolved.guarantee == "repeatable"
    assert set(resolved.origins) >= set(flatten(resolved.values)) - {"name"}
    assert resolved.origins["seed"].set_by in {"the dict", "the DictConfig"}
    assert resolved.origins["seed"].replaced.set_by.startswith("torchrepro:seed-only.yaml")


def test_origins_travel_to_other_processes(team):
    """A child process of `run` inherits the profile with the same origins."""
    given = ["backends.cudnn.benchmark=false", "env_extra.WANDB_NAME='ä \U0001f40d'"]
    resolved = torchrepro.load(team, given).resolved

    arrived = ResolvedProfile.from_json(json.loads(json.dumps(resolved.to_json())))

    assert arrived == resolved
    assert {key: origin.to_json() for key, origin in arrived.origins.items()} == {
        key: origin.to_json() for key, origin in resolved.origins.items()
    }


def test_hydra_knows_the_override_that_wrote_a_section(hydra_app, tmp_path):
    """`repro={...}` is the origin of the values in it, and of no other value."""
    ended = hydra_app("+repro=seed-only", "repro={seed: 3}", f"hydra.run.dir={tmp_path}/out")
    held = json.loads((tmp_path / "out" / ".hydra" / "repro.json").read_text(encoding="utf-8"))

    assert ended.status == 0, ended.err
    assert held["origins"]["seed"]["set_by"] == "override repro={seed: 3}"
    assert held["origins"]["seed"]["replaced"][0]["value"] == 1234
    assert held["origins"]["on_late"]["set_by"] == "torchrepro:seed-only.yaml:9"
    assert held["origins"]["name"]["set_by"] == "torchrepro:seed-only.yaml:3"
