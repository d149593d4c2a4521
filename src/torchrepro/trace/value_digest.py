"""Computes digests of values of a program. Equal values have equal digests in all processes.

Computing a digest runs no code of the program. Types are compared by identity or `id`, because a
metaclass may define `__hash__` and `__eq__`. A class may override its methods, so fields are read
with the descriptors of `type` and of slots, and content with methods of the builtin base class.
A class of a library is recognized only if the loaded library exports the same class object.
"""

from __future__ import annotations

import array
import builtins
import collections
import datetime as dt
import functools
import io
import os
import pathlib
import random
import stat
import sys
import types
from collections.abc import Callable, Iterable
from itertools import chain
from marshal import dumps
from operator import itemgetter
from typing import Any, Final

from xxhash import xxh3_64, xxh3_64_digest

OPAQUE: Final = b"?"
"""The digest of a value that cannot be compared between two processes."""

NOTHING: Final = b""
"""The digest of code: modules, functions, classes, methods. Code never counts as different."""

PARTLY: Final = b"~"
"""The end of the digest of a value that has some opaque elements."""

MISSING: Final = object()
"""Returned by `field_of` for an attribute that cannot be read without running code."""

ELEMENTS = 50_000  # the most elements of all containers in one value
PLAIN_ELEMENTS = 1_000_000  # the most numbers and texts in one container or column
SIZE = 1 << 28  # the most bytes of text, bytes and arrays in one value
DEPTH = 3  # the most objects nested in one another

_module_of = vars(type)["__module__"].__get__
_name_of = vars(type)["__qualname__"].__get__
_mro_of = vars(type)["__mro__"].__get__
_flags_of = vars(type)["__flags__"].__get__
_size_of = vars(type)["__basicsize__"].__get__
_dict_offset_of = vars(type)["__dictoffset__"].__get__
_weak_offset_of = vars(type)["__weakrefoffset__"].__get__
_namespace_of = vars(type)["__dict__"].__get__
_globals_of = vars(types.ModuleType)["__dict__"].__get__
_buffer_of = vars(io.TextIOWrapper)["buffer"].__get__

IS_HEAP_TYPE, IS_CLASS = 1 << 9, 1 << 31  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_TYPE_SUBCLASS
POINTER = 8

# Version 2 of marshal encodes equal values as equal bytes; later versions add references.
NUMBERS = {id(cls) for cls in (int, float, bool, complex, type(None))}
PLAIN = NUMBERS | {id(str), id(bytes)}
MARKS = {OPAQUE: b"opaque..", NOTHING: b"code...."}


class _BeyondBoundError(Exception):
    """A value has more elements or bytes than the limits allow."""


def digest_of(value: Any) -> bytes:
    """Return the digest of a value: 8 bytes, `OPAQUE` or `NOTHING`. Never raises.

    Different values have different bytes. `PARTLY` is appended if some elements are opaque.
    """
    try:
        if id(type(value)) in NUMBERS or (type(value) is str and len(value) < ELEMENTS):
            return xxh3_64_digest(dumps(value, 2))
        walk = _Walk()
        digest = walk.digest(value)
        return digest + PARTLY if walk.is_partly_opaque and digest not in MARKS else digest
    except Exception:  # noqa: BLE001 - libraries raise any error; other threads change values
        return OPAQUE


def field_of(value: Any, name: str) -> Any:
    """Return the attribute `name`, or `MISSING` if reading it could run code of the program.

    Reads the `__dict__` of a module or an instance, slots, and class variables that are not
    descriptors. Never raises.
    """
    try:
        return _field_of(value, name)
    except Exception:  # noqa: BLE001 - an empty slot, or a value that another thread changes
        return MISSING


def _field_of(value: Any, name: str) -> Any:
    cls = type(value)
    if any(base is types.ModuleType for base in _mro_of(cls)):
        return dict.get(_globals_of(value), name, MISSING)
    if type(_class_variable(cls, "__getattribute__")) is not types.WrapperDescriptorType:
        return MISSING
    is_class = _flags_of(cls) & IS_CLASS
    shared = _class_variable(cls, name)
    is_descriptor = _class_variable(type(shared), "__get__") is not MISSING
    if is_descriptor and (is_class or _class_variable(type(shared), "__set__") is not MISSING):
        is_slot = type(shared) is types.MemberDescriptorType and not is_class
        return shared.__get__(value) if is_slot else MISSING
    if is_class:
        field = _class_variable(value, name)
        if _class_variable(type(field), "__get__") is not MISSING:
            return MISSING
    else:
        field = dict.get(_dict_of(value), name, MISSING)
    return field if field is not MISSING or is_descriptor else shared


def _class_variable(cls: type, name: str) -> Any:
    for base in _mro_of(cls):
        variable = _namespace_of(base).get(name, MISSING)
        if variable is not MISSING:
            return variable
    return MISSING


def _dict_of(value: Any) -> dict[Any, Any]:
    if not _dict_offset_of(type(value)):
        return {}
    for base in _mro_of(type(value)):
        getter = _namespace_of(base).get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return getter.__get__(value)  # type: ignore[no-any-return]
    return {}


def _fields_of(value: Any, base: type) -> dict[str, Any] | None:
    """Return the fields of `value` by name, from its slots and its `__dict__`.

    Returns None if `value` has more memory than `base` and the fields use, as C types may.
    """
    cls = type(value)
    memory = _size_of(cls) - _size_of(base)
    offset = _dict_offset_of(cls)
    before_object = offset < -POINTER or offset == -1  # in Python 3.11 and 3.12
    if offset and not before_object and not _dict_offset_of(base):
        memory -= POINTER
    if _weak_offset_of(cls) > 0 and not _weak_offset_of(base):
        memory -= POINTER
    fields: dict[str, Any] = {}
    may_have_slots = memory != 0
    for owner in _mro_of(cls):
        if owner is base or not may_have_slots:
            break
        for name, slot in _namespace_of(owner).items():
            if type(slot) is types.MemberDescriptorType and slot.__objclass__ is owner:
                memory -= POINTER
                try:
                    fields[name] = slot.__get__(value)
                except AttributeError:  # an empty slot
                    continue
    fields.update(item for item in dict.items(_dict_of(value)) if type(item[0]) is str)
    return None if memory else fields


class _Walk:
    """Computes one digest. Counts elements and bytes to enforce the limits, and detects cycles."""

    def __init__(self) -> None:
        self.elements = self.size = self.depth = 0
        self.is_partly_opaque = False
        self.enclosing: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        cls = type(value)
        if id(cls) in PLAIN:
            if id(cls) not in NUMBERS:
                self.read(len(value))
            return xxh3_64_digest(dumps(value, 2))
        if _flags_of(cls) & IS_CLASS:
            return NOTHING
        if id(value) in self.enclosing:
            return xxh3_64_digest(b"enclosing %d" % self.enclosing[id(value)])
        self.enclosing[id(value)] = len(self.enclosing)
        try:
            handler = _handler(cls)
            return handler(value, self) if handler else self.of_object(value)
        except (_BeyondBoundError, RecursionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - one field that raises does not affect the others
            return OPAQUE
        finally:
            del self.enclosing[id(value)]

    def count(self, elements: int) -> None:
        self.elements += elements
        if self.elements > ELEMENTS:
            raise _BeyondBoundError

    def read(self, size: int) -> None:
        self.size += size
        if self.size > SIZE:
            raise _BeyondBoundError

    def of_elements(self, name: str, elements: Iterable[Any], count: int) -> bytes:
        """Return the digest of a container, or `OPAQUE` if all elements are opaque."""
        if count > PLAIN_ELEMENTS:
            raise _BeyondBoundError
        row = tuple(elements)
        type_ids = {*map(id, map(type, row))}
        if not type_ids <= PLAIN:
            self.count(count)
            return self.of_values(name, *row, least=1)
        if not type_ids <= NUMBERS:
            self.read(sum(len(text) for text in row if id(type(text)) not in NUMBERS))
        return xxh3_64_digest(_utf8(name) + dumps(row, 2))

    def of_values(self, name: str, *values: Any, least: int | None = None) -> bytes:
        """Return one digest of several values. Returns `OPAQUE` if any value is opaque.

        If `least` is set, it is enough that this many values are not opaque.
        """
        digests = [self.digest(value) for value in values]
        if len(digests) - digests.count(OPAQUE) < (len(values) if least is None else least):
            return OPAQUE
        self.is_partly_opaque = self.is_partly_opaque or OPAQUE in digests
        marks = [MARKS.get(digest, digest) for digest in digests]
        return xxh3_64_digest(_utf8(name) + b"".join(marks))

    def of_object(self, value: Any) -> bytes:
        """Return one digest of the fields of an object, and of the content of its builtin base.

        For a subclass of list, the content is the elements. Ignores opaque fields and code.
        """
        cls = base = type(value)
        handler = None
        for base in _mro_of(cls):
            handler = _handler(base)
            if handler or base is object:
                break
            module = _package_of(base)
            is_iterator = "__next__" in _namespace_of(base)
            if is_iterator or module in OPAQUE_PACKAGES or not _flags_of(base) & IS_HEAP_TYPE:
                return OPAQUE
        if handler is _code:
            return NOTHING
        fields = _fields_of(value, base)
        inherited = handler in (None, _numpy_array) or id(base) in INHERITABLE
        if fields is None or not inherited or self.depth >= DEPTH:
            return OPAQUE
        self.count(len(fields))
        self.depth += 1
        items = sorted(fields.items(), key=itemgetter(0))
        digests = [(name, self.digest(field)) for name, field in items]
        self.depth -= 1
        if handler:
            digests.append(("", handler(value, self)))
        known = [(_utf8(name), digest) for name, digest in digests if digest not in MARKS]
        text = b"\0".join((_utf8(_name_of(cls)), *chain.from_iterable(known)))
        return xxh3_64_digest(text) if known else OPAQUE


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _package_of(cls: type) -> str:
    module = _module_of(cls)
    return module.partition(".")[0] if type(module) is str else ""


Handler = Callable[[Any, _Walk], bytes]


def _code(value: Any, walk: _Walk) -> bytes:
    return NOTHING


def _opaque(value: Any, walk: _Walk) -> bytes:
    return OPAQUE


def _elements(base: Any) -> Handler:
    name, iterate, count = base.__name__, base.__iter__, base.__len__
    return lambda value, walk: walk.of_elements(name, iterate(value), count(value))


def _dict(value: Any, walk: _Walk) -> bytes:
    items = chain.from_iterable(dict.items(value))
    return walk.of_elements("dict", items, 2 * dict.__len__(value))


def _ordered_dict(value: Any, walk: _Walk) -> bytes:
    # `dict.items` has another order. The iterator of an OrderedDict calls `__hash__` of every key.
    if dict.__len__(value) > ELEMENTS or not {*map(id, map(type, dict.keys(value)))} <= PLAIN:
        return OPAQUE
    items = chain.from_iterable(collections.OrderedDict.items(value))
    return walk.of_elements("OrderedDict", items, 2 * dict.__len__(value))


def _bytearray(value: Any, walk: _Walk) -> bytes:
    walk.read(bytearray.__len__(value))
    # A copy, because the program cannot resize a bytearray while its memory is exported.
    return xxh3_64_digest(b"bytearray" + bytearray.__getitem__(value, slice(None)))


def _values_read_by(name: str, *getters: Callable[[Any], Any]) -> Handler:
    return lambda value, walk: walk.of_values(name, *(get(value) for get in getters))


def _attributes(base: Any, *names: str) -> Handler:
    return _values_read_by(base.__name__, *(vars(base)[name].__get__ for name in names))


def _read_by(read: Callable[[Any], Any]) -> Handler:
    """Return a handler for a class. The handler digests the state that `read` returns."""
    return lambda value, walk: walk.of_values(type(value).__name__, read(value))


def _file(value: Any, walk: _Walk) -> bytes:
    # `tell` of a text file flushes it, and `tell` of a buffer blocks on a pipe.
    buffered = _buffer_of(value) if type(value) is io.TextIOWrapper else value
    if not any(type(buffered) is file_type for file_type in FILES):
        return OPAQUE
    raw = buffered if type(buffered) is io.FileIO else buffered.raw
    if type(raw) is not io.FileIO or not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        return OPAQUE
    return walk.of_values("file", raw.name, raw.mode, buffered.tell())


FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom)
TIME = ("hour", "minute", "second", "microsecond", "fold", "tzinfo")
# These handlers call only methods of the builtin class, so no code of a subclass runs.
INHERITED: dict[Any, Handler] = {
    int: _values_read_by("int", int.__int__),
    float: _values_read_by("float", float.__float__),
    complex: _values_read_by("complex", complex.__complex__),
    str: _values_read_by("str", str.__str__),
    bytes: _values_read_by("bytes", lambda value: bytes.__getitem__(value, slice(None))),
    bytearray: _bytearray,
    **{base: _elements(base) for base in (list, tuple, set, frozenset, collections.deque)},
    dict: _dict,
    collections.defaultdict: _dict,
    collections.OrderedDict: _ordered_dict,
    dt.date: _attributes(dt.date, "year", "month", "day"),
    dt.timedelta: _attributes(dt.timedelta, "days", "seconds", "microseconds"),
}
EXACT: dict[Any, Handler] = {
    dt.datetime: _read_by(lambda value: (value.date(), value.timetz())),
    dt.time: _attributes(dt.time, *TIME),
    dt.timezone: _read_by(lambda value: value.__getinitargs__()),
    **{cls: _attributes(cls, "start", "stop", "step") for cls in (range, slice)},
    array.array: _read_by(lambda value: (value.typecode, value.tobytes())),
    random.Random: _read_by(lambda value: dumps(value.getstate(), 2)),
    types.SimpleNamespace: _read_by(vars),
    **dict.fromkeys((io.BytesIO, io.StringIO), _read_by(lambda v: (v.getvalue(), v.tell()))),
    **dict.fromkeys((type({}.keys()), type({}.values()), type({}.items())), _read_by(list)),
    **dict.fromkeys((pathlib.PosixPath, pathlib.PurePosixPath), _read_by(str)),
    **dict.fromkeys((*FILES, io.TextIOWrapper), _file),
}
CODE: tuple[Any, ...] = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
    *(types.CodeType, types.GenericAlias, types.UnionType, types.EllipsisType, property),
    *(types.NotImplementedType, staticmethod, classmethod, functools.partial),
    type(functools.cache(print)),
)
OPAQUE_PACKAGES = {
    *("threading", "queue", "multiprocessing", "concurrent", "asyncio", "subprocess", "socket"),
    *("selectors", "logging", "tempfile", "weakref", "ctypes", "contextlib"),
}
"""Packages whose objects depend on process and thread ids, times, and other threads."""


def _numpy_array(value: Any, walk: _Walk) -> bytes:
    np = sys.modules["numpy"]
    plain = np.ndarray.view(value, np.ndarray)
    dtype = plain.dtype
    name = f"ndarray {dtype.str} {dtype.type.__name__} {plain.shape}"
    if dtype.names:  # by field, because there may be uninitialized gaps between fields
        return walk.of_values(f"{name} {dtype.names}", *(plain[field] for field in dtype.names))
    if dtype.hasobject:
        return walk.of_elements(name, plain.reshape(-1).flat, plain.size)
    if dtype.type in (np.longdouble, np.clongdouble):  # 6 of 16 bytes are uninitialized
        return OPAQUE
    walk.read(plain.nbytes)
    state = xxh3_64(name.encode())
    pieces: Iterable[Any] = ()
    if plain.nbytes and plain.flags.c_contiguous:
        pieces = (plain.reshape(-1),)
    elif plain.nbytes:
        buffered = {"flags": ("external_loop", "buffered"), "op_flags": [["readonly", "contig"]]}
        pieces = np.nditer(plain, **buffered, order="C", buffersize=1 << 20)
    for piece in pieces:
        state.update(piece.view(np.uint8))
    return state.digest()


def _numpy_scalar(value: Any, walk: _Walk) -> bytes:
    return walk.of_values("scalar", sys.modules["numpy"].asarray(value))


def _tensor(value: Any, walk: _Walk) -> bytes:
    from torchrepro.trace.fingerprint import fingerprint, memory_of, torch, unobserved

    with unobserved():
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)  # noqa: SLF001
        if wrapped or torch._is_functional_tensor(value) or value.device.type != "cpu":  # noqa: SLF001
            return OPAQUE
        memory = memory_of(value)
        walk.read(sum(part.nbytes for part in memory.parts))
        name = f"tensor {value.dtype} {tuple(value.shape)} "
        known = memory.layout != "no memory"
        return xxh3_64_digest(name.encode() + fingerprint(value)) if known else OPAQUE


def _generator_state(value: Any) -> Any:
    return value.get_state() if value.device.type == "cpu" else iter(())


def _column_of_values(
    walk: _Walk, description: tuple[Any, ...], count: int, read: Callable[[], Any]
) -> bytes:
    """Return the digest of a column that is not plain memory. `read` returns the values."""
    if count > PLAIN_ELEMENTS:
        return OPAQUE
    return walk.of_elements(repr(walk.of_values("column", *description)), read(), count)


def _pandas_column(value: Any, walk: _Walk) -> bytes:
    data = value.array
    if _package_of(type(data)) != "pandas":  # an extension array of the program
        return OPAQUE
    description = ("pandas", value.name, str(value.dtype))
    if hasattr(data, "asi8"):  # times, as integers
        return walk.of_values("column", *description, data.asi8)
    if hasattr(data, "categories"):
        return walk.of_values("column", *description, data.codes, data.categories, data.ordered)
    if _package_of(type(value.dtype)) == "numpy" and not value.dtype.hasobject:
        return walk.of_values("column", *description, value.to_numpy())
    return _column_of_values(walk, description, len(data), value.to_list)


def _pandas_series(value: Any, walk: _Walk) -> bytes:
    column = _pandas_column(value, walk)
    return OPAQUE if column == OPAQUE else walk.of_values("Series", value.index, column)


def _pandas_frame(value: Any, walk: _Walk) -> bytes:
    columns = [_pandas_column(value.iloc[:, number], walk) for number in range(value.shape[1])]
    return walk.of_values("DataFrame", value.index, value.columns, columns)


def _polars_column(value: Any, walk: _Walk) -> bytes:
    dtype = value.dtype
    if _package_of(type(dtype)) != "polars" or len(value) * 8 > SIZE:
        return OPAQUE
    description = ("polars", value.name, str(dtype))
    if (dtype.is_integer() or dtype.is_float()) and not value.null_count():
        return walk.of_values("column", *description, value.to_numpy())
    return _column_of_values(walk, description, len(value), value.to_list)


def _arrow_column(value: Any, walk: _Walk) -> bytes:
    dtype = sys.modules["pyarrow"].DataType.__str__(value.type)
    chunks = getattr(value, "chunks", [value])
    if dtype.startswith(
        ("timestamp", "time", "duration", "date")
    ):  # `to_pylist` would import pandas
        chunks = [chunk.view(f"int{value.type.bit_width}") for chunk in chunks]
    elif dtype in ARROW_NUMBERS and not value.null_count:
        state = xxh3_64(f"arrow {dtype} {len(value)}".encode())
        for chunk in chunks:
            walk.read(chunk.nbytes)
            state.update(chunk.to_numpy(zero_copy_only=True))
        return state.digest()
    if "extension" in dtype:
        return OPAQUE
    lists = (chunk.to_pylist() for chunk in chunks)
    return _column_of_values(walk, ("arrow", dtype), len(value), lambda: chain.from_iterable(lists))


def _image(value: Any) -> Any:
    palette = value.getpalette() if value.mode == "P" else None
    return value.mode, value.size, palette, value.tobytes()


WIDTHS = (8, 16, 32, 64)
ARROW_NUMBERS = {"float", "double", *(f"{s}int{width}" for s in ("", "u") for width in WIDTHS)}

LIBRARIES: dict[str, dict[str, Handler]] = {
    "decimal": {"Decimal": _read_by(lambda value: tuple(value.as_tuple()))},
    "zoneinfo": {"ZoneInfo": _read_by(lambda value: value.key)},
    "numpy": {
        "ndarray": _numpy_array,
        "generic+": _numpy_scalar,
        "ufunc": _code,
    },
    "numpy.dtypes": {"object+": _read_by(str)},
    "numpy.random": {
        "Generator": _read_by(lambda value: value.bit_generator),
        "RandomState": _read_by(lambda value: value.get_state(legacy=False)),
        "BitGenerator+": _read_by(lambda value: value.state),
    },
    "torch": {
        "Tensor": _tensor,
        "Generator": _read_by(_generator_state),
        "Size": _read_by(tuple),
        **dict.fromkeys(("dtype", "device", "layout", "memory_format"), _read_by(str)),
    },
    "torch.return_types": {"tuple+": _read_by(tuple)},
    "torch.nn": {"Parameter": _tensor, "Module": _opaque},
    "torch.optim": {"Optimizer": _opaque},
    "pandas": {
        "DataFrame": _pandas_frame,
        "Series": _pandas_series,
        "Index+": _pandas_column,
        "MultiIndex": _read_by(lambda value: [*value.names, *value.levels, *value.codes]),
        "Timestamp": _read_by(lambda value: (value.value, value.unit, str(value.tz))),
        "Timedelta": _read_by(lambda value: (value.value, value.unit)),
    },
    "polars": {
        "DataFrame": _read_by(lambda value: value.get_columns()),
        "Series": _polars_column,
        "LazyFrame": _opaque,
    },
    "pyarrow": {
        **dict.fromkeys(
            ("Table", "RecordBatch"), _read_by(lambda value: [value.schema.names, value.columns])
        ),
        **dict.fromkeys(("ChunkedArray", "Array+"), _arrow_column),
    },
    "PIL.Image": {"Image": _read_by(_image)},
}
"""The handlers of the classes that each module exports; with a `+`, also of exported subclasses."""

PACKAGES = {module.partition(".")[0] for module in LIBRARIES}
INHERITABLE = {id(cls) for cls in INHERITED}
_searched: set[str] = set()
_handlers: dict[int, Handler] = {
    **{id(cls): _code for cls in CODE},
    **{id(cls): handler for cls, handler in (*INHERITED.items(), *EXACT.items())},
}
"""The handlers by the `id` of the exact class; no class in it is ever freed."""


def _handler(cls: type) -> Handler | None:
    if id(cls) not in _handlers and _package_of(cls) in PACKAGES:
        for module in LIBRARIES.keys() - _searched:
            exported = _globals_of(sys.modules[module]) if module in sys.modules else {}
            if exported and not getattr(exported["__spec__"], "_initializing", False):
                for name, handler in LIBRARIES[module].items():
                    base = exported.get(name.removesuffix("+")) or getattr(builtins, name[:-1])
                    candidates = exported.values() if name.endswith("+") else (base,)
                    subclasses = [export for export in candidates if _derives(export, base)]
                    _handlers.update((id(subclass), handler) for subclass in subclasses)
                _searched.add(module)
    return _handlers.get(id(cls))


def _derives(exported: Any, base: type) -> bool:
    is_class = bool(_flags_of(type(exported)) & IS_CLASS)
    return is_class and any(parent is base for parent in _mro_of(exported))
