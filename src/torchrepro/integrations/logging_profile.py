"""Log the active profile to experiment trackers: MLflow, Weights & Biases, TensorBoard, a folder.

MLflow loads this module while MLflow itself is imported, through the entry-point group
`mlflow.run_context_provider` (https://mlflow.org/docs/latest/ml/plugins). It calls `ProfileTags` at
the start of every run. To keep MLflow fast, this module imports the applier only when it logs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import say_once
from torchrepro.ground.errors import Problem, TorchreproError, near, shown

if TYPE_CHECKING:
    from torchrepro.application.applier import Applied
    from torchrepro.manifest.destinations import Destination


@dataclass(slots=True)
class Logged:
    """The destinations to which a profile was logged.

    In a `with` statement, the profile is logged again when the block ends.
    """

    applied: Applied | None  #: None if no profile was active.
    targets: tuple[tuple[Destination, Any], ...]
    places: tuple[str, ...] = ()  #: What was written, and where: one line per destination.

    def again(self) -> Logged:
        """Log the present state of the profile, and replace the earlier log.

        Does nothing if no profile was active at the first call. Raises
        `TorchreproError` if a tool refuses the profile, after the other tools have received it.
        """
        if self.applied is None:
            return self
        from torchrepro.manifest.contents import manifest

        contents = manifest(self.applied.resolved, self.applied.report)
        written, refusals = [], []
        for destination, target in self.targets:
            try:
                written.append(f"{destination.name}: {destination.write(target, contents)}")
            except Exception as error:  # noqa: BLE001 - tools raise errors of any class
                reason = str(error).strip().partition("\n")[0]
                refusals.append(
                    f"log_to: {destination.name} refused: {type(error).__name__}: "
                    + json.dumps(reason, ensure_ascii=False)
                )
        self.places = tuple(written)
        if refusals:
            raise TorchreproError("\n".join(refusals + [f"logged to {line}" for line in written]))
        return self

    def __enter__(self) -> Logged:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.again()
        except TorchreproError as refusal:
            if error is None:
                raise
            error.add_note(f"torchrepro: {refusal}")  # the error of the block comes first

    def __str__(self) -> str:
        return "\n".join(self.places)


def log_to(*targets: Any) -> Logged:
    """Log the digest, values and manifest of the active profile to experiment trackers.

    A target is ``mlflow`` or one of its runs, ``wandb`` or one of its runs, a ``SummaryWriter``, a
    folder as a path or as text, or the name of a tool. Without targets, it logs to every tool that
    has an active run, and imports no tool for that. A later call replaces the log of an earlier
    call. So call it again at the end of a run, or use it as a context manager, to include what
    policies and seeds did during the run. Without an active profile, it only prints a note once.
    Raises `TorchreproError` if no tool has an active run, a target is not of these types,
    or a tool refuses.
    """
    from torchrepro.application.applier import active_profiles
    from torchrepro.manifest.destinations import DESTINATIONS, LEGAL
    from torchrepro.start.bootstrap import finish_applying

    finish_applying()  # under `torchrepro run` a profile may wait for torch
    if not active_profiles():
        say_once(
            "log_to: no profile is active, so nothing is logged; apply one with "
            "torchrepro.apply, with +repro=NAME of a Hydra app, or with torchrepro run"
        )
        return Logged(None, ())
    if targets:
        chosen = list(map(_destination_of, targets))
    else:
        active = [(destination, destination.active()) for destination in DESTINATIONS]
        chosen = [(destination, run) for destination, run in active if run is not None]
    if not chosen:
        startable = [f"{d.name} ({d.started_by})" for d in DESTINATIONS if d.started_by]
        problem = Problem(
            "log_to: nothing is active to log to",
            todo=f"start one, {', '.join(startable)}, or pass a target: {LEGAL}",
        )
        raise TorchreproError(str(problem))
    return Logged(active_profiles()[-1], tuple(chosen)).again()


def _destination_of(target: Any) -> tuple[Destination, Any]:
    """Return the destination of `target` and the object to write to; raises `TorchreproError`."""
    from torchrepro.manifest.destinations import DESTINATIONS, LEGAL, TOOLS

    for destination in DESTINATIONS:
        if destination.is_place(target):
            return destination, target
        if destination.is_tool(target):
            if (active := destination.active()) is not None:
                return destination, active
            inactive = f"log_to: nothing is active in {destination.name}"
            todo = f"pass {destination.place} itself"
            if destination.started_by:
                todo = f"start one: {destination.started_by}"
            raise TorchreproError(str(Problem(inactive, todo=todo)))
    problem = Problem(
        "cannot be logged to, and is not an existing folder",
        where="log_to",
        found=shown(target),
        legal=f"{LEGAL}, or a name: {', '.join(TOOLS)}",
        near=near(target, TOOLS) if isinstance(target, str) else "",
    )
    raise TorchreproError(str(problem))


class ProfileTags:
    """MLflow plugin that tags each run with the active profile. `log_to` adds the manifest."""

    def in_context(self) -> bool:
        """Return whether a profile is active."""
        # If the module is not loaded, no profile was applied, and the import would cost time.
        applier = sys.modules.get("torchrepro.application.applier")
        return bool(applier and applier.active_profiles())

    def tags(self) -> dict[str, str]:
        """Return the name, the satisfied guarantee and the digest of the innermost profile."""
        from torchrepro.application.applier import active_profiles

        report = active_profiles()[-1].report
        return {
            "torchrepro.name": report.profile,
            "torchrepro.guarantee": report.guarantee.held,
            "torchrepro.digest": report.digest,
        }
