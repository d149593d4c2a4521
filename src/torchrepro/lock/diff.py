"""Compare two profiles, manifests, locks or runs, and rate the impact of each difference.

Each of the two is read as a `Snapshot`. Two profiles are compared by their effect on this machine.
A key that a profile omits has the value that is in effect without a profile, so setting that value
explicitly makes no difference. An `Impact` rates how likely a difference changes losses and
parameters. For two profiles it also depends on whether this machine has the hardware of the knob.
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
from torchrepro.ground.errors import ProfileError, printable, shown, some
from torchrepro.ground.imports import import_torch
from torchrepro.ground.redaction import HIDDEN
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import MissingState
from torchrepro.knobs.variables import DECIDE_RESULTS, variable
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
"""Section of the knobs whose hardware was absent in a process, each with the reason.

It explains why a knob was not set. It is not compared itself.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The sections of a profile, manifest, lock or run to compare, as far as they were recorded."""

    name: str
    kind: str  # ``profile``, ``manifest``, ``lock`` or ``recording``

    sections: Mapping[str, Section]
    ranks: Mapping[str, Mapping[str, Section]] = field(default_factory=dict)
    """The sections of each process of a recording, by a name such as ``rank 1``.

    `sections` belong to the first process.
    """

    def of_rank(self, rank: str) -> Snapshot:
        """Return the snapshot of one process. Without ranks, all processes share one snapshot."""
        return Snapshot(self.name, self.kind, self.ranks.get(rank, self.sections))


def snapshot_of(name: str) -> Snapshot:
    """Return the snapshot of a profile, a manifest, a lock or the folder of a run.

    `name` is the name of a profile or a path. A name that is both a profile and a folder means the
    profile, and ./NAME means the folder. Raises `ProfileError` or `TraceError` if reading fails.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not name.startswith("pkg://"):
        if os.path.isdir(name):  # noqa: PTH112 - never raises
            try:
                return of_profile(name, resolve(name))
            except ProfileError:
                return _of_folder(name, path)
        if path.suffix in (".json", ".lock") or os.path.isfile(name):  # noqa: PTH113 - see above
            return of_contents(name, *read_complete(path))
    return of_profile(name, resolve(name))


def of_profile(name: str, resolved: ResolvedProfile) -> Snapshot:
    """Return the snapshot of a profile: the values, and the packs that set the values."""
    sections = {
        "profile": flatten(plain(resolved.values)),
        "packs": _packs({key: origin.to_json() for key, origin in resolved.origins.items()}),
        "asked": {"digest": resolved.digest, "guarantee": resolved.guarantee},
    }
    return Snapshot(name, "profile", sections)


def of_contents(name: str, kind: str, contents: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot of a manifest or a lock. Raises `ProfileError` if it is damaged."""
    sections: dict[str, Section] = {}
    for name_of_section, row in SECTIONS.items():
        if row.key not in contents:
            continue
        try:
            section = row.read(contents[row.key])
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            problem = "damaged: not as torchrepro writes it"
            raise ProfileError.about(problem, name, row.key) from None
        if section is not None:
            sections[name_of_section] = section
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
    """Return a knob's value after the profile was applied, or the outcome if it was not set."""
    return after if is_set(outcome, after, absent) else str(outcome)


def _packs(origins: Any) -> Section:
    """Return the version of each package that set a value, even if another value replaced it."""
    packs: dict[str, set[str]] = {}
    for origin in _pairs(origins).values():
        for layer in (origin, *origin["replaced"]):
            package, _, version = layer["package"].partition(" ")
            if package not in ("", DISTRIBUTION):  # `versions` has the version of torchrepro
                packs.setdefault(package, set()).add(version)
    return {package: ", ".join(sorted(versions)) for package, versions in packs.items()}


def _versions(value: Any) -> Section:
    versions = dict(_pairs(value))
    if isinstance(versions.get("python"), str):
        major, _, rest = versions["python"].partition(".")
        minor, _, patch = rest.partition(".")
        versions |= {"python": f"{major}.{minor}", "python patch": patch}
    return versions


class _SectionRow(NamedTuple):
    key: str  # the key of a manifest that has the section
    read: Callable[[Any], Section | None] = _pairs  # returns None to omit the section
    prefix: str = ""  # printed before a name, because tables have no column for the section
    absent: str = ""
    """The state of a name that a snapshot lacks, such as `not set`; empty if it is unknown."""


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
    "source": _SectionRow(
        "repository", lambda state: None if "unknown" in _pairs(state) else state
    ),
    "started": _SectionRow(
        "command_line", lambda words: {"command line": " ".join(map(str, words))}, absent="none"
    ),
}


RUN_DEPENDENCIES: Mapping[str, _SectionRow] = {
    "data": _SectionRow("data", prefix="file ", absent="does not exist"),
    "listed": _SectionRow("listed", prefix="names in ", absent="not listed"),
    "variables": _SectionRow("variables", prefix="variable ", absent="not read"),
}
"""Other dependencies of a run. They are compared only if its results differ from the lock."""


def _row_of(name: str) -> _SectionRow:
    # A recording has sections that manifests do not have, such as `processes`.
    return SECTIONS.get(name) or RUN_DEPENDENCIES.get(name, _SectionRow(""))


def _of_folder(name: str, folder: Path) -> Snapshot:
    from torchrepro.trace.reader import read_run

    if not any(folder.glob(f"rank*{SUFFIX}")):
        path = manifest_in(name, folder)
        if path is not None:
            return of_contents(name, *read_complete(path))
        raise ProfileError.about(
            "contains neither a manifest nor a recording",
            found=name,
            todo="name the output folder of a Hydra job, of torchrepro run --record, or of "
            "torchrepro.log_to",
        )
    traces = read_run(folder, records=False)
    try:
        ranks = {
            f"rank {trace.path.stem.removeprefix('rank')}": _recorded(trace) for trace in traces
        }
    finally:
        for trace in traces:
            trace.close()
    return Snapshot(name, "recording", next(iter(ranks.values())), ranks)


def _recorded(trace: Trace) -> Mapping[str, Section]:
    meta = trace.meta

    def pairs(key: str) -> Section:
        section = meta.get(key)
        return section if isinstance(section, dict) else {}

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
    """How likely a difference changes results. The likeliest member comes first."""

    CHANGES = "changes numbers"
    MAY = "may change numbers"
    NOTHING_HERE = "nothing here reads it"
    """Two profiles only: this machine does not have the hardware of the setting."""
    SHOULD_NOT = "should not change numbers"
    PROGRAM = "another program"
    """The source code differs. A lock allows this: development continues under a lock."""
    STARTED = "how it was started"


ENFORCED = (Impact.CHANGES, Impact.MAY)  # a lock forbids these

ENFORCED_STRICTLY = (*ENFORCED, Impact.SHOULD_NOT)

_ENDINGS = ("HOME", "ROOT", "PATH", "DIR", "LOG*", "DEBUG*", "VERSION", "ADDR*", "PORT", "IFNAME")
"""Endings of the names of variables for paths, logging, versions and network addresses."""

IMPACTS: tuple[tuple[Impact, tuple[str, ...]], ...] = (
    (Impact.SHOULD_NOT, ("profile/name", "profile/description", "profile/schema")),
    (Impact.SHOULD_NOT, ("profile/requires*", "profile/on_late", "profile/guard*")),
    (Impact.CHANGES, ("profile/*", "asked/*", "knobs/*", "seeding calls/*", "processes/*")),
    (Impact.MAY, ("guarantee/*",)),
    (Impact.MAY, ("environment/*_VISIBLE_DEVICES", "environment/*_AFFINITY", "environment/OMP_P*")),
    (Impact.CHANGES, ("environment/*",)),
    (Impact.SHOULD_NOT, tuple(f"other variables/*_{end}" for end in _ENDINGS)),
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
"""Impact of differences -> patterns of section and key; the first pattern that matches counts."""


def impact_of(section: str, key: str) -> Impact:
    name = f"{section}/{key}"
    for impact, patterns in IMPACTS:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return impact
    return Impact.MAY


FOLLOWS = {"python patch": "python", "torch commit": "torch", "cpu family": "cpu"}
"""Key -> the more general key that implies it."""

THREADS = ("backends.cpu.num_threads", "env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS")
"""Knobs that set the number of threads. A lock records the number before they are applied."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with different values in two snapshots. A missing value is stored as None."""

    section: str
    key: str
    left: Any
    right: Any
    ranks: tuple[str, ...] = ()
    """The ranks of a recorded run that have this difference; empty if all have it."""
    here: Impact | None = None  # the impact on this machine, if known
    hardware: str = ""  # the hardware that one machine lacked, so that the knob was not set there

    @property
    def impact(self) -> Impact:
        return self.here or impact_of(self.section, self.key)

    def to_json(self, left: str = "left", right: str = "right") -> dict[str, Any]:
        """Return the difference as plain JSON. `left` and `right` are the keys of the values."""
        row = {"key": self.key, left: self.left, right: self.right}
        row |= {"section": self.section, "rank": str(self.impact)}
        return {**row, "ranks": list(self.ranks)} if self.ranks else row


class Gap(NamedTuple):
    """A section or key that could not be compared, because one snapshot does not contain it."""

    side: str  # the name of that snapshot
    section: str
    key: str = ""  # empty if the whole section is missing

    def __str__(self) -> str:
        return f"{self.section}: {self.key}" if self.key else self.section

    def to_json(self) -> dict[str, str]:
        return {"side": self.side, "what": str(self)}


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The differences of two snapshots. The likeliest to change results come first."""

    left: str
    right: str
    differences: tuple[Difference, ...]
    gaps: tuple[Gap, ...]

    @property
    def same(self) -> bool:
        return not self.substantial

    @property
    def substantial(self) -> tuple[Difference, ...]:
        """All differences except in how the runs were started."""
        return self.having(*(impact for impact in Impact if impact is not Impact.STARTED))

    def having(self, *impacts: Impact) -> tuple[Difference, ...]:
        return tuple(it for it in self.differences if it.impact in impacts)

    def to_json(self) -> dict[str, Any]:
        """Return the differences as plain JSON. Optional lists are omitted if they are empty."""
        answer = {"same": self.same, "differences": [it.to_json() for it in self.substantial]}
        if started := self.having(Impact.STARTED):
            answer["told"] = [difference.to_json() for difference in started]
        if self.gaps:
            answer["not_compared"] = [gap.to_json() for gap in self.gaps]
        return answer


def compare(left: Snapshot, right: Snapshot) -> SnapshotDiff:
    """Return the differences in the sections that both snapshots have.

    A difference that follows from another one is omitted. Recorded runs are compared rank by rank,
    and a difference names its ranks if only some ranks have it. Raises `ProfileError` if two runs
    have no rank in common.
    """
    ranks = tuple(left.ranks or right.ranks) or ("",)
    missing: list[Gap] = []
    if left.ranks and right.ranks:
        ranks = tuple(rank for rank in left.ranks if rank in right.ranks)
        for lacking, having in ((left, right), (right, left)):
            missing += [Gap(lacking.name, it) for it in having.ranks if it not in lacking.ranks]
    if not ranks:
        raise ProfileError.about(
            "have no rank in common",
            found=f"{left.name} and {right.name}",
            todo="name two recordings of the same ranks",
        )
    by_text: dict[str, Difference] = {}
    for rank in ranks:
        left_rank, right_rank = left.of_rank(rank), right.of_rank(rank)
        missing += _gaps(left_rank, right_rank)
        for difference in _differences(left_rank, right_rank):
            text = json.dumps([difference.to_json(), difference.hardware], sort_keys=True)
            known = by_text.get(text, difference)
            by_text[text] = replace(known, ranks=(*known.ranks, rank))
    differences = [
        replace(it, ranks=()) if len(it.ranks) == len(ranks) else it for it in by_text.values()
    ]
    gaps = tuple(dict.fromkeys(missing))
    return SnapshotDiff(left.name, right.name, _ordered(differences), gaps)


def _ordered(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(differences, key=lambda it: list(Impact).index(it.impact)))


def differences_of(left: str, right: str) -> SnapshotDiff:
    """Return the differences of two profiles, manifests, locks or runs with these names or paths.

    Two profiles are compared by their effect on this machine, which imports torch. Raises
    `ProfileError` or `TraceError` if one of them cannot be read.
    """
    snapshots = snapshot_of(left), snapshot_of(right)
    comparison = compare(*snapshots)
    are_profiles = all(snapshot.kind == "profile" for snapshot in snapshots)
    return effective(comparison) if are_profiles else comparison


def effective(comparison: SnapshotDiff) -> SnapshotDiff:
    """Keep the differences of two profiles that have an effect on this machine, and rate them."""
    if not comparison.differences:
        return comparison
    import_torch()
    absent = absent_hardware()
    kept = []
    for difference in comparison.differences:
        key, left, right = difference.key, difference.left, difference.right
        impact = impact_of(difference.section, key)
        if difference.section == "profile":
            explicit = right if left is None else left
            if None in (left, right) and explicit == _without_profile(key):
                continue
            knobs = knobs_for_key(key)
            if impact is not Impact.CHANGES:
                pass
            elif key in DEFAULTS:
                impact = Impact.SHOULD_NOT  # such a key may refuse a run, but computes nothing
            elif knobs and all(knob.hardware in absent for knob in knobs):
                impact = Impact.NOTHING_HERE
            elif not any(k.decides_results or k.variable in DECIDE_RESULTS for k in knobs):
                impact = Impact.MAY
        kept.append(replace(difference, here=impact))
    return replace(comparison, differences=_ordered(kept))


def _without_profile(key: str) -> Any:
    """Return the value of `key` in this process without a profile, or None if it is unknown."""
    if key in DEFAULTS:
        return DEFAULTS[key]
    knobs = [knob for knob in knobs_for_key(key) if knob.name == key]
    if not knobs or knobs[0].changes_with_use or knobs[0].variable or not knobs[0].loaded:
        return None
    try:
        return knobs[0].access.read()
    except MissingState:
        return None


def _differences(left: Snapshot, right: Snapshot) -> list[Difference]:
    differences = []
    shared = [name for name in left.sections if name in right.sections and name != ABSENT_HARDWARE]
    if "profile" in shared:
        shared = [name for name in shared if name != "asked"]  # follows from the profile
    for section in shared:
        left_section, right_section = left.sections[section], right.sections[section]
        # Values are compared with their types, except for knobs: a recording stores them as texts.
        as_text = section == "knobs" and "recording" in (left.kind, right.kind)
        write = shown if as_text else partial(json.dumps, sort_keys=True)
        for key in sorted({*left_section, *right_section}):
            if section == "profile" and key in NOT_INHERITED:
                continue
            in_both = key in left_section and key in right_section
            if not in_both and not _row_of(section).absent:
                continue
            values = left_section.get(key), right_section.get(key)
            if section != "started" and any(map(_is_unknown, values)):
                continue
            left_text, right_text = (None if value is None else write(value) for value in values)
            if left_text == right_text:
                continue
            is_knob = section == "knobs" and key in knobs_by_name()
            lacks_hardware = is_knob and (_lacks_hardware(left, key) or _lacks_hardware(right, key))
            hardware = knobs_by_name()[key].hardware if lacks_hardware else ""
            differences.append(Difference(section, key, *values, hardware=hardware))
    differing = {(it.section, it.key) for it in differences}
    return [it for it in differences if not _is_implied(it, left, right, differing)]


def _lacks_hardware(snapshot: Snapshot, knob: str) -> bool:
    is_unsupported = snapshot.sections["knobs"].get(knob) == Outcome.UNSUPPORTED
    return is_unsupported and knob in snapshot.sections.get(ABSENT_HARDWARE, {})


def _is_unknown(value: Any) -> bool:  # such a text gives the reason
    return isinstance(value, str) and (value.startswith(UNKNOWN) or HIDDEN in value)


def _gaps(left: Snapshot, right: Snapshot) -> Iterator[Gap]:
    for lacking, having in ((left, right), (right, left)):
        for section, pairs in having.sections.items():
            if section in ("asked", "started", "compiler", ABSENT_HARDWARE):
                continue
            if section not in lacking.sections:
                yield Gap(lacking.name, section)
            elif not _row_of(section).absent:
                absent = pairs.keys() - lacking.sections[section].keys()
                yield from (Gap(lacking.name, section, key) for key in sorted(absent))
        for section, pairs in lacking.sections.items():
            if section not in ("started", ABSENT_HARDWARE):
                unknown = sorted(key for key, value in pairs.items() if _is_unknown(value))
                yield from (Gap(lacking.name, section, key) for key in unknown)


def _is_implied(
    difference: Difference, left: Snapshot, right: Snapshot, differing: set[tuple[str, str]]
) -> bool:
    """Return whether another difference, or a knob of a profile, explains this difference."""
    section, key = difference.section, difference.key
    if section == "knobs":
        known = knobs_by_name().get(key)
        profile_key = known.profile_key if known else key.replace("env.", "env_extra.", 1)
        return ("profile", profile_key) in differing
    knobs = {*left.sections.get("knobs", {}), *right.sections.get("knobs", {})}
    if section in ("environment", "other variables"):
        name = f"env.{key}"
        setting = {knob.name for knob in CATALOGUE if name in (knob.name, *knob.aliases)}
        return not knobs.isdisjoint({*setting, variable(key).name})
    if (section, key) == ("hardware", "threads"):
        return not knobs.isdisjoint(THREADS)
    return (section, FOLLOWS.get(key, "")) in differing


@parts.register(SnapshotDiff)
def _comparison_parts(comparison: SnapshotDiff) -> tuple[Part, ...]:
    rows = comparison.substantial
    shared = shared_impact(rows)
    return (
        *(difference_parts(rows, comparison.left, comparison.right) if rows else ("the same",)),
        *([f"each of these: {shared}"] if shared else []),
        *(
            f"{row.key}: {_value(row, row.left)} | {_value(row, row.right)}"
            for row in comparison.having(Impact.STARTED)
        ),
        *gap_lines(comparison.gaps),
    )


def difference_parts(rows: Sequence[Difference], left: str, right: str) -> tuple[Part, ...]:
    """Return a table of differences, and a line on the knobs that only one machine could set.

    The other machine lacks the hardware of these knobs. The table omits the column for the impact
    if two or more differences all have the same impact.
    """
    displayed: list[Part] = []
    if listed := [row for row in rows if not row.hardware]:
        headings = ("how likely", "what differs", left, right)
        cells = [
            (str(row.impact), _name(row), _value(row, row.left), _value(row, row.right))
            for row in listed
        ]
        first = int(shared_impact(listed) is not None)
        displayed.append(table(headings[first:], [line[first:] for line in cells]))
    if hardware := [row.hardware for row in rows if row.hardware]:
        displayed.append(f"{for_hardware(hardware)}: not on both sides")
    return tuple(displayed)


def shared_impact(rows: Sequence[Difference]) -> Impact | None:
    """Return the impact that two or more differences share, or None if they share no impact."""
    return rows[0].impact if rows[1:] and len({row.impact for row in rows}) == 1 else None


def change(row: Difference) -> str:
    return f"{_name(row)} ({_value(row, row.left)} -> {_value(row, row.right)})"


def gap_lines(rows: Iterable[Gap]) -> list[str]:
    unknown: dict[str, list[str]] = {}
    for gap in rows:
        unknown.setdefault(gap.side, []).append(printable(str(gap)))
    return [f"not compared, unknown in {name}: {some(keys)}" for name, keys in unknown.items()]


def _name(row: Difference) -> str:
    ranks = f"{', '.join(row.ranks)}: " if row.ranks else ""
    return ranks + _row_of(row.section).prefix + printable(row.key)


def _value(row: Difference, value: Any) -> str:
    return shown(value) if value is not None else _row_of(row.section).absent or "none"
