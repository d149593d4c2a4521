"""The page of a check has the answer that a terminal shows."""

from __future__ import annotations

import html
import json
import re

import pytest

HOSTILE = "</pre><script>alert(1)</script>\u202egpj"


@pytest.fixture
def page(command, tmp_path):
    """Check a lock with a page; returns the status, the output, and the page's title and text."""

    def page(lock, *words):
        path = tmp_path / "check.html"
        status, out, err = command("check", lock, *words, "--report", path)
        assert err == f"torchrepro: the page is in {path}\n"
        source = path.read_text(encoding="utf-8")
        [title] = re.findall(r"<title>(.*)</title>", source)
        [text] = re.findall(r"<pre>\n(.*?)</pre>", source, re.DOTALL)
        return status, out, html.unescape(title), html.unescape(text)

    return page


def test_the_page_of_a_check_has_the_text_of_the_terminal(lock, edit, page):
    """The page has each line of the answer, and the sentence that answers as its title."""
    met, out, title, text = page(lock)
    assert (met, text) == (0, out)
    assert title == f"{lock} is met: nothing that it forbids differs"

    edit(lock, {"versions/torch": "2.5.0"})
    not_met, out, title, text = page(lock)
    assert (not_met, text) == (1, out)
    assert "2.5.0" in text
    assert title.startswith(f"{lock} is not met: 1 that changes")


def test_a_hostile_lock_adds_nothing_to_the_page(lock, edit, page):
    """A value with a script is shown as text, and marks of text direction are escaped visibly."""
    edit(lock, {"hardware/cpu": HOSTILE})

    status, out, _, text = page(lock)

    assert status == 1
    assert text == out
    assert "</pre><script>" in text
    assert "\u202e" not in text


def test_a_page_that_cannot_be_written_is_refused_first(lock, command, tmp_path):
    """A page in a missing folder is refused before anything is checked, with the way out."""
    status, out, err = command("check", lock, "--report", tmp_path / "missing" / "page.html")

    assert (status, out) == (2, "")
    assert "to do: name a file in an existing folder" in err


def test_a_page_leaves_the_json_one_document(lock, answer, command, tmp_path):
    """With --json the answer is the same document with and without a page."""
    status, out, _ = command("check", lock, "--json", "--report", tmp_path / "page.html")
    expected = answer("check", lock)

    assert (status, json.loads(out)) == expected
