"""What a knob is, which values it takes, and how the state behind one is reached.

Legal values are judged here once, and shown in messages and in the JSON Schema.

A variable is written to `os.environ`, which reaches C code that has not read it yet and every
child of the process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from torchrepro.ground.imports import named
from torchrepro.ground.patching import set_variable


class Legal:
    """The legal values of a knob."""

    if TYPE_CHECKING:  # a field in some kinds, computed in others

        @property
        def words(self) -> str:
            """The legal values in words."""

    def complaint(self, value: Any) -> str:
        """Return why `value` is illegal, or an empty string."""
        return self.wrong_part(value)[1]

    def wrong_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        """Return the keys that lead to the first part of `value` that is wrong, and why it is."""
        return (), self.complaint(value)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a legal value, by default that of a variable's."""
        return {"type": ["string", "integer"], "description": self.words}

    def examples(self) -> tuple[Any, ...]:
        """Return a few legal values: at least one, and two where there are two."""
        return self.choices()

    def choices(self) -> tuple[str, ...]:
        """Return the words among which a near match is looked for."""
        return ()


@dataclass(frozen=True, slots=True)
class Switch(Legal):
    """true or false."""

    words: str = "true or false"

    def complaint(self, value: Any) -> str:
        return "" if isinstance(value, bool) else "not true or false"

    def examples(self) -> tuple[Any, ...]:
        return (True, False)

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer(Legal):
    """A whole number in a closed range; `high` None means no upper end."""

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
    """One of a few words."""

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
    """Text, by a pattern that has to match as a whole."""

    pattern: str
    words: str
    because: str = ""
    """Why another text is refused: what the library that reads it would do with it."""

    ignore_case: bool = False
    variable: bool = True
    """Whether it is an environment variable's: there an unquoted number stands for its digits."""

    def complaint(self, value: Any) -> str:
        if not isinstance(value, str):
            return "not text"
        flags = re.IGNORECASE if self.ignore_case else 0
        if re.fullmatch(self.pattern, value, flags):
            return ""
        return self.because or "not a legal value"

    def examples(self) -> tuple[Any, ...]:
        """Return those of the words for the legal values that are legal themselves."""
        words = (word.strip(',"') for word in self.words.split())
        return tuple(word for word in words if not self.complaint(word))

    def json_schema(self) -> dict[str, Any]:
        own = {"type": "string", "pattern": f"^{self.pattern}$"}
        return Legal.json_schema(self) if self.variable else own

    def choices(self) -> tuple[str, ...]:
        return tuple(self.words.split(", "))


@dataclass(frozen=True, slots=True)
class Digits(Legal):
    """The text of an environment variable that holds a whole number of a closed range."""

    low: int
    high: int
    also: tuple[str, ...] = ()  # words that are legal besides numbers

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
    """A mapping from names to legal values, each of which may be null."""

    of: Legal
    maps: str  # what to what: ``patterns to devices``
    words: str
    nested: str = ""
    """The complaint about a mapping in place of a value, where there is more to say."""

    def wrong_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        if not isinstance(value, Mapping) or not all(n and isinstance(n, str) for n in value):
            return (), f"not a mapping of {self.maps}"
        for name, one in value.items():
            why = "" if one is None else self.of.complaint(one)
            if why:
                return (name,), (isinstance(one, Mapping) and self.nested) or why
        return (), ""

    def examples(self) -> tuple[Any, ...]:
        return tuple({"*": value} for value in self.of.examples())

    def json_schema(self) -> dict[str, Any]:
        one = {"anyOf": [self.of.json_schema(), {"type": "null"}]}
        return {"type": "object", "additionalProperties": one}

    def choices(self) -> tuple[str, ...]:
        return self.of.choices()


@dataclass(frozen=True, slots=True)
class WordOrMapping(Legal):
    """One word for all, or a mapping from names to words."""

    word: OneOf
    mapping: MappingOf
    under: str = ""  # the only key of the value under which the mapping stands, if there is one

    @property
    def words(self) -> str:
        return f"{self.word.words}, or {self.mapping.words}"

    def wrong_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        if not isinstance(value, Mapping):
            return (), self.word.complaint(value)
        if not self.under:
            return self.mapping.wrong_part(value)
        for key, inner in value.items():
            if key != self.under:
                return (str(key),), f"unknown key: only `{self.under}` belongs here"
            place, why = self.mapping.wrong_part(inner)
            if why:
                return (key, *place), why
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


ANY_TEXT = Text(r"[^\0]*", "any text without NUL characters")
SEED = Integer(0, 2**32 - 1)
SCHEMA_VERSION = Integer(1, 1)  # the versions of the schema that a profile may be written for


Value = str | Mapping[str, Any] | None
"""What `device.fallback` holds: a word for every op, or a word per op."""


def per_op(value: Value) -> Mapping[str, str]:
    """Return the word of every op and pattern that `value` names."""
    return value.get("ops", {}) if isinstance(value, Mapping) else {}


def is_pattern(name: str) -> bool:
    """Whether `name` stands for several ops."""
    return any(sign in name for sign in "*?[")


def waits_for_refusal(value: Value) -> bool:
    """Whether `value` does something only once torch refuses to run a kernel."""
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
"""The door that closes a phase -> the last moment at which a knob of it still takes effect.

Without a door it never ends.
"""


class Scope(StrEnum):
    """What a write reaches."""

    PROCESS = "this process"
    PROCESS_AND_CHILDREN = "this process and the processes it starts"
    EVERY_THREAD = "every thread of this process"


class MissingState(Exception):  # noqa: N818 - an answer, not an error
    """The state behind a knob does not exist in this process; the text says why."""


class Access(Protocol):
    """How to reach one piece of state."""

    def read(self) -> Any:
        """Return the present value in the words of a profile; raise `MissingState` without one.

        Changes nothing, and imports nothing but the knob's own library.
        """

    def write(self, value: Any) -> None:
        """Set `value`; raises whatever the library raises for one that it refuses."""

    def save(self) -> Any:
        """Return all that `restore` needs, which may be finer than what `read` shows."""

    def restore(self, saved: Any) -> None:
        """Put back exactly what `save` saw."""


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """How to find out what a library made of an environment variable that it has read."""

    read: Callable[[], Any]
    """Return the value in effect; raises `MissingState` where the library does not show it."""

    means: Callable[[str], Any]
    """Return the value that a text of the variable means; raises `MissingState` if unknown."""

    words: str
    """What the library does, with a place for the value: ``torch computes with {} threads``."""

    def check(self, text: str) -> tuple[bool | None, str]:
        """Return whether `text` is in effect, None if unknown, and what is in effect in words."""
        try:
            now = self.read()
            return bool(now == self.means(text)), self.words.format(now)
        except (MissingState, ValueError):  # the library may read this text in its own way
            return None, ""


@dataclass(frozen=True, slots=True, eq=False)
class Knob:
    """One piece of process state: a row of the catalogue."""

    name: str  # dotted name; also the key of the profile, unless `key` says otherwise
    legal: Legal
    access: Access
    summary: str
    cost: str
    source: str  # address of the documentation, paper or issue that says so
    door: str = ""  # the name of the one-way door (see `process_state.DOORS`) that closes the phase
    set_on_import: str = "torch"
    """The module with whose import `torchrepro run` sets the knob; empty: before all others."""

    scope: Scope = Scope.PROCESS
    since: str = ""  # first version that has it, as documented; whether it exists is detected
    library: str = ""  # the module that has to be loaded before the state can be read or written
    aliases: tuple[str, ...] = ()
    """Other names of the same state: keys a profile may use, variables, attributes of torch."""

    key: str = ""  # the key of the profile that this knob obeys, where it is not `name`
    variable: str = ""  # the environment variable behind the row, if it is one
    needs: str = ""  # the knob without which a value that is `needing` has nothing to act on
    needing: Callable[[Any], bool] = lambda _: False
    needed: tuple[Any, ...] = ()
    """The values of the knob `needs` that suffice; any value, if this is empty."""

    enough: Callable[[str], bool] | None = None
    """For a variable: whether another legal text serves the guarantee; `why_equivalent` asks."""

    misspelt: tuple[str, ...] = ()
    """For a variable: illegal texts by which programs mean the profile's value.

    Its library refuses them aloud, so that nothing is ever computed under one.
    """

    effect: EffectiveValue | None = None
    """For a variable: how to see what its library made of it, if it shows that."""

    moves_on: bool = False
    """Whether use changes the state in ways that reading does not show, as with a generator.

    Such a knob is always written, and always put back.
    """

    reread: bool = False
    """Whether setting another knob can move this one.

    If so it is decided again when its turn comes, and read again once all others are set.
    """

    guarded: bool = True  # whether the drift guard reads the knob again
    hardware: str = ""
    """The hardware without which nothing acts on the knob, a key of `process_state.HARDWARE`."""

    warn_if_unsupported: bool = False
    """Whether a user is told each time that the knob cannot be set here, not only how many."""

    @property
    def profile_key(self) -> str:
        return self.key or self.name

    @property
    def loaded(self) -> bool:
        """Whether the state can be reached without importing anything."""
        return not self.library or self.library in sys.modules

    def holds(self, value: Any) -> bool:
        """Whether `value` is in force now: read back, or as the access itself can tell."""
        check = getattr(self.access, "holds", None)
        return bool(check(value)) if check else bool(self.access.read() == value)

    def refusal(self, value: Any) -> str:
        """Return why `value` cannot be set here although the state exists, or an empty string."""
        refuses = getattr(self.access, "refuses", None)
        return str(refuses(value)) if refuses else ""

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        """Return why `value` would have no effect here although it can be set, or an empty string.

        `wanted` holds all values of the profile, by the name of the knob. The library is loaded.
        """
        judge = getattr(self.access, "inert", None)
        return str(judge(value, wanted)) if judge else ""


def unfrozen() -> AbstractContextManager[None]:
    """Let the flags of ``torch.backends`` be put back although the program has frozen them.

    torch's own ``flags()`` managers use the same private function on exit. Where it is gone,
    undoing after ``torch.backends.disable_global_flags`` raises what torch raises.
    """
    backends = sys.modules.get("torch.backends")
    manager = getattr(backends, "__allow_nonbracketed_mutation", nullcontext)
    return cast("AbstractContextManager[None]", manager())


def object_at(path: str, name: str = "") -> Any:
    """Return what `name` means in ``module:path.to.object``; None where a part of it is absent."""
    module, _, inner = path.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise MissingState(f"no module {error.name}") from None
    for part in filter(None, f"{inner}.{name}".split(".")):
        found = getattr(found, part, None)
    return found


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute that can be read and assigned, such as ``torch.backends.cudnn:benchmark``."""

    owner: str  # the module, then the path to the object: ``torch.backends.cuda:matmul``
    name: str

    def read(self) -> Any:
        absent = object()
        value = getattr(object_at(self.owner), self.name, absent)
        if value is absent:
            raise MissingState(f"{self.owner.replace(':', '.')} has no {self.name} here")
        if value is None:
            raise MissingState(f"{self.owner}.{self.name} is None: what it steers is not here")
        return value

    def write(self, value: Any) -> None:
        setattr(object_at(self.owner), self.name, value)

    save = read

    def restore(self, saved: Any) -> None:
        if self.read() != saved:  # flags that were frozen meanwhile refuse even their own value
            self.write(saved)


@dataclass(frozen=True, slots=True)
class Calls:
    """A getter and a setter, each named by module and function, with values translated."""

    module: str
    getter: str
    setter: str
    to_profile: Callable[[Any], Any] = lambda value: value
    to_library: Callable[[Any], Any] = lambda value: value

    def _function(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] | None = object_at(self.module, name)
        if function is None:
            raise MissingState(f"{self.module.replace(':', '.')} has no {name} here")
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
    """The access behind `path`, which is imported when a profile first uses it."""

    path: str  # module and object, relative to torchrepro: ``seeding.loader_hook:seeding_policy``
    at_rest: Any = _ALWAYS_ACTIVE
    """The value that needs nothing installed; while it holds, nothing is imported."""

    inherited: bool = False
    """Whether data-loading workers get the value however they are started.

    A forked worker has it in any case; a spawned one starts afresh.
    """

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

    def refuses(self, value: Any) -> str:
        if value == self.at_rest:
            return ""
        refuses = getattr(named(self.path), "refuses", None)
        return str(refuses(value)) if refuses else ""

    def __getattr__(self, name: str) -> Any:
        """Return an optional method of the access, such as `holds`; at rest there is none."""
        if name.startswith("__") or self._resting:
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
    """One environment variable; None is a variable that is not set."""

    name: str

    def read(self) -> Any:
        return os.environ.get(self.name)

    def write(self, value: str) -> None:
        os.environ[self.name] = value

    save = read

    def restore(self, saved: Any) -> None:
        set_variable(self.name, saved)


def variable(name: str) -> Knob:
    """Return a row for a variable outside the catalogue, as `env_extra` names it."""
    return Knob(
        name=f"env_extra.{name}",
        legal=ANY_TEXT,
        access=Variable(name),
        variable=name,
        summary="A variable of the profile's own, which the catalogue does not know.",
        cost="unknown",
        source="",
        scope=Scope.PROCESS_AND_CHILDREN,
    )
