"""`torchrepro new-pack`: what it writes, whatever the name, and what it refuses."""

from __future__ import annotations

import ast
import json
import resource
import tomllib
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.scaffold import LEGAL, LONGEST, RESERVED, VERSION, write_pack

NAMES = st.from_regex(LEGAL, fullmatch=True).filter(
    lambda name: len(name) <= LONGEST and name not in RESERVED
)


@contextmanager
def installed(pack):
    """Have the pack found as an installed one is: by the metadata beside its package."""
    source = pack.folder / "src"
    metadata = source / f"{pack.module}-{VERSION}.dist-info"
    metadata.mkdir()
    about = f"Metadata-Version: 2.1\nName: {pack.distribution}\nVersion: {VERSION}\n"
    (metadata / "METADATA").write_text(about, encoding="utf-8")
    entry = f"[torchrepro.profiles]\n{pack.name} = {pack.module}\n"
    (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(source)
        yield


@pytest.fixture
def new_pack(command, monkeypatch, tmp_path):
    """Run the command in an empty folder; returns its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: command("new-pack", *words)


def _everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.slow
@settings(max_examples=8)
@given(name=NAMES)
def test_a_pack_of_any_legal_name_is_complete(name):
    """Its profiles load under its name, ask for what is pinned, and are valid in an editor."""
    with TemporaryDirectory() as folder:
        pack = write_pack(Path(folder) / name)
        project = tomllib.loads((pack.folder / "pyproject.toml").read_text(encoding="utf-8"))
        entries = project["project"]["entry-points"]["torchrepro.profiles"]
        assert entries == {name: pack.module}
        pinned = json.loads((pack.folder / "published.json").read_text(encoding="utf-8"))
        with installed(pack):
            loaded = {each: torchrepro.load(each).digest for each in pack.profiles}
        assert pinned == {project["project"]["version"]: loaded}
        assert len(set(loaded.values())) == len(loaded) == 3
        for file in pack.folder.rglob("*.yaml"):
            text = file.read_text(encoding="utf-8")
            _, named = text.splitlines()[0].split("# yaml-language-server: $schema=")
            schema = json.loads((file.parent / named).read_text(encoding="utf-8"))
            jsonschema.validate(yaml.safe_load(text), schema)
        for file in pack.folder.rglob("*.py"):
            ast.parse(file.read_text(encoding="utf-8"))
        for file in pack.folder.rglob("*.json"):
            json.loads(file.read_text(encoding="utf-8"))
        assert "{{" not in "".join(f.read_text() for f in pack.folder.rglob("*") if f.is_file())


@pytest.mark.parametrize("folder", ["acme", "packs/deep/acme", "acme/", "./acme"])
def test_the_command_says_what_it_wrote_and_what_comes_next(new_pack, tmp_path, folder):
    """The last part of a path is the name; every file that is listed is there, and no other."""
    status, out, err = new_pack(folder)

    assert (status, err) == (0, "")
    written = [line.strip() for line in out.split("next:")[0].splitlines()[1:]]
    files = [p for p in (tmp_path / folder).rglob("*") if p.is_file()]
    assert sorted(written) == sorted(p.relative_to(tmp_path / folder).as_posix() for p in files)
    assert f'pip install -e "./{folder.strip("./")}[test]"' in out
    assert "+repro=acme/strict" in out


def test_the_answer_can_be_json(new_pack, tmp_path):
    """--json prints one document that names folder, name, distribution, profiles and files."""
    (tmp_path / "acme-vision").mkdir()  # a folder that is empty will do

    status, out, err = new_pack("acme-vision", "--json")

    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert {"folder": "acme-vision", "name": "acme-vision"}.items() <= answer.items()
    assert answer["distribution"] == "acme-vision-profiles"
    assert answer["profiles"] == [
        "acme-vision/fast",
        "acme-vision/strict",
        "acme-vision/with/math-attention",
    ]


REFUSED = {  # name, words of the message
    "nothing": ("", "not the name of a pack"),
    "here": (".", "not the name of a pack"),
    "above": ("..", "not the name of a pack"),
    "capitals": ("Acme", "did you mean: acme"),
    "a digit first": ("1a", "not the name of a pack"),
    "a space": ("a b", "did you mean: a-b"),
    "two dashes": ("a--b", "did you mean: a-b"),
    "another alphabet": ("\u0430cme", "not the name of a pack"),
    "too long": ("a" * 41, "at most 40"),
    "a line break": ("a\nb", "a\\nb: not the name of a pack"),
    "pieces": ("with", "the folder for pieces"),
    "ours": ("torchrepro", "need no prefix"),
    "not empty": ("full", "exists and is not empty"),
    "a file": ("file", "cannot be written: Not a directory"),
    "below a file": ("file/acme", "cannot be written: Not a directory"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_pack_is_refused_and_nothing_is_written(new_pack, tmp_path, case):
    """A name or a folder that will not do is one plain error, exit status 2, and no file."""
    name, words = case
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    (tmp_path / "file").touch()
    before = _everything(tmp_path)

    status, out, err = new_pack(name)

    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert before == _everything(tmp_path)


def test_a_name_that_is_taken_is_refused(new_pack, tmp_path):
    """A new pack shadows neither an installed pack nor a module of another one."""
    pack = write_pack(tmp_path / "there" / "acme-vision")
    with installed(pack):
        before = _everything(tmp_path)
        same, other = new_pack("acme-vision"), new_pack("acme_vision")

    assert (same[0], other[0]) == (2, 2)
    assert "acme-vision-profiles is installed" in same[2]
    assert "a module acme_vision_profiles is installed" in other[2]
    assert before == _everything(tmp_path)


@contextmanager
def _full_disk(size):
    """Let no file of this process grow beyond `size` bytes, as if there were no more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("there", ["", "deep", "deep/acme"])
def test_a_pack_that_cannot_be_written_leaves_nothing(new_pack, tmp_path, there):
    """Where one of its files cannot be written, what was there before is all that is left."""
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = _everything(tmp_path)

    with _full_disk(size=20_000):  # README.md has room, the JSON Schema has not
        status, out, err = new_pack("deep/acme")

    assert (status, out) == (2, "")
    assert "deep/acme: cannot be written: File too large" in err
    assert before == _everything(tmp_path)
