"""The table of diagnosis, `diagnosis.yaml`: causes, what helps, and the families of ops."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

_TABLE: Mapping[str, Any] = yaml.load(
    Path(__file__).with_name("diagnosis.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506 - both are safe, one is quick
)

OPS: Mapping[str, frozenset[str]] = {
    name: frozenset(text.split()) for name, text in _TABLE["ops"].items()
}
"""Families of ops by name, as in `drawing`."""

_PATTERNS = {
    name: re.compile("".join(text.split()), re.VERBOSE)
    for name, text in {
        **_TABLE["patterns"],
        "summing": "|".join(f"(?:{text})" for text in _TABLE["patterns"].values()),
    }.items()
}

RANDOM_NUMBERS = tuple(_TABLE["knobs"]["random_numbers"])
"""Patterns of knobs that decide on random numbers alone."""


def one_of(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name fits one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Fix:
    """A key of a profile and the value that helps."""

    key: str
    value: str
    """As an override writes it: a word that YAML takes for a boolean is in quotes."""

    enough: tuple[str, ...] = ()
    """Other values that help as well; ``*`` for any."""

    needs: str = ""
    """The feature without which the program cannot feel it (see `evidence.FEATURES`)."""

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> tuple[Fix, ...]:
        """Return some fixes of the table."""
        return tuple(cls(**{**row, "enough": tuple(row.get("enough", ()))}) for row in rows)

    def is_met_by(self, value: str | None) -> bool:
        """Whether `value` is one that helps."""
        return value is not None and (self.enough == ("*",) or value in (self.value, *self.enough))


@dataclass(frozen=True, slots=True)
class Rule:
    """A reason for two runs to diverge, and when it applies. The table says what fields mean."""

    cause: str
    kinds: tuple[Kind, ...]
    ops: tuple[str, ...]
    device: str
    fits: tuple[str, ...]
    fixes: tuple[Fix, ...]
    knobs: tuple[str, ...]
    edit: str
    by_program: bool
    rerecord: bool
    kernel: bool
    """Whether an op gave two results for equal inputs."""

    @classmethod
    def of(cls, *, kernel: bool = False, **row: Any) -> Rule:
        """Return a row of the table."""
        return cls(
            cause=row.pop("cause"),
            kinds=tuple(Kind[name] for name in row.pop("kinds", Kind.__members__)),
            ops=tuple(row.pop("ops", ())),
            device=row.pop("device", ""),
            fits=tuple(row.pop("fits", ())),
            fixes=Fix.of(row.pop("fixes", [])),
            knobs=tuple(row.pop("knobs", ())),
            **{"edit": "", "by_program": False, "rerecord": True, **row},
            kernel=kernel,
        )


def is_of(op: str, family: str) -> bool:
    """Whether an op, as in ``add``, is of a family of the table."""
    if family in OPS:
        return op in OPS[family]
    return _PATTERNS[family].fullmatch(op) is not None


HASHES = next(fix for fix in Fix.of(_TABLE["settings"]) if fix.key == "env.PYTHONHASHSEED")

RULES = (
    *(Rule.of(**row) for row in _TABLE["rules"]),
    *(Rule.of(**row, kernel=True) for row in _TABLE["kernel_rules"]),
)


@dataclass(frozen=True, slots=True)
class EscalationRow:
    """Settings that are tried together."""

    name: str
    fixes: tuple[Fix, ...]
    why: str
    """What it means if these settings make the runs equal."""

    helps: str
    """The property of `Evidence` that says whether it can help."""

    needs: str = ""
    """The feature without which the program cannot feel it; an accelerator is ``device``."""

    of_module: bool = False
    """Whether its key is a module, that of the divergence."""


ESCALATION = tuple(
    EscalationRow(**{**row, "fixes": Fix.of(row["fixes"])}) for row in _TABLE["escalation"]
)
"""What `verify --escalate` tries, the mildest settings first."""
