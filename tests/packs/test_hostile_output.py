"""What a pack says of itself, in every place where somebody reads it, steers nothing."""

from __future__ import annotations

import time

import pytest

import torchrepro
from torchrepro.ground.console import as_html, as_text, table
from torchrepro.profile.load import listed
from torchrepro.profile.search_path import MANY

MARKUP = "<script>x</script> [link=http://x]y[/link] [red]z :bomb:"
STEERING = "a\x1b[31mb\x1b]8;;http://x\x1b\\c\u202ed\re"


@pytest.fixture(autouse=True)
def _consent(monkeypatch):
    """Consent to the variable of these profiles, whose value is to be anything."""
    monkeypatch.setenv("TORCHREPRO_ALLOW_ENV", "TEAM")


def test_no_part_of_an_answer_steers_a_terminal_or_a_page():
    """HTML, rich's markup and emoji names are the text that they are; control is escaped."""
    for part in (table(("a",), [(MARKUP,)]), MARKUP):
        page = as_html(part)
        assert MARKUP in as_text(part)
        assert "&lt;script&gt;" in page
        assert [tag for tag in ("<script>", "<a ") if tag in page] == []
    for part in (table(("a",), [(STEERING,)]), STEERING):
        text = as_text(part)
        assert all(letter.isprintable() for letter in text.replace("\n", ""))
        assert "\\x1b[31m" in text


def test_a_list_shows_what_metadata_says_as_text(installed_pack, command):
    """`list` escapes what the metadata of a pack holds, and shows markup as it is written."""
    installed_pack(
        "loud",
        {"a.yaml": f"description: '{MARKUP}'\n", "bad.yaml": 'name: "\\e[31m"\n'},
        metadata="Metadata-Version: 2.1\nName: lo\x1b[31mud\nVersion: 1\n",
    )
    status, out, _ = command("list")

    assert status == 0
    assert MARKUP in out
    assert "\x1b" not in out


@pytest.mark.parametrize("value", ['"a\\nLD_PRELOAD=/x.so"', '"it\'s"', "'a\\b'"])
def test_what_readers_of_dotenv_take_differently_is_refused(installed_pack, command, value):
    """A value that could end its line, or that not all readers unquote alike, is status 2."""
    installed_pack("acme-pack", {"p.yaml": f"env_extra: {{TEAM: {value}}}\n"})
    status, out, err = command("env", "team/p", "--format", "dotenv")

    assert (status, out) == (2, "")
    assert "--format sh" in err


@pytest.mark.slow
def test_a_pack_of_thousands_of_files_is_listed_and_read(installed_pack):
    """A list looks at a bounded number of files; each profile can be asked for all the same."""
    pack = installed_pack("acme-pack", {"p0.yaml": "seed: 1\n"})
    for number in range(1, 3 * MANY):
        (pack.package / f"p{number}.yaml").touch()
    began = time.process_time()

    assert len([each for each in listed() if each.name.startswith("team/")]) <= MANY
    assert time.process_time() - began < 15
    assert torchrepro.load("team/p0").seed == 1


def test_a_broken_pack_hurts_no_other(installed_pack):
    """Beside packs that are broken in every way, one that is in order is listed and loaded."""
    for number, lines in enumerate(
        (b"[torchrepro.profiles]\nx\n", b"\xff", b"[torchrepro.profiles\n=")
    ):
        installed_pack(f"broken{number}", {}, entry_points=lines)
    installed_pack("acme-pack", {"good.yaml": "seed: 4\n"})

    assert torchrepro.load("team/good").seed == 4
    shown = {each.origin: each for each in listed()}
    assert "team/good" in [each.name for each in shown.values()]
    assert "its entry points cannot be read" in shown["package broken0"].description


def test_a_pack_takes_no_other_packs_files(installed_pack):
    """A distribution that names another one's package is refused, and the owner is not its name."""
    installed_pack("acme-pack", {"good.yaml": "seed: 4\n"})
    installed_pack("thief", {}, entry_points="[torchrepro.profiles]\nmine = acme_pack\n")

    assert torchrepro.load("team/good").resolved.origins["seed"].package == "acme-pack"
    with pytest.raises(torchrepro.ProfileError, match="did not come with it") as caught:
        torchrepro.load("mine/good")
    assert "entry point of thief" in str(caught.value)
