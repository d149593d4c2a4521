"""Tensors inside tuples, lists, mappings and dataclasses: changed one by one, in a new container.

Other objects are handed on as they are, so that one which keeps state, a cache of keys and values
say, stays the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any, NamedTuple

Parts = dict[Any, Any]


class Kind(NamedTuple):
    """A kind of container, and how it is taken to pieces and put together."""

    includes: Callable[[Any], bool]
    parts: Callable[[Any], Parts]
    made: Callable[[Any, Parts], Any]
    """Returns a container like the first argument, with other parts."""

    refill: Callable[[Any, Parts], None] | None = None
    """Gives a container other parts; None for one that cannot be changed."""


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor."""
    return isinstance(value, import_module("torch").Tensor)


def _is_packed(value: Any) -> bool:
    return isinstance(value, import_module("torch").nn.utils.rnn.PackedSequence)


def _packed_parts(packed: Any) -> Parts:
    # The sizes of its batches are on the host wherever its data is.
    return {name: part for name, part in packed._asdict().items() if name != "batch_sizes"}


def _packed_made(packed: Any, parts: Parts) -> Any:
    return type(packed)(batch_sizes=packed.batch_sizes, **parts)


def _tuple_made(old: Any, parts: Parts) -> Any:
    make = getattr(type(old), "_make", type(old))  # a named tuple takes its fields one by one
    return old if _same(_numbered(old), parts) else make(parts.values())


def _numbered(sequence: Any) -> Parts:
    return dict(enumerate(sequence))


def _list_refill(old: Any, parts: Parts) -> None:
    old[:] = parts.values()


def _mapping_refill(old: Any, parts: Parts) -> None:
    for key in [key for key in old if key not in parts]:
        del old[key]
    for key, part in parts.items():
        if key not in old or old[key] is not part:
            old[key] = part


def _is_record(value: Any) -> bool:
    module = import_module("torch").nn.Module
    return is_dataclass(value) and not isinstance(value, type | module)


def _record_parts(record: Any) -> Parts:
    return {f.name: getattr(record, f.name) for f in fields(record) if hasattr(record, f.name)}


def _record_refill(record: Any, parts: Parts) -> None:
    for name, part in parts.items():
        if getattr(record, name) is not part:
            object.__setattr__(record, name, part)  # a frozen one is changed as well


def _copied(refill: Callable[[Any, Parts], None]) -> Callable[[Any, Parts], Any]:
    def made(old: Any, parts: Parts) -> Any:
        new = copy(old)
        refill(new, parts)
        return new

    return made


KINDS = (
    Kind(_is_packed, _packed_parts, _packed_made),
    Kind(lambda value: isinstance(value, tuple), _numbered, _tuple_made),
    Kind(lambda value: isinstance(value, list), _numbered, _copied(_list_refill), _list_refill),
    Kind(
        lambda value: isinstance(value, MutableMapping),
        lambda value: dict(value.items()),
        _copied(_mapping_refill),
        _mapping_refill,
    ),
    Kind(_is_record, _record_parts, _copied(_record_refill), _record_refill),
)
"""Every kind of container that is looked into; the first that includes a value is its kind."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A container that was made anew, and what it was made from."""

    kind: Kind
    old: Any
    new: Any
    parts: Parts
    """What the new one held when it was made."""

    @property
    def present(self) -> Parts | None:
        """The parts of the new one, if somebody has changed them since."""
        parts = self.kind.parts(self.new)
        return None if _same(parts, self.parts) else parts


class Mapped:
    """Makes nested values anew with every tensor changed, each tensor and container once.

    Two places that hold one object hold one object afterwards.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # the old is kept, so that its id stays its own
        self.containers: list[Changed] = []

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors changed."""
        if id(value) in self._done:
            return self._done[id(value)][1]
        if is_tensor(value):
            self._done[id(value)] = value, self._change(value)
            return self._done[id(value)][1]
        kind = next((kind for kind in KINDS if kind.includes(value)), None)
        return value if kind is None else self._contained(kind, value)

    def _contained(self, kind: Kind, value: Any) -> Any:
        if kind.refill is not None:
            self._done[id(value)] = value, value  # what holds itself is not followed round
        parts = {key: self(part) for key, part in kind.parts(value).items()}
        new = kind.made(value, parts)
        self._done[id(value)] = value, new
        if kind.refill is not None:
            self.containers.append(Changed(kind, value, new, parts))
        return new


def _same(left: Mapping[Any, Any], right: Mapping[Any, Any]) -> bool:
    return left.keys() == right.keys() and all(left[key] is right[key] for key in left)
