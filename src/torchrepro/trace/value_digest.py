"""Digests of the values of a program: equal in two processes where the values are equal.

No digest runs code of the program. A type is compared by identity or by its `id`: a metaclass may
have its own `__hash__` and `__eq__`. Fields are read by the descriptors of `type` and of slots, and
content by methods of the builtin base, since a class may replace its own. A class of a library is
known only if the library, once loaded, exports that very object.
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
"""Of a value that has no digest with the same meaning in two processes."""

NOTHING: Final = b""
"""Of code: modules, functions, classes, methods. Never a difference."""

PARTLY: Final = b"~"
"""Ends the digest of a value with elements that have none."""

MISSING: Final = object()
"""What `field_of` returns for an attribute that only code of the program may read."""

ELEMENTS = 50_000  # of containers, in one value
PLAIN_ELEMENTS = 1_000_000  # of one container, or column of a frame, of numbers and text
SIZE = 1 << 28  # bytes of text, bytes and arrays, in one value
DEPTH = 3  # objects within objects

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

# Version 2 of marshal writes equal values of these in the same bytes; later ones add references.
NUMBERS = {id(kind) for kind in (int, float, bool, complex, type(None))}
PLAIN = NUMBERS | {id(str), id(bytes)}
MARKS = {OPAQUE: b"opaque..", NOTHING: b"code...."}


class _BeyondBoundError(Exception):
    """A value has more elements or bytes than are read."""


def digest_of(value: Any) -> bytes:
    """Return 8 bytes that differ where the value does, or `OPAQUE`, or `NOTHING`. Never raises.

    After those of a container with opaque elements comes `PARTLY`.
    """
    try:
        if id(type(value)) in NUMBERS or (type(value) is str and len(value) < ELEMENTS):
            return xxh3_64_digest(dumps(value, 2))
        walk = _Walk()
        digest = walk.digest(value)
        return digest + PARTLY if walk.is_partly_opaque and digest not in MARKS else digest
    except Exception:  # noqa: BLE001 - any error of a library, or of what another thread changes
        return OPAQUE


def field_of(value: Any, name: str) -> Any:
    """Return the attribute `name` if it can be read without code of the program, or `MISSING`.

    It can where it is in the `__dict__` of a module or an instance, in a slot, or a class variable
    that is not a descriptor. Never raises.
    """
    try:
        return _field_of(value, name)
    except Exception:  # noqa: BLE001 - an empty slot, or what another thread changes
        return MISSING


def _field_of(value: Any, name: str) -> Any:
    kind = type(value)
    if any(base is types.ModuleType for base in _mro_of(kind)):
        return dict.get(_globals_of(value), name, MISSING)
    if type(_class_variable(kind, "__getattribute__")) is not types.WrapperDescriptorType:
        return MISSING
    is_class = _flags_of(kind) & IS_CLASS
    shared = _class_variable(kind, name)
    is_descriptor = _class_variable(type(shared), "__get__") is not MISSING
    if is_descriptor and (is_class or _class_variable(type(shared), "__set__") is not MISSING):
        is_slot = type(shared) is types.MemberDescriptorType and not is_class
        return shared.__get__(value) if is_slot else MISSING
    if is_class:
        own = _class_variable(value, name)
        if _class_variable(type(own), "__get__") is not MISSING:
            return MISSING
    else:
        own = dict.get(_dict_of(value), name, MISSING)
    return own if own is not MISSING or is_descriptor else shared


def _class_variable(kind: type, name: str) -> Any:
    for base in _mro_of(kind):
        found = _namespace_of(base).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def _dict_of(value: Any) -> dict[Any, Any]:
    for base in _mro_of(type(value)) if _dict_offset_of(type(value)) else ():
        getter = _namespace_of(base).get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            found: dict[Any, Any] = getter.__get__(value)
            return found
    return {}


def _fields_of(value: Any, base: type) -> dict[str, Any] | None:
    """Return what the slots and the `__dict__` of `value` hold.

    Returns None where it has other memory than these and that of `base`: its class is written in C.
    """
    kind = type(value)
    memory = _size_of(kind) - _size_of(base)
    offset = _dict_offset_of(kind)
    before_object = offset < -POINTER or offset == -1  # as Python 3.11 and 3.12 say it
    if offset and not before_object and not _dict_offset_of(base):
        memory -= POINTER
    if _weak_offset_of(kind) > 0 and not _weak_offset_of(base):
        memory -= POINTER
    fields: dict[str, Any] = {}
    for each in _mro_of(kind) if memory else ():
        if each is base:
            break
        for name, slot in _namespace_of(each).items():
            if type(slot) is types.MemberDescriptorType and slot.__objclass__ is each:
                memory -= POINTER
                try:
                    fields[name] = slot.__get__(value)
                except AttributeError:  # nothing was assigned
                    continue
    fields.update(item for item in dict.items(_dict_of(value)) if type(item[0]) is str)
    return None if memory else fields


class _Walk:
    """What was read of one value, and the objects that enclose the current one."""

    def __init__(self) -> None:
        self.elements = self.size = self.depth = 0
        self.is_partly_opaque = False
        self.enclosing: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        kind = type(value)
        if id(kind) in PLAIN:
            if id(kind) not in NUMBERS:
                self.read(len(value))
            return xxh3_64_digest(dumps(value, 2))
        if _flags_of(kind) & IS_CLASS:
            return NOTHING
        if id(value) in self.enclosing:
            return xxh3_64_digest(b"enclosing %d" % self.enclosing[id(value)])
        self.enclosing[id(value)] = len(self.enclosing)
        try:
            handler = _handler(kind)
            return handler(value, self) if handler else self.of_object(value)
        except (_BeyondBoundError, RecursionError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - an error in one field leaves the others
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
        """Return the digest of a container; opaque where each element is."""
        if count > PLAIN_ELEMENTS:
            raise _BeyondBoundError
        row = tuple(elements)
        kinds = {*map(id, map(type, row))}
        if not kinds <= PLAIN:
            self.count(count)
            return self.of_parts(name, *row, least=1)
        if not kinds <= NUMBERS:
            self.read(sum(len(each) for each in row if id(type(each)) not in NUMBERS))
        return xxh3_64_digest(_utf8(name) + dumps(row, 2))

    def of_parts(self, name: str, *parts: Any, least: int | None = None) -> bytes:
        """Return the digest of what an object consists of; opaque where one of them is."""
        digests = [self.digest(part) for part in parts]
        if len(digests) - digests.count(OPAQUE) < (len(parts) if least is None else least):
            return OPAQUE
        self.is_partly_opaque = self.is_partly_opaque or OPAQUE in digests
        return xxh3_64_digest(_utf8(name) + b"".join(MARKS.get(each, each) for each in digests))

    def of_object(self, value: Any) -> bytes:
        """Return the digest of the fields, and of the content that a builtin base holds.

        Opaque fields and code are left out.
        """
        kind = base = type(value)
        handler = None
        for base in _mro_of(kind):
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
        text = b"\0".join((_utf8(_name_of(kind)), *chain.from_iterable(known)))
        return xxh3_64_digest(text) if known else OPAQUE


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _package_of(kind: type) -> str:
    module = _module_of(kind)
    return module.partition(".")[0] if type(module) is str else ""


# Of builtin types.

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
    # Its order is not that of `dict.items`, and its iterator hashes every key.
    if dict.__len__(value) > ELEMENTS or not {*map(id, map(type, dict.keys(value)))} <= PLAIN:
        return OPAQUE
    items = chain.from_iterable(collections.OrderedDict.items(value))
    return walk.of_elements("OrderedDict", items, 2 * dict.__len__(value))


def _bytearray(value: Any, walk: _Walk) -> bytes:
    walk.read(bytearray.__len__(value))
    # A copy: the program could not resize it while its memory is exported.
    return xxh3_64_digest(b"bytearray" + bytearray.__getitem__(value, slice(None)))


def _parts(name: str, *getters: Callable[[Any], Any]) -> Handler:
    return lambda value, walk: walk.of_parts(name, *(get(value) for get in getters))


def _attributes(base: Any, *names: str) -> Handler:
    return _parts(base.__name__, *(vars(base)[name].__get__ for name in names))


def _from(read: Callable[[Any], Any]) -> Handler:
    """Return what handles an exact type of which `read` returns all that counts."""
    return lambda value, walk: walk.of_parts(type(value).__name__, read(value))


def _file(value: Any, walk: _Walk) -> bytes:
    # The `tell` of a text flushes, and that of a buffer waits where the file is a pipe.
    buffered = _buffer_of(value) if type(value) is io.TextIOWrapper else value
    if not any(type(buffered) is each for each in FILES):
        return OPAQUE
    raw = buffered if type(buffered) is io.FileIO else buffered.raw
    if type(raw) is not io.FileIO or not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        return OPAQUE
    return walk.of_parts("file", raw.name, raw.mode, buffered.tell())


FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom)
TIME = ("hour", "minute", "second", "microsecond", "fold", "tzinfo")
# Each reads by methods of the base alone, so that a subclass of the program has no say in it.
INHERITED: dict[Any, Handler] = {
    int: _parts("int", int.__int__),
    float: _parts("float", float.__float__),
    complex: _parts("complex", complex.__complex__),
    str: _parts("str", str.__str__),
    bytes: _parts("bytes", lambda value: bytes.__getitem__(value, slice(None))),
    bytearray: _bytearray,
    **{base: _elements(base) for base in (list, tuple, set, frozenset, collections.deque)},
    dict: _dict,
    collections.defaultdict: _dict,
    collections.OrderedDict: _ordered_dict,
    dt.date: _attributes(dt.date, "year", "month", "day"),
    dt.timedelta: _attributes(dt.timedelta, "days", "seconds", "microseconds"),
}
EXACT: dict[Any, Handler] = {
    dt.datetime: _from(lambda value: (value.date(), value.timetz())),
    dt.time: _attributes(dt.time, *TIME),
    dt.timezone: _from(lambda value: value.__getinitargs__()),
    **{kind: _attributes(kind, "start", "stop", "step") for kind in (range, slice)},
    array.array: _from(lambda value: (value.typecode, value.tobytes())),
    random.Random: _from(lambda value: dumps(value.getstate(), 2)),
    types.SimpleNamespace: _from(vars),
    **dict.fromkeys((io.BytesIO, io.StringIO), _from(lambda v: (v.getvalue(), v.tell()))),
    **dict.fromkeys((type({}.keys()), type({}.values()), type({}.items())), _from(list)),
    **dict.fromkeys((pathlib.PosixPath, pathlib.PurePosixPath), _from(str)),
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
"""Their objects hold ids of processes and threads, times, and what other threads do."""


# Of libraries, by what each exports.


def _numpy_array(value: Any, walk: _Walk) -> bytes:
    np = sys.modules["numpy"]
    plain = np.ndarray.view(value, np.ndarray)
    dtype = plain.dtype
    name = f"ndarray {dtype.str} {dtype.type.__name__} {plain.shape}"
    if dtype.names:  # there may be gaps between them that nothing writes
        return walk.of_parts(f"{name} {dtype.names}", *(plain[each] for each in dtype.names))
    if dtype.hasobject:
        return walk.of_elements(name, plain.reshape(-1).flat, plain.size)
    if dtype.type in (np.longdouble, np.clongdouble):  # 10 bytes of 16 are written
        return OPAQUE
    walk.read(plain.nbytes)
    state = xxh3_64(name.encode())
    pieces = [plain.reshape(-1)] if plain.flags.c_contiguous and plain.nbytes else []
    if plain.nbytes and not pieces:
        buffered = {"flags": ("external_loop", "buffered"), "op_flags": [["readonly", "contig"]]}
        pieces = np.nditer(plain, **buffered, order="C", buffersize=1 << 20)
    for piece in pieces:
        state.update(piece.view(np.uint8))
    return state.digest()


def _numpy_scalar(value: Any, walk: _Walk) -> bytes:
    return walk.of_parts("scalar", sys.modules["numpy"].asarray(value))


def _tensor(value: Any, walk: _Walk) -> bytes:
    from torchrepro.trace.fingerprint import fingerprint, memory_of, torch, unobserved

    with unobserved():
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)  # noqa: SLF001
        if wrapped or torch._is_functional_tensor(value) or value.device.type != "cpu":  # noqa: SLF001
            return OPAQUE
        memory = memory_of(value)
        walk.read(sum(part.nbytes for part in memory.parts))
        name = f"tensor {value.dtype} {tuple(value.shape)} "
        known = memory.kind != "no memory"
        return xxh3_64_digest(name.encode() + fingerprint(value)) if known else OPAQUE


def _state(value: Any) -> Any:
    return value.get_state() if value.device.type == "cpu" else iter(())


def _column(walk: _Walk, head: tuple[Any, ...], count: int, read: Callable[[], Any]) -> bytes:
    """Return the digest of a column of a frame that is not plain memory."""
    if count > PLAIN_ELEMENTS:
        return OPAQUE
    return walk.of_elements(repr(walk.of_parts("column", *head)), read(), count)


def _pandas_column(value: Any, walk: _Walk) -> bytes:
    data = value.array
    if _package_of(type(data)) != "pandas":  # of the program
        return OPAQUE
    named = ("pandas", value.name, str(value.dtype))
    if hasattr(data, "asi8"):  # times, as integers
        return walk.of_parts("column", *named, data.asi8)
    if hasattr(data, "categories"):
        return walk.of_parts("column", *named, data.codes, data.categories, data.ordered)
    if _package_of(type(value.dtype)) == "numpy" and not value.dtype.hasobject:
        return walk.of_parts("column", *named, value.to_numpy())
    return _column(walk, named, len(data), value.to_list)


def _pandas_series(value: Any, walk: _Walk) -> bytes:
    column = _pandas_column(value, walk)
    return OPAQUE if column == OPAQUE else walk.of_parts("Series", value.index, column)


def _pandas_frame(value: Any, walk: _Walk) -> bytes:
    columns = [_pandas_column(value.iloc[:, number], walk) for number in range(value.shape[1])]
    return walk.of_parts("DataFrame", value.index, value.columns, columns)


def _polars_column(value: Any, walk: _Walk) -> bytes:
    dtype = value.dtype
    if _package_of(type(dtype)) != "polars" or len(value) * 8 > SIZE:
        return OPAQUE
    named = ("polars", value.name, str(dtype))
    if (dtype.is_integer() or dtype.is_float()) and not value.null_count():
        return walk.of_parts("column", *named, value.to_numpy())
    return _column(walk, named, len(value), value.to_list)


def _arrow_column(value: Any, walk: _Walk) -> bytes:
    dtype = sys.modules["pyarrow"].DataType.__str__(value.type)
    chunks = getattr(value, "chunks", [value])
    if dtype.startswith(("timestamp", "time", "duration", "date")):  # else it imports pandas
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
    return _column(walk, ("arrow", dtype), len(value), lambda: chain.from_iterable(lists))


def _image(value: Any) -> Any:
    palette = value.getpalette() if value.mode == "P" else None
    return value.mode, value.size, palette, value.tobytes()


WIDTHS = (8, 16, 32, 64)
ARROW_NUMBERS = {"float", "double", *(f"{s}int{width}" for s in ("", "u") for width in WIDTHS)}

LIBRARIES: dict[str, dict[str, Handler]] = {
    "decimal": {"Decimal": _from(lambda value: tuple(value.as_tuple()))},
    "zoneinfo": {"ZoneInfo": _from(lambda value: value.key)},
    "numpy": {
        "ndarray": _numpy_array,
        "generic+": _numpy_scalar,
        "ufunc": _code,
    },
    "numpy.dtypes": {"object+": _from(str)},
    "numpy.random": {
        "Generator": _from(lambda value: value.bit_generator),
        "RandomState": _from(lambda value: value.get_state(legacy=False)),
        "BitGenerator+": _from(lambda value: value.state),
    },
    "torch": {
        "Tensor": _tensor,
        "Generator": _from(_state),
        "Size": _from(tuple),
        **dict.fromkeys(("dtype", "device", "layout", "memory_format"), _from(str)),
    },
    "torch.return_types": {"tuple+": _from(tuple)},
    "torch.nn": {"Parameter": _tensor, "Module": _opaque},
    "torch.optim": {"Optimizer": _opaque},
    "pandas": {
        "DataFrame": _pandas_frame,
        "Series": _pandas_series,
        "Index+": _pandas_column,
        "MultiIndex": _from(lambda value: [*value.names, *value.levels, *value.codes]),
        "Timestamp": _from(lambda value: (value.value, value.unit, str(value.tz))),
        "Timedelta": _from(lambda value: (value.value, value.unit)),
    },
    "polars": {
        "DataFrame": _from(lambda value: value.get_columns()),
        "Series": _polars_column,
        "LazyFrame": _opaque,
    },
    "pyarrow": {
        **dict.fromkeys(
            ("Table", "RecordBatch"), _from(lambda value: [value.schema.names, value.columns])
        ),
        **dict.fromkeys(("ChunkedArray", "Array+"), _arrow_column),
    },
    "PIL.Image": {"Image": _from(_image)},
}
"""The classes that each module exports; with a `+`, also those that derive from it."""

PACKAGES = {module.partition(".")[0] for module in LIBRARIES}
INHERITABLE = {id(kind) for kind in INHERITED}
_searched: set[str] = set()
_handlers: dict[int, Handler] = {
    **{id(kind): _code for kind in CODE},
    **{id(kind): handler for kind, handler in (*INHERITED.items(), *EXACT.items())},
}
"""What reads instances of exactly one class, by the `id` of the class; none is ever freed."""


def _handler(kind: type) -> Handler | None:
    if id(kind) not in _handlers and _package_of(kind) in PACKAGES:
        for module in LIBRARIES.keys() - _searched:
            exported = _globals_of(sys.modules[module]) if module in sys.modules else {}
            if exported and not getattr(exported["__spec__"], "_initializing", False):
                for name, handler in LIBRARIES[module].items():
                    base = exported.get(name.removesuffix("+")) or getattr(builtins, name[:-1])
                    kinds = exported.values() if name.endswith("+") else (base,)
                    _handlers.update((id(each), handler) for each in kinds if _derives(each, base))
                _searched.add(module)
    return _handlers.get(id(kind))


def _derives(exported: Any, base: type) -> bool:
    is_class = bool(_flags_of(type(exported)) & IS_CLASS)
    return is_class and any(each is base for each in _mro_of(exported))
