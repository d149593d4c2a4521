"""The values that a knob takes: judged here once, shown in messages and in the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


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
    words: str
    no_mapping: str = ""  # the complaint about a value that is no mapping
    is_name: Callable[[Any], bool] = lambda name: isinstance(name, str)
    no_name: str = ""  # the complaint about a key for which `is_name` does not hold
    wrong: str = "{why}"  # the complaint about the value of a `name`, whose own complaint is `why`
    nested: str = ""
    """The complaint about a mapping in place of a value, where there is more to say."""

    located: bool = True  # whether a message says under which key the wrong value stands

    def wrong_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        if not isinstance(value, Mapping):
            return (), self.no_mapping
        for name, one in value.items():
            if not self.is_name(name):
                return (), self.no_name
            why = "" if one is None else self.of.complaint(one)
            if why:
                wrong = self.nested if isinstance(one, Mapping) else ""
                why = wrong or self.wrong.format(name=name, why=why)
                return (str(name),) if self.located else (), why
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


SCHEMA_VERSION = Integer(1, 1)  # the versions of the schema that a profile may be written for

ANY_TEXT = Text(r"[^\0]*", "any text without NUL characters")
SEED = Integer(0, 2**32 - 1)
DEVICE = Text(r"[a-z_][a-z0-9_]*(:[0-9]{1,4})?", "cpu, cuda, npu, xpu, mps", variable=False)
DEVICES_OF_MODULES = MappingOf(
    DEVICE,
    "a mapping such as {encoder.layer.*: cpu}, of devices such as cpu, cuda or cuda:1",
    no_mapping="not a mapping of patterns to devices",
    is_name=lambda name: isinstance(name, str) and name != "",
    no_name="a key is not the name of a module",
    wrong="not the name of a device",
    nested="not a device: write the whole name of a module as one key",
)
SEEDS_OF_STREAMS = MappingOf(
    SEED,
    "a mapping such as {split: 3}, each a whole number, 0 to 4294967295",
    no_mapping="not a mapping of streams to seeds",
    no_name="not a mapping of streams to seeds",
    wrong="{name}: {why}",
    located=False,
)
_RANK_POLICY = OneOf(("distinct", "same"))
RANK_POLICIES = WordOrMapping(
    _RANK_POLICY,
    MappingOf(
        _RANK_POLICY,
        "one of them per mesh dimension as in {dp: distinct}",
        is_name=lambda _: True,
        located=False,
    ),
)
_FALLBACK_OF_OP = OneOf(("cpu", "error", "native"))
FALLBACK = WordOrMapping(
    OneOf(("error", "cpu")),
    MappingOf(
        _FALLBACK_OF_OP,
        f"per op as in {{ops: {{cumsum: cpu}}}}: {_FALLBACK_OF_OP.words}",
        no_mapping="not a mapping of ops to words",
        no_name="not the name of an op",
    ),
    under="ops",
)

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
