"""One line that puts what is in force where a team looks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.applier import in_force
from torchrepro.errors import TorchreproError
from torchrepro.integrations.destinations.entry import Destination, Entry
from torchrepro.integrations.destinations.to_folder import FOLDER, HYDRA
from torchrepro.integrations.destinations.to_mlflow import MLFLOW
from torchrepro.integrations.destinations.to_tensorboard import TENSORBOARD
from torchrepro.integrations.destinations.to_wandb import WANDB
from torchrepro.messages import Problem, near, shown
from torchrepro.started import in_force_now

if TYPE_CHECKING:
    from types import TracebackType

    from torchrepro.applier import Applied

DESTINATIONS = (MLFLOW, WANDB, TENSORBOARD, HYDRA, FOLDER)
_LEGAL = ", ".join(destination.takes for destination in DESTINATIONS)
_ACTIVE = ", ".join(
    f"{destination.name} ({destination.would_be})"
    for destination in DESTINATIONS
    if destination.active
)


@dataclass(slots=True)
class Logged:
    """Where a profile in force was logged; leaving a `with` block logs it again, as it is then."""

    applied: Applied
    targets: tuple[tuple[Destination, Any], ...]
    places: tuple[str, ...] = ()
    """What was written where, one line per destination."""

    def again(self) -> Logged:
        """Log the profile as it is now, over what was logged before.

        Raises `TorchreproError` if a tool refuses, after all the others have been written.
        """
        entry = Entry.of(self.applied)
        places, refusals = [], []
        for destination, target in self.targets:
            try:
                places.append(f"{destination.name}: {destination.write(target, entry)}")
            except Exception as error:  # noqa: BLE001 - whatever a tool raises is its refusal
                refusals.append(_refusal(destination, error))
        self.places = tuple(places)
        if refusals:
            raise TorchreproError("\n".join(refusals + [f"logged to {place}" for place in places]))
        return self

    def __enter__(self) -> Logged:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.again()
        except TorchreproError as refused:
            if error is None:
                raise
            error.add_note(f"torchrepro: {refused}")  # what went wrong first is what to show

    def __str__(self) -> str:
        return "\n".join(self.places)


def log_to(*targets: Any) -> Logged:
    """Put digest, profile and manifest of what is in force into the tools that a team uses.

    A target is ``mlflow`` or a run of it, ``wandb`` or a run of it, a ``SummaryWriter``, a path to
    a folder, or the name of a tool; without targets, all that are active now. A tool that the
    program has not imported is not imported. What an earlier call has logged there is replaced, so
    call it again at the end of a run, or use it as a context manager, and what policies and seeds
    did is part of it. Raises `TorchreproError` where no profile is in force, nothing is active, a
    target is none, or a tool refuses.
    """
    applied = _innermost()
    chosen = tuple(_chosen(target) for target in targets) or _all_active()
    return Logged(applied, chosen).again()


def _innermost() -> Applied:
    in_force_now()  # under `torchrepro run` it waits for the imports of what it sets
    if not in_force():
        todo = "put one in force: torchrepro.apply, +repro=NAME of a Hydra app, or torchrepro run"
        raise TorchreproError(str(Problem("log_to: no profile is in force", todo=todo)))
    return in_force()[-1]


def _chosen(target: Any) -> tuple[Destination, Any]:
    """Return the destination of `target`, and what is active in it if that is the tool itself."""
    for destination in DESTINATIONS:
        if destination.is_place(target):
            return destination, target
        if target == destination.name or destination.is_tool(target):
            return destination, _active_in(destination)
    names = [destination.name for destination in DESTINATIONS if destination is not FOLDER]
    close = near(target, names) if isinstance(target, str) else ""
    problem = Problem(
        "not a place to log to, nor a folder that is there",
        where="log_to",
        found=shown(target),
        legal=f"{_LEGAL}, or a name: {', '.join(names)}",
        near=close,
    )
    raise TorchreproError(str(problem))


def _active_in(destination: Destination) -> Any:
    active = destination.active_now()
    if active is None:
        problem = Problem(f"log_to: nothing is active in {destination.name}")
        raise TorchreproError(f"{problem}\n    active would be: {destination.would_be}")
    return active


def _all_active() -> tuple[tuple[Destination, Any], ...]:
    found = tuple(
        (destination, active)
        for destination in DESTINATIONS
        for active in (destination.active_now(),)
        if active is not None
    )
    if not found:
        problem = Problem(
            "log_to: nothing is active to log to",
            todo=f"start one, {_ACTIVE}, or name a place: {_LEGAL}",
        )
        raise TorchreproError(str(problem))
    return found


def _refusal(destination: Destination, error: Exception) -> str:
    words = json.dumps(str(error).strip().partition("\n")[0], ensure_ascii=False)
    return f"log_to: {destination.name} refused: {type(error).__name__}: {words}"
