"""What code of the program can reach: variables, attributes, and the globals that it names."""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash

from torchrepro.ground.callers import address, is_library
from torchrepro.seeding.generators import GeneratorKind, generator_kind
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.hooks import parts_of
from torchrepro.trace.op_facts import tensors_in

_MOST, _ITEMS = 2000, 200  # values that are looked at in all, and of one
NUMBERS = (int, float)
_WITHOUT_PARTS = (*NUMBERS, bool, complex, str, bytes, type(None), torch.Tensor, ModuleType)


def digest(value: Any) -> str:
    """Return one digest of all that can be compared in a value; empty where nothing can."""
    with unobserved():
        parts = [(its, kind, mark.hex()) for its, kind, mark in parts_of(value)]
    is_empty = isinstance(value, list | tuple | dict | None) and not value
    return text_digest(parts) if parts or is_empty else ""


def batch_digest(batch: Any) -> str:
    """Return a digest of a batch, the same in a worker and where it is handed out."""
    with unobserved():
        return digest(batch) or text_digest([fingerprint(each) for each in tensors_in(batch)])


def text_digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def global_generators() -> dict[str, Any]:
    return {
        "random": getattr(random.getstate, "__self__", None),
        "numpy.random": getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None),
        "torch": torch.default_generator,
    }


def generators(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, GeneratorKind]]:
    """Yield each generator that can be reached, with its first name."""
    seen = set[int]()
    for name, value in reached(roots):
        kind = None if isinstance(value, random.SystemRandom) else generator_kind(value)
        if kind is not None and address(value) not in seen:
            seen.add(address(value))
            yield name, value, kind


def reached(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield values by their names: the roots, what these have, and globals that functions read.

    Below a root without a name, an attribute is called by its class, as ``rng of Rows``.
    """
    seen = set[int]()
    todo = [*roots]
    for name, value in todo:
        if name:
            yield name, value
        is_expanded = isinstance(value, _WITHOUT_PARTS) or address(value) in seen
        if not is_expanded and len(todo) < _MOST:
            seen.add(address(value))
            todo += islice(_within(name, value), _ITEMS)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        names, attributes = _read_by(value.__code__)
        for each in names:
            found = value.__globals__.get(each)
            yield each, found
            if isinstance(found, ModuleType) and is_own(found):
                yield from ((its, vars(found)[its]) for its in attributes if its in vars(found))
    elif isinstance(value, list | tuple):
        its = enumerate(value)
        yield from ((f"{name}[{at}]", each) for at, each in its if type(each) not in NUMBERS)
    elif isinstance(value, dict):
        items = [*value.items()]
        yield from ((f"{name}[{key!r}]", each) for key, each in items if isinstance(key, str | int))
    else:
        kind = value if isinstance(value, type) else type(value)
        try:
            own = {} if value is kind else vars(value)
        except Exception:  # noqa: BLE001 - it has none, or is a proxy that stands for nothing now
            own = {}
        for members in (own, *_members_of(kind)):
            for its, each in [*members.items()]:
                is_code = isinstance(each, FunctionType | staticmethod | classmethod)
                if is_code or not its.startswith("__"):
                    is_variable = name and " of " not in name
                    yield f"{name}.{its}" if is_variable else f"{its} of {kind.__name__}", each


@cache
def _read_by(code: CodeType) -> tuple[list[str], list[str]]:
    """Return the globals that code of the program reads, and the attributes that may be theirs."""
    codes = [code] if is_of_program(code) else []
    for each in codes:
        codes += [its for its in each.co_consts if isinstance(its, CodeType)]
    read = [its for each in codes for its in dis.get_instructions(each)]
    names = dict.fromkeys(its.argval for its in read if its.opname == "LOAD_GLOBAL")
    return [*names], [name for each in codes for name in each.co_names]


@cache
def _members_of(kind: type) -> list[Mapping[str, Any]]:
    return [vars(each) for each in kind.__mro__ if is_own(sys.modules.get(each.__module__))]


def is_own(module: ModuleType | None) -> bool:
    return not is_library(getattr(module, "__file__", None) or "")
