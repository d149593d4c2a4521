"""Profiles, manifests, locks and runs as snapshots; in what two differ, and how much it matters.

Two profiles are compared by what they come to on this machine. A key that a profile leaves out has
the value that is in effect here without a profile, so spelling out a default makes no difference.
How likely a difference changes numbers follows from what the setting is for, and from whether
anything here reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.console import parts, table
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.imports import import_torch
from torchrepro.ground.messages import printable, shown, some
from torchrepro.ground.redaction import HIDDEN
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import MissingState, variable
from torchrepro.manifest.contents import manifest_in, read_complete
from torchrepro.manifest.environment import UNKNOWN
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import DEFAULTS, NOT_INHERITED, flatten, knobs_for_key, plain
from torchrepro.profile.search_path import DISTRIBUTION
from torchrepro.reporting.outcomes import Outcome, is_set
from torchrepro.reporting.process_state import absent_hardware
from torchrepro.reporting.report import for_hardware
from torchrepro.trace.format import SUFFIX

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.trace.reader import Trace

    Section = Mapping[str, Any]

ABSENT_HARDWARE = "absent hardware"
"""Section of the knobs whose hardware a process did not have, each with the reason in words.

It says why a knob was not set and is not compared itself.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one of two sides was, by section; a section that it does not hold is absent."""

    name: str
    kind: str  # ``profile``, ``manifest``, ``lock`` or ``recording``

    sections: Mapping[str, Section]
    ranks: Mapping[str, Mapping[str, Section]] = field(default_factory=dict)
    """The sections of each process of a recording, by a name such as ``rank 1``.

    `sections` are those of the first.
    """

    def of_rank(self, rank: str) -> Snapshot:
        """Return the snapshot of one process; one without ranks is the same for each."""
        return Snapshot(self.name, self.kind, self.ranks.get(rank, self.sections))


def snapshot_of(name: str) -> Snapshot:
    """Return the snapshot of a profile, or of the path of a manifest, a lock or a run's folder.

    A name that is both a profile and a folder is the profile; ./NAME is the folder. Raises
    `ProfileError` or `TraceError` for what cannot be read.
    """
    place = Path(name)
    if place.suffix not in (".yaml", ".yml") and not name.startswith("pkg://"):
        if os.path.isdir(name):  # noqa: PTH112 - never raises
            try:
                return of_profile(name, resolve(name))
            except ProfileError:
                return _of_folder(name, place)
        if place.suffix in (".json", ".lock") or os.path.isfile(name):  # noqa: PTH113 - see above
            return of_contents(name, *read_complete(place))
    return of_profile(name, resolve(name))


def of_profile(name: str, resolved: ResolvedProfile) -> Snapshot:
    """Return the snapshot of a profile: its values and the packs that they come from."""
    sections = {
        "profile": flatten(plain(resolved.values)),
        "packs": _packs({key: origin.to_json() for key, origin in resolved.origins.items()}),
        "asked": {"digest": resolved.digest, "guarantee": resolved.guarantee},
    }
    return Snapshot(name, "profile", sections)


def of_contents(name: str, kind: str, contents: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot of a manifest or a lock; raises `ProfileError` for a damaged one."""
    sections: dict[str, Section] = {}
    for section, its in SECTIONS.items():
        if its.key not in contents:
            continue
        try:
            held = its.read(contents[its.key])
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            raise ProfileError.about("damaged: not what is written there", name, its.key) from None
        if held is not None:
            sections[section] = held
    digest = contents.get("digest")
    if isinstance(digest, str):
        sections["asked"] = {"digest": digest}
    return Snapshot(name, kind, sections)


def _pairs(value: Any) -> Section:
    if not isinstance(value, dict):
        raise TypeError(value)
    return value


def _knobs(report: Any) -> Section:
    return {
        str(row["knob"]): _state(row["outcome"], row["after"], row.get("absent", ""))
        for row in _pairs(report)["knobs"]
    }


def _state(outcome: Any, after: Any, absent: Any) -> Any:
    # The value that a knob had after applying, or the outcome if it was not set.
    return after if is_set(outcome, after, absent) else str(outcome)


def _packs(origins: Any) -> Section:
    # The version of each package that the values come from, or once came from.
    found: dict[str, set[str]] = {}
    for origin in _pairs(origins).values():
        for each in (origin, *origin["replaced"]):
            package, _, version = each["package"].partition(" ")
            if package not in ("", DISTRIBUTION):  # our own version is among the others
                found.setdefault(package, set()).add(version)
    return {package: ", ".join(sorted(versions)) for package, versions in found.items()}


def _versions(value: Any) -> Section:
    found = dict(_pairs(value))
    if isinstance(found.get("python"), str):
        major, _, rest = found["python"].partition(".")
        minor, _, patch = rest.partition(".")
        found |= {"python": f"{major}.{minor}", "python patch": patch}
    return found


class _SectionRow(NamedTuple):
    key: str  # of a manifest, which holds it
    read: Callable[[Any], Section | None] = _pairs  # None leaves it out
    prefix: str = ""  # what stands before a name, because tables have no column for the section
    absent: str = ""
    """What a name is that one side does not have; empty where it was not recorded."""


SECTIONS: Mapping[str, _SectionRow] = {
    "profile": _SectionRow("profile", lambda value: flatten(_pairs(value)), absent="not set"),
    "packs": _SectionRow("origins", _packs, "version of pack ", "not used"),
    "guarantee": _SectionRow(
        "report", lambda report: {"held": str(report["guarantee"]["held"])}, "guarantee "
    ),
    "knobs": _SectionRow("report", _knobs, absent="not set"),
    ABSENT_HARDWARE: _SectionRow(
        "report",
        lambda report: {r["knob"]: r["absent"] for r in report["knobs"] if r.get("absent")},
    ),
    "seeding calls": _SectionRow(
        "seeding_calls",
        lambda calls: {f"{call['function']} at {call['where']}": call["value"] for call in calls},
        absent="not seeded",
    ),
    "environment": _SectionRow("environment", _pairs, "exported ", "not set"),
    "other variables": _SectionRow("other_variables", _pairs, "exported ", "not set"),
    "compiler": _SectionRow("compiler", _pairs, "setting of torch's compiler ", "the default"),
    "versions": _SectionRow("versions", _versions, "version of "),
    "hardware": _SectionRow("hardware"),
    "source": _SectionRow("repository", lambda its: None if "unknown" in _pairs(its) else its),
    "started": _SectionRow(
        "command_line", lambda words: {"command line": " ".join(map(str, words))}, absent="none"
    ),
}


OF_A_RUN: Mapping[str, _SectionRow] = {
    "data": _SectionRow("data", prefix="file ", absent="not there"),
    "listed": _SectionRow("listed", prefix="names in ", absent="not listed"),
    "variables": _SectionRow("variables", prefix="variable ", absent="not read"),
}
"""What a run depended on besides: compared where its numbers differ."""


def _row_of(name: str) -> _SectionRow:
    # Of another name are those of a recording.
    return SECTIONS.get(name) or OF_A_RUN.get(name, _SectionRow(""))


def _of_folder(name: str, folder: Path) -> Snapshot:
    from torchrepro.trace.reader import read_run

    if not any(folder.glob(f"rank*{SUFFIX}")):
        path = manifest_in(name, folder)
        if path is not None:
            return of_contents(name, *read_complete(path))
        raise ProfileError.about(
            "holds neither a manifest nor a recording",
            found=name,
            todo="name the output folder of a Hydra job, of torchrepro run --record, or of "
            "torchrepro.log_to",
        )
    traces = read_run(folder, records=False)
    try:
        ranks = {f"rank {each.path.stem.removeprefix('rank')}": _recorded(each) for each in traces}
    finally:
        for trace in traces:
            trace.close()
    return Snapshot(name, "recording", next(iter(ranks.values())), ranks)


def _recorded(trace: Trace) -> Mapping[str, Section]:
    meta = trace.meta

    def pairs(key: str) -> Section:
        its = meta.get(key)
        return its if isinstance(its, dict) else {}

    sections: dict[str, Section] = {
        "versions": _versions(pairs("versions")),
        "hardware": pairs("hardware"),
        "processes": {"world size": meta.get("world_size")},
        "started": {"program": str(meta.get("program", ""))},
    }
    if meta.get("digest"):
        outcomes, absent = pairs("outcomes"), pairs("absent")
        sections["asked"] = {key: meta.get(key) for key in ("digest", "guarantee")}
        sections[ABSENT_HARDWARE] = absent
        sections["knobs"] = {
            knob: _state(outcomes.get(knob, Outcome.APPLIED), after, knob in absent)
            for knob, after in pairs("knobs").items()
        }
    return sections


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


ENFORCED = (Impact.CHANGES, Impact.MAY)  # what a lock forbids

ENFORCED_STRICTLY = (*ENFORCED, Impact.SHOULD_NOT)

_PLACES = ("HOME", "ROOT", "PATH", "DIR", "LOG*", "DEBUG*", "VERSION", "ADDR*", "PORT", "IFNAME")
"""How names end of variables that say where something is, how much is said, or who takes part."""

IMPACTS: tuple[tuple[Impact, tuple[str, ...]], ...] = (
    (Impact.SHOULD_NOT, ("profile/name", "profile/description", "profile/schema")),
    (Impact.SHOULD_NOT, ("profile/requires*", "profile/on_late", "profile/guard*")),
    (Impact.CHANGES, ("profile/*", "asked/*", "knobs/*", "seeding calls/*", "processes/*")),
    (Impact.MAY, ("guarantee/*",)),
    (Impact.MAY, ("environment/*_VISIBLE_DEVICES", "environment/*_AFFINITY", "environment/OMP_P*")),
    (Impact.CHANGES, ("environment/*",)),
    (Impact.SHOULD_NOT, tuple(f"other variables/*_{end}" for end in _PLACES)),
    (Impact.MAY, ("other variables/*", "compiler/*")),
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
    rows = ((impact, pattern) for impact, patterns in IMPACTS for pattern in patterns)
    fitting = (impact for impact, pattern in rows if fnmatchcase(f"{section}/{key}", pattern))
    return next(fitting, Impact.MAY)


FOLLOWS = {"python patch": "python", "torch commit": "torch", "cpu family": "cpu"}
"""Key -> the more general key that implies it."""

THREADS = ("backends.cpu.num_threads", "env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS")
"""Knobs that set the number of threads. A lock records that number before they are applied."""

DECIDES_NUMBERS = (
    *("seed", "streams*", "ranks*", "dropout", "device.rng", "device.modules*"),
    *("dataloader.seeding", "*precision*", "*_hf32", "*tf32*", "*FPMATH*", "*fp16_accumulation"),
    *("*default_dtype", "*num_threads", "*NUM_THREADS", "*CPU_CAPABILITY", "*MAX_CPU_ISA"),
)
"""Keys that decide numbers themselves. Others choose between kernels that may round alike."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with another value on each side; None where it is not set or not there."""

    section: str
    key: str
    left: Any
    right: Any
    ranks: tuple[str, ...] = ()
    """The processes of a recorded run that have it; empty if all have it."""
    here: Impact | None = None  # how likely it changes numbers on this machine, where that is known
    hardware: str = ""  # the hardware that one side lacks, so that it could not set this knob

    @property
    def impact(self) -> Impact:
        return self.here or impact_of(self.section, self.key)

    def to_json(self, left: str = "left", right: str = "right") -> dict[str, Any]:
        """Return the difference as plain JSON values, the two sides under these names."""
        its = {"key": self.key, left: self.left, right: self.right}
        its |= {"section": self.section, "rank": str(self.impact)}
        return {**its, "ranks": list(self.ranks)} if self.ranks else its


class Gap(NamedTuple):
    """What one side lacks, so that it could not be compared."""

    side: str
    section: str
    key: str = ""  # empty where all of the section is missing

    def __str__(self) -> str:
        return f"{self.section}: {self.key}" if self.key else self.section

    def to_json(self) -> dict[str, str]:
        return {"side": self.side, "what": str(self)}


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The differences of two snapshots, the likeliest to change numbers first."""

    left: str
    right: str
    differences: tuple[Difference, ...]
    gaps: tuple[Gap, ...]

    @property
    def same(self) -> bool:
        return not self.substantial

    @property
    def substantial(self) -> tuple[Difference, ...]:
        """The differences in anything but how the two were started."""
        return self.having(*(impact for impact in Impact if impact is not Impact.STARTED))

    def having(self, *impacts: Impact) -> tuple[Difference, ...]:
        return tuple(each for each in self.differences if each.impact in impacts)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values; what is empty beside it is left out."""
        its = {"same": self.same, "differences": [each.to_json() for each in self.substantial]}
        if started := self.having(Impact.STARTED):
            its["told"] = [each.to_json() for each in started]
        if self.gaps:
            its["not_compared"] = [each.to_json() for each in self.gaps]
        return its


def compare(left: Snapshot, right: Snapshot) -> SnapshotDiff:
    """Compare what both snapshots hold; a difference that follows from another one is left out.

    Recorded runs are compared rank by rank: a difference that some ranks lack names those that
    have it. Raises `ProfileError` for two runs without a rank in common.
    """
    ranks = tuple(left.ranks or right.ranks) or ("",)  # one without ranks is the same for each
    missing: list[Gap] = []
    if left.ranks and right.ranks:
        ranks = tuple(rank for rank in left.ranks if rank in right.ranks)
        for mine, other in ((left, right), (right, left)):
            missing += [Gap(mine.name, rank) for rank in other.ranks if rank not in mine.ranks]
    if not ranks:
        raise ProfileError.about(
            "have no rank in common",
            found=f"{left.name} and {right.name}",
            todo="name two recordings of the same ranks",
        )
    found: dict[str, Difference] = {}
    for rank in ranks:
        mine, other = left.of_rank(rank), right.of_rank(rank)
        missing += _gaps(mine, other)
        for each in _differences(mine, other):
            text = json.dumps([each.to_json(), each.hardware], sort_keys=True)
            known = found.get(text, each)
            found[text] = replace(known, ranks=(*known.ranks, rank))
    every = [replace(e, ranks=()) if len(e.ranks) == len(ranks) else e for e in found.values()]
    return SnapshotDiff(left.name, right.name, _ordered(every), tuple(dict.fromkeys(missing)))


def _ordered(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda each: list(Impact).index(each.impact)))


def differences_of(left: str, right: str) -> SnapshotDiff:
    """Return in what two profiles, manifests, locks or runs differ, each given by name or path.

    Two profiles are compared by what they come to on this machine, which imports torch. Raises
    `ProfileError` or `TraceError` for what cannot be read.
    """
    one, two = snapshot_of(left), snapshot_of(right)
    found = compare(one, two)
    return effective(found) if {one.kind, two.kind} == {"profile"} else found


def effective(found: SnapshotDiff) -> SnapshotDiff:
    """Return what is left of the differences of two profiles here, and how likely it matters."""
    if not found.differences:
        return found
    import_torch()
    absent = absent_hardware()
    kept = []
    for each in found.differences:
        impact = impact_of(each.section, each.key)
        if each.section == "profile":
            spelt_out = each.right if each.left is None else each.left
            if None in (each.left, each.right) and spelt_out == _without_profile(each.key):
                continue
            knobs = knobs_for_key(each.key)
            if impact is not Impact.CHANGES:
                pass
            elif each.key in DEFAULTS:
                impact = Impact.SHOULD_NOT  # it decides what is refused, not what is computed
            elif knobs and all(knob.hardware in absent for knob in knobs):
                impact = Impact.NOTHING_HERE
            elif not any(fnmatchcase(each.key, pattern) for pattern in DECIDES_NUMBERS):
                impact = Impact.MAY
        kept.append(replace(each, here=impact))
    return replace(found, differences=_ordered(kept))


def _without_profile(key: str) -> Any:
    # What a process here has for a key that its profile leaves out, None if nothing.
    if key in DEFAULTS:
        return DEFAULTS[key]
    knobs = [knob for knob in knobs_for_key(key) if knob.name == key]
    if not knobs or knobs[0].moves_on or knobs[0].variable or not knobs[0].loaded:
        return None
    try:
        return knobs[0].access.read()
    except MissingState:
        return None


def _differences(left: Snapshot, right: Snapshot) -> list[Difference]:
    every = []
    both = [name for name in left.sections if name in right.sections and name != ABSENT_HARDWARE]
    if "profile" in both:
        both = [name for name in both if name != "asked"]  # the values are compared themselves
    for section in both:
        one, two = left.sections[section], right.sections[section]
        as_text = section == "knobs" and "recording" in (left.kind, right.kind)
        write = shown if as_text else partial(json.dumps, sort_keys=True)
        for key in sorted({*one, *two}):
            if section == "profile" and key in NOT_INHERITED:
                continue
            if not _row_of(section).absent and not (key in one and key in two):
                continue
            values = one.get(key), two.get(key)
            if section != "started" and any(map(_is_unknown, values)):
                continue
            # Values are compared with their types, but for knobs of a recording, which holds texts.
            one_text, other_text = (None if value is None else write(value) for value in values)
            if one_text == other_text:
                continue
            lacking = section == "knobs" and any(
                side.sections["knobs"].get(key) == Outcome.UNSUPPORTED
                and key in side.sections.get(ABSENT_HARDWARE, {})
                for side in (left, right)
            )
            hardware = knobs_by_name()[key].hardware if lacking and key in knobs_by_name() else ""
            every.append(Difference(section, key, *values, hardware=hardware))
    differ = {(each.section, each.key) for each in every}
    return [each for each in every if not _follows(each, left, right, differ)]


def _is_unknown(value: Any) -> bool:  # it is only the reason why there is none
    return isinstance(value, str) and (value.startswith(UNKNOWN) or HIDDEN in value)


def _gaps(left: Snapshot, right: Snapshot) -> Iterator[Gap]:
    for mine, other in ((left, right), (right, left)):
        for section, its in other.sections.items():
            if section in ("asked", "started", "compiler", ABSENT_HARDWARE):
                continue
            if section not in mine.sections:
                yield Gap(mine.name, section)
            elif not _row_of(section).absent:
                absent = its.keys() - mine.sections[section].keys()
                yield from (Gap(mine.name, section, key) for key in sorted(absent))
        for section, its in mine.sections.items():
            if section not in ("started", ABSENT_HARDWARE):
                unknown = sorted(key for key, value in its.items() if _is_unknown(value))
                yield from (Gap(mine.name, section, key) for key in unknown)


def _follows(
    found: Difference, left: Snapshot, right: Snapshot, differ: set[tuple[str, str]]
) -> bool:
    # Whether another difference, or a knob that the profile sets, already says it.
    if found.section == "knobs":
        known = knobs_by_name().get(found.key)
        key = known.profile_key if known else found.key.replace("env.", "env_extra.", 1)
        return ("profile", key) in differ
    knobs = {*left.sections.get("knobs", {}), *right.sections.get("knobs", {})}
    if found.section in ("environment", "other variables"):
        name = f"env.{found.key}"
        setting = {knob.name for knob in CATALOGUE if name in (knob.name, *knob.aliases)}
        return not knobs.isdisjoint({*setting, variable(found.key).name})
    if (found.section, found.key) == ("hardware", "threads"):
        return not knobs.isdisjoint(THREADS)
    return (found.section, FOLLOWS.get(found.key, "")) in differ


@parts.register(SnapshotDiff)
def _comparison_parts(found: SnapshotDiff) -> tuple[Part, ...]:
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
    """Return a table of differences, and a line for those of hardware that one side lacks.

    How likely they change numbers is a column where it is not the same for all of them.
    """
    found: list[Part] = []
    if kept := [each for each in rows if not each.hardware]:
        headings = ("how likely", "what differs", left, right)
        cells = [
            (str(each.impact), _name(each), _value(each, each.left), _value(each, each.right))
            for each in kept
        ]
        first = int(shared_impact(kept) is not None)
        found.append(table(headings[first:], [row[first:] for row in cells]))
    if lacking := [each.hardware for each in rows if each.hardware]:
        found.append(f"{for_hardware(lacking)}: not on both sides")
    return tuple(found)


def shared_impact(rows: Sequence[Difference]) -> Impact | None:
    """Return how likely several differences change numbers, if that is the same for all."""
    return rows[0].impact if rows[1:] and len({row.impact for row in rows}) == 1 else None


def change(found: Difference) -> str:
    return f"{_name(found)} ({_value(found, found.left)} -> {_value(found, found.right)})"


def gap_lines(rows: Iterable[Gap]) -> list[str]:
    lacking: dict[str, list[str]] = {}
    for each in rows:
        lacking.setdefault(each.side, []).append(printable(str(each)))
    return [f"not compared, unknown in {side}: {some(names)}" for side, names in lacking.items()]


def _name(found: Difference) -> str:
    where = f"{', '.join(found.ranks)}: " if found.ranks else ""
    return where + _row_of(found.section).prefix + printable(found.key)


def _value(found: Difference, value: Any) -> str:
    return shown(value) if value is not None else _row_of(found.section).absent or "none"
