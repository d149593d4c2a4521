"""Writing a lock, and whether this machine still is what a lock says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.application.planner import Plan, make_plan
from torchrepro.ground.console import parts
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.imports import import_torch
from torchrepro.ground.messages import some
from torchrepro.ground.redaction import without_secrets
from torchrepro.ground.writing import write_in_place
from torchrepro.lock.diff import (
    ENFORCED,
    ENFORCED_STRICTLY,
    Difference,
    Gap,
    Impact,
    SnapshotDiff,
    change,
    compare,
    difference_parts,
    gap_lines,
    of_contents,
)
from torchrepro.manifest.contents import (
    FORMAT,
    as_text,
    common_contents,
    read_complete,
    read_contents,
    seal_of,
    secrets_here,
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
    """Raise `ProfileError` for the path of a profile at which there is no file."""
    if profile.endswith(SUFFIXES) and "://" not in profile and not os.path.exists(profile):  # noqa: PTH110 - never raises
        found = os.path.normpath(profile)
        raise ProfileError.about("the profile's file does not exist", found=found)


def is_relative_path(profile: str) -> bool:
    """Whether the name of a profile is a path from the lock's own folder."""
    is_path = profile.endswith(SUFFIXES) or profile.startswith(("./", "../"))
    return is_path and "://" not in profile and not os.path.isabs(profile) and profile[0] != "~"  # noqa: PTH117 - the text of a name


def plan_of_a_run(resolved: ResolvedProfile) -> Plan:
    """Return the plan for a run of `resolved` that `torchrepro run` starts here; imports torch."""
    import_torch()
    return make_plan(resolved, closed={})


def write_lock(path: Path, profile: str, overrides: Sequence[str]) -> Report:
    """Write what a run of `profile` would be here, and return the report on it.

    Imports torch and applies nothing. Raises `ProfileError` for a profile that is not valid, an
    override that holds a secret, and a file that cannot be written or is no lock. Raises
    `ApplyError` if a strict profile could not be applied here.
    """
    refuse_other_file(path)
    contents, report = contents_of_lock(path, profile, overrides)
    write_in_place(path, as_text({**contents, "seal": seal_of(contents)}))
    return report


def refuse_other_file(path: Path) -> None:
    """Raise `ProfileError` if there is a file that is no lock."""
    if path.exists():
        try:
            kind = read_contents(path)[0]
        except ProfileError:
            kind = ""
        if kind != "lock" and (path.is_dir() or path.stat().st_size):
            todo = "name another file, or remove it"
            raise ProfileError.about("exists already and is not a lock", found=str(path), todo=todo)


def contents_of_lock(
    path: Path, profile: str, overrides: Sequence[str]
) -> tuple[dict[str, Any], Report]:
    """Return what a lock in the file `path` holds, and the report on it; raises as `write_lock`."""
    resolved = resolve(profile, overrides)
    secrets = secrets_here(resolved)
    for text in overrides:
        if without_secrets(text, secrets) != text:
            problem = "an override that may hold a secret, and a lock is shared"
            todo = "put it into the environment of the run instead"
            raise ProfileError.about(problem, key=key_of(text), todo=todo)
    named = profile
    if is_relative_path(profile):  # from the lock's own folder
        named = Path(os.path.relpath(profile, path.parent)).as_posix()
    plan = plan_of_a_run(resolved)
    plan.refuse_if_stopping()
    its = common_contents(resolved, plan.report)
    for row in its["report"]["knobs"]:
        del row["before"]  # the state of this process, such as a random seed
    its |= {"lock": FORMAT, "named": {"profile": named, "overrides": list(overrides)}}
    return its, plan.report


SHARED = ("lock", "manifest", "named", "profile", "digest")
"""What all sections of a lock with numbers share, besides the command and its options."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    lock: str
    strict: bool
    resolved: ResolvedProfile | None
    """The locked profile as it is here; None where it cannot be resolved any more."""
    comparison: SnapshotDiff

    @property
    def enforced(self) -> tuple[Impact, ...]:
        return ENFORCED_STRICTLY if self.strict else ENFORCED

    @property
    def forbidden(self) -> tuple[Difference, ...]:
        return self.comparison.having(*self.enforced)

    @property
    def met(self) -> bool:
        return not self.forbidden

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the lock would forbid and could not be compared."""
        return tuple(each for each in self.comparison.gaps if each.section != "source")

    def to_json(self) -> dict[str, Any]:
        forbidden = self.forbidden
        allowed = [each for each in self.comparison.differences if each not in forbidden]
        return {
            "met": self.met,
            "lock": self.lock,
            "strict": self.strict,
            "differences": [each.to_json("locked", "here") for each in forbidden],
            "not_held": [each.to_json("locked", "here") for each in allowed],
            "not_compared": [each.to_json() for each in self.gaps],
        }


def named_in(path: Path, contents: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the profile of a lock, as it is named from here, and its overrides."""
    its: dict[str, Any] = contents["named"] if isinstance(contents.get("named"), dict) else {}
    name, own = its.get("profile", ""), its.get("overrides")
    if not (name and isinstance(own, list) and all(isinstance(text, str) for text in (name, *own))):
        raise ProfileError.about("damaged: it does not name its profile", str(path), "named")
    return str(path.parent / name) if is_relative_path(name) else name, own


def check(
    path: Path, *, strict: bool = False, profile: str = "", overrides: Sequence[str] = ()
) -> CheckResult:
    """Return in what this machine differs from the lock in the file `path`.

    The profile is resolved again from its name, so that a pack that has changed is seen. The name
    is the lock's own unless `profile` is given. Imports torch. Raises `ProfileError` for a file
    that is no lock or is damaged, and for a `profile` that is not valid.
    """
    kind, contents = read_complete(path)
    if kind != "lock":
        todo = "write a lock: torchrepro lock PROFILE -o FILE; to compare, use "
        todo += f"`torchrepro diff {path} OTHER`"
        raise ProfileError.about("a manifest, not a lock", str(path), todo=todo)
    locked = of_contents(str(path), kind, contents)
    first = []
    written, true = contents["seal"], contents["true_seal"]
    if written != true:
        first.append(Difference("profile", "seal, as the lock was edited", written, true))
    name, own = named_in(path, contents)
    resolved = resolve(profile, overrides) if profile else None
    if resolved is None:
        try:
            refuse_lost_file(name)
            resolved = resolve(name, own, typed=False)  # the lock is a file
        except ProfileError as error:
            problem = error.problem
            words = ": ".join(filter(None, (problem.key, problem.found, problem.what)))
            first.append(Difference("profile", "(the whole)", "as locked", words))
    if resolved is None:
        import_torch()
        here = {"versions": software(), "hardware": hardware()}
    else:
        here = common_contents(resolved, plan_of_a_run(resolved).report)
    comparison = compare(locked, of_contents(HERE, "lock", here))
    every = (*first, *comparison.differences)
    return CheckResult(str(path), strict, resolved, replace(comparison, differences=every))


@parts.register(CheckResult)
def _check_parts(found: CheckResult) -> tuple[Part, ...]:
    counts = [
        f"{number} that {impact if number == 1 else impact.replace('changes', 'change')}"
        for impact in found.enforced
        if (number := len(found.comparison.having(impact)))
    ]
    allowed = [
        f"allowed, {impact}: {some(map(change, rows))}"
        for impact in Impact
        if impact not in found.enforced and (rows := found.comparison.having(impact))
    ]
    return (
        *difference_parts(found.forbidden, "locked", "here"),
        f"{found.lock} is not met: {', '.join(counts)}"
        if counts
        else f"{found.lock} is met: nothing that it forbids differs",
        *allowed,
        *gap_lines(found.gaps),
    )
