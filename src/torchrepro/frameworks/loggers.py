"""The profile of a run in the loggers that its framework writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.console import say
from torchrepro.frameworks.hooking import in_force

if TYPE_CHECKING:
    from collections.abc import Iterable


def log_profile(framework: str, places: Iterable[Any]) -> None:
    """Write digest, values and manifest of the profile in force to each of `places`.

    A place is a run of MLflow or wandb, a SummaryWriter, or a path to a folder; what is none is
    left out. One that refuses is said on standard error, and the program goes on.
    """
    # A framework is imported as fast with a profile as without: this is loaded when it is used.
    from torchrepro.manifest.contents import manifest
    from torchrepro.manifest.destinations import Entry, destination_of

    profile = in_force()
    known = [(destination_of(place), place) for place in places]
    if profile is None or not any(destination for destination, _ in known):
        return
    entry = Entry(manifest(profile.resolved, profile.report()))
    for destination, place in known:
        if destination is None:
            continue
        try:
            destination.write(place, entry)
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is its refusal
            why = str(error).strip().partition("\n")[0]
            say(f"{framework}: {destination.name} did not take the profile: {why}")


def place_of(logger: Any) -> Any:
    """Return what a logger of Lightning writes to: a run, a SummaryWriter, a folder of files."""
    from torchrepro.manifest.destinations import destination_of

    experiment = logger.experiment
    if hasattr(experiment, "get_run") and hasattr(logger, "run_id"):
        return experiment.get_run(logger.run_id)  # MLflow's client has the run under its id
    known = destination_of(experiment) is not None
    return experiment if known else getattr(logger, "log_dir", None) or experiment
