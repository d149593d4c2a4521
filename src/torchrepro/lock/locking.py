"""Writing a lock, and holding this machine to one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ApplyError, Problem, ProfileError
from torchrepro.hidden import sounds_secret, without_secrets
from torchrepro.lock.described import Described, of_contents
from torchrepro.lock.differing import Comparison, Difference, Missing, compare
from torchrepro.lock.ranks import HELD, HELD_STRICTLY
from torchrepro.manifest.contents import as_text, described, secrets_here
from torchrepro.manifest.hardware import hardware
from torchrepro.manifest.reading import KINDS, read_contents
from torchrepro.manifest.versions import software
from torchrepro.planner import Plan, make_plan, observe, refusal
from torchrepro.profile.load import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torchrepro.profile.resolved import Resolved


@dataclass(frozen=True, slots=True)
class Checked:
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
    def missing(self) -> tuple[Missing, ...]:
        """What would be held and could not be compared."""
        return tuple(each for each in self.comparison.missing if each.section != "source")

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
            "not_compared": [each.to_json() for each in self.missing],
        }


def write_lock(path: Path, profile: str, overrides: Sequence[str]) -> Resolved:
    """Write what a run of `profile` would be here, and return the profile.

    Imports torch; puts nothing in force. Raises `ProfileError` for a profile that is not valid, an
    override that holds a secret, and a file that cannot be written or is no lock, and `ApplyError`
    if a strict profile could not be put in force here.
    """
    _refuse_another_file(path)
    resolved = resolve(profile, overrides)
    _refuse_secrets(resolved, overrides)
    named = {"profile": profile, "overrides": list(overrides)}
    plan = _plan(resolved)
    if plan.stopping:
        raise ApplyError(refusal(resolved, plan.stopping), plan.report)
    its = described(resolved, plan.report)
    for row in its["report"]["knobs"]:
        del row["before"]  # what this process began with, such as a seed of chance
    text = as_text({"lock": KINDS["lock"], "named": named, **its})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProfileError(
            Problem(f"the lock cannot be written: {error.strerror}", found=str(path))
        ) from None
    return resolved


def check(
    path: Path,
    *,
    strict: bool = False,
    profile: str = "",
    overrides: Sequence[str] = (),
) -> Checked:
    """Return in what this machine differs from what the lock in the file `path` holds.

    The profile is resolved again from its name, the lock's own unless `profile` is given, so that
    a pack that has changed is seen. Imports torch. Raises `ProfileError` for a file that is no
    lock, and for a `profile` that is not valid.
    """
    kind, contents = read_contents(path)
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
    name, own_overrides = _named(path, contents.get("named"))
    if profile:
        resolved = resolve(profile, overrides)
    else:
        try:
            resolved = resolve(name, own_overrides)
        except ProfileError as error:
            return Checked(str(path), strict, None, _without_profile(locked, error))
    its = described(resolved, _plan(resolved).report)
    here = of_contents("this machine", "lock", its)
    return Checked(str(path), strict, resolved, compare(locked, here))


def _named(path: Path, named: Any) -> tuple[str, list[str]]:
    """Return how a lock names its profile, and the overrides."""
    its = named if isinstance(named, dict) else {}
    profile, overrides = its.get("profile"), its.get("overrides")
    texts = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
    if not isinstance(profile, str) or not profile or not isinstance(overrides, list) or not texts:
        raise ProfileError(
            Problem("damaged: it does not say of which profile it is", str(path), "named")
        )
    return profile, overrides


def _plan(resolved: Resolved) -> Plan:
    """Return the plan for a run of `resolved` that `torchrepro run` starts here."""
    _import_libraries()
    return make_plan(resolved, observe(resolved, closed={}))


def _without_profile(locked: Described, error: ProfileError) -> Comparison:
    """Compare with a machine on which the profile cannot be resolved."""
    _import_libraries()
    here = {"versions": software(), "hardware": hardware()}
    others = compare(locked, of_contents("this machine", "lock", here))
    problem = error.problems[0]
    words = ": ".join(filter(None, (problem.found, problem.what)))
    lost = Difference("profile", "(the whole)", "as locked", words)
    return Comparison((lost, *others.differences), others.missing)


def _import_libraries() -> None:
    try:
        import_module("numpy.random")
        import_module("torch")
    except (ImportError, RuntimeError) as error:
        words = str(error).partition("\n")[0]
        raise ApplyError(
            f"torch cannot be imported: {words}\n  `torchrepro doctor` says more"
        ) from None


def _refuse_secrets(resolved: Resolved, overrides: Sequence[str]) -> None:
    """Raise `ProfileError` for an override that a lock could not hold: it would show a secret."""
    secrets = secrets_here(resolved)
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~").replace("/", ".")
        named_so = key.startswith("env_extra.") and sounds_secret(key.removeprefix("env_extra."))
        if named_so or without_secrets(text, secrets) != text:
            raise ProfileError(
                Problem(
                    "an override with what may be a secret: a lock is shared, and holds none",
                    key=key,
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
