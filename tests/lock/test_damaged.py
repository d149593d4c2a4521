"""Locks and manifests that somebody has edited: a message, never a traceback."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache

import pytest
import torch._inductor.config as compiler
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.ground.console import as_text, parts
from torchrepro.ground.errors import TorchreproError
from torchrepro.knobs.variables import RECORDED
from torchrepro.lock.diff import Snapshot, compare, snapshot_of
from torchrepro.lock.lock_file import check, write_lock

NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The contents of a lock as text, with a setting of torch's compiler."""
    path = tmp_path_factory.mktemp("lock") / "repro.lock"
    with (
        compiler.patch(shape_padding=not compiler.shape_padding),
        pytest.MonkeyPatch.context() as clean,
    ):
        for name in RECORDED:  # as each test is without what its reader has exported
            clean.delenv(name, raising=False)
        write_lock(path, "seed-only", ())
        yield path.read_text(encoding="utf-8")


@cache
def _places(text):
    """Return the path of every value in a JSON document."""

    def below(value, path):
        yield path
        if isinstance(value, list):
            value = dict(enumerate(value))
        for key, entry in value.items() if isinstance(value, dict) else ():
            yield from below(entry, (*path, key))

    return [path for path in below(json.loads(text), ()) if path]


@pytest.mark.slow
@given(data=st.data())
def test_a_lock_with_any_replaced_value_is_read_or_refused(whole, tmp_path, data):
    """Any value of a lock may be replaced by any other: check and diff answer or refuse."""
    contents = json.loads(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        *sections, last = data.draw(st.sampled_from(_places(whole)))
        with suppress(KeyError, TypeError, IndexError):  # the first nonsense took the place away
            inner = contents
            for key in sections:
                inner = inner[key]
            inner[last] = data.draw(NONSENSE)
    path = _written(tmp_path, json.dumps(contents))
    for answer in (
        lambda: check(path),
        lambda: compare(snapshot_of(str(path)), snapshot_of("seed-only")),
    ):
        with suppress(TorchreproError):
            assert as_text(*parts(answer())).encode()


@given(text=st.one_of(st.text(), NONSENSE.map(json.dumps), st.binary().map(repr)))
def test_any_other_file_than_a_lock_is_refused(tmp_path, text):
    """Any text is refused with a message that names the file."""
    with pytest.raises(TorchreproError, match=r"any\.lock"):
        check(_written(tmp_path, text))


def _written(folder, text):
    path = folder / "any.lock"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"lock": 2, "manifest": 1, "profile": {}}', "a lock of another format"),
        ('{"lock": 1, "manifest": 9, "profile": {}}', "a manifest of another format"),
        ('{"lock": "x", "manifest": 1, "profile": {}}', "a lock of another format"),
        ('{"manifest": 1, "profile": {}}', "a manifest, not a lock"),
        ('{"lock": 1, "manifest": 1, "profile": {}}', "damaged: these parts are missing"),
        ('{"seed": 1}', "neither a manifest nor a lock"),
        ("[" * 100000, "nested too deep"),
        ("seed: 1", "not JSON"),
        ('{"lock": ' + "9" * 5000 + "}", "not JSON"),
        ("", "not JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_refused_file_is_reported_with_the_reason(command, tmp_path, text, words):
    """`check` ends with status 2 and reports what is wrong with the file."""
    path = _written(tmp_path, text) if text is not None else tmp_path / "absent.lock"
    for named in (path, tmp_path) if text is None else (path,):  # a folder is no lock either
        status, out, err = command("check", named)

        assert (status, out) == (2, "")
        assert words in err
        assert len(err) < 400


def test_a_special_file_is_refused_unread(command):
    """A device or a pipe is no lock: reading a pipe would wait for its writer."""
    status, out, err = command("check", "/dev/null")

    assert (status, out) == (2, "")
    assert "not a regular file" in err


def test_a_lock_without_one_of_its_sections_is_damaged(whole, command, tmp_path):
    """Without any one of its sections, or with one that is empty, a lock is refused with what to
    do, and never met: what says nothing of torch or the CPU holds nothing to a machine. Only where
    torch's compiler was loaded has a lock its settings; that they are gone, the seal tells.
    """
    contents = json.loads(whole)
    del contents["compiler"]
    without = {
        key: {name: its for name, its in contents.items() if name != key}
        for key in contents.keys() - {"lock"}
    }
    emptied = {f"{name}.": {**contents, name: {}} for name in ("versions", "hardware")}
    for key, kept in {**without, **emptied}.items():
        status, out, err = command("check", _written(tmp_path, json.dumps(kept)))

        assert (status, out) == (2, ""), key
        assert key in err
        assert "torchrepro lock" in err

    status, out, _ = command("check", _written(tmp_path, json.dumps(contents)))
    assert (status, "seal" in out) == (1, True)


@pytest.mark.parametrize("nonsense", ["unknown", ["unknown"]])
def test_a_section_of_another_type_is_damaged(whole, command, tmp_path, nonsense):
    """A section must contain names and values; a text or a list is not skipped, but refused."""
    contents = json.loads(whole)
    for key in ("origins", "report", "versions", "hardware", "environment", "repository"):
        path = _written(tmp_path, json.dumps({**contents, key: nonsense}))
        for words in (("check", path), ("diff", path, "seed-only")):
            status, out, err = command(*words)

            assert (status, out) == (2, ""), (key, words)
            assert "damaged" in err
            assert key in err


def test_an_edited_lock_is_not_met(whole, command, tmp_path):
    """No edit is accepted, even if this machine matches the edited lock."""
    contents = json.loads(whole)
    profile, versions, hardware = (contents[key] for key in ("profile", "versions", "hardware"))
    for change in (
        {"profile": {**profile, "seed": 4321}},
        {"profile": {**profile, "seed": str(profile["seed"])}},
        {"profile": {**profile, "name": "x"}},
        {"versions": {**versions, "torch": "2.0.0"}},
        {"hardware": {**hardware, "threads": hardware["threads"] + 1}},
        {"environment": {"OMP_NUM_THREADS": "1"}},
        {"other_variables": {"CXX": "sha256:0000"}},
        {"digest": None},
        {"seal": "sha256:0"},
    ):
        edited = json.dumps({**contents, **change})
        status, out, err = command("check", _written(tmp_path, edited))

        assert (status, err) == (1, ""), change
        assert "seal, as the lock was edited" in out
        assert "seed" in out or change.get("profile", profile)["seed"] == profile["seed"]
    reformatted = json.dumps(dict(reversed(contents.items())), indent=8)
    assert command("check", _written(tmp_path, reformatted))[0] == 0


@given(one=st.booleans() | st.integers() | st.text(max_size=6))
def test_values_are_equal_only_with_their_type(one):
    """A text such as '1' or 'true' does not equal the value, in a profile and in a report."""
    written = one if isinstance(one, str) else json.dumps(one)
    other = json.dumps(one) if isinstance(one, str) else written
    for section in ("profile", "hardware", "environment", "knobs"):
        sides = [Snapshot("a", "lock", {section: {"x": value}}) for value in (one, other)]
        differences = compare(*sides).differences

        assert [each.key for each in differences] == ["x"]
