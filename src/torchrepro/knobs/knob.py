"""Defines what a knob is: its legal values, and how the state behind the knob is read and written.

Messages and the JSON Schema take the legal values from this module.

A knob of an environment variable is written to `os.environ`. Child processes inherit the variable.
C code of this process gets the new value too, unless it read the variable earlier.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from torchrepro.ground.imports import named
from torchrepro.ground.patching import set_variable


class Legal:
    """The legal values of a knob."""

    if TYPE_CHECKING:  # a field in some subclasses, a property in others

        @property
        def words(self) -> str:
            """The legal values in words."""

    def complaint(self, value: Any) -> str:
        """Return why `value` is illegal, or an empty string."""
        return self.first_illegal_part(value)[1]

    def first_illegal_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        """Return the keys that lead to the first illegal part of `value`, and why it is illegal."""
        return (), self.complaint(value)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a legal value. The base class describes a variable."""
        return {"type": ["string", "integer"], "description": self.words}

    def examples(self) -> tuple[Any, ...]:
        """Return at least two legal values as examples, or one if only one value is legal."""
        return self.choices()

    def choices(self) -> tuple[str, ...]:
        """Return the words that an error message may suggest for a misspelt value."""
        return ()


@dataclass(frozen=True, slots=True)
class Switch(Legal):
    """Allows the values true and false."""

    words: str = "true or false"

    def complaint(self, value: Any) -> str:
        return "" if isinstance(value, bool) else "not true or false"

    def examples(self) -> tuple[Any, ...]:
        return (True, False)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer(Legal):
    """Allows whole numbers from `low` to `high` inclusive. There is no maximum for `high=None`."""

    low: int = 0
    high: int | None = None

    @property
    def words(self) -> str:
        end = f" to {self.high}" if self.high is not None else " or more"
        return f"a whole number, {self.low}{end}" if self.low != self.high else str(self.low)

    def complaint(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int):
            return "not a whole number"
        if value < self.low or (self.high is not None and value > self.high):
            return "out of range"
        return ""

    def examples(self) -> tuple[Any, ...]:
        return tuple(range(self.low, self.low + 2)) if self.high != self.low else (self.low,)

    def json_schema(self) -> dict[str, Any]:
        end = {} if self.high is None else {"maximum": self.high}
        return {"type": "integer", "minimum": self.low, **end}


@dataclass(frozen=True, slots=True)
class OneOf(Legal):
    """Allows the words in `values`."""

    values: tuple[str, ...]

    @property
    def words(self) -> str:
        return ", ".join(self.values)

    def complaint(self, value: Any) -> str:
        return "" if isinstance(value, str) and value in self.values else "not a legal value"

    def json_schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}

    def choices(self) -> tuple[str, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class Text(Legal):
    """Allows texts that match `pattern` from start to end."""

    pattern: str
    words: str
    because: str = ""
    """Why any other text is illegal, for example because the library would read it as off."""

    ignore_case: bool = False
    variable: bool = True
    """True for an environment variable: a number without quotes is read as its digits."""

    def complaint(self, value: Any) -> str:
        if not isinstance(value, str):
            return "not text"
        flags = re.IGNORECASE if self.ignore_case else 0
        if re.fullmatch(self.pattern, value, flags):
            return ""
        return self.because or "not a legal value"

    def examples(self) -> tuple[Any, ...]:
        """Return each word of the description `words` that is itself a legal text."""
        words = (word.strip(',"') for word in self.words.split())
        return tuple(word for word in words if not self.complaint(word))

    def json_schema(self) -> dict[str, Any]:
        if self.variable:
            return Legal.json_schema(self)
        return {"type": "string", "pattern": f"^{self.pattern}$"}

    def choices(self) -> tuple[str, ...]:
        return tuple(self.words.split(", "))


@dataclass(frozen=True, slots=True)
class Digits(Legal):
    """Allows the text of a whole number from `low` to `high` inclusive, or a word in `also`."""

    low: int
    high: int
    also: tuple[str, ...] = ()  # other legal words

    @property
    def words(self) -> str:
        return ", ".join([*self.also, f'a whole number of {self.low} to {self.high} such as "1"'])

    def complaint(self, value: Any) -> str:
        if not isinstance(value, str):
            return "not text"
        number = value.isascii() and value.isdigit() and len(value) <= len(str(self.high))
        in_range = number and self.low <= int(value) <= self.high
        return "" if in_range or value in self.also else "not a legal value"

    def examples(self) -> tuple[Any, ...]:
        return (str(self.low), str(min(self.low + 1, self.high)), *self.also)

    def choices(self) -> tuple[str, ...]:
        return self.also


@dataclass(frozen=True, slots=True)
class MappingOf(Legal):
    """Allows mappings from names to values that `of` allows, or to null."""

    of: Legal
    maps: str  # keys and values in words: ``patterns to devices``
    words: str
    nested: str = ""
    """The complaint about a mapping where a plain value is expected, if `of` has no good one."""

    def first_illegal_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        if not isinstance(value, Mapping) or not all(n and isinstance(n, str) for n in value):
            return (), f"not a mapping of {self.maps}"
        for name, inner in value.items():
            why = "" if inner is None else self.of.complaint(inner)
            if why:
                return (name,), (isinstance(inner, Mapping) and self.nested) or why
        return (), ""

    def examples(self) -> tuple[Any, ...]:
        return tuple({"*": value} for value in self.of.examples())

    def json_schema(self) -> dict[str, Any]:
        or_null = {"anyOf": [self.of.json_schema(), {"type": "null"}]}
        return {"type": "object", "additionalProperties": or_null}

    def choices(self) -> tuple[str, ...]:
        return self.of.choices()


@dataclass(frozen=True, slots=True)
class WordOrMapping(Legal):
    """Allows either one word for all names, or a mapping from names to words."""

    word: OneOf
    mapping: MappingOf
    under: str = ""  # if not empty, the only key of an outer mapping that contains the mapping

    @property
    def words(self) -> str:
        return f"{self.word.words}, or {self.mapping.words}"

    def first_illegal_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        if not isinstance(value, Mapping):
            return (), self.word.complaint(value)
        if not self.under:
            return self.mapping.first_illegal_part(value)
        for key, inner in value.items():
            if key != self.under:
                return (str(key),), f"unknown key: only `{self.under}` belongs here"
            keys, why = self.mapping.first_illegal_part(inner)
            if why:
                return (key, *keys), why
        return (), ""

    def examples(self) -> tuple[Any, ...]:
        return self.word.examples()

    def json_schema(self) -> dict[str, Any]:
        mapping = self.mapping.json_schema()
        if self.under:
            properties = {self.under: mapping}
            mapping = {"type": "object", "properties": properties, "additionalProperties": False}
        return {"anyOf": [self.word.json_schema(), mapping]}

    def choices(self) -> tuple[str, ...]:
        return (*self.mapping.choices(), *filter(None, [self.under]))


SEED = Integer(0, 2**32 - 1)
SCHEMA_VERSION = Integer(1, 1)  # the schema versions that a profile may name


Value = str | Mapping[str, Any] | None
"""A value of `device.fallback`: one word for all ops, or a mapping from ops to words."""


def per_op(value: Value) -> Mapping[str, str]:
    """Return the word for each op or pattern. Returns {} if `value` is one word for all ops."""
    return value.get("ops", {}) if isinstance(value, Mapping) else {}


def is_pattern(name: str) -> bool:
    """Return whether `name` is a pattern, which can match several ops."""
    return any(sign in name for sign in "*?[")


def acts_only_on_refusal(value: Value) -> bool:
    """Return whether `value` of `device.fallback` affects only ops that torch refuses to run."""
    named = per_op(value)
    words = {value} if isinstance(value, str) else set(named.values())
    return words != {"error"} and all(map(is_pattern, named))


PHASES = {
    "interpreter": "interpreter start",
    "openmp": "library load",
    "torch": "library load",
    "torch_npu": "library load",
    "cuda": "device init",
    "npu": "device init",
    "communicator": "first communicator",
    "transformer_engine": "module construction",
    "": "any time",
}
"""The latch of a knob -> the last moment when setting the knob takes effect.

A knob without a latch takes effect at any time.
"""


class Scope(StrEnum):
    """The processes and threads that a write of a knob affects."""

    PROCESS = "this process"
    PROCESS_AND_CHILDREN = "this process and the processes it starts"
    EVERY_THREAD = "every thread of this process"


class MissingState(Exception):  # noqa: N818 - an answer, not an error
    """The state behind a knob does not exist in this process. The message says why."""


class Access(Protocol):
    """How to read and write the state behind one knob."""

    def read(self) -> Any:
        """Return the current value, in the form that a profile uses.

        Changes nothing, and imports only the library of the knob. Raises `MissingState` if the
        state does not exist.
        """

    def write(self, value: Any) -> None:
        """Set `value`. If the library refuses the value, the error of the library is raised."""

    def save(self) -> Any:
        """Return the state for `restore`. It can contain more than the value that `read` shows."""

    def restore(self, saved: Any) -> None:
        """Restore exactly the state that `save` returned."""


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """How to find out which value a library took from an environment variable."""

    read: Callable[[], Any]
    """Return the value in effect, or None if the library has not taken one yet.

    Raises `MissingState` if the library does not expose the value.
    """

    means: Callable[[str], Any]
    """Translate a text of the variable to a value; raises `MissingState` if that is unknown."""

    words: str
    """A sentence about the library, to format with the value: ``MKL has {} threads``."""

    library: str = ""  # the module that must be loaded before `read` can be called

    def check(self, text: str) -> tuple[bool | None, str]:
        """Return whether `text` is in effect (None if unknown), and the real value in words."""
        with suppress(MissingState, ValueError):  # how the library parses this text is unknown
            now = None if self.library and self.library not in sys.modules else self.read()
            if now is not None:
                return bool(now == self.means(text)), self.words.format(now)
        return None, ""


@dataclass(frozen=True, slots=True, eq=False)
class Knob:
    """One setting of the process: a row of the catalogue."""

    name: str  # dotted name; also the key of the profile, unless `key` is set
    legal: Legal
    access: Access
    summary: str
    cost: str
    source: str  # URL of the documentation, paper or issue behind the summary
    door: str = ""  # the latch after which a write has no effect, a key of `process_state.LATCHES`
    set_on_import: str = "torch"
    """`torchrepro run` sets the knob when this module is imported; if empty, at the very start."""

    scope: Scope = Scope.PROCESS
    since: str = ""  # the first documented version, for display: the state itself is looked up
    library: str = ""  # the module that must be loaded before the state can be read or written
    aliases: tuple[str, ...] = ()
    """Other names of this state: keys for profiles, variables, attributes of torch."""

    key: str = ""  # the key of the profile that sets this knob, if it is not `name`
    variable: str = ""  # the environment variable behind the row, if any
    needs: str = ""  # the knob that has to be set too if `needing` returns true for the value
    needing: Callable[[Any], bool] = lambda _: False
    needed: tuple[Any, ...] = ()
    """The values of the knob `needs` that are enough; if empty, any value is."""

    enough: Callable[[str], bool] | None = None
    """For a variable: returns whether another text gives the same guarantee (`why_equivalent`)."""

    misspellings: tuple[str, ...] = ()
    """For a variable: illegal texts that programs write for the value of the profile.

    The library raises an error for them, so nothing is ever computed with such a text.
    """

    effect: EffectiveValue | None = None
    """For a variable: how to read the value that its library took, if the library exposes it."""

    changes_with_use: bool = False
    """True if use changes the state and `read` does not show it, as with a generator.

    Such a knob is always written and always restored.
    """

    reread: bool = False
    """True if setting another knob can change this one.

    Such a knob is checked again just before it is set, and read again after all knobs are set.
    """

    guarded: bool = True  # whether the drift guard reads the knob again
    decides_results: bool = False
    """True if the value decides results directly; other knobs choose kernels, which may agree."""

    setters: tuple[str, ...] = ()
    """Patterns for the names of the functions of ``torch._C`` that write the knob."""

    hardware: str = ""
    """The hardware that the knob affects, a key of `process_state.HARDWARE`; empty: all."""

    warn_if_unsupported: bool = False
    """True to warn by name that the knob cannot be set; otherwise such knobs are only counted."""

    @property
    def profile_key(self) -> str:
        return self.key or self.name

    @property
    def loaded(self) -> bool:
        """True if the state can be read and written without an import."""
        return not self.library or self.library in sys.modules

    def holds(self, value: Any) -> bool:
        """Return whether the state equals `value`. An access may define its own comparison."""
        check = getattr(self.access, "holds", None)
        return bool(check(value)) if check else bool(self.access.read() == value)

    def refusal(self, value: Any) -> str:
        """Return why `value` cannot be set although the state exists, or an empty string."""
        refuses = getattr(self.access, "refuses", None)
        return str(refuses(value)) if refuses else ""

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        """Return why `value` would have no effect although it can be set, or an empty string.

        `wanted` maps each knob of the profile to its value. The library must be loaded already.
        """
        judge = getattr(self.access, "inert", None)
        return str(judge(value, wanted)) if judge else ""


def unfrozen() -> AbstractContextManager[None]:
    """Return a context that allows setting the flags of ``torch.backends`` even if they are frozen.

    A program freezes them with ``torch.backends.disable_global_flags``. The private function of
    torch is also used by torch's ``flags()``. If it is missing, writing a frozen flag fails.
    """
    backends = sys.modules.get("torch.backends")
    manager = getattr(backends, "__allow_nonbracketed_mutation", nullcontext)
    return cast("AbstractContextManager[None]", manager())


def object_at(path: str, name: str = "") -> Any:
    """Return the attribute `name` of the object at ``module:path.to.object``.

    Returns None if an attribute is missing. Raises `MissingState` if the import fails.
    """
    module, _, inner = path.partition(":")
    try:
        attribute: Any = import_module(module)
    except ImportError as error:
        raise MissingState(f"no module {error.name}") from None
    for step in filter(None, f"{inner}.{name}".split(".")):
        attribute = getattr(attribute, step, None)
    return attribute


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute that can be read and assigned, such as ``torch.backends.cudnn:benchmark``."""

    owner: str  # the module, then the path to the object: ``torch.backends.cuda:matmul``
    name: str

    def read(self) -> Any:
        absent = object()
        value = getattr(object_at(self.owner), self.name, absent)
        if value is absent:
            raise MissingState(f"{self.owner.replace(':', '.')} has no {self.name}")
        if value is None:
            raise MissingState(f"{self.owner}.{self.name} is None: its feature is not available")
        return value

    def write(self, value: Any) -> None:
        setattr(object_at(self.owner), self.name, value)

    save = read

    def restore(self, saved: Any) -> None:
        if self.read() != saved:  # a flag that is frozen by now refuses even an equal value
            self.write(saved)


@dataclass(frozen=True, slots=True)
class Calls:
    """A state that the function `getter` of a module reads, and the function `setter` writes."""

    module: str
    getter: str
    setter: str
    to_profile: Callable[[Any], Any] = lambda value: value
    to_library: Callable[[Any], Any] = lambda value: value

    def _function(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] | None = object_at(self.module, name)
        if function is None:
            raise MissingState(f"{self.module.replace(':', '.')} has no {name}")
        return function

    def read(self) -> Any:
        self._function(self.setter)
        return self.to_profile(self._function(self.getter)())

    def write(self, value: Any) -> None:
        self._function(self.setter)(self.to_library(value))

    def save(self) -> Any:
        self._function(self.setter)
        return self._function(self.getter)()

    def restore(self, saved: Any) -> None:
        self._function(self.setter)(saved)


_ALWAYS_ACTIVE = object()


@dataclass(frozen=True, slots=True)
class LazyAccess:
    """Forwards to the access at `path`. The module in `path` is imported at the first use."""

    path: str  # module and object, relative to torchrepro: ``seeding.loader_hook:seeding_policy``
    at_rest: Any = _ALWAYS_ACTIVE
    """The value without a policy; while it is the current value, nothing is imported."""

    inherited: bool = False
    """True to pass the value to spawned data-loading workers too; forked workers inherit it."""

    def read(self) -> Any:
        return self.at_rest if self._resting else named(self.path).read()

    def write(self, value: Any) -> None:
        if not self._resting or value != self.at_rest:
            named(self.path).write(value)
            self._pass_to_workers()

    def save(self) -> Any:
        return self.at_rest if self._resting else named(self.path).save()

    def restore(self, saved: Any) -> None:
        if not self._resting:
            named(self.path).restore(saved)
            self._pass_to_workers()

    def __getattr__(self, name: str) -> Any:
        """Return an optional method such as `holds`. Raises `AttributeError` if it is missing.

        Only `refuses` imports the module, since it is about a value that is not in effect yet.
        """
        if name.startswith("__") or (self._resting and name != "refuses"):
            raise AttributeError(name)
        return getattr(named(self.path), name)

    @property
    def _resting(self) -> bool:
        module = self.path.partition(":")[0]
        return self.at_rest is not _ALWAYS_ACTIVE and f"torchrepro.{module}" not in sys.modules

    def _pass_to_workers(self) -> None:
        if self.inherited:
            value = self.read()
            pass_to_workers = named("seeding.loader_hook:pass_to_workers")
            pass_to_workers(self.path, None if value == self.at_rest else value)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable. The value None means that the variable is not set."""

    name: str

    def read(self) -> Any:
        return os.environ.get(self.name)

    def write(self, value: str) -> None:
        os.environ[self.name] = value

    save = read

    def restore(self, saved: Any) -> None:
        set_variable(self.name, saved)
