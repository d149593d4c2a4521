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
    """A mapping from patterns of names of modules to devices."""

    device: Text = Text(r"[a-z_][a-z0-9_]*(:[0-9]{1,4})?", "cpu, cuda, npu, xpu, mps")
    words: str = "a mapping such as {encoder.layer.*: cpu}, of devices such as cpu, cuda or cuda:1"

    def complaint(self, value: Any) -> str:
        mapping = isinstance(value, Mapping)
        return self.wrong_part(value)[1] if mapping else "not a mapping of patterns to devices"

    def wrong_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        """Return the key of the first part of `value` that is wrong, if any, and why it is."""
        for pattern, device in value.items() if isinstance(value, Mapping) else ():
            if not isinstance(pattern, str) or not pattern:
                return (), "a key is not the name of a module"
            if isinstance(device, Mapping):
                return (pattern,), "not a device: write the whole name of a module as one key"
            if device is not None and self.device.complaint(device):
                return (pattern,), "not the name of a device"
        return (), ""

    def json_schema(self) -> dict[str, Any]:
        word = {"type": "string", "pattern": f"^{self.device.pattern}$"}
        one = {"anyOf": [word, {"type": "null"}]}
        return {"type": "object", "additionalProperties": one}

    def choices(self) -> tuple[str, ...]:
        return self.device.choices()


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
class Fallback:
    """One word for all ops without a deterministic kernel, or one per op."""

    one: OneOf = OneOf(("error", "cpu"))
    per_op: OneOf = OneOf(("cpu", "error", "native"))

    @property
    def words(self) -> str:
        return f"{self.one.words}, or per op as in {{ops: {{cumsum: cpu}}}}: {self.per_op.words}"

    def complaint(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return self.one.complaint(value)
        return self.wrong_part(value)[1]

    def wrong_part(self, value: Any) -> tuple[tuple[str, ...], str]:
        """Return the keys that lead to the first part of `value` that is wrong, and why it is."""
        for key, ops in value.items() if isinstance(value, Mapping) else ():
            if key != "ops":
                return (str(key),), "unknown key: only `ops` belongs here"
            if not isinstance(ops, Mapping):
                return (key,), "not a mapping of ops to words"
            for op, word in ops.items():
                complaint = "" if word is None else self.per_op.complaint(word)
                if complaint or not isinstance(op, str):
                    return (key, str(op)), complaint or "not the name of an op"
        return (), ""

    def json_schema(self) -> dict[str, Any]:
        word = {"anyOf": [self.per_op.json_schema(), {"type": "null"}]}
        ops = {"type": "object", "additionalProperties": word}
        mapping = {"type": "object", "properties": {"ops": ops}, "additionalProperties": False}
        return {"anyOf": [self.one.json_schema(), mapping]}

    def choices(self) -> tuple[str, ...]:
        return (*self.per_op.choices(), "ops")


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
