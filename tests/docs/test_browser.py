"""The documentation in a real browser, opened as files."""

import time

import pytest

from ..verdict.browser import PROGRAM, tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="no Chromium or Chrome is installed"),
]
TIMEOUT = 300
NARROW = 420


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Return the page of a browser whose window is as narrow as a phone."""
    with tab(tmp_path_factory.mktemp("browser")) as opened:
        size = {"width": NARROW, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        opened.ask("Emulation.setDeviceMetricsOverride", **size)
        yield opened


def test_every_page_fits_a_phone_and_asks_no_server(browser, documentation):
    """No page is wider than the window, complains, or loads anything but files."""
    pages = sorted(documentation.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        browser.complaints.clear()
        browser.requests.clear()
        browser.open(page)

        assert browser.value("document.documentElement.scrollWidth") == NARROW, page.name
        assert browser.complaints == [], page.name
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


def test_search_works_from_a_file(browser, documentation):
    """A search for a knob finds its entry, without a server."""
    browser.open(documentation / "search.html", "?q=benchmark_limit")
    ends = time.monotonic() + TIMEOUT
    found: list[str] = []
    while not any("reference/knobs.html" in link for link in found):
        assert time.monotonic() < ends, f"the search finds only {found}"
        time.sleep(0.1)
        found = browser.value("[...document.querySelectorAll('ul.search a')].map(a => a.href)")
