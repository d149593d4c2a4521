"""The sdist and the wheel: complete, with true metadata, and readable on an index of packages."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readme_renderer import markdown

REPO = Path(__file__).parents[2]
ADDRESS = "https://host.example/team/torchrepro"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TAG = f"v{PROJECT['version']}"
NOT_DISTRIBUTED = {
    ".pre-commit-config.yaml",  # checks before a commit, which an sdist has none of
    "src/torchrepro/causes",  # a link to `docs/causes`
    "src/torchrepro/conf",  # a link to `conf`
}
with_absolute_links = runpy.run_path(str(REPO / ".ci" / "index_readme.py"))["with_absolute_links"]

BUILD = """
import sys
from hatchling import build
print(getattr(build, sys.argv[1])(sys.argv[2]))
"""


@dataclass(frozen=True)
class Distributions:
    """The paths of both files, and their contents."""

    sdist: Path
    wheel: Path
    sources: frozenset[str]
    """The files of the sdist, below its folder."""
    installed: frozenset[str]
    """The files of the wheel."""
    metadata: dict[str, bytes]
    """The files of the wheel's `dist-info`, by name."""


def _build(target, folder, source, **variables):
    words = [sys.executable, "-c", BUILD, f"build_{target}", folder]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        words, cwd=source, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist, and the wheel from the sdist, as the release workflow does."""
    folder = tmp_path_factory.mktemp("dist")
    sdist = _build("sdist", folder, REPO, TORCHREPRO_REPOSITORY=ADDRESS)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
        names = [entry.name for entry in archive.getmembers() if entry.isfile()]
    [source] = (folder / "unpacked").iterdir()
    wheel = _build("wheel", folder, source)
    with zipfile.ZipFile(wheel) as archive:
        installed = frozenset(archive.namelist())
        facts = {Path(n).name: archive.read(n) for n in installed if ".dist-info/" in n}
    sources = frozenset(name.partition("/")[2] for name in names)
    return Distributions(sdist, wheel, sources, installed, facts)


@pytest.mark.slow
def test_the_sdist_has_every_file_of_the_repository(built):
    """Each tracked file is in the sdist, and nothing else is, except for the metadata."""
    if not (REPO / ".git").exists():
        pytest.skip("only a git repository knows which files belong to it")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    tracked = {name for name in done.stdout.split("\0") if name and (REPO / name).exists()}

    assert built.sources == tracked - NOT_DISTRIBUTED | {"PKG-INFO"}


@pytest.mark.slow
def test_the_wheel_has_the_package_the_plugin_and_the_profiles(built):
    """The wheel installs each file of `src`, each profile and each cause, and no test."""
    expected = {name.removeprefix("src/") for name in built.sources if name.startswith("src/")}
    expected |= {f"torchrepro/{name}" for name in built.sources if name.startswith("conf/")}
    pages = {name for name in built.sources if name.startswith("docs/causes/")}
    expected |= {name.replace("docs", "torchrepro", 1) for name in pages}

    assert {name for name in built.installed if ".dist-info/" not in name} == expected
    assert {"torchrepro/py.typed", "torchrepro/conf/repro/debug-strict.yaml"} <= expected


@pytest.mark.slow
def test_every_entry_point_leads_to_a_module_of_the_wheel(built):
    """The command and each plugin name a module that the wheel has."""
    entries = ConfigParser()
    entries.read_string(built.metadata["entry_points.txt"].decode())
    modules = [entry.partition(":")[0] for group in entries for entry in entries[group].values()]
    files = [module.replace(".", "/") for module in modules]

    assert len(files) > len(PROJECT["entry-points"])
    assert [f for f in files if not built.installed & {f"{f}.py", f"{f}/__init__.py"}] == []


@pytest.mark.slow
def test_both_files_have_the_metadata_of_the_project(built):
    """Name, version, licence, versions of Python and addresses are the same in both files."""
    metadata = message_from_bytes(built.metadata["METADATA"])
    with tarfile.open(built.sdist) as archive:
        [name] = [each for each in archive.getnames() if each.endswith("PKG-INFO")]
        of_sdist = archive.extractfile(name).read()
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))

    assert of_sdist == built.metadata["METADATA"]
    assert (metadata["Name"], metadata["Version"]) == ("torchrepro", PROJECT["version"])
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata.get_all("Classifier") == sorted(PROJECT["classifiers"])
    assert urls["Source"] == ADDRESS
    assert all((REPO / _path_in_repository(urls[key])).exists() for key in urls if "doc" in key)


@pytest.mark.slow
def test_an_index_accepts_both_files(built):
    """`twine check --strict` renders the README of both files without a warning."""
    words = [sys.executable, "-m", "twine", "--no-color", "check", "--strict"]
    words += [built.sdist, built.wheel]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)

    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout + done.stderr


@pytest.mark.slow
def test_the_page_on_an_index_links_to_the_repository(built):
    """Each link and picture of the rendered README is an address of a file at the tag."""
    metadata = message_from_bytes(built.metadata["METADATA"])
    page = markdown.render(metadata.get_payload(decode=True).decode())
    links = re.findall(r'href="([^"]+)"', page)
    pictures = re.findall(r'src="([^"]+)"', page)

    assert links
    assert pictures
    for link in [*(each for each in links if not each.startswith("#")), *pictures]:
        assert urlsplit(link).scheme == "https", link
        if link.startswith(f"{ADDRESS}/"):
            assert (REPO / _path_in_repository(link)).exists(), link
    assert all(picture.startswith(f"{ADDRESS}/raw/{TAG}/") for picture in pictures)


def _path_in_repository(link):
    """Return the path of an address at the tag, relative to the repository."""
    found = re.fullmatch(rf"{re.escape(ADDRESS)}/(?:blob|raw)/{re.escape(TAG)}/([^#]+)(#.*)?", link)
    assert found, link
    return found[1]


@pytest.mark.slow
def test_a_build_without_an_address_publishes_none(tmp_path):
    """Without the variable the README keeps its relative links, and no address is invented."""
    wheel = _build("wheel", tmp_path, REPO, TORCHREPRO_REPOSITORY="")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith("/METADATA")]
        metadata = message_from_bytes(archive.read(name))

    assert metadata.get_all("Project-URL") is None
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert metadata.get_payload(decode=True).decode().strip() == readme.strip()


NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
PATHS = st.builds(lambda parts, end: "/".join(parts) + end, st.lists(NAMES, min_size=1, max_size=4),
                  st.sampled_from([".md", ".svg", ".png", "", ".md#a-heading"]))  # fmt: skip
TEXTS = st.text(alphabet="abc \n`.|", max_size=20)
FORMS = st.sampled_from(["[{}]({})", "![{}]({})", '{}<img src="{}">', '{}<source srcset="{}">'])


@given(form=FORMS, text=TEXTS, path=PATHS, before=TEXTS, after=TEXTS)
def test_a_relative_link_becomes_the_address_of_its_file(form, text, path, before, after):
    """The address is that of the file at the tag; pictures are raw files; other text stays."""
    shows_file = "raw" if path.endswith((".svg", ".png")) else "blob"
    address = f"{ADDRESS}/{shows_file}/{TAG}/{path}"

    changed = with_absolute_links(before + form.format(text, path) + after, ADDRESS, TAG)

    assert changed == before + form.format(text, address) + after
    assert with_absolute_links(changed, ADDRESS, TAG) == changed


@given(path=PATHS)
def test_an_absolute_link_stays(path):
    """A link to another host is unchanged."""
    link = f"[a]({urljoin('https://elsewhere.example/', path)})"

    assert with_absolute_links(link, ADDRESS, TAG) == link
