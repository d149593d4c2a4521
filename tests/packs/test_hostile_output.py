"""Texts of a pack never control a terminal, a page or a shell that shows them."""

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
    """Allow the variable of these profiles any value."""
    monkeypatch.setenv("TORCHREPRO_ALLOW_ENV", "TEAM")


def test_output_cannot_control_a_terminal_or_a_page():
    """HTML, rich's markup and emoji names are shown as text; control characters are escaped."""
    for part in (table(("a",), [(MARKUP,)]), MARKUP):
        page = as_html(part)
        assert MARKUP in as_text(part)
        assert "&lt;script&gt;" in page
        assert [tag for tag in ("<script>", "<a ") if tag in page] == []
    for part in (table(("a",), [(STEERING,)]), STEERING):
        text = as_text(part)
        assert all(letter.isprintable() for letter in text.replace("\n", ""))
        assert "\\x1b[31m" in text


def test_list_shows_metadata_as_text(installed_pack, command):
    """`list` escapes control characters in the metadata of a pack, and shows markup literally."""
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
def test_a_value_that_dotenv_readers_parse_differently_is_refused(installed_pack, command, value):
    """A value that could end its line, or that readers unquote differently, is status 2."""
    installed_pack("acme-pack", {"p.yaml": f"env_extra: {{TEAM: {value}}}\n"})
    status, out, err = command("env", "team/p", "--format", "dotenv")

    assert (status, out) == (2, "")
    assert "--format sh" in err


@pytest.mark.slow
def test_a_pack_of_thousands_of_files_is_listed_and_read(installed_pack):
    """`list` reads a bounded number of files, but every profile can be loaded."""
    pack = installed_pack("acme-pack", {"p0.yaml": "seed: 1\n"})
    for number in range(1, 3 * MANY):
        (pack.package / f"p{number}.yaml").touch()
    began = time.process_time()

    assert len([row for row in listed() if row.name.startswith("team/")]) <= MANY
    assert time.process_time() - began < 15
    assert torchrepro.load("team/p0").seed == 1


def test_broken_packs_do_not_affect_others(installed_pack):
    """A valid pack is listed and loaded beside packs with broken entry points."""
    for number, lines in enumerate(
        (b"[torchrepro.profiles]\nx\n", b"\xff", b"[torchrepro.profiles\n=")
    ):
        installed_pack(f"broken{number}", {}, entry_points=lines)
    installed_pack("acme-pack", {"good.yaml": "seed: 4\n"})

    assert torchrepro.load("team/good").seed == 4
    shown = {row.origin: row for row in listed()}
    assert "team/good" in [row.name for row in shown.values()]
    assert "its entry points cannot be read" in shown["package broken0"].description


def test_a_pack_cannot_claim_the_package_of_another_distribution(installed_pack):
    """Its entry point is refused, and origins name the distribution that owns the package."""
    installed_pack("acme-pack", {"good.yaml": "seed: 4\n"})
    installed_pack("thief", {}, entry_points="[torchrepro.profiles]\nmine = acme_pack\n")

    assert torchrepro.load("team/good").resolved.origins["seed"].package == "acme-pack"
    with pytest.raises(torchrepro.ProfileError, match="did not come with it") as caught:
        torchrepro.load("mine/good")
    assert "entry point of thief" in str(caught.value)
