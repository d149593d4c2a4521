"""Finds the values that a program can reach through variables, attributes and globals."""

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

_MOST, _ITEMS = 2000, 200  # the most values visited in total, and inside of one value
NUMBERS = (int, float)
_WITHOUT_PARTS = (*NUMBERS, bool, complex, str, bytes, type(None), torch.Tensor, ModuleType)


def digest(value: Any) -> str:
    """Return one digest of the comparable parts of a value. It is empty without such parts."""
    with unobserved():
        parts = [(path, part_type, mark.hex()) for path, part_type, mark in parts_of(value)]
    is_empty = isinstance(value, list | tuple | dict | None) and not value
    return text_digest(parts) if parts or is_empty else ""


def batch_digest(batch: Any) -> str:
    """Return a digest of a batch. It is the same in a worker and in the main process."""
    with unobserved():
        return digest(batch) or text_digest([fingerprint(tensor) for tensor in tensors_in(batch)])


def text_digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())


def global_generators() -> dict[str, Any]:
    return {
        "random": getattr(random.getstate, "__self__", None),
        "numpy.random": getattr(sys.modules.get("numpy.random.mtrand"), "_rand", None),
        "torch": torch.default_generator,
    }


def generators(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, GeneratorKind]]:
    """Yield each reachable random generator once, with the first name found and its kind."""
    seen, kinds = set[int](), dict[type, GeneratorKind | None]()
    for name, value in reached(roots):
        cls = type(value)
        if cls not in kinds:
            kinds[cls] = None if isinstance(value, random.SystemRandom) else generator_kind(value)
        generator = kinds[cls]
        if generator is not None and address(value) not in seen:
            seen.add(address(value))
            yield name, value, generator


def reached(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield values with their names: `roots`, their parts, and globals that functions read.

    Below a root without a name, attributes are named with the class, such as ``rng of Rows``.
    """
    seen = set[int]()
    todo = [*roots]
    for name, value in todo:
        if name:
            yield name, value
        has_parts = len(todo) < _MOST and not isinstance(value, _WITHOUT_PARTS)
        if has_parts and address(value) not in seen:
            seen.add(address(value))
            todo += islice(_within(name, value), _ITEMS)


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        names, attributes = _read_by(value.__code__)
        for global_name in names:
            global_value = value.__globals__.get(global_name)
            yield global_name, global_value
            if isinstance(global_value, ModuleType) and is_own(global_value):
                in_module = vars(global_value)
                yield from ((key, in_module[key]) for key in attributes if key in in_module)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            if type(part) not in NUMBERS:
                yield f"{name}[{index}]", part
    elif isinstance(value, dict):
        for key, part in [*value.items()]:
            if isinstance(key, str | int):
                yield f"{name}[{key!r}]", part
    else:
        cls = value if isinstance(value, type) else type(value)
        try:
            attributes_of_value = {} if value is cls else vars(value)
        except Exception:  # noqa: BLE001 - no attributes, or a proxy without a target
            attributes_of_value = {}
        is_variable = name and " of " not in name
        before, after = (f"{name}.", "") if is_variable else ("", f" of {cls.__name__}")
        for members in (attributes_of_value, *_members_of(cls)):
            for key, part in [*members.items()]:
                if key[:2] != "__" or isinstance(part, FunctionType | staticmethod | classmethod):
                    yield before + key + after, part


@cache
def _read_by(code: CodeType) -> tuple[list[str], list[str]]:
    """Return the names of globals that program code reads, and of attributes it may read."""
    codes = [code] if is_of_program(code) else []
    for outer in codes:
        codes += [inner for inner in outer.co_consts if isinstance(inner, CodeType)]
    instructions = [step for code in codes for step in dis.get_instructions(code)]
    names = dict.fromkeys(step.argval for step in instructions if step.opname == "LOAD_GLOBAL")
    return [*names], [name for code in codes for name in code.co_names]


@cache
def _members_of(cls: type) -> list[Mapping[str, Any]]:
    return [vars(base) for base in cls.__mro__ if is_own(sys.modules.get(base.__module__))]


def is_own(module: ModuleType | None) -> bool:
    return not is_library(getattr(module, "__file__", None) or "")
