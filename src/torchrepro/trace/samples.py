"""What the program's own functions return while a loader prepares a batch.

Only a batch that is loaded in the main process, and only for a request that asks for samples: the
profile function that sees every call costs more than the rest of a recording.
"""

from __future__ import annotations

import marshal
import sys
import threading
from dataclasses import dataclass
from functools import cache
from itertools import islice
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrepro.trace.fingerprint_cache import fingerprint_of, size_of
from torchrepro.trace.format import BETWEEN, RETURNED, SAMPLE
from torchrepro.trace.frames import is_of_program, place_at
from torchrepro.trace.op_facts import shape_of, value_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from torchrepro.trace.frames import Place

_MOST = 64  # parts of one value
_LONGEST = 100_000  # items of a list or a dict
_DEEPEST = 4
_LARGEST = 1 << 26  # bytes: a dataset that a function passes on is not read again and again
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_ASKS_FOR_A_SAMPLE = ("__getitem__", "__getitems__")
_GENERATOR = 0x20  # the flag of a generator's code, see the documentation of `inspect`
_digest = xxhash.xxh3_128_digest


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a value, by its fingerprint."""

    shape: tuple[Any, ...]
    kind: Any
    """Its dtype, or the name of its type."""
    digest: Any


def parts_of(value: Any) -> list[Part]:
    """Return the parts of `value` that can be compared between runs; a few of very many.

    These are tensors, arrays, numbers, texts, and what has `tobytes` as an image does, alone and
    in lists, tuples and mappings.
    """
    try:
        return list(islice(_parts(value, 0), _MOST))
    except Exception:  # noqa: BLE001 - a class of the program's may raise what it likes
        return []


def _parts(value: Any, depth: int) -> Iterator[Part]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if size_of(value) <= _LARGEST:
            shape, *rest = shape_of(value)
            yield Part(shape, " ".join(map(str, rest)), fingerprint_of(value))
    elif kind in _PLAIN:
        if not isinstance(value, str | bytes) or len(value) <= _LARGEST:
            yield Part((), kind.__name__, _digest(marshal.dumps(value, 2)))
    elif kind is dict and len(value) <= _LONGEST:  # another mapping may load what it is asked
        yield from _of_several(list(value), depth)
        yield from _of_several(list(value.values()), depth)
    elif isinstance(value, list | tuple) and len(value) <= _LONGEST:
        yield from _of_several(list(value), depth)
    elif callable(getattr(value, "tobytes", None)):  # an array or an image
        dtype = getattr(value, "dtype", None)
        if not getattr(dtype, "hasobject", False) and getattr(value, "nbytes", 0) <= _LARGEST:
            data = value.tobytes()
            shape = getattr(value, "shape", None) or getattr(value, "size", ())
            name = kind.__name__ if dtype is None else str(dtype)
            yield Part(tuple(shape) if isinstance(shape, tuple) else (), name, _digest(data))


def _of_several(values: list[Any], depth: int) -> Iterator[Part]:
    """Yield a list of plain values as one part, and any other by what is in it."""
    if values and all(type(each) in _PLAIN for each in values):
        yield Part((len(values),), "list", _digest(marshal.dumps(values, 2)))
    elif depth < _DEEPEST:
        for each in values:
            yield from _parts(each, depth + 1)


class _Calls(threading.local):
    """The calls of the program's functions that are under way on one thread."""

    def __init__(self) -> None:
        self.loading = 0
        self.before: Any = None
        self.ours: Any = None
        self.stack: list[tuple[FrameType, str, bool]] = []
        self.sample = ""


class SampleRecorder:
    """Reports what each function of the program returns between `begin` and `end`.

    `take` is called with the place of the return, the function, the value and what is known of the
    call. A generator's `yield` counts as a return.
    """

    def __init__(self, take: Callable[[Place, str, Any, str], None]) -> None:
        self._take = take
        self._calls = _Calls()

    def begin(self) -> None:
        """Begin to watch the calls of this thread; a profile function that is set goes on."""
        calls = self._calls
        calls.loading += 1
        before = sys.getprofile()
        if calls.loading > 1 or (before is not None and not callable(before)):
            return  # a loader within a loader; or a profiler written in C, which cannot be called
        calls.before, calls.ours = before, self._on_event
        sys.setprofile(calls.ours)

    def end(self) -> None:
        """Stop watching; does nothing on a thread that has not begun."""
        calls = self._calls
        if not calls.loading:
            return
        calls.loading -= 1
        if not calls.loading:
            if calls.ours is not None and sys.getprofile() == calls.ours:
                sys.setprofile(calls.before)
            calls.before = calls.ours = None
            calls.stack.clear()
            calls.sample = ""

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        calls, code = self._calls, frame.f_code
        if calls.before is not None:
            calls.before(frame, event, value)
        if event not in {"call", "return"} or not is_of_program(code):
            return
        if event == "return":
            while calls.stack:
                called, text, is_sample = calls.stack.pop()
                if is_sample:
                    calls.sample = ""
                if called is frame:
                    place = place_at("", code, frame.f_lasti)
                    self._take(place, f"{_name(code)}{RETURNED}", value, text)
                    return
        elif not calls.sample and code.co_name in _ASKS_FOR_A_SAMPLE and code.co_argcount > 1:
            calls.sample = f"{SAMPLE}{_index_text(frame.f_locals[code.co_varnames[1]])}"
            calls.stack.append((frame, calls.sample, True))
        else:
            known = filter(None, (calls.sample, _numbers_given(frame)))
            calls.stack.append((frame, BETWEEN.join(known), False))


@cache
def _name(code: CodeType) -> str:
    return code.co_qualname.replace("<locals>.", "")


def _index_text(index: Any) -> str:
    try:
        return value_text(index.tolist() if hasattr(index, "tolist") else index)
    except Exception:  # noqa: BLE001 - see `parts_of`
        return type(index).__name__


def _numbers_given(frame: FrameType) -> str:
    """Return the numbers among the arguments of a call that begins, as in ``angle=3.2``."""
    code = frame.f_code
    if code.co_flags & _GENERATOR:
        return ""  # it may only go on, with other values in its arguments
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = ((name, frame.f_locals.get(name)) for name in names)
    return ", ".join(
        f"{name}={value_text(value.item() if hasattr(value, 'item') else value)}"
        for name, value in given
        if isinstance(value, Number)
    )
