"""Whether this machine still is what a lock says, and how the answer is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.console import parts
from torchrepro.errors import ProfileError
from torchrepro.imports import import_torch
from torchrepro.lock.diff import (
    ENFORCED,
    ENFORCED_STRICTLY,
    Comparison,
    Difference,
    Gap,
    Impact,
    change,
    compare,
    difference_parts,
    gap_lines,
)
from torchrepro.lock.lock_file import (
    named_in,
    plan_of_a_run,
    read_whole,
    refuse_lost_file,
    true_digest,
)
from torchrepro.lock.snapshot import of_contents
from torchrepro.manifest.contents import common_contents
from torchrepro.manifest.environment import hardware, software
from torchrepro.messages import some
from torchrepro.profile.load import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchrepro.console import Part
    from torchrepro.profile.resolved import ResolvedProfile

HERE = "this machine"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """In what this machine differs from a lock."""

    lock: str
    strict: bool
    resolved: ResolvedProfile | None
    """The locked profile as it is here; None where it cannot be resolved any more."""

    comparison: Comparison

    @property
    def enforced(self) -> tuple[Impact, ...]:
        """The impacts that the lock forbids."""
        return ENFORCED_STRICTLY if self.strict else ENFORCED

    @property
    def forbidden(self) -> tuple[Difference, ...]:
        """The differences that the lock forbids."""
        return self.comparison.having(*self.enforced)

    @property
    def allowed(self) -> tuple[Difference, ...]:
        """The differences that are shown and that nothing forbids."""
        return tuple(each for each in self.comparison.differences if each not in self.forbidden)

    @property
    def met(self) -> bool:
        """Whether a run here may start."""
        return not self.forbidden

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the lock would forbid and could not be compared."""
        return tuple(each for each in self.comparison.gaps if each.section != "source")

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
        return {
            "met": self.met,
            "lock": self.lock,
            "strict": self.strict,
            "differences": [each.to_json("locked", "here") for each in self.forbidden],
            "not_held": [each.to_json("locked", "here") for each in self.allowed],
            "not_compared": [each.to_json() for each in self.gaps],
        }


def check(
    path: Path,
    *,
    strict: bool = False,
    profile: str = "",
    overrides: Sequence[str] = (),
) -> CheckResult:
    """Return in what this machine differs from the lock in the file `path`.

    The profile is resolved again from its name, so that a pack that has changed is seen. The name
    is the lock's own unless `profile` is given. Imports torch. Raises `ProfileError` for a file
    that is no lock or is damaged, and for a `profile` that is not valid.
    """
    kind, contents = read_whole(path)
    if kind != "lock":
        raise ProfileError.about(
            "a manifest, not a lock",
            str(path),
            todo="write a lock: torchrepro lock PROFILE -o FILE; to compare, use "
            f"`torchrepro diff {path} OTHER`",
        )
    locked = of_contents(str(path), kind, contents)
    first = []
    written, true = contents["digest"], true_digest(contents)
    if true not in (None, written):
        first.append(Difference("profile", "digest, as the lock was edited", written, true))
    name, own_overrides = named_in(path, contents.get("named"))
    resolved = None
    if profile:
        resolved = resolve(profile, overrides)
    else:
        try:
            refuse_lost_file(name)
            resolved = resolve(name, own_overrides, typed=False)  # the lock is a file
        except ProfileError as error:
            problem = error.problems[0]
            words = ": ".join(filter(None, (problem.key, problem.found, problem.what)))
            first.append(Difference("profile", "(the whole)", "as locked", words))
    if resolved is None:
        import_torch()
        here = {"versions": software(), "hardware": hardware()}
    else:
        here = common_contents(resolved, plan_of_a_run(resolved).report)
    comparison = compare(locked, of_contents(HERE, "lock", here))
    return CheckResult(str(path), strict, resolved, comparison.preceded_by(*first))


_PLURAL = {
    Impact.CHANGES: "change numbers",
    Impact.MAY: "may change numbers",
    Impact.SHOULD_NOT: "should not change numbers",
}


@parts.register(CheckResult)
def _check_parts(found: CheckResult) -> tuple[Part, ...]:
    """Return what the lock forbids, the answer, what it allows, and what was not compared."""
    counts = [
        f"{number} that {impact if number == 1 else _PLURAL[impact]}"
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
