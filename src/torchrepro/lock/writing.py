"""Writing a lock: what a run of a profile would be on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.errors import ApplyError, ProfileError
from torchrepro.hidden import without_secrets
from torchrepro.imports import import_torch
from torchrepro.lock.naming import from_its_lock
from torchrepro.manifest.contents import as_text, common_contents, secrets_here
from torchrepro.manifest.reading import KINDS, read_contents
from torchrepro.messages import Problem
from torchrepro.planner import Plan, make_plan, observe, refusal
from torchrepro.profile.load import resolve
from torchrepro.profile.overrides import key_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchrepro.profile.resolved import Resolved
    from torchrepro.report import Report


def write_lock(path: Path, profile: str, overrides: Sequence[str]) -> Report:
    """Write what a run of `profile` would be here, and return the report on it.

    Imports torch; puts nothing in force. Raises `ProfileError` for a profile that is not valid, an
    override that holds a secret, and a file that cannot be written or is no lock, and `ApplyError`
    if a strict profile could not be put in force here.
    """
    _refuse_another_file(path)
    resolved = resolve(profile, overrides)
    _refuse_secrets(resolved, overrides)
    named = {"profile": from_its_lock(path, profile), "overrides": list(overrides)}
    plan = plan_of_a_run(resolved)
    if plan.stopping:
        raise ApplyError(refusal(resolved, plan.stopping), plan.report)
    its = common_contents(resolved, plan.report)
    for row in its["report"]["knobs"]:
        del row["before"]  # what this process began with, such as a seed of chance
    text = as_text({"lock": KINDS["lock"], "named": named, **its})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProfileError(
            Problem(f"the lock cannot be written: {error.strerror}", found=str(path))
        ) from None
    return plan.report


def plan_of_a_run(resolved: Resolved) -> Plan:
    """Return the plan for a run of `resolved` that `torchrepro run` starts here; imports torch."""
    import_torch()
    return make_plan(resolved, observe(resolved, closed={}))


def _refuse_secrets(resolved: Resolved, overrides: Sequence[str]) -> None:
    """Raise `ProfileError` for an override that a lock could not hold: it would show a secret."""
    secrets = secrets_here(resolved)
    for text in overrides:
        if without_secrets(text, secrets) != text:
            raise ProfileError(
                Problem(
                    "an override with what may be a secret: a lock is shared, and holds none",
                    key=key_of(text),
                    todo="put it into the environment of the run instead",
                )
            )


def _refuse_another_file(path: Path) -> None:
    """Raise `ProfileError` if there is a file that is no lock: it would be lost."""
    if not path.exists():
        return
    try:
        kind = read_contents(path)[0]
    except ProfileError:
        kind = ""
    if kind != "lock" and (path.is_dir() or path.stat().st_size):
        raise ProfileError(
            Problem(
                "is there already and is no lock",
                found=str(path),
                todo="name another file, or remove it",
            )
        )
