"""The callback that puts a job's profile in force and takes it back.

Hydra turns an exception in a callback into a warning and runs the task all the same, so whatever
stops a run here leaves as `SystemExit`, which gets through.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from torchrepro.applier import Applied, apply_resolved, meet_late_knobs
from torchrepro.errors import ApplyError, Problem, ProfileError, TorchreproError
from torchrepro.integrations.hydra import GROUP, composed
from torchrepro.manifest import write_manifest
from torchrepro.planner import plan
from torchrepro.process import inherited
from torchrepro.profile.compose import Composition, flatten
from torchrepro.profile.difference import differences
from torchrepro.profile.load import from_mapping, validate
from torchrepro.tables import announce

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved

MANIFEST = "repro.json"
REFUSED_STATUS = 3


class ReproCallback(Callback):
    """Puts the profile of each job in force; does nothing without one."""

    def __init__(self) -> None:
        self._applied: Applied | None = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile, and relaunch if it asks for that: no work has been done yet."""
        with _StopOnRefusal():
            resolved = _resolved(config)
            if resolved is not None and inherited() is None:
                meet_late_knobs(plan(resolved), "")

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Put the job's profile in force and write its manifest."""
        with _StopOnRefusal():
            resolved = _resolved(config)
            if resolved is None:
                return
            _agree_with_run(resolved)
            self._applied = apply_resolved(resolved, "Hydra has started the job")
            write_manifest(_manifest_path(config), resolved, self._applied.report)
            announce(self._applied.report)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Take the job's profile back, so that the next job starts from a clean state."""
        if self._applied is not None:
            with _StopOnRefusal():
                self._applied.restore()
            self._applied = None


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
    if len(composed) > 1:
        raise ProfileError(
            Problem(
                "two profiles at once",
                found=f"{GROUP}: [{', '.join(composed)}]",
                todo="write a profile that inherits both: defaults: [one, two, _self_]",
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
    composition = from_mapping(section, where="this app's config")
    _remember_places(composition, next(iter(composed.values()), None), config)
    return validate(composition).resolved


def _remember_places(
    composition: Composition, from_files: Composition | None, config: DictConfig
) -> None:
    """Give every value the place that set it: the override, else the file's line."""
    lines = list(config.hydra.overrides.task)
    for key in flatten(composition.values):
        line = next((text for text in reversed(lines) if _sets(text, key)), None)
        if line is not None:
            composition.origins[key] = f"override {line}"
        elif from_files is not None and key in from_files.origins:
            composition.origins[key] = from_files.origins[key]


def _sets(override: str, key: str) -> bool:
    name = override.partition("=")[0].lstrip("+~").replace("/", ".")
    return name != GROUP and f"{GROUP}.{key}.".startswith(f"{name}.")


def _agree_with_run(resolved: Resolved) -> None:
    """Raise `ApplyError` if `torchrepro run` started this process under another profile."""
    outer = inherited()
    if outer is None or outer.digest == resolved.digest:
        return
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
