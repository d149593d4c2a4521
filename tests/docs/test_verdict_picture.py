"""The verdict in the README shows what the command answers today."""

import importlib.util
import re
from xml.etree import ElementTree as ET

import pytest
from rich.text import Text

from .blocks import REPO
from .blocks import block_named as documented

SCRIPT = REPO / "docs" / "verdict_picture.py"
_CHANGES = re.compile(r"/\S+/|torchrepro-verify-\w+|\b[0-9a-f]{8}\b")  # folders, fingerprints


def _substance(text):
    """Return the words, without folders and fingerprints; lines may break elsewhere."""
    return "".join(_CHANGES.sub("#", " ".join(text.split())).split())


def _shown(svg):
    texts = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(text.text or "" for text in texts)


@pytest.mark.slow
def test_the_picture_shows_what_the_command_answers(clean_environment):
    """Text and pictures show the words of a real answer, and ask for nothing from the network."""
    spec = importlib.util.spec_from_file_location("verdict_picture", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    answer = _substance(Text.from_ansi(script.answer(clean_environment)).plain)

    assert _substance(documented("verdict").text) == answer
    for theme in script.THEMES:
        svg = script.picture(theme).read_text(encoding="utf-8")
        assert _substance(_shown(svg)) == answer
        assert "url(http" not in svg
