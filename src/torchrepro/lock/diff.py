"""In what two snapshots differ, how likely that changes numbers, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torchrepro.console import parts, table
from torchrepro.errors import ProfileError
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import variable
from torchrepro.lock.snapshot import ABSENT_HARDWARE, ABSENT_IS_UNSET, Snapshot
from torchrepro.manifest.environment import UNKNOWN
from torchrepro.messages import printable, shown, some
from torchrepro.outcomes import Outcome
from torchrepro.profile.composition import NOT_INHERITED
from torchrepro.redaction import HIDDEN
from torchrepro.report import for_hardware

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrepro.console import Part, Table


class Impact(StrEnum):
    """How likely a difference changes numbers, the likeliest first."""

    CHANGES = "changes numbers"
    MAY = "may change numbers"
    NOTHING_HERE = "nothing here reads it"
    """Of two profiles only: the setting is for hardware that this machine does not have."""
    SHOULD_NOT = "should not change numbers"
    PROGRAM = "another program"
    """The source has changed. No lock forbids that: development goes on under a lock."""
    STARTED = "how it was started"


ENFORCED = (Impact.CHANGES, Impact.MAY)
"""What a lock forbids."""

ENFORCED_STRICTLY = (*ENFORCED, Impact.SHOULD_NOT)

IMPACTS: tuple[tuple[Impact, tuple[str, ...]], ...] = (
    (Impact.SHOULD_NOT, ("profile/name", "profile/description", "profile/schema")),
    (Impact.SHOULD_NOT, ("profile/requires*", "profile/on_late", "profile/guard*")),
    (Impact.CHANGES, ("profile/*", "asked/*", "knobs/*", "seeding calls/*", "processes/*")),
    (Impact.MAY, ("guarantee/*",)),
    (Impact.MAY, ("environment/*_VISIBLE_DEVICES", "environment/*_AFFINITY", "environment/OMP_P*")),
    (Impact.CHANGES, ("environment/*",)),
    (Impact.CHANGES, ("versions/torch", "versions/torch_npu", "versions/torch commit")),
    (Impact.CHANGES, ("versions/cuda", "versions/hip", "versions/cudnn", "versions/cann")),
    (Impact.CHANGES, ("versions/blas", "versions/blas of torch", "versions/onednn")),
    (Impact.SHOULD_NOT, ("versions/python patch", "versions/kernel", "versions/torchrepro")),
    (Impact.SHOULD_NOT, ("versions/hydra-core", "versions/omegaconf", "versions/pydantic")),
    (Impact.MAY, ("versions/*", "hardware/cpus")),
    (Impact.CHANGES, ("hardware/system", "hardware/machine", "hardware/cpu*")),
    (Impact.CHANGES, ("hardware/instruction set", "hardware/threads")),
    (Impact.CHANGES, ("hardware/gpu", "hardware/npu", "hardware/accelerator")),
    (Impact.MAY, ("hardware/*",)),
    (Impact.SHOULD_NOT, ("packs/*",)),
    (Impact.PROGRAM, ("source/*",)),
    (Impact.STARTED, ("started/*",)),
)
"""How likely differences change numbers, by patterns of section and key; the first that fits."""


def impact_of(section: str, key: str) -> Impact:
    """Return how likely a difference in `key` of `section` changes numbers."""
    name = f"{section}/{key}"
    fitting = (
        impact for impact, patterns in IMPACTS if any(fnmatchcase(name, each) for each in patterns)
    )
    return next(fitting, Impact.MAY)


FOLLOWS = {"python patch": "python", "torch commit": "torch", "cpu family": "cpu"}
"""A version or a piece of hardware, and another one that says it better."""

THREADS = ("backends.cpu.num_threads", "env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS")
"""Knobs that set the number of threads. A lock records that number before they are applied."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with another value on each side; None where it is not set or not there."""

    section: str
    key: str
    left: Any
    right: Any
    ranks: tuple[str, ...] = ()
    """The processes of a recorded run that have it; empty if all have it."""
    here: Impact | None = None
    """How likely it changes numbers on this machine, where that is known."""
    hardware: str = ""
    """The hardware that one side lacks, so that it could not set this knob; empty if it is there.
    """

    @property
    def impact(self) -> Impact:
        """How likely it changes numbers."""
        return self.here or impact_of(self.section, self.key)

    def to_json(self, left: str = "left", right: str = "right") -> dict[str, Any]:
        """Return the difference as plain JSON values, the two sides under these names."""
        its = {"key": self.key, left: self.left, right: self.right}
        its |= {"section": self.section, "rank": str(self.impact)}
        return {**its, "ranks": list(self.ranks)} if self.ranks else its


@dataclass(frozen=True, slots=True)
class Gap:
    """What one side lacks, so that it could not be compared."""

    side: str
    """The name of the side that lacks it."""

    section: str
    key: str = ""
    """Empty for the whole section."""

    def __str__(self) -> str:
        return f"{self.section}: {self.key}" if self.key else self.section

    def to_json(self) -> dict[str, str]:
        """Return it as plain JSON values."""
        return {"side": self.side, "what": str(self)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of two snapshots, the likeliest to change numbers first."""

    left: str
    right: str
    differences: tuple[Difference, ...]
    gaps: tuple[Gap, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs but how the two were started."""
        return not self.substantial

    @property
    def substantial(self) -> tuple[Difference, ...]:
        """The differences in anything but how the two were started."""
        return self.having(*(impact for impact in Impact if impact is not Impact.STARTED))

    def having(self, *impacts: Impact) -> tuple[Difference, ...]:
        """Return the differences with one of `impacts`."""
        return tuple(each for each in self.differences if each.impact in impacts)

    def preceded_by(self, *first: Difference) -> Comparison:
        """Return the same with further differences in front."""
        return replace(self, differences=(*first, *self.differences))

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values; what is empty beside it is left out."""
        optional = {
            "told": [each.to_json() for each in self.having(Impact.STARTED)],
            "not_compared": [each.to_json() for each in self.gaps],
        }
        its = {"same": self.same, "differences": [each.to_json() for each in self.substantial]}
        return its | {key: rows for key, rows in optional.items() if rows}


def compare(left: Snapshot, right: Snapshot) -> Comparison:
    """Compare what both snapshots hold; a difference that follows from another one is left out.

    Recorded runs are compared rank by rank: a difference that some ranks lack names those that
    have it. Raises `ProfileError` for two runs without a rank in common.
    """
    ranks = _common_ranks(left, right)
    found: dict[str, Difference] = {}
    missing = list(_unpaired_ranks(left, right))
    for rank in ranks:
        mine, other = left.of_rank(rank), right.of_rank(rank)
        missing += _gaps(mine, other)
        for each in _differences(mine, other):
            text = _typed_text([each.to_json(), each.hardware])
            known = found.get(text, each)
            found[text] = replace(known, ranks=(*known.ranks, rank))
    every = [replace(e, ranks=()) if len(e.ranks) == len(ranks) else e for e in found.values()]
    return Comparison(left.name, right.name, ordered(every), tuple(dict.fromkeys(missing)))


def ordered(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Return differences with the likeliest to change numbers first."""
    return tuple(sorted(differences, key=lambda each: list(Impact).index(each.impact)))


def _common_ranks(left: Snapshot, right: Snapshot) -> tuple[str, ...]:
    """Return the ranks to compare; a side without ranks is compared with each of the other's."""
    if not (left.ranks and right.ranks):
        return tuple(left.ranks or right.ranks) or ("",)
    both = tuple(rank for rank in left.ranks if rank in right.ranks)
    if not both:
        raise ProfileError.about(
            "have no rank in common",
            found=f"{left.name} and {right.name}",
            todo="name two recordings of the same ranks",
        )
    return both


def _unpaired_ranks(left: Snapshot, right: Snapshot) -> Iterator[Gap]:
    if left.ranks and right.ranks:
        for mine, other in ((left, right), (right, left)):
            yield from (Gap(mine.name, r) for r in other.ranks if r not in mine.ranks)


def _differences(left: Snapshot, right: Snapshot) -> list[Difference]:
    """Return the differences of two processes, section by section."""
    both = [name for name in left.sections if name in right.sections and name != ABSENT_HARDWARE]
    if "profile" in both:
        both = [name for name in both if name != "asked"]  # the values are compared themselves
    every = [each for name in both for each in _in_section(name, left, right)]
    differ = {(each.section, each.key) for each in every}
    return [each for each in every if not _follows(each, left, right, differ)]


def _in_section(section: str, left: Snapshot, right: Snapshot) -> Iterator[Difference]:
    one, two = left.sections[section], right.sections[section]
    recorded = section == "knobs" and "recording" in (left.kind, right.kind)
    as_compared = _untyped_text if recorded else _typed_text
    for key in sorted({*one, *two}):
        if section == "profile" and key in NOT_INHERITED:
            continue
        if section != "started":  # how a run was started is shown as it is
            if section not in ABSENT_IS_UNSET and not (key in one and key in two):
                continue
            if is_unknown(one.get(key)) or is_unknown(two.get(key)):
                continue
        if as_compared(one.get(key)) != as_compared(two.get(key)):
            hardware = _lacking_hardware(key, left, right) if section == "knobs" else ""
            yield Difference(section, key, one.get(key), two.get(key), hardware=hardware)


def _lacking_hardware(name: str, left: Snapshot, right: Snapshot) -> str:
    """Return the hardware of a knob that one side could not set for the lack of it, or nothing."""
    knob = knobs_by_name().get(name)
    lacking = any(
        side.sections["knobs"].get(name) == Outcome.UNSUPPORTED
        and name in side.sections.get(ABSENT_HARDWARE, {})
        for side in (left, right)
    )
    return knob.hardware if knob and lacking else ""


def is_unknown(value: Any) -> bool:
    """Whether a value is only the reason why there is none."""
    return isinstance(value, str) and (value.startswith(UNKNOWN) or HIDDEN in value)


def _typed_text(value: Any) -> str:
    """Return a value as it is compared: with its type."""
    return json.dumps(value, sort_keys=True)


def _untyped_text(value: Any) -> str | None:
    """Return the value of a knob as recordings hold it: as text."""
    return None if value is None else shown(value)


def _gaps(left: Snapshot, right: Snapshot) -> Iterator[Gap]:
    for mine, other in ((left, right), (right, left)):
        for section, its in other.sections.items():
            if section in ("asked", "started", ABSENT_HARDWARE):
                continue
            if section not in mine.sections:
                yield Gap(mine.name, section)
            elif section not in ABSENT_IS_UNSET:
                absent = its.keys() - mine.sections[section].keys()
                yield from (Gap(mine.name, section, key) for key in sorted(absent))
        for section, its in mine.sections.items():
            if section not in ("started", ABSENT_HARDWARE):
                unknown = sorted(key for key, value in its.items() if is_unknown(value))
                yield from (Gap(mine.name, section, key) for key in unknown)


def _follows(
    found: Difference, left: Snapshot, right: Snapshot, differ: set[tuple[str, str]]
) -> bool:
    """Whether another difference, or a knob that the profile sets, already says it."""
    if found.section == "knobs":
        return ("profile", _profile_key(found.key)) in differ
    knobs = {*left.sections.get("knobs", {}), *right.sections.get("knobs", {})}
    if found.section == "environment":
        name = f"env.{found.key}"
        setting = {knob.name for knob in CATALOGUE if name in (knob.name, *knob.aliases)}
        setting.add(variable(found.key).name)
        return not knobs.isdisjoint(setting)
    if (found.section, found.key) == ("hardware", "threads"):
        return not knobs.isdisjoint(THREADS)
    return (found.section, FOLLOWS.get(found.key, "")) in differ


def _profile_key(knob: str) -> str:
    known = knobs_by_name().get(knob)
    return known.profile_key if known else knob.replace("env.", "env_extra.", 1)


_PREFIXES = {
    "guarantee": "guarantee ",
    "versions": "version of ",
    "environment": "exported ",
    "packs": "version of pack ",
}
"""What is written before a key, because tables have no column for the section."""

_ABSENT = {
    **dict.fromkeys(("profile", "knobs", "environment"), "not set"),
    "seeding calls": "not seeded",
    "packs": "not used",
}
"""What is written for a value that one side does not have."""


@parts.register(Comparison)
def _comparison_parts(found: Comparison) -> tuple[Part, ...]:
    """Return the table of differences, how each side was started, and what was not compared."""
    rows = found.substantial
    return (
        *(difference_parts(rows, found.left, found.right) if rows else ("the same",)),
        *([f"each of these: {shared}"] if (shared := shared_impact(rows)) else []),
        *(
            f"{each.key}: {_value(each, each.left)} | {_value(each, each.right)}"
            for each in found.having(Impact.STARTED)
        ),
        *gap_lines(found.gaps),
    )


def difference_parts(rows: Sequence[Difference], left: str, right: str) -> tuple[Part, ...]:
    """Return a table of differences, and a line for those of hardware that one side lacks."""
    kept = [each for each in rows if not each.hardware]
    names = [each.hardware for each in rows if each.hardware]
    lines = [f"{for_hardware(names)}: not on both sides"] if names else []
    return *([difference_table(kept, left, right)] if kept else []), *lines


def difference_table(rows: Iterable[Difference], left: str, right: str) -> Table:
    """Return a table of differences, with these headings for the two sides.

    How likely they change numbers is a column where it is not the same for all of them.
    """
    rows = tuple(rows)
    cells = [(_name(each), _value(each, each.left), _value(each, each.right)) for each in rows]
    headings = ("what differs", left, right)
    if shared_impact(rows):
        return table(headings, cells)
    likely = [(str(row.impact), *its) for row, its in zip(rows, cells, strict=True)]
    return table(("how likely", *headings), likely)


def shared_impact(rows: Sequence[Difference]) -> Impact | None:
    """Return how likely several differences change numbers, if that is the same for all."""
    return rows[0].impact if rows[1:] and len({row.impact for row in rows}) == 1 else None


def change(found: Difference) -> str:
    """Return a difference as words within a line."""
    return f"{_name(found)} ({_value(found, found.left)} -> {_value(found, found.right)})"


def gap_lines(rows: Iterable[Gap]) -> list[str]:
    """Return a line for each side that lacks something."""
    lacking: dict[str, list[str]] = {}
    for each in rows:
        lacking.setdefault(each.side, []).append(printable(str(each)))
    return [f"not compared, unknown in {side}: {some(names)}" for side, names in lacking.items()]


def _name(found: Difference) -> str:
    where = f"{', '.join(found.ranks)}: " if found.ranks else ""
    return where + _PREFIXES.get(found.section, "") + printable(found.key)


def _value(found: Difference, value: Any) -> str:
    return _ABSENT.get(found.section, "none") if value is None else shown(value)
