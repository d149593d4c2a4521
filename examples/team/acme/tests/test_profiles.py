"""Every profile loads by its name, and has the settings that its version has published."""

import pytest
import torchrepro
from hydra import compose, initialize
from omegaconf import OmegaConf
from published import NAMES, published, version

PIECES = [name for name in NAMES if "/with/" in name]
PROFILES = [name for name in NAMES if name not in PIECES]


def from_hydra(*overrides: str) -> torchrepro.Profile:
    """Return the profile of a Hydra app with these overrides on its command line."""
    with initialize(version_base=None, config_path=None):
        config = compose(overrides=list(overrides))
    return torchrepro.Profile.model_validate(OmegaConf.to_container(config.repro))


def test_the_pack_has_profiles() -> None:
    """The pack contains at least one profile."""
    assert PROFILES


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_the_same_in_code_and_under_hydra(name: str) -> None:
    """A profile loads by its name, and `+repro=` loads the same profile."""
    assert from_hydra(f"+repro={name}") == torchrepro.load(name)


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_changes_a_profile(piece: str) -> None:
    """A piece changes a shipped profile in the same way in code and under Hydra."""
    override = f"with=[{piece.replace('/with/', '/')}]"
    under_hydra = from_hydra("+repro=seed-only", f"+repro/{override}")

    assert under_hydra == torchrepro.load("seed-only", overrides=[override])
    assert under_hydra != torchrepro.load("seed-only")


@pytest.mark.parametrize("name", NAMES)
def test_a_version_never_changes(name: str) -> None:
    """The settings of a profile are the same as when its version was pinned in published.json.

    Inherited settings count too, for example after an upgrade of torchrepro.
    """
    digest = torchrepro.load(name).digest
    pins = published().get(version(), {})
    if pins.get(name) != digest:
        pytest.fail(
            f"{name} differs from the published version {version()}.\n"
            "If this is intended, raise `version` in pyproject.toml, then accept it:\n"
            "    python tests/published.py",
            pytrace=False,
        )


def test_no_profile_is_lost() -> None:
    """Every profile that this version has published still exists."""
    assert set(published().get(version(), {})) <= set(NAMES)
