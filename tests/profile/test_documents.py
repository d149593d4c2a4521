"""A file is read as data: any contents give its values or a readable refusal."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.profile.document import (
    MAX_BYTES,
    MAX_DEPTH,
    Document,
    read_document,
)
from torchrepro.profile.search_path import SHIPPED

DEEP = "".join(f"{' ' * level}k:\n" for level in range(MAX_DEPTH + 1))

AT_A_LINE = {  # what the file says, the line that is wrong, words of the message
    "a bracket left open": ("seed: 7\nenv: [1\n", 3, "YAML syntax error"),
    "two values on one line": ("name: a\nseed: 7: 8\n", 2, "YAML syntax error"),
    "a python name": ("name: !!python/name:os.system\n", 1, "!!python/name:os.system"),
    "a standard tag": ('name: a\nseed: !!int "7"\n', 2, "!!int"),
    "the empty tag": ("seed: ! 7\n", 1, "tags"),
    "an anchor": ("seed: &s 7\n", 1, "anchors"),
    "an alias": ("name: a\nseed: *s\n", 2, "anchors"),
    "a merge": ("name: a\n<<: {seed: 7}\n", 2, "a key must be a word"),
    "nesting without end": (DEEP, MAX_DEPTH + 1, f"deeper than {MAX_DEPTH}"),
    "a key twice": ("seed: 7\nname: a\nseed: 8\n", 3, "duplicate key (first in line 1)"),
    "two documents": ("seed: 7\n---\nseed: 8\n", 2, "second YAML document"),
    "a target in braces": ("seed: 7\nenv: {OMP_DYNAMIC: a, _target_: b}\n", 2, "_target_"),
    "a target in a list": ("seed:\n  - 1\n  - _target_: os.system\n", 3, "_target_"),
    "a target among defaults": ("name: a\ndefaults:\n  - _target_: x\n", 3, "_target_"),
    "a package header": ("# @package _global_\nseed: 7\n", 1, "# @package _global_"),
    "an interpolation": ("seed: ${nope}\n", 1, "interpolates nothing"),
    "an interpolation in a list": ("seed:\n- 1\n- ${nope}\n", 3, "interpolates nothing"),
    "a missing value": ("name: a\nseed: ???\n", 2, "missing"),
    "a number for a key": ("name: a\n7: seed\n", 2, "a key must be a word"),
    "a list for a key": ("name: a\n? [a, b]\n: 1\n", 2, "a key must be a word"),
    "defaults that are no list": ("name: a\ndefaults: seed-only\n", 2, "defaults list"),
    "self twice": ("name: a\ndefaults: [_self_, _self_]\n", 2, "twice"),
}


@pytest.mark.parametrize("case", AT_A_LINE.values(), ids=AT_A_LINE)
def test_a_refusal_names_the_file_and_the_line(refusal, case):
    """An error in a line is refused with the file, that line and the rule."""
    content, line, words = case

    said = refusal(content)

    assert f"bad.yaml:{line}:" in said
    assert words in said


WITHOUT_A_LINE = {
    "empty": (b"", "empty"),
    "comments only": (b"# seed: 7\n", "empty"),
    "a list at the top": (b"- seed: 7\n", "not a list"),
    "a word at the top": (b"debug-strict\n", "not a single value"),
    "bytes that are no text": (bytes(range(128, 256)), "not UTF-8"),
    "an archive": (b"PK\x03\x04\x00\x00", "NUL"),
    "one byte too many": (b"seed: 7\n" + b"#" * (MAX_BYTES - 7), f"{MAX_BYTES:,}"),
}


@pytest.mark.parametrize("case", WITHOUT_A_LINE.values(), ids=WITHOUT_A_LINE)
def test_a_refusal_of_a_file_names_it(refusal, case):
    """A file that is not the text of one mapping is refused with its name and the reason."""
    content, words = case

    said = refusal(content)

    assert "bad.yaml" in said
    assert words in said


def test_a_directory_is_refused(tmp_path):
    """A directory is not a profile, and the message names it."""
    (tmp_path / "bad.yaml").mkdir()

    with pytest.raises(torchrepro.ProfileError, match=r"bad\.yaml: is a directory"):
        torchrepro.load(str(tmp_path / "bad.yaml"))


def test_the_advice_for_an_unreadable_file_fits_the_reason(write, monkeypatch):
    """The message has the system's reason; a missing file adds the advice to name a profile."""
    file = write("seed: 7\n")
    below_a_file = file / "no.yaml"
    loop = below_a_file.parent.with_name("loop.yaml")
    loop.symlink_to(loop)

    for path, advice in (
        (below_a_file, "torchrepro list"),
        (below_a_file.parent.with_name("gone.yaml"), "torchrepro list"),
        (loop, "check the path"),
    ):
        with pytest.raises(torchrepro.ProfileError, match="cannot be read: ") as refused:
            read_document(path)
        assert path.name in str(refused.value)
        assert advice in str(refused.value)
    # The system refuses nobody's files to an administrator.
    monkeypatch.setattr(type(file), "open", Mock(side_effect=PermissionError(13, "refused")))
    with pytest.raises(torchrepro.ProfileError, match=r"(?s)read: refused.*right to read it"):
        read_document(file)


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a mark"])
def test_line_ends_and_byte_order_marks_change_nothing(write, ending, mark):
    """A file has the same values, whichever editor saved it."""
    text = f"{mark}name: a\nseed: 7\nenv: {{OMP_NUM_THREADS: '4'}}\n".replace("\n", ending)

    document = read_document(write(text))

    assert document.values == {"name": "a", "seed": 7, "env": {"OMP_NUM_THREADS": "4"}}
    assert document.lines == {"name": 1, "seed": 2, "env": 3, "env.OMP_NUM_THREADS": 3}


def test_a_date_stays_text(write):
    """Of YAML's types only null, booleans and numbers are read; all other scalars stay text."""
    document = read_document(write("name: 2026-11-20\ndescription: =\n"))

    assert document.values == {"name": "2026-11-20", "description": "="}


@given(st.binary(max_size=200))
def test_any_bytes_give_a_document_or_a_refusal(attempt, write, content):
    """Any bytes are read as a document or refused with a `ProfileError`."""
    outcome = attempt(read_document, write(content), "bad.yaml")

    assert isinstance(outcome, Document) or str(outcome).startswith("bad.yaml")


TEXTS = [path.read_text(encoding="utf-8") for path in sorted(SHIPPED.glob("*.yaml"))]
TEXTS.append(
    "defaults: [debug-strict, _self_]\nname: acme\nseed: 20261120\ndropout: zero\n"
    "backends: {cudnn: {benchmark: false}, npu: {task_queue: 1}}\n"
    "env_extra: {TQDM_DISABLE: '1'}\ndevice: {modules: {'enc.*': cpu}}\n"
    "requires: {numpy: '>=1'}\nranks: distinct\ndataloader: {seeding: auto, num_workers: 0}\n"
)
TOKEN = re.compile(r"[\w.-]+|\s+|.")
FOREIGN = st.sampled_from(
    [
        *("null", "true", "off", "~", "0", "-1", "1.5", "1e9", ".nan", ".inf", "0x1F", "1:30"),
        *("''", '"', "'", "[", "]", "{", "}", ":", ": ", "- ", ",", "#", "&a", "*a", "!!int", "!"),
        *("|", ">", "%", "@", "`", "?", "? ", "<<", "=", "---", "...", "\t", "\n", "\r", "\0"),
        *("${nope}", "${oc.env:HOME}", "???", "_target_", "_self_", "# @package _global_\n"),
        *("pkg://torchrepro.conf.repro/seed-only", "../seed-only", "/etc/passwd", "LD_PRELOAD"),
        *("\ufeff", "\x85", "\u2028", "\ud7ff", "é", "\U0001f600", "\x07", "9" * 40, "k: " * 20),
        '"\\0"',
        '"\\ud800"',
        "[" * 30,
    ]
)


def _pieces(text, unit):
    if unit == "character":
        return list(text)
    return text.splitlines(keepends=True) if unit == "line" else TOKEN.findall(text)


@st.composite
def mutants(draw):
    """Draw a valid text with one to five characters, tokens or lines changed."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 5))):
        pieces = _pieces(text, draw(st.sampled_from(["character", "token", "line"])))
        at = draw(st.integers(0, max(len(pieces) - 1, 0)))
        other = draw(st.integers(0, max(len(pieces) - 1, 0)))
        match draw(st.sampled_from(["delete", "duplicate", "insert", "replace", "swap", "move"])):
            case "delete":
                del pieces[at : at + 1]
            case "duplicate":
                pieces[at:at] = pieces[at : at + 1]
            case "insert":
                pieces.insert(at, draw(FOREIGN | st.text(max_size=3)))
            case "replace":
                other_word = st.sampled_from(pieces or [""])
                pieces[at : at + 1] = [draw(FOREIGN | other_word | st.text(max_size=3))]
            case "swap" if pieces:
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case "move" if pieces:
                pieces.insert(other, pieces.pop(at))
        text = "".join(pieces)
    return text


@pytest.mark.slow
@settings(max_examples=500)
@given(text=mutants())
def test_a_mutated_text_gives_a_profile_or_a_refusal(write, attempt, text):
    """A valid text with any damage loads as a valid profile or is refused by its name."""
    outcome = attempt(torchrepro.load, str(write(text.encode("utf-8", "surrogatepass"))))

    if isinstance(outcome, torchrepro.ProfileError):
        assert "bad.yaml" in str(outcome) or "torchrepro:" in str(outcome)
        return
    assert outcome.digest.startswith("sha256:")
    for knob, value in outcome.resolved.settings():
        assert knob.legal.complaint(value) == ""
