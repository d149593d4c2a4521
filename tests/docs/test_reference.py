"""The reference, as Sphinx builds it, has everything that the code has."""

import re
from html import unescape
from pathlib import Path

import pytest
import yaml

import torchrepro
from torchrepro.cli.app import ROWS
from torchrepro.ground.errors import EXIT_STATUSES, TorchreproError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.variables import allowed
from torchrepro.policies.deterministic_ops import OPS
from torchrepro.reporting.outcomes import Outcome

BORROWED = Path(__file__).parent.parent / "borrowed.yaml"
WITHOUT_JSON = ("run", "schema", "lock")
"""Commands that start another one, or that write JSON as it is."""

EXPECTED = {
    "commands": [f"torchrepro {name}" for name in ROWS],
    "answers": [f"torchrepro {name}" for name in ROWS if name not in WITHOUT_JSON],
    "python": [f"torchrepro.{name}" for name in torchrepro.__all__],
    "knobs": [knob.name for knob in CATALOGUE],
    "profile-keys": [knob.profile_key for knob in CATALOGUE if not knob.variable],
    "outcomes": [str(outcome) for outcome in Outcome],
    "variables": list(allowed()),
    "nondeterministic-ops": [row.name for row in OPS],
    "borrowed": [row["title"] for row in yaml.safe_load(BORROWED.read_text(encoding="utf-8"))],
}
"""What has an entry of its own on each page."""


def entries(page):
    """Return the headings, signatures and bold words of a page: what it has entries for."""
    found = set()
    for tag in ("h2", "h3", "strong"):
        for inner in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL):
            found.add(unescape(re.sub(r"<a class=\"headerlink.*?</a>|<[^>]+>", "", inner)).strip())
    return found | set(re.findall(r'<dt class="sig[^"]*" id="([^"]+)"', page))


@pytest.fixture
def built(documentation):
    """Return a function that reads a built page of the reference."""
    return lambda page: (documentation / "reference" / f"{page}.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", EXPECTED)
def test_the_reference_has_an_entry_for_every_row(built, page):
    """A page has an entry for each thing of its kind, and the build has no warning."""
    assert set(EXPECTED[page]) - entries(built(page)) == set()


@pytest.mark.slow
def test_every_exit_status_is_on_the_page_of_commands(built):
    """Each exit status is listed, and each exception has one that is."""
    public = [getattr(torchrepro, name) for name in torchrepro.__all__]
    raised = [
        each for each in public if isinstance(each, type) and issubclass(each, TorchreproError)
    ]

    assert {str(status) for status in EXIT_STATUSES} <= entries(built("commands"))
    assert {error.exit_status for error in raised} <= set(EXIT_STATUSES)
