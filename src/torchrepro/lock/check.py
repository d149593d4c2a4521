"""Holding this machine to a lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.imports import import_torch
from torchrepro.lock.diff import HELD, HELD_STRICTLY, Comparison, Difference, NotCompared, compare
from torchrepro.lock.lock_file import named_in, plan_of_a_run, read_whole, refuse_lost, true_digest
from torchrepro.lock.snapshot import Snapshot, of_contents
from torchrepro.manifest.contents import common_contents
from torchrepro.manifest.environment import hardware, software
from torchrepro.messages import Problem
from torchrepro.profile.load import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torchrepro.profile.resolved import Resolved


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What holding this machine to a lock came to."""

    lock: str
    strict: bool
    resolved: Resolved | None
    """The locked profile as it is here; None where it cannot be resolved any more."""

    comparison: Comparison

    @property
    def broken(self) -> tuple[Difference, ...]:
        """The differences that the lock forbids."""
        return self.comparison.having(*(HELD_STRICTLY if self.strict else HELD))

    @property
    def not_held(self) -> tuple[Difference, ...]:
        """The differences that are told and forbidden by nothing."""
        return tuple(each for each in self.comparison.differences if each not in self.broken)

    @property
    def not_compared(self) -> tuple[NotCompared, ...]:
        """What would be held and could not be compared."""
        return tuple(each for each in self.comparison.not_compared if each.section != "source")

    @property
    def met(self) -> bool:
        """Whether a run here may start."""
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
        return {
            "met": self.met,
            "lock": self.lock,
            "strict": self.strict,
            "differences": [each.to_json("locked", "here") for each in self.broken],
            "not_held": [each.to_json("locked", "here") for each in self.not_held],
            "not_compared": [each.to_json() for each in self.not_compared],
        }


def check(
    path: Path,
    *,
    strict: bool = False,
    profile: str = "",
    overrides: Sequence[str] = (),
) -> CheckResult:
    """Return in what this machine differs from what the lock in the file `path` holds.

    The profile is resolved again from its name, the lock's own unless `profile` is given, so that
    a pack that has changed is seen. Imports torch. Raises `ProfileError` for a file that is no
    lock or is damaged, and for a `profile` that is not valid.
    """
    kind, contents = read_whole(path)
    if kind != "lock":
        raise ProfileError(
            Problem(
                "a manifest, not a lock",
                str(path),
                todo="write a lock: torchrepro lock PROFILE -o FILE; to compare, use "
                f"`torchrepro diff {path} OTHER`",
            )
        )
    locked = of_contents(str(path), kind, contents)
    edited = _edited(contents)
    name, own_overrides = named_in(path, contents.get("named"))
    if profile:
        resolved = resolve(profile, overrides)
    else:
        try:
            refuse_lost(name)
            resolved = resolve(name, own_overrides, typed=False)  # the lock is a file
        except ProfileError as error:
            return CheckResult(
                str(path), strict, None, _without_profile(locked, error).led_by(edited)
            )
    its = common_contents(resolved, plan_of_a_run(resolved).report)
    here = of_contents("this machine", "lock", its)
    return CheckResult(str(path), strict, resolved, compare(locked, here).led_by(edited))


def _edited(contents: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the digest of a lock and that of the profile in it, if somebody has changed one."""
    written, own = contents["digest"], true_digest(contents)
    if own in (None, written):
        return ()
    return (Difference("profile", "digest, as the lock was edited", written, own),)


def _without_profile(locked: Snapshot, error: ProfileError) -> Comparison:
    """Compare with a machine on which the profile cannot be resolved."""
    import_torch()
    here = {"versions": software(), "hardware": hardware()}
    others = compare(locked, of_contents("this machine", "lock", here))
    problem = error.problems[0]
    words = ": ".join(filter(None, (problem.key, problem.found, problem.what)))
    return others.led_by((Difference("profile", "(the whole)", "as locked", words),))
