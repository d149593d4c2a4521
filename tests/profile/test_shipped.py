"""The profiles of the package keep the package's promises about them."""

from __future__ import annotations

import hashlib

import pytest

import torchrepro
from torchrepro.profile.load import compose
from torchrepro.profile.resolved import STRICT, ResolvedProfile
from torchrepro.profile.search_path import SHIPPED

GUARANTEES = {
    "debug-strict": "repeatable",
    "npu-align": "aligned",
    "seed-only": "seeded",
    "train-fast": "seeded",
}
DESCRIBES_ITSELF = ("schema", "name", "description", "guarantee", "defaults")


@pytest.mark.parametrize("name", GUARANTEES)
def test_a_shipped_profile_needs_no_validation(name):
    """The plain values of a shipped profile are the values after validation."""
    assert ResolvedProfile.of(compose(name).values).values == torchrepro.load(name).resolved.values


@pytest.mark.parametrize("name", GUARANTEES)
def test_a_shipped_profile_has_its_guarantee(name):
    """Every shipped profile has its guarantee, continues when late, and has a description."""
    profile = torchrepro.load(name)
    strict = GUARANTEES[name] in STRICT
    late = "relaunch_or_warn" if strict else "warn"

    assert (GUARANTEES[name], late, name) == (profile.guarantee, profile.on_late, profile.name)
    assert profile.description


@pytest.mark.parametrize("name", GUARANTEES)
def test_every_value_of_a_shipped_profile_has_a_reason(name):
    """Each value in a shipped file has a comment on its line or on the line above."""
    lines = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    bare = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if not line.startswith("#")
        and not line.endswith(":")
        and line.partition(":")[0].strip() not in DESCRIBES_ITSELF
        and "#" not in above + line
    ]

    assert bare == []


def test_the_digest_is_the_same_everywhere(load_text, monkeypatch):
    """The digest of a profile is equal on every machine and every Python."""
    monkeypatch.setenv("TORCHREPRO_ALLOW_ENV", "WORDS")
    words = "gr\u00fc\u00df \u4f60"
    text = f"name: any\nseed: 7\nenv: {{OMP_NUM_THREADS: 4}}\nenv_extra: {{WORDS: '{words}'}}\n"
    canonical = (
        r'{"env":{"OMP_NUM_THREADS":"4"},"env_extra":{"WORDS":"gr\u00fc\u00df \u4f60"},"seed":7}'
    )

    expected = "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()
    assert load_text(text).digest == expected
