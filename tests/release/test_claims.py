"""The project claims what was proven, and nothing about an index before a person has published."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from ..docs.blocks import PAGES

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = (
    *PAGES,
    *REPO.glob("*.md"),
    *REPO.glob("examples/**/*.md"),
    *(path for path in (REPO / "src").rglob("*") if path.suffix in {".py", ".jinja", ".yaml"}),
)
INSTALLED_FROM_INDEX = re.compile(
    r"""
    \b(?: (?:pip3?|conda|mamba)\ install | uv\ (?:pip\ install | add | tool\ (?:install|run))
        | uvx | pipx\ (?:install|run) | poetry\ add )
    (?: \ +-{1,2}(?!from\b)[\w-]+ )*       # options, but for the folder of `uvx --from .`
    \ +["']?torchrepro(?![\w/-])(?!\ *@)   # the bare name, without the address of a repository
    """,
    re.VERBOSE,
)


@pytest.mark.parametrize(
    ("text", "claims"),
    [
        ("uvx torchrepro demo", True),
        ("pip install torchrepro", True),
        ("pip install -U torchrepro==0.2.0", True),
        ('pip install "torchrepro[examples]"', True),
        ("uv tool install torchrepro", True),
        ("pipx run torchrepro demo", True),
        ("uvx --from . torchrepro demo", False),
        ('pip install ".[examples]"', False),
        ('pip install "torchrepro @ git+https://host.example/team/torchrepro"', False),
        ("pip install -e ./torchrepro-profiles", False),
    ],
)
def test_a_claim_of_an_index_is_found(text, claims):
    """An installation by the bare name is a claim; by a folder or an address it is none."""
    assert bool(INSTALLED_FROM_INDEX.search(text)) == claims


def test_no_page_claims_that_an_index_has_torchrepro():
    """Until the release anybody may register the name: no page or message installs by it.

    The release removes this test: see "Publish" in CONTRIBUTING.md.
    """
    claims = [
        f"{path.relative_to(REPO)}: {claim[0]}"
        for path in dict.fromkeys(TEXTS)
        if path.name != "CONTRIBUTING.md"  # its steps for the release name the later commands
        for claim in INSTALLED_FROM_INDEX.finditer(path.read_text(encoding="utf-8"))
    ]

    assert claims == []


def _versions(name):
    """Return the versions that the classifiers of the project name, such as those of CUDA."""
    pattern = re.compile(rf"{re.escape(name)} :: (\d[\d.]*)$")
    return [found[1] for line in PROJECT["classifiers"] if (found := pattern.search(line))]


def test_the_classifiers_name_what_was_proven():
    """Each version of Python and CUDA is in the section "Proven" of the status, not below it."""
    status = (REPO / "docs" / "status.md").read_text(encoding="utf-8")
    _, proven, not_proven, *_ = re.split(r"^## .+$", status, flags=re.MULTILINE)
    python = [version for version in _versions("Programming Language :: Python") if "." in version]

    assert python
    assert [v for v in python if f"Python {v}" not in proven] == []
    assert [v for v in python if re.search(rf"^\| Python[^|]*{v}", not_proven, re.MULTILINE)] == []
    assert [v for v in _versions("NVIDIA CUDA") if f"CUDA {v}" not in proven] == []
    assert "Linux" in proven
    assert [c for c in PROJECT["classifiers"] if "Operating System" in c] == [
        "Operating System :: POSIX :: Linux"
    ]


CITATION = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
TYPES = {  # of the keys of the Citation File Format 1.2.0 that the file may have
    **dict.fromkeys(("cff-version", "message", "title", "type", "abstract", "version"), str),
    **dict.fromkeys(("license", "doi", "date-released", "repository-code", "url"), str),
    **dict.fromkeys(("authors", "keywords"), list),
}
REQUIRED = {"cff-version", "message", "title", "authors"}


def test_the_citation_is_valid():
    """The citation has the keys that its format requires, no unknown key, and values of their type.

    `cffconvert --validate` and the format's own schema accept it too.
    """
    assert REQUIRED <= CITATION.keys() <= TYPES.keys()
    assert {k: v for k, v in CITATION.items() if not isinstance(v, TYPES[k])} == {}
    assert (CITATION["cff-version"], CITATION["type"]) == ("1.2.0", "software")
    assert CITATION["authors"]
    for author in CITATION["authors"]:
        assert {"name"} <= author.keys() or {"given-names", "family-names"} <= author.keys()


def test_the_citation_is_of_this_version():
    """The citation has the name, version, licence, authors and keywords of the package."""
    authors = [author.get("name") for author in CITATION["authors"]]

    assert CITATION["title"] == PROJECT["name"]
    assert CITATION["version"] == PROJECT["version"]
    assert CITATION["license"] == PROJECT["license"]
    assert authors == [author["name"] for author in PROJECT["authors"]]
    assert CITATION["keywords"] == PROJECT["keywords"]
