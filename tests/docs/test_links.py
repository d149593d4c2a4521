"""Links lead somewhere: those within the repository are followed, others are read.

Sphinx follows the links between pages of the documentation. No test asks a server.
"""

import re
from urllib.parse import urlsplit

import pytest

from torchrepro.knobs.catalogue import CATALOGUE

from .blocks import PAGES, REPO

OUTSIDE_OF_SPHINX = [*REPO.glob("*.md"), *REPO.glob("examples/**/*.md")]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|<(https?://[^>\s]+)>|!\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^( *```).*?^\1", re.MULTILINE | re.DOTALL)


def links(page):
    """Return where the links and pictures of a page lead, those in code left out."""
    text = re.sub(r"`[^`]*`", "", _FENCED.sub("", page.read_text(encoding="utf-8")))
    return ["".join(found) for found in _LINK.findall(text)]


def anchors(page):
    """Return the names of the headings of a page, as hosts of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE_OF_SPHINX, ids=lambda page: str(page.relative_to(REPO)))
def test_links_of_pages_outside_of_sphinx_lead_somewhere(page):
    """A relative link names a file or folder of the repository, and a heading that is there."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        if urlsplit(link).scheme:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(REPO), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_links_are_secure_or_stay_within_the_repository():
    """An address of another host, on a page or in a row, is https and names a host; a relative
    link stays within the repository.
    """
    pages = {page: links(page) for page in {*PAGES, *OUTSIDE_OF_SPHINX}}
    rows = {REPO / each.name: re.findall(r"https?://[^\s,;()]+", each.source) for each in CATALOGUE}
    for place, found in {**pages, **rows}.items():
        for link in found:
            parts = urlsplit(link)
            if parts.scheme:
                assert (parts.scheme, "." in parts.netloc) == ("https", True), f"{place}: {link}"
            else:
                target = (place.parent / link.partition("#")[0]).resolve()
                assert target.is_relative_to(REPO), f"{place}: {link}"
