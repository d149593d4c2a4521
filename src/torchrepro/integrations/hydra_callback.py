"""The callback that puts a job's profile in force and takes it back.

Hydra turns an exception in a callback into a warning and runs the task all the same, so whatever
stops a run here leaves as `SystemExit`, which gets through.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from torchrepro.applier import Applied, apply_resolved, stop_or_relaunch
from torchrepro.errors import ApplyError, Problem, ProfileError, TorchreproError, near, some
from torchrepro.integrations.hydra import GROUP, composed
from torchrepro.manifest import write_manifest
from torchrepro.planner import plan
from torchrepro.process import inherited
from torchrepro.profile.compose import Composition, flatten
from torchrepro.profile.difference import differences
from torchrepro.profile.load import from_mapping, validate
from torchrepro.seeding.ranks import world
from torchrepro.seeding.seed_plan import drawn, never_drawn
from torchrepro.started import in_force_now

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved

MANIFEST = "repro.json"
REFUSED_STATUS = 3


class ReproCallback(Callback):
    """Puts the profile of each job in force; does nothing without one."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile, and relaunch if it asks for that: no work has been done yet."""
        with _StopOnRefusal():
            _take_back()
            resolved = _resolved(config)
            if resolved is not None and inherited() is None:
                stop_or_relaunch(plan(resolved), "")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the sweep from a clean state."""
        with _StopOnRefusal():
            _take_back()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Put the job's profile in force and write its manifest."""
        with _StopOnRefusal():
            _take_back()
            resolved = _resolved(config)
            if resolved is None:
                return
            started_under = _agreeing_run(resolved)
            if started_under is not None and config.hydra.mode is RunMode.RUN:
                # `run` has put this very profile in force: there is nothing to change.
                _record(config, started_under)
                return
            _job.append(apply_resolved(resolved, "Hydra has started the job"))
            _job[-1].refuse = _exit
            _record(config, _job[-1])
            _announce(_job[-1])

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Complete the manifest and take the job's profile back: the next job starts clean."""
        with _StopOnRefusal():
            if _job:
                _record(config, _job[-1])
                _tell_of_random_numbers(_job[-1])
            _take_back()


_job: list[Applied] = []  # what the present job has in force


def _take_back() -> None:
    """Undo what a job left in force: the one that ends, or one that left by `sys.exit`."""
    while _job:
        _job.pop().restore()


def _announce(applied: Applied) -> None:
    from torchrepro.tables import announce  # only a job with a profile pays for it

    announce(applied.report)


def _tell_of_random_numbers(applied: Applied) -> None:
    """Tell standard error what the job did with random numbers that its profile does not say."""
    lines = [f"seeded by the program itself: {call}" for call in applied.seeding_calls]
    lines += [
        f"streams.{name} was not drawn from in this process; drawn: {some(drawn()) or 'none'}"
        + (f"; did you mean {close}?" if (close := near(name, drawn())) else "")
        for name in never_drawn()
    ]
    if world().rank == 0:
        sys.stderr.writelines(f"torchrepro: {line}\n" for line in lines)


def _record(config: DictConfig, applied: Applied) -> None:
    """Write the job's manifest; where that fails, nothing stays in force."""
    path = _manifest_path(config)
    try:
        write_manifest(path, applied.resolved, applied.report)
    except OSError as error:
        _take_back()
        raise ApplyError(f"the manifest cannot be written: {path}: {error.strerror}") from None


def _exit(error: ApplyError) -> None:
    """End the job with status 3: an exception would be shown as a fault of the program."""
    with _StopOnRefusal():
        raise error


class _StopOnRefusal:
    """Turns whatever torchrepro refuses, and any fault of its own, into exit status 3."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if isinstance(error, TorchreproError):
            sys.stderr.write(f"torchrepro: {error}\n")
            raise SystemExit(REFUSED_STATUS) from None
        if isinstance(error, Exception):
            # Hydra would warn and run the task unprotected.
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(REFUSED_STATUS) from None


def _resolved(config: DictConfig) -> Resolved | None:
    """Return the profile that the composed config asks for, or None if it asks for none."""
    section = config.get(GROUP)
    pieces = [str(key) for key in config if str(key).startswith(f"{GROUP}/")]
    if pieces:
        raise ProfileError(
            Problem("this version knows no pieces of profiles", found=f"+{pieces[0]}")
        )
    if len(composed) > 1:
        raise ProfileError(
            Problem(
                "two profiles at once",
                found=f"{GROUP}: [{', '.join(composed)}]",
                todo="write a profile that inherits both: defaults: [one, two, _self_]",
            )
        )
    if section is None and composed:
        raise ProfileError(
            Problem(
                f"the profile was put elsewhere than `{GROUP}`, so it is not in force",
                found=", ".join(composed),
                todo=f"choose it without a package: +{GROUP}={next(iter(composed))}",
            )
        )
    if section is None:
        return None
    if not isinstance(section, DictConfig):
        raise ProfileError(
            Problem(
                f"`{GROUP}` is a plain value in this app's config, so no profile is in force",
                found=str(section),
                todo=f"choose the profile in the defaults list: `- {GROUP}: {section}`, "
                f"or on the command line: +{GROUP}={section}",
            )
        )
    try:
        composition = from_mapping(section, where="this app's config")
    except ProfileError as error:
        raise ProfileError(
            [_with_override(problem, config) for problem in error.problems]
        ) from None
    _remember_places(composition, next(iter(composed.values()), None), config)
    return validate(composition).resolved


def _remember_places(
    composition: Composition, from_files: Composition | None, config: DictConfig
) -> None:
    """Give every value the place that set it: the override, else the file's line."""
    for key in flatten(composition.values):
        line = _override_of(key, config)
        if line is not None:
            composition.origins[key] = f"override {line}"
        elif from_files is not None and key in from_files.origins:
            composition.origins[key] = from_files.origins[key]


def _with_override(problem: Problem, config: DictConfig) -> Problem:
    """Return `problem` with the override that set its value as its place, if one did."""
    key = problem.key.removeprefix(f"{GROUP}.")
    line = _override_of(key, config) if key else None
    return replace(problem, where=f"override {line}") if line else problem


def _override_of(key: str, config: DictConfig) -> str | None:
    # Unresolved: an override shows what was written, never what a resolver makes of it.
    lines: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return next((text for text in reversed(lines) if _sets(text, key)), None)


def _sets(override: str, key: str) -> bool:
    name = override.partition("=")[0].lstrip("+~").replace("/", ".")
    whole = f"{GROUP}.{key}."
    return name != GROUP and (whole.startswith(f"{name}.") or f"{name}.".startswith(whole))


def _agreeing_run(resolved: Resolved) -> Applied | None:
    """Return what `torchrepro run` put in force in this process, if it started it.

    Raises `ApplyError` if that was another profile.
    """
    outer = inherited()
    if outer is None:
        return None
    if outer.digest == resolved.digest:
        return in_force_now()
    lines = [
        f"  {difference.key}: run {difference.left!r}, job {difference.right!r}"
        for difference in differences(outer, resolved)
    ]
    head = (
        f"this process was started by `torchrepro run {outer.name}`, and the job asks for "
        f"'{resolved.name}', which differs in:"
    )
    raise ApplyError("\n".join([head, *lines, "  to do: use the same profile in both places"]))


def _manifest_path(config: DictConfig) -> Path:
    subdir = config.hydra.output_subdir or ".hydra"
    return Path(config.hydra.runtime.output_dir) / subdir / MANIFEST
