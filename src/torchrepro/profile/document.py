"""Read one profile file as plain data, with the line of every key. The file cannot run code.

The events of PyYAML's parser are checked before any node becomes an object. This check refuses
tags, anchors and deep nesting (https://pyyaml.org/wiki/PyYAMLDocumentation, "Events").
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from torchrepro.ground.errors import ProfileError, shown

if TYPE_CHECKING:
    from pathlib import Path


MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_NODES = 2000  # keys and values
MAX_TEXT = 4096  # characters of one key or value
LONGEST_NUMBER = 64  # characters; no knob needs more

_NAME_ONE = "name a profile: torchrepro list shows them, torchrepro quickstart writes one"
_NOT_A_PAGE = "a profile is a page of settings: is this the right file?"
_NOT_READ: Mapping[type[OSError], str] = {
    FileNotFoundError: _NAME_ONE,
    NotADirectoryError: _NAME_ONE,
    PermissionError: "give this user the right to read it and the folders above it",
}
"""Error of the system for a file -> the advice to the user."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is optional in PyYAML's builds
_PACKAGE_HEADER = re.compile(r"^\s*#\s*@(\w+)")
_INVISIBLE = re.compile(  # control characters, writing direction, half of a surrogate pair
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

# Integers that mean the same in YAML 1.1 and 1.2, unlike 010 and 1:30.
_INTEGER = re.compile(r"[-+]?([0-9]|[1-9][0-9_]*|0x[0-9a-fA-F_]+)")

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}  # all else stays text


def refuse_instructions(word: str, source: str, key: str) -> None:
    """Raise `ProfileError` if `word` is an instruction to Hydra, such as the key ``_target_``."""
    if len(word) > 1 and word.startswith("_") and word.endswith("_"):
        message, todo = "a profile is data and runs no code", f"remove `{word}`"
        raise ProfileError.about(message, source, key, todo=todo)


def refuse_interpolation(text: str, source: str, key: str) -> None:
    """Raise `ProfileError` for an interpolation (``${...}``) or a missing value (``???``)."""
    if "${" in text:
        message = "a profile is data: it interpolates nothing and calls no resolver"
        todo = "write the value itself, or override it where the program is started"
        raise ProfileError.about(message, source, key, shown(text), todo=todo)
    if text == "???":
        todo = "write it, or remove the key"
        raise ProfileError.about("a value is missing here", source, key, text, todo=todo)


@dataclass(frozen=True, slots=True)
class Document:
    """The content of one profile file: values, defaults list, and the line of every key."""

    source: str  # the file, as messages show it
    values: Mapping[str, Any]
    defaults: tuple[str, ...] = ("_self_",)
    lines: Mapping[str, int] = field(default_factory=dict)  # by dotted key, counted from 1
    typed: bool = False  # True for a dict in code by the user who starts the run

    def line_of(self, key: str) -> str:
        """Return ``file:line`` of `key`, or of the nearest section that contains `key`."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.source}:{self.lines[key]}" if key else self.source


def read_document(path: Path, source: str = "") -> Document:
    """Read the profile in the file `path`, which messages show as `source`.

    Raises `ProfileError` if the file is not a plain YAML mapping of at most 256 KiB.
    """
    source = source or str(path)
    try:
        if path.is_dir():
            todo = "name a .yaml file in it"
            raise ProfileError.about("is a directory, not a profile file", source, todo=todo)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProfileError.about("not a regular file", source)
        if status.st_size > MAX_BYTES:
            message = f"the file has {status.st_size:,} bytes"
            legal = f"at most {MAX_BYTES:,} bytes"
            raise ProfileError.about(message, source, legal=legal, todo=_NOT_A_PAGE)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        todo = _NOT_READ.get(type(error), "check the path, and the disk it is on")
        raise ProfileError.about(f"cannot be read: {error.strerror}", source, todo=todo) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start} is {content[error.start]:#04x})"
        todo = "save it as UTF-8, if it is the file of a profile"
        raise ProfileError.about(message, source, todo=todo) from None
    if "\0" in text:
        raise ProfileError.about("not text: the file contains NUL bytes", source, todo=_NAME_ONE)
    return parse_document(text, source)


def parse_document(text: str, source: str) -> Document:
    for number, written in enumerate(text.splitlines(), start=1):
        if written.strip() and not written.lstrip().startswith("#"):
            break
        if _PACKAGE_HEADER.match(written):
            raise ProfileError.about(
                "a profile cannot place itself elsewhere in the config",
                f"{source}:{number}",
                found=written.strip(),
                todo="remove the header: a profile is always the `repro` section",
            )
    try:
        _judge_events(text, source)
        loader = LOADER(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        line = f"{source}:{mark.line + 1}" if mark else source
        if "maximum nesting depth" in message:  # libyaml's own limit, reached while it reads ahead
            raise ProfileError.about(f"nested deeper than {MAX_DEPTH} levels", line) from None
        todo = "correct this line; if the file is no profile, name another one"
        raise ProfileError.about(f"YAML syntax error: {message}", line, todo=todo) from None
    except (yaml.YAMLError, UnicodeError) as error:
        message = f"not YAML: {str(error).splitlines()[0]}"
        todo = "correct the file; if it is no profile, name another one"
        raise ProfileError.about(message, source, todo=todo) from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
        todo = "write at least `name:` and `seed:`"
        raise ProfileError.about("the file is empty", source, todo=todo)
    if not isinstance(root, yaml.MappingNode):
        content = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ProfileError.about(f"a profile is a mapping of keys to values, not {content}", source)
    lines: dict[str, int] = {}
    values = _value(root, source, lines, "")
    defaults = defaults_list(values.pop("defaults", None), f"{source}:{lines.get('defaults', 1)}")
    return Document(source, values, defaults, lines)


def _judge_events(text: str, source: str) -> None:
    depth = documents = nodes = 0
    event: Any  # PyYAML's type stubs only have the base class of events
    for event in yaml.parse(text, Loader=LOADER):
        nodes += isinstance(event, yaml.NodeEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        line = f"{source}:{event.start_mark.line + 1}"
        if documents > 1:
            raise ProfileError.about("a second YAML document in one file", line)
        alias, tag = isinstance(event, yaml.AliasEvent), getattr(event, "tag", None)
        if alias or getattr(event, "anchor", None):
            raise ProfileError.about(
                "YAML anchors and aliases are refused: a small file can unfold without end",
                line,
                found=f"{'*' if alias else '&'}{event.anchor}",
                todo="write the value out, or inherit it through `defaults`",
            )
        if nodes > MAX_NODES:
            message = f"more than {MAX_NODES:,} keys and values"
            raise ProfileError.about(message, line, todo=_NOT_A_PAGE)
        if tag is not None:
            raise ProfileError.about(
                "YAML tags are refused: a profile is data and runs no code",
                line,
                found=tag.replace(_TAG, "!!"),
                todo="remove the tag",
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ProfileError.about(f"nested deeper than {MAX_DEPTH} levels", line)


def defaults_list(entries: Any, source: str) -> tuple[str, ...]:
    """Check a defaults list, and return its entries. Adds `_self_` at the end if it is missing."""
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ProfileError.about(
            "the defaults list of a profile holds names of profiles",
            source,
            "defaults",
            shown(entries),
            legal="a list such as [debug-strict, _self_]",
        )
    if entries.count("_self_") > 1:
        raise ProfileError.about("`_self_` is listed twice", source, "defaults", shown(entries))
    # Hydra's rule since 1.1: without `_self_` the file itself comes last.
    return tuple(entries) if "_self_" in entries else (*entries, "_self_")


def _value(node: yaml.Node, source: str, lines: dict[str, int], dotted: str) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_value(entry, source, lines, dotted) for entry in node.value]
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            number = key_node.start_mark.line + 1
            line = f"{source}:{number}"
            is_scalar = isinstance(key_node, yaml.ScalarNode)
            if not is_scalar or key_node.tag != f"{_TAG}str":
                key_text = shown(key_node.value) if is_scalar else "a list or mapping"
                raise ProfileError.about("a key must be a word", line, found=key_text)
            key: str = key_node.value
            _refuse_characters(key, line, "")
            refuse_instructions(key, line, key)
            inner = f"{dotted}.{key}" if dotted else key
            if key in values:
                message = f"duplicate key (first in line {lines[inner]})"
                raise ProfileError.about(message, line, inner)
            lines[inner] = number
            values[key] = _value(value_node, source, lines, inner)
        return values
    text: str = node.value
    line = f"{source}:{node.start_mark.line + 1}"
    refuse_interpolation(text, line, dotted)
    _refuse_characters(text, line, dotted)
    is_foreign = node.tag.endswith(":int") and not _INTEGER.fullmatch(text)
    if node.tag not in _SCALARS or len(text) > LONGEST_NUMBER or is_foreign:
        return text
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (ValueError, OverflowError):  # for instance 0x without digits
        return text


def _refuse_characters(text: str, source: str, key: str) -> None:
    if len(text) > MAX_TEXT:
        message, legal = f"a text of {len(text):,} characters", f"at most {MAX_TEXT:,} characters"
        raise ProfileError.about(message, source, key, shown(text), legal=legal)
    if _INVISIBLE.search(text):
        raise ProfileError.about("invisible control character", source, key, shown(text))
