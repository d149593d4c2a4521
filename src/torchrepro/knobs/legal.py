"""The values that a knob takes: judged here once, shown in messages and in the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Legal(Protocol):
    """The legal values of a knob."""

    @property
    def words(self) -> str:
        """The legal values in words."""

    def complaint(self, value: Any) -> str:
        """Return why `value` is illegal, or an empty string."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a legal value."""

    def choices(self) -> tuple[str, ...]:
        """Return the words among which a near match is looked for."""


@dataclass(frozen=True, slots=True)
class Switch:
    """true or false."""

    words: str = "true or false"

    def complaint(self, value: Any) -> str:
        return "" if isinstance(value, bool) else "not true or false"

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def choices(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a closed range; `high` None means no upper end."""

    low: int = 0
    high: int | None = None

    @property
    def words(self) -> str:
        end = f" to {self.high}" if self.high is not None else " or more"
        return f"a whole number, {self.low}{end}"

    def complaint(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int):
            return "not a whole number"
        if value < self.low or (self.high is not None and value > self.high):
            return "out of range"
        return ""

    def json_schema(self) -> dict[str, Any]:
        end = {} if self.high is None else {"maximum": self.high}
        return {"type": "integer", "minimum": self.low, **end}

    def choices(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class OneOf:
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
class Text:
    """The text of an environment variable, by a pattern that has to match as a whole."""

    pattern: str
    words: str
    because: str = ""
    """Why another text is refused: what the library that reads it would do with it."""

    ignore_case: bool = False

    def complaint(self, value: Any) -> str:
        if not isinstance(value, str):
            return "not text"
        flags = re.IGNORECASE if self.ignore_case else 0
        if re.fullmatch(self.pattern, value, flags):
            return ""
        return self.because or "not a legal value"

    def json_schema(self) -> dict[str, Any]:
        # In `env` an unquoted whole number stands for its digits.
        return {"type": ["string", "integer"], "description": self.words}

    def choices(self) -> tuple[str, ...]:
        return tuple(self.words.split(", "))


@dataclass(frozen=True, slots=True)
class Digits:
    """The text of an environment variable that holds a whole number of a closed range."""

    low: int
    high: int
    also: tuple[str, ...] = ()
    """Words that are legal besides numbers."""

    @property
    def words(self) -> str:
        return ", ".join([*self.also, f'a whole number of {self.low} to {self.high} such as "1"'])

    def complaint(self, value: Any) -> str:
        if not isinstance(value, str):
            return "not text"
        number = value.isascii() and value.isdigit() and len(value) <= len(str(self.high))
        in_range = number and self.low <= int(value) <= self.high
        return "" if in_range or value in self.also else "not a legal value"

    def json_schema(self) -> dict[str, Any]:
        return {"type": ["string", "integer"], "description": self.words}

    def choices(self) -> tuple[str, ...]:
        return self.also


@dataclass(frozen=True, slots=True)
class Patterns:
    """A mapping from patterns of names to words."""

    words: str = "a mapping such as {encoder.*: cpu}"

    def complaint(self, value: Any) -> str:
        texts = isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())
        return "" if texts else "not a mapping of patterns to words"

    def json_schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "string"}}

    def choices(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Seeds:
    """A mapping from names of streams to seeds."""

    words: str = "a mapping such as {split: 3}, each a whole number, 0 to 4294967295"

    def complaint(self, value: Any) -> str:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            return "not a mapping of streams to seeds"
        wrong = {name: SEED.complaint(seed) for name, seed in value.items() if seed is not None}
        return next((f"{name}: {why}" for name, why in wrong.items() if why), "")

    def json_schema(self) -> dict[str, Any]:
        one = {"anyOf": [SEED.json_schema(), {"type": "null"}]}
        return {"type": "object", "additionalProperties": one}

    def choices(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class RankPolicies:
    """One word for all ranks, or one per dimension of a device mesh."""

    one: OneOf = OneOf(("distinct", "same"))

    @property
    def words(self) -> str:
        return f"{self.one.words}, or one of them per mesh dimension as in {{dp: distinct}}"

    def complaint(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return self.one.complaint(value)
        words = [word for word in value.values() if word is not None]
        return next(filter(None, map(self.one.complaint, words)), "")

    def json_schema(self) -> dict[str, Any]:
        one = {"anyOf": [self.one.json_schema(), {"type": "null"}]}
        per_dimension = {"type": "object", "additionalProperties": one}
        return {"anyOf": [self.one.json_schema(), per_dimension]}

    def choices(self) -> tuple[str, ...]:
        return self.one.choices()


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """The version of the schema that a profile was written for."""

    newest: int = 1

    @property
    def words(self) -> str:
        return str(self.newest)

    def complaint(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return "not the version of a schema"
        if value > self.newest:
            return "written for a newer torchrepro: upgrade torchrepro to use it"
        return ""

    def json_schema(self) -> dict[str, Any]:
        return {"type": "integer", "enum": [self.newest]}

    def choices(self) -> tuple[str, ...]:
        return ()


ANY_TEXT = Text(r"[^\0]*", "any text without NUL characters")
SEED = Whole(0, 2**32 - 1)
