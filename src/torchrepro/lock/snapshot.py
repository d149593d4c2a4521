"""A profile, a manifest, a lock or the folder of a run as a value that can be compared."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.manifest.contents import FILE, read_complete
from torchrepro.messages import some
from torchrepro.outcomes import Outcome, is_set
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten, plain
from torchrepro.profile.search_path import DISTRIBUTION
from torchrepro.trace.format import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.trace.reader import Trace

    Section = Mapping[str, Any]

ABSENT_IS_UNSET = ("profile", "knobs", "seeding calls", "environment", "packs")
"""Sections in which an absent key was not set; in others an absent key was not recorded."""

ABSENT_HARDWARE = "absent hardware"
"""Section of the knobs whose hardware a process did not have, each with the reason in words.

It says why a knob was not set and is not compared itself.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one of two sides was, by section; a section that it does not hold is absent."""

    name: str
    kind: str
    """``profile``, ``manifest``, ``lock`` or ``recording``."""

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
    if place.suffix in (".yaml", ".yml") or name.startswith("pkg://"):
        return of_profile(name, resolve(name))
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
    for section, (key, read) in READERS.items():
        if key not in contents:
            continue
        try:
            its = read(contents[key])
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            raise ProfileError.about("damaged: not what is written there", name, key) from None
        if its is not None:
            sections[section] = its
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


def _absent_hardware(report: Any) -> Section:
    rows = _pairs(report)["knobs"]
    return {str(row["knob"]): row["absent"] for row in rows if row.get("absent")}


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


def _seeding_calls(calls: Any) -> Section:
    return {f"{call['function']} at {call['where']}": call["value"] for call in calls}


def _versions(value: Any) -> Section:
    found = dict(_pairs(value))
    if isinstance(found.get("python"), str):
        major, _, rest = found["python"].partition(".")
        minor, _, patch = rest.partition(".")
        found |= {"python": f"{major}.{minor}", "python patch": patch}
    return found


READERS: Mapping[str, tuple[str, Callable[[Any], Section | None]]] = {
    "profile": ("profile", lambda value: flatten(_pairs(value))),
    "packs": ("origins", _packs),
    "guarantee": ("report", lambda report: {"held": str(report["guarantee"]["held"])}),
    "knobs": ("report", _knobs),
    ABSENT_HARDWARE: ("report", _absent_hardware),
    "seeding calls": ("seeding_calls", _seeding_calls),
    "environment": ("environment", _pairs),
    "versions": ("versions", _versions),
    "hardware": ("hardware", _pairs),
    "source": ("repository", lambda value: None if "unknown" in _pairs(value) else value),
    "started": ("command_line", lambda words: {"command line": " ".join(map(str, words))}),
}
"""Section -> the key of a manifest that holds it, and how it is read; None leaves it out."""


def manifest_in(name: str, folder: Path) -> Path | None:
    """Return the manifest in the folder of a run, or None.

    Raises `ProfileError` for a folder with several, such as that of a sweep.
    """
    found = sorted(path for path in (folder / FILE, *folder.glob(f"*/{FILE}")) if path.is_file())
    if len(found) > 1:
        todo = f"name one of them: {some(map(str, found))}"
        raise ProfileError.about("holds several manifests", found=name, todo=todo)
    if not found and (jobs := sorted(folder.glob(f"*/.hydra/{FILE}"))):
        todo = f"name one of them: {jobs[0].parent.parent}"
        raise ProfileError.about("holds the jobs of a sweep", found=name, todo=todo)
    return found[0] if found else None


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
