"""The file of a profile's name: exactly one, or an error that names both."""

import os
import re
from itertools import permutations

import pytest

import torchrepro
from torchrepro.profile.search_path import SHIPPED, VARIABLE


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Put folders of profiles, each a dict of files, on TORCHREPRO_PATH."""

    def folders(*contents):
        paths = []
        for number, files in enumerate(contents):
            for name, text in files.items():
                path = tmp_path / str(number) / f"{name}.yaml"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            paths.append(str(tmp_path / str(number)))
        monkeypatch.setenv(VARIABLE, os.pathsep.join(paths))
        return paths

    return folders


def test_folders_of_the_variable_are_searched(folders):
    """A profile in a folder of TORCHREPRO_PATH is found by its name, also in subfolders."""
    folders({"mine": "seed: 3\n"}, {"lab/strict": "defaults: [mine, _self_]\ndropout: zero\n"})

    values = torchrepro.load("lab/strict").resolved.values

    assert (values["name"], values["seed"], values["dropout"]) == ("lab/strict", 3, "zero")


def test_two_profiles_of_one_name_are_an_error_that_names_both(folders):
    """A name of two different files is refused, in any order of the search path."""
    files = {"mine": "seed: 1\n"}, {"mine": "seed: 2\n"}
    for one, two in permutations(files):
        paths = folders(one, two)

        with pytest.raises(torchrepro.ProfileError, match="two profiles are called 'mine'") as no:
            torchrepro.load("mine")
        assert all(path in str(no.value) for path in paths)


def test_a_name_of_two_files_is_refused_in_a_defaults_list_too(folders):
    """It is refused also if one of the files is in the same folder as the defaults list."""
    folders({"mine": "seed: 1\n", "base": "defaults: [mine, _self_]\n"}, {"mine": "seed: 2\n"})

    with pytest.raises(torchrepro.ProfileError, match="two profiles are called 'mine'"):
        torchrepro.load("base")


def test_a_profile_with_a_shipped_name_is_refused(folders):
    """A profile with the name of a shipped one clashes with it; its path can be used."""
    (path,) = folders({"debug-strict": "seed: 1\n"})

    with pytest.raises(torchrepro.ProfileError, match=re.escape(str(SHIPPED))):
        torchrepro.load("debug-strict")
    assert torchrepro.load(f"{path}/debug-strict.yaml").seed == 1
    assert torchrepro.load("seed-only").seed == 1234


def test_an_existing_file_comes_before_a_profile_of_its_stem(write, monkeypatch, tmp_path):
    """A name that ends in .yaml is the file, although a profile has its stem as the name."""
    write("defaults: [seed-only, _self_]\nseed: 2\n", "seed-only.yaml")
    monkeypatch.chdir(tmp_path)

    assert torchrepro.load("seed-only.yaml").seed == 2
    assert torchrepro.load("seed-only").seed == 1234


def test_a_copy_is_no_clash(folders):
    """Two files of one name with equal bytes are one profile."""
    folders({"mine": "seed: 5\n"}, {"mine": "seed: 5\n"})

    assert torchrepro.load("mine").seed == 5


def test_a_profile_may_inherit_another_of_its_own_name(write):
    """A file that extends a shipped profile under the same name does not inherit from itself."""
    path = write("defaults: [seed-only, _self_]\nseed: 9\n", "seed-only.yaml")
    profile = torchrepro.load(str(path))

    assert (profile.seed, profile.dataloader.seeding) == (9, "auto")


def test_a_missing_folder_of_the_variable_is_reported(folders, show, monkeypatch):
    """A mistake in TORCHREPRO_PATH is reported with an unknown profile, and breaks no other."""
    monkeypatch.setenv(VARIABLE, "/no/such/folder")

    assert show("seed-only").status == 0
    ended = show("mine")

    assert ended.status == 2
    assert f"{VARIABLE} names /no/such/folder, which is no folder" in ended.err


def test_a_link_out_of_a_folder_of_profiles_is_refused(folders, tmp_path):
    """A link to a file outside a folder of profiles is refused by every name of it."""
    (path,) = folders({"mine": "defaults: [other, _self_]\n"})
    (tmp_path / "secret.yaml").write_text("description: the secret\n", encoding="utf-8")
    (tmp_path / "0" / "other.yaml").symlink_to(tmp_path / "secret.yaml")

    for name in ("other", "mine", f"{path}/mine.yaml"):
        with pytest.raises(torchrepro.ProfileError, match="points outside the folder") as caught:
            torchrepro.load(name)
        assert "the secret" not in str(caught.value)


class TestDiamonds:
    """A file that is inherited twice overwrites no value set in between."""

    BASE = "dropout: keep\nseed: 1\n"

    def test_a_file_that_would_overwrite_a_value_is_refused(self, folders):
        """The refusal names the value, its origin, and the file that would overwrite it."""
        (path,) = folders(
            {
                "root": self.BASE,
                "one": "defaults: [root, _self_]\ndropout: zero\n",
                "two": "defaults: [root, _self_]\ndevice: {rng: host}\n",
                "both": "defaults: [one, two, _self_]\n",
            }
        )

        with pytest.raises(torchrepro.ProfileError, match="inherited again") as caught:
            torchrepro.load("both")

        for words in (f"{path}/one.yaml:2 sets dropout to zero", "root.yaml:1", "dropout = keep"):
            assert words in str(caught.value)

    def test_a_file_that_overwrites_nothing_is_accepted(self, folders):
        """No other file changed the value, or a later value, override or null section decides."""
        folders(
            {
                "root": self.BASE,
                "one": "defaults: [root, _self_]\ndropout: zero\ndevice: {rng: native}\n",
                "two": "defaults: [root, _self_]\nenv_extra: {WANDB_NAME: a}\n",
                "three": "defaults: [root, _self_]\nguard: warn\n",
                "quiet": "defaults: [two, three, _self_]\n",
                "both": "defaults: [one, two, _self_]\n",
                "decided": "defaults: [one, two, _self_]\ndropout: zero\n",
                "section": "device: {rng: host}\n",
                "changed": "defaults: [section, _self_]\ndevice: {rng: native}\n",
                "null": "defaults: [section, changed, section, _self_]\ndevice: null\n",
            }
        )

        assert torchrepro.load("quiet").guard == "warn"
        assert torchrepro.load("decided").dropout == "zero"
        assert torchrepro.load("both", ["dropout=zero"]).dropout == "zero"
        assert torchrepro.load("null").device.rng is None
