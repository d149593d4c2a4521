"""Pieces are added to a profile in the same way in code, on the command line and under Hydra."""

import json

import pytest
import yaml

import torchrepro
from torchrepro.profile.search_path import SHIPPED

PIECES = sorted(path.stem for path in (SHIPPED / "with").glob("*.yaml"))
WITH = "with=[dropout-zero,host-rng]"
APP = """
import hydra

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    print("SEEN", dict(config.get("repro") or config))

main()
"""


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("profile", ["seed-only", "debug-strict", "npu-align"])
def test_a_shipped_piece_fits_every_profile(profile, piece):
    """A shipped piece adds its own values to a profile and changes no other value."""
    plain = torchrepro.load(profile).resolved
    pieced = torchrepro.load(profile, [f"with=[{piece}]"]).resolved
    own = yaml.safe_load((SHIPPED / "with" / f"{piece}.yaml").read_text(encoding="utf-8"))
    of_piece = {k for k, o in pieced.origins.items() if f"with/{piece}.yaml" in o.set_by}

    assert pieced.name == plain.name
    assert {key.partition(".")[0] for key in of_piece} == set(own) - {"description"}
    for key, origin in pieced.origins.items():
        assert key in of_piece or origin == plain.origins[key]


@pytest.mark.parametrize("order", [("seed=7", WITH, "dropout=keep"), ("dropout=keep", WITH)])
def test_overrides_replace_values_of_pieces(order):
    """Pieces are added before every other override, in any order on the command line."""
    values = torchrepro.load("seed-only", list(order)).resolved.values

    assert values["dropout"] == "keep"
    assert values["device"] == {"rng": "host"}


def test_later_pieces_replace_values_of_earlier_ones(write):
    """If two pieces set the same key, the piece that is named last decides."""
    for name in ("one", "two"):
        write(f"env_extra: {{WANDB_NAME: {name}}}\n", f"with/{name}.yaml")
    path = write("defaults: [with/one, with/two, _self_]\nseed: 1\n", "mine.yaml")

    assert torchrepro.load(str(path)).resolved.values["env_extra"] == {"WANDB_NAME": "two"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("with=[dropout-zer]", "did you mean: with/dropout-zero"),
        ("with={a: 1}", "with=[dropout-zero,host-rng]"),
        ("with=3", "with=[dropout-zero,host-rng]"),
        ("with=[../../secret]", "unknown profile"),
        ("with=[/etc/passwd]", "unknown profile"),
        ("with.dropout=zero", "unknown key"),
    ],
)
def test_an_unknown_piece_is_refused(override, words):
    """A piece that does not exist, or is not in a list, is refused with the legal form."""
    with pytest.raises(torchrepro.ProfileError, match=override.partition("=")[0]) as caught:
        torchrepro.load("seed-only", [override])

    assert words in str(caught.value)


@pytest.fixture
def app(fork_python, write, tmp_path):
    """Run an app with its own pieces; returns how it ended, and its manifest if it has one.

    PYTHONHASHSEED is exported, so that no strict profile relaunches it.
    """
    for name in ("one", "two"):
        write(f"env_extra: {{WANDB_NAME: {name}}}\ndropout: keep\n", f"conf/repro/with/{name}.yaml")
    write(APP, "app.py")

    def app(*arguments, config="{}\n"):
        write(config, "conf/config.yaml")
        done = fork_python("app.py", "hydra.run.dir=out", *arguments, env={"PYTHONHASHSEED": "0"})
        path = tmp_path / "out" / ".hydra" / "repro.json"
        return done, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    return app


def test_an_app_may_choose_pieces_in_its_own_defaults_list(app):
    """Pieces of the app's own folder work from its config, and its overrides replace values."""
    config = "defaults: [{repro: seed-only}, {repro/with: [one]}, _self_]\n"

    done, held = app("repro.env_extra.WANDB_NAME=override", config=config)

    assert "'dropout': 'keep'" in done.stdout, done.stderr
    assert "'name': 'seed-only'" in done.stdout
    assert held["profile"]["env_extra"] == {"WANDB_NAME": "override"}
    replaced = held["origins"]["env_extra.WANDB_NAME"]["replaced"]
    assert [one["value"] for one in replaced] == ["one"]


ORDERS = {  # where pieces stand, and the one that lies on top
    "after the profile": (["+repro=seed-only", "+repro/with=[one,two]"], "two"),
    "before the profile": (["+repro/with=[one,two]", "+repro=seed-only"], "two"),
    "the other way round": (["+repro/with=[two,one]", "+repro=seed-only"], "one"),
    "alone": (["+repro/with=[two,one]"], "one"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_piece_named_last_decides_in_hydra(app, order):
    """The last piece decides in any position, and is recorded once as the replacement."""
    arguments, winner = ORDERS[order]
    loser = {"one": "two", "two": "one"}[winner]

    done, held = app(*arguments)

    assert "'dropout': 'keep'" in done.stdout, done.stderr
    assert held["profile"]["env_extra"] == {"WANDB_NAME": winner}
    origin = held["origins"]["env_extra.WANDB_NAME"]
    assert origin["set_by"].endswith(f"with/{winner}.yaml:1")
    assert [each["value"] for each in origin["replaced"]] == [loser]


def test_a_deleted_profile_is_not_applied(app):
    """With `~repro` an app prints the same as without a profile."""
    plain, _ = app()

    done, held = app("~repro", config="defaults: [{repro: seed-only}, _self_]\n")

    assert (plain.returncode, plain.stdout) == (0, "SEEN {}\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "SEEN {}\n", plain.stderr)
    assert held is None


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("defaults: [{repro: seed-only}, {repro/with: one}, _self_]\n", ["~repro/with"]),
        ("{}\n", ["+repro=seed-only", "+repro/with=one", "~repro/with=one"]),
    ],
)
def test_a_deleted_piece_is_not_applied(app, config, arguments):
    """`~repro/with` removes a piece, with its values and from the recorded request."""
    done, held = app(*arguments, config=config)

    assert "'name': 'seed-only'" in done.stdout, done.stderr
    assert not {"dropout", "env_extra"} & set(held["profile"])
    assert not any("with/one" in origin["set_by"] for origin in held["origins"].values())
    assert held["started"]["asked"] == ["seed-only"]
