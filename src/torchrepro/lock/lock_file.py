"""Write a lock of a profile on this machine, and check this machine against a lock."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.application.planner import Plan, feasible_plan, make_plan
from torchrepro.ground.console import parts
from torchrepro.ground.errors import ProfileError, some
from torchrepro.ground.imports import import_torch
from torchrepro.ground.redaction import without_secrets
from torchrepro.ground.writing import write_in_place
from torchrepro.lock import diff
from torchrepro.lock.diff import Difference, Gap, Impact, change
from torchrepro.manifest.contents import (
    FORMAT,
    as_text,
    common_contents,
    known_secrets,
    read_complete,
    read_contents,
    seal_of,
)
from torchrepro.manifest.environment import hardware, software
from torchrepro.profile.load import key_of, resolve
from torchrepro.profile.search_path import SUFFIXES

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report


HERE = "this machine"


def refuse_lost_file(profile: str) -> None:
    """Raise `ProfileError` if `profile` is the path of a file that does not exist."""
    if profile.endswith(SUFFIXES) and "://" not in profile and not os.path.exists(profile):  # noqa: PTH110 - never raises
        path = os.path.normpath(profile)
        raise ProfileError.about("the profile's file does not exist", found=path)


def is_relative_path(profile: str) -> bool:
    """Return whether the name of a profile is a path relative to the folder of its lock."""
    is_path = profile.endswith(SUFFIXES) or profile.startswith(("./", "../"))
    return is_path and "://" not in profile and not os.path.isabs(profile) and profile[0] != "~"  # noqa: PTH117 - a text


def plan_of_a_run(resolved: ResolvedProfile) -> Plan:
    """Return the plan for `torchrepro run` of a profile on this machine. Imports torch."""
    import_torch()
    return make_plan(resolved, closed={})


def write_lock(path: Path, profile: str, overrides: Sequence[str]) -> Report:
    """Write a lock of `profile` on this machine into `path`, and return the planned report.

    Imports torch, but does not apply the profile. Raises `ProfileError` if the profile is invalid,
    if an override contains a secret, and if `path` cannot be written or is not a lock. Raises
    `ApplyError` if a strict profile could not be applied on this machine.
    """
    refuse_other_file(path)
    contents, report = contents_of_lock(path, resolve(profile, overrides), profile, overrides)
    write_in_place(path, as_text({**contents, "seal": seal_of(contents)}))
    return report


def refuse_other_file(path: Path) -> None:
    """Raise `ProfileError` if `path` is a file other than a lock."""
    if path.exists():
        try:
            kind = read_contents(path)[0]
        except ProfileError:
            kind = ""
        if kind != "lock" and (path.is_dir() or path.stat().st_size):
            todo = "name another file, or remove it"
            raise ProfileError.about("exists already and is not a lock", found=str(path), todo=todo)


def contents_of_lock(
    path: Path, resolved: ResolvedProfile, profile: str, overrides: Sequence[str]
) -> tuple[dict[str, Any], Report]:
    """Return the contents of a lock at `path`, and the planned report. Raises like `write_lock`.

    `resolved` is the `profile` with the `overrides`.
    """
    secrets = known_secrets(resolved)
    for text in overrides:
        if without_secrets(text, secrets) != text:
            problem = "the override may contain a secret, and a lock is shared"
            todo = "set it in the environment of the run instead"
            raise ProfileError.about(problem, key=key_of(text), todo=todo)
    named = profile
    if is_relative_path(profile):
        named = Path(os.path.relpath(profile, path.parent)).as_posix()
    import_torch()
    report = feasible_plan(resolved, closed={}).report
    contents = common_contents(resolved, report)
    for row in contents["report"]["knobs"]:
        del row["before"]  # the state of this process, such as a random seed
    contents |= {"lock": FORMAT, "named": {"profile": named, "overrides": list(overrides)}}
    return contents, report


SHARED = ("lock", "manifest", "named", "profile", "digest")
"""Keys that the platforms of a lock with results share, in addition to the command."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The differences between a lock and this machine."""

    lock: str
    strict: bool
    resolved: ResolvedProfile | None
    """The locked profile, resolved on this machine; None if it cannot be resolved any more."""
    comparison: diff.SnapshotDiff

    @property
    def enforced(self) -> tuple[Impact, ...]:
        return diff.ENFORCED_STRICTLY if self.strict else diff.ENFORCED

    @property
    def forbidden(self) -> tuple[Difference, ...]:
        return self.comparison.having(*self.enforced)

    @property
    def met(self) -> bool:
        return not self.forbidden

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The keys that could not be compared. Keys of the source code are omitted."""
        return tuple(gap for gap in self.comparison.gaps if gap.section != "source")

    def to_json(self) -> dict[str, Any]:
        forbidden = self.forbidden
        allowed = [it for it in self.comparison.differences if it not in forbidden]
        return {
            "met": self.met,
            "lock": self.lock,
            "strict": self.strict,
            "differences": [it.to_json("locked", "here") for it in forbidden],
            "not_held": [it.to_json("locked", "here") for it in allowed],
            "not_compared": [gap.to_json() for gap in self.gaps],
        }


def named_in(path: Path, contents: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the profile and the overrides that a lock names.

    If the profile is a path, it is returned relative to the working directory.
    """
    named: dict[str, Any] = contents["named"] if isinstance(contents.get("named"), dict) else {}
    name: Any = named.get("profile")
    overrides: Any = named.get("overrides")
    is_valid = name and isinstance(overrides, list)
    if not (is_valid and all(isinstance(text, str) for text in (name, *overrides))):
        raise ProfileError.about("damaged: it does not name its profile", str(path), "named")
    return str(path.parent / name) if is_relative_path(name) else name, overrides


def check(
    path: Path,
    *,
    strict: bool = False,
    profile: str | ResolvedProfile = "",
    overrides: Sequence[str] = (),
) -> CheckResult:
    """Return the differences between the lock in the file `path` and this machine.

    Resolves `profile`, or the locked profile if `profile` is empty, because packs may have changed
    since. Imports torch. Raises `ProfileError` if the file is damaged or is not a lock, and if
    `profile` is invalid.
    """
    kind, contents = read_complete(path)
    if kind != "lock":
        todo = "write a lock: torchrepro lock PROFILE -o FILE; to diff.compare, use "
        todo += f"`torchrepro diff {path} OTHER`"
        raise ProfileError.about("a manifest, not a lock", str(path), todo=todo)
    locked = diff.of_contents(str(path), kind, contents)
    first = []
    seal, true_seal = contents["seal"], contents["true_seal"]
    if seal != true_seal:
        first.append(Difference("profile", "seal, as the lock was edited", seal, true_seal))
    name, locked_overrides = named_in(path, contents)
    resolved = resolve(profile, overrides) if profile else None
    if resolved is None:
        try:
            refuse_lost_file(name)
            resolved = resolve(name, locked_overrides, typed=False)
        except ProfileError as error:
            problem = error.problem
            text = ": ".join(filter(None, (problem.key, problem.found, problem.what)))
            first.append(Difference("profile", "(the whole)", "as locked", text))
    if resolved is None:
        import_torch()
        machine = {"versions": software(), "hardware": hardware()}
    else:
        machine = common_contents(resolved, plan_of_a_run(resolved).report)
    comparison = diff.compare(locked, diff.of_contents(HERE, "lock", machine))
    differences = (*first, *comparison.differences)
    return CheckResult(str(path), strict, resolved, replace(comparison, differences=differences))


@parts.register(CheckResult)
def _check_parts(answer: CheckResult) -> tuple[Part, ...]:
    counts = [
        f"{number} that {impact if number == 1 else impact.replace('changes', 'change')}"
        for impact in answer.enforced
        if (number := len(answer.comparison.having(impact)))
    ]
    allowed = [
        f"allowed, {impact}: {some(map(change, rows))}"
        for impact in Impact
        if impact not in answer.enforced and (rows := answer.comparison.having(impact))
    ]
    headline = f"{answer.lock} is met: nothing that it forbids differs"
    if counts:
        headline = f"{answer.lock} is not met: {', '.join(counts)}"
    return (
        *diff.difference_parts(answer.forbidden, "locked", "here"),
        headline,
        *allowed,
        *diff.gap_lines(answer.gaps),
    )
