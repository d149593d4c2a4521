"""In what two snapshots differ, and how likely that changes numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import variable
from torchrepro.lock.snapshot import ABSENT_IS_UNSET, Snapshot
from torchrepro.manifest.environment import UNKNOWN
from torchrepro.messages import Problem, shown
from torchrepro.profile.composition import NOT_INHERITED
from torchrepro.redaction import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class Rank(StrEnum):
    """How likely a difference changes numbers, the likeliest first."""

    CHANGES = "changes numbers"
    MAY = "may change numbers"
    SHOULD_NOT = "should not change numbers"
    PROGRAM = "another program"
    """The source has changed, which a lock does not hold: a run is locked, and code goes on."""
    STARTED = "how it was started"


ORDER: Mapping[Rank, int] = {rank: position for position, rank in enumerate(Rank)}

HELD = (Rank.CHANGES, Rank.MAY)
"""What a lock is held to."""

HELD_STRICTLY = (*HELD, Rank.SHOULD_NOT)

ROWS: tuple[tuple[str, Rank], ...] = (
    ("profile/name", Rank.SHOULD_NOT),
    ("profile/description", Rank.SHOULD_NOT),
    ("profile/schema", Rank.SHOULD_NOT),
    ("profile/requires*", Rank.SHOULD_NOT),
    ("profile/on_late", Rank.SHOULD_NOT),
    ("profile/guard*", Rank.SHOULD_NOT),
    ("profile/*", Rank.CHANGES),
    ("asked/*", Rank.CHANGES),
    ("guarantee/*", Rank.MAY),
    ("knobs/*", Rank.CHANGES),
    ("seeding calls/*", Rank.CHANGES),
    ("environment/*_VISIBLE_DEVICES", Rank.MAY),
    ("environment/*_AFFINITY", Rank.MAY),
    ("environment/OMP_P*", Rank.MAY),
    ("environment/*", Rank.CHANGES),
    ("versions/torch", Rank.CHANGES),
    ("versions/torch_npu", Rank.CHANGES),
    ("versions/torch commit", Rank.CHANGES),
    ("versions/cuda", Rank.CHANGES),
    ("versions/hip", Rank.CHANGES),
    ("versions/cudnn", Rank.CHANGES),
    ("versions/cann", Rank.CHANGES),
    ("versions/blas", Rank.CHANGES),
    ("versions/blas of torch", Rank.CHANGES),
    ("versions/onednn", Rank.CHANGES),
    ("versions/python patch", Rank.SHOULD_NOT),
    ("versions/kernel", Rank.SHOULD_NOT),
    ("versions/hydra-core", Rank.SHOULD_NOT),
    ("versions/omegaconf", Rank.SHOULD_NOT),
    ("versions/pydantic", Rank.SHOULD_NOT),
    ("versions/torchrepro", Rank.SHOULD_NOT),
    ("versions/*", Rank.MAY),
    ("hardware/system", Rank.CHANGES),
    ("hardware/machine", Rank.CHANGES),
    ("hardware/cpus", Rank.MAY),
    ("hardware/cpu*", Rank.CHANGES),
    ("hardware/instruction set", Rank.CHANGES),
    ("hardware/threads", Rank.CHANGES),
    ("hardware/gpu", Rank.CHANGES),
    ("hardware/npu", Rank.CHANGES),
    ("hardware/accelerator", Rank.CHANGES),
    ("hardware/*", Rank.MAY),
    ("packs/*", Rank.SHOULD_NOT),
    ("processes/*", Rank.CHANGES),
    ("source/*", Rank.PROGRAM),
    ("started/*", Rank.STARTED),
)
"""Section and key, as a pattern, and the rank; the first row that fits counts."""


def rank_of(section: str, key: str) -> Rank:
    """Return how likely a difference in `key` of `section` changes numbers."""
    name = f"{section}/{key}"
    return next((rank for pattern, rank in ROWS if fnmatchcase(name, pattern)), Rank.MAY)


THREADS = ("backends.cpu.num_threads", "env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS")
"""Knobs that settle how many threads there are, which a lock is taken before."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with another value on each side; None where it is not set or not there."""

    section: str
    key: str
    left: Any
    right: Any
    ranks: tuple[str, ...] = ()
    """The ranks of a recorded run that it is on; empty if it is on all."""

    @property
    def rank(self) -> Rank:
        """How likely it changes numbers."""
        return rank_of(self.section, self.key)

    def to_json(self, left: str = "left", right: str = "right") -> dict[str, Any]:
        """Return the difference as plain JSON values, the two sides under these names."""
        its = {"key": self.key, left: self.left, right: self.right}
        its |= {"section": self.section, "rank": str(self.rank)}
        return {**its, "ranks": list(self.ranks)} if self.ranks else its


@dataclass(frozen=True, slots=True)
class NotCompared:
    """What one side does not tell of although the other one does, so that nobody compared it."""

    side: str
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
    """What comparing two descriptions came to, the likeliest to change numbers first."""

    differences: tuple[Difference, ...]
    not_compared: tuple[NotCompared, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs but how the two were started."""
        return not self._differing

    @property
    def _differing(self) -> tuple[Difference, ...]:
        return tuple(each for each in self.differences if each.rank is not Rank.STARTED)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values; what is empty beside it is left out."""
        aside = {
            "told": [each.to_json() for each in self.having(Rank.STARTED)],
            "not_compared": [each.to_json() for each in self.not_compared],
        }
        differences = [each.to_json() for each in self._differing]
        its = {"same": self.same, "differences": differences}
        return its | {key: rows for key, rows in aside.items() if rows}

    def led_by(self, first: Iterable[Difference]) -> Comparison:
        """Return the same with further differences in front."""
        return replace(self, differences=(*first, *self.differences))

    def having(self, *ranks: Rank) -> tuple[Difference, ...]:
        """Return the differences with one of `ranks`."""
        return tuple(each for each in self.differences if each.rank in ranks)


def compare(left: Snapshot, right: Snapshot) -> Comparison:
    """Compare what both sides tell of; a difference that follows from another one is left out.

    Runs that were recorded rank by rank are compared so: a difference that is not the same on
    every rank says on which it is. Raises `ProfileError` for two runs without a rank in common.
    """
    ranks = _ranks_of_both(left, right)
    found = [(rank, _compare(left.of_rank(rank), right.of_rank(rank))) for rank in ranks]
    kept: dict[str, Difference] = {}
    for rank, its in found:
        for each in its.differences:
            known = kept.setdefault(_written(each.to_json()), each)
            kept[_written(each.to_json())] = replace(known, ranks=(*known.ranks, rank))
    every = [replace(e, ranks=()) if len(e.ranks) == len(ranks) else e for e in kept.values()]
    every.sort(key=lambda each: ORDER[each.rank])
    untold = [each for _, its in found for each in its.not_compared]
    lonely = _ranks_of_one(left, right)
    return Comparison(tuple(every), tuple(dict.fromkeys((*lonely, *untold))))


def _ranks_of_both(left: Snapshot, right: Snapshot) -> tuple[str, ...]:
    """Return the ranks to compare; a side that is no recording stands for each of the other's."""
    if not (left.ranks and right.ranks):
        return tuple(left.ranks or right.ranks) or ("",)
    both = tuple(rank for rank in left.ranks if rank in right.ranks)
    if not both:
        raise ProfileError(
            Problem(
                "have no rank in common",
                found=f"{left.name} and {right.name}",
                todo="name two recordings of the same ranks",
            )
        )
    return both


def _ranks_of_one(left: Snapshot, right: Snapshot) -> Iterator[NotCompared]:
    if left.ranks and right.ranks:
        for mine, other in ((left, right), (right, left)):
            yield from (NotCompared(mine.name, r) for r in other.ranks if r not in mine.ranks)


def _compare(left: Snapshot, right: Snapshot) -> Comparison:
    both = [name for name in left.sections if name in right.sections]
    if "profile" in both:
        both = [name for name in both if name != "asked"]  # the values themselves say more
    every = [each for name in both for each in _in_section(name, left, right)]
    differ = {(each.section, each.key) for each in every}
    kept = [each for each in every if not _follows(each, left, right, differ)]
    kept.sort(key=lambda each: (ORDER[each.rank], both.index(each.section), each.key))
    return Comparison(tuple(kept), tuple(_not_compared(left, right)))


def _in_section(section: str, left: Snapshot, right: Snapshot) -> Iterator[Difference]:
    one, two = left.sections[section], right.sections[section]
    as_text = section == "knobs" and "recording" in (left.kind, right.kind)
    written = _text if as_text else _written
    for key in sorted({*one, *two}):
        if not _both_say(section, key, left, right) or (
            section == "profile" and key in NOT_INHERITED
        ):
            continue
        if written(one.get(key)) != written(two.get(key)):
            yield Difference(section, key, one.get(key), two.get(key))


def _both_say(section: str, key: str, left: Snapshot, right: Snapshot) -> bool:
    """Whether both sides say what `key` is; how a run was started is shown as it is."""
    if section == "started":
        return True
    sides = (left.sections[section], right.sections[section])
    if section not in ABSENT_IS_UNSET and not all(key in side for side in sides):
        return False
    return not any(is_unknown(side.get(key)) for side in sides)


def is_unknown(value: Any) -> bool:
    """Whether a value is only the reason why there is none."""
    return isinstance(value, str) and (value.startswith(UNKNOWN) or HIDDEN in value)


def _written(value: Any) -> str:
    """Return a value as it is compared: with its type."""
    return json.dumps(value, sort_keys=True)


def _text(value: Any) -> str | None:
    """Return the value of a knob as a recording tells it, which is as text."""
    return None if value is None else shown(value)


def _not_compared(left: Snapshot, right: Snapshot) -> Iterator[NotCompared]:
    for mine, other in ((left, right), (right, left)):
        for section, its in other.sections.items():
            if section in ("asked", "started"):
                continue
            if section not in mine.sections:
                yield NotCompared(mine.name, section)
            elif section not in ABSENT_IS_UNSET:
                absent = its.keys() - mine.sections[section].keys()
                yield from (NotCompared(mine.name, section, key) for key in sorted(absent))
        for section, its in mine.sections.items():
            shown = section == "started"
            unknown = [key for key, value in its.items() if not shown and is_unknown(value)]
            yield from (NotCompared(mine.name, section, key) for key in sorted(unknown))


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


FOLLOWS = {"python patch": "python", "torch commit": "torch", "cpu family": "cpu"}
"""A version or a piece of hardware, and another one that says it better."""


def _profile_key(knob: str) -> str:
    known = knobs_by_name().get(knob)
    return known.profile_key if known else knob.replace("env.", "env_extra.", 1)
