"""A new pack as its authors have it: built, installed, changed, published again."""

from __future__ import annotations

import tarfile
import zipfile

import pytest

from torchrepro.scaffold import write_pack

BUILD = "import hatchling.build as b; print(b.build_wheel('dist'), b.build_sdist('dist'))"


@pytest.fixture
def pack(environment, tmp_path):
    """A new pack with a dash in its name, installed as its authors install it."""
    pack = write_pack(tmp_path / "acme-vision")
    environment.succeed("pip", "install", "-q", "--no-deps", "-e", pack.folder, cwd=tmp_path)
    return pack


@pytest.mark.slow
def test_a_new_pack_passes_its_tests_and_its_distributions_hold_every_profile(environment, pack):
    """Its tests pass, the wheel has all YAML files, and the sdist all files."""
    environment.succeed("pytest", "-q", cwd=pack.folder)
    wheel, sdist = environment.succeed("python", "-c", BUILD, cwd=pack.folder).split()

    profiles = {path.removeprefix("src/") for path in pack.files if path.endswith(".yaml")}
    with zipfile.ZipFile(pack.folder / "dist" / wheel) as built:
        assert profiles <= set(built.namelist())
    with tarfile.open(pack.folder / "dist" / sdist) as built:
        inside = {name.partition("/")[2] for name in built.getnames()}
        assert set(pack.files) <= inside


@pytest.mark.slow
def test_a_change_is_noticed_until_the_version_is_raised(environment, pack):
    """A profile that asks for something else fails the pack's tests, which say what to do."""
    profile = pack.folder / "src" / pack.module / "strict.yaml"
    project = pack.folder / "pyproject.toml"
    changed = profile.read_text(encoding="utf-8").replace("num_threads: 4", "num_threads: 8")
    profile.write_text(changed, encoding="utf-8")

    noticed = environment.run("pytest", "-q", "-k", "version", cwd=pack.folder)
    assert noticed.returncode == 1
    assert "acme-vision/strict asks for something else than version 0.1.0" in noticed.stdout
    assert "python tests/published.py" in noticed.stdout
    assert "1 failed" in noticed.stdout

    too_soon = environment.run("python", "tests/published.py", cwd=pack.folder)
    assert (too_soon.returncode, too_soon.stdout) == (1, "")
    assert "raise the version" in too_soon.stderr

    raised = project.read_text(encoding="utf-8").replace('"0.1.0"', '"0.2.0"')
    project.write_text(raised, encoding="utf-8")
    environment.succeed("python", "tests/published.py", cwd=pack.folder)
    environment.succeed("pytest", "-q", "-k", "version", cwd=pack.folder)
    kept = (pack.folder / "published.json").read_text(encoding="utf-8")
    assert '"0.1.0"' in kept
    assert '"0.2.0"' in kept
