"""Every profile can be used under its name, and asks for what its version has published."""

import pytest
import torchrepro
from hydra import compose, initialize
from omegaconf import OmegaConf
from published import NAMES, published, version

PIECES = [name for name in NAMES if "/with/" in name]
PROFILES = [name for name in NAMES if name not in PIECES]


def from_hydra(*overrides: str) -> torchrepro.Profile:
    """Return the profile that a Hydra app gets with these words on its command line."""
    with initialize(version_base=None, config_path=None):
        config = compose(overrides=list(overrides))
    return torchrepro.Profile.model_validate(OmegaConf.to_container(config.repro))


def test_the_pack_has_profiles() -> None:
    """There is something to test."""
    assert PROFILES


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_the_same_in_code_and_under_hydra(name: str) -> None:
    """A profile loads under its name, and `+repro=` gives the very same one."""
    assert from_hydra(f"+repro={name}") == torchrepro.load(name)


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_can_be_laid_on_a_profile(piece: str) -> None:
    """A piece changes a shipped profile, in code and under Hydra alike."""
    laid = f"with=[{piece.replace('/with/', '/')}]"
    under_hydra = from_hydra("+repro=seed-only", f"+repro/{laid}")

    assert under_hydra == torchrepro.load("seed-only", overrides=[laid])
    assert under_hydra != torchrepro.load("seed-only")


@pytest.mark.parametrize("name", NAMES)
def test_a_version_never_changes(name: str) -> None:
    """A profile asks for what it asked for when its version was pinned in published.json.

    Its own values count, and those that it inherits: from another torchrepro, say.
    """
    digest = torchrepro.load(name).digest
    pins = published().get(version(), {})
    if pins.get(name) != digest:
        pytest.fail(
            f"{name} asks for something else than version {version()} has published.\n"
            "If that is meant, raise `version` in pyproject.toml, then accept it:\n"
            "    python tests/published.py",
            pytrace=False,
        )


def test_no_profile_is_lost() -> None:
    """A name that this version has published is still there."""
    assert set(published().get(version(), {})) <= set(NAMES)
