"""Valid YAML, mutated at random: every outcome is a valid profile or a `ProfileError`."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.profile.search_path import SHIPPED

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


@settings(max_examples=2000)
@given(text=mutants())
def test_a_mutated_text_is_a_profile_or_a_refusal(write, attempt, text):
    """However a valid text is damaged, it loads as a valid profile or is refused by its name."""
    outcome = attempt(torchrepro.load, str(write(text.encode("utf-8", "surrogatepass"))))

    if isinstance(outcome, torchrepro.ProfileError):
        assert "bad.yaml" in str(outcome) or "torchrepro:" in str(outcome)
        return
    assert outcome.digest.startswith("sha256:")
    for knob, value in outcome.resolved.settings():
        assert knob.legal.complaint(value) == ""
