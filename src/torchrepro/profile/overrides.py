"""Overrides of a profile, written in Hydra's grammar."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchrepro.errors import ProfileError
from torchrepro.profile.composition import plain, walk
from torchrepro.profile.document import MAX_DEPTH, refuse_instructions, refuse_interpolation


class Override(NamedTuple):
    """A dotted key and the value it is given; null for one that is deleted."""

    text: str
    key: str
    value: Any
    typed: bool = True
    """Whether the user who starts the run wrote it, rather than a file."""

    @property
    def place(self) -> str:
        """The place that messages name."""
        return f"override {self.text}"

    def nested(self) -> dict[str, Any]:
        """Return the value under its key, a mapping per section."""
        value = self.value
        for part in reversed(self.key.split(".")):
            value = {part: value}
        nested: dict[str, Any] = value
        return nested


def parsed(text: str, *, typed: bool = True) -> Override:
    """Parse an override such as ``seed=7``; raises `ProfileError` for one that is not plain."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    place = f"override {text}"
    todo = "write key=value, as in seed=7 or backends.cudnn.benchmark=false"
    try:
        found = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):
        raise ProfileError.about("not an override", place, todo=todo) from None
    if found.is_sweep_override():
        raise ProfileError.about("a sweep needs Hydra's --multirun; here one value is set", place)
    depth = found.key_or_group.count(".")
    if found.package is not None or not found.key_or_group or depth > MAX_DEPTH:
        raise ProfileError.about("not an override", place, todo=todo)
    value = None if found.is_delete() else plain(found.value())
    key = found.key_or_group.replace("/", ".")
    check_values(value, place, key)
    return Override(text, key, value, typed)


def key_of(text: str) -> str:
    """Return the dotted key that an override names, without parsing what it sets it to."""
    return text.partition("=")[0].lstrip("+~").replace("/", ".")


def check_values(value: Any, place: str, key: str) -> None:
    """Raise `ProfileError` for an instruction or an interpolation anywhere in `value`."""
    for inner, entry in walk(value, key):
        refuse_instructions(inner.rpartition(".")[2], place, inner)
        if isinstance(entry, str):
            refuse_interpolation(entry, place, inner)
