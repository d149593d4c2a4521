"""Log the profile in force to the tools that a team uses.

MLflow loads this through the entry-point group `mlflow.run_context_provider` when it is imported
itself, and asks `ProfileTags` whenever a run starts; see https://mlflow.org/docs/latest/ml/plugins.
So what puts profiles in force is imported here only once something is logged.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import say_once
from torchrepro.ground.errors import TorchreproError
from torchrepro.ground.messages import Problem, near, shown

if TYPE_CHECKING:
    from torchrepro.application.applier import Applied
    from torchrepro.manifest.destinations import Destination


@dataclass(slots=True)
class Logged:
    """Where a profile was logged; leaving a `with` block logs its state at that moment again."""

    applied: Applied | None  #: None where no profile was in force.
    targets: tuple[tuple[Destination, Any], ...]
    places: tuple[str, ...] = ()  #: What was written where, one line per destination.

    def again(self) -> Logged:
        """Log the profile as it is now, over what was logged before.

        Does nothing where no profile was in force when it was first logged. Raises
        `TorchreproError` if a tool refuses, after all the others have been written.
        """
        if self.applied is None:
            return self
        from torchrepro.manifest.contents import manifest

        its = manifest(self.applied.resolved, self.applied.report)
        places, refusals = [], []
        for destination, target in self.targets:
            try:
                places.append(f"{destination.name}: {destination.write(target, its)}")
            except Exception as error:  # noqa: BLE001 - whatever a tool raises is its refusal
                words = str(error).strip().partition("\n")[0]
                refusals.append(
                    f"log_to: {destination.name} refused: {type(error).__name__}: "
                    + json.dumps(words, ensure_ascii=False)
                )
        self.places = tuple(places)
        if refusals:
            raise TorchreproError("\n".join(refusals + [f"logged to {place}" for place in places]))
        return self

    def __enter__(self) -> Logged:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.again()
        except TorchreproError as refused:
            if error is None:
                raise
            error.add_note(f"torchrepro: {refused}")  # what went wrong first is what to show

    def __str__(self) -> str:
        return "\n".join(self.places)


def log_to(*targets: Any) -> Logged:
    """Log digest, values and manifest of the profile in force to the tools that a team uses.

    A target is ``mlflow`` or a run of it, ``wandb`` or a run of it, a ``SummaryWriter``, a folder
    as a path or as text, or the name of a tool. Without targets, all that are active now are
    meant. No tool is imported for that. A later call replaces what an earlier one has logged. So
    call it again at the end of a run, or use it as a context manager, to include what policies and
    seeds did.
    Without a profile there is nothing to log: a note says so once, and nothing is written. Raises
    `TorchreproError` if nothing is active, a target is not a place to log to, or a tool refuses.
    """
    from torchrepro.application.applier import in_force
    from torchrepro.manifest.destinations import DESTINATIONS, LEGAL
    from torchrepro.start.bootstrap import in_force_now

    in_force_now()  # under `torchrepro run` it waits for the imports of what it sets
    if not in_force():
        say_once(
            "log_to: no profile is in force, so nothing is logged; put one in force: "
            "torchrepro.apply, +repro=NAME of a Hydra app, or torchrepro run"
        )
        return Logged(None, ())
    active = [(each, each.active()) for each in DESTINATIONS] if not targets else []
    chosen = [*map(_chosen, targets), *(each for each in active if each[1] is not None)]
    if not chosen:
        could_be = [f"{each.name} ({each.started_by})" for each in DESTINATIONS if each.started_by]
        problem = Problem(
            "log_to: nothing is active to log to",
            todo=f"start one, {', '.join(could_be)}, or name a place: {LEGAL}",
        )
        raise TorchreproError(str(problem))
    return Logged(in_force()[-1], tuple(chosen)).again()


def _chosen(target: Any) -> tuple[Destination, Any]:
    from torchrepro.manifest.destinations import DESTINATIONS, LEGAL, TOOLS

    for destination in DESTINATIONS:
        if destination.is_place(target):
            return destination, target
        if destination.is_tool(target):
            if (active := destination.active()) is not None:
                return destination, active
            what = f"log_to: nothing is active in {destination.name}"
            todo = f"hand over {destination.place} itself"
            if destination.started_by:
                todo = f"start one: {destination.started_by}"
            raise TorchreproError(str(Problem(what, todo=todo)))
    problem = Problem(
        "not a place to log to, nor a folder that is there",
        where="log_to",
        found=shown(target),
        legal=f"{LEGAL}, or a name: {', '.join(TOOLS)}",
        near=near(target, TOOLS) if isinstance(target, str) else "",
    )
    raise TorchreproError(str(problem))


class ProfileTags:
    """Names the profile in force to MLflow; `log_to` adds its values and the manifest."""

    def in_context(self) -> bool:
        """Whether a profile is in force."""
        # Without the module nothing was ever put in force, and importing it would cost time.
        applier = sys.modules.get("torchrepro.application.applier")
        return bool(applier and applier.in_force())

    def tags(self) -> dict[str, str]:
        """Return the name, the guarantee held and the digest of the innermost profile in force."""
        from torchrepro.application.applier import in_force

        report = in_force()[-1].report
        return {
            "torchrepro.name": report.profile,
            "torchrepro.guarantee": report.guarantee.held,
            "torchrepro.digest": report.digest,
        }
