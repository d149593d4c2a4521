"""The profile of a run in the loggers that its framework writes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.frameworks.hooking import going_on_without, in_force

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def log_profile(framework: str, loggers: Iterable[Any], place_of: Callable[[Any], Any]) -> None:
    """Write digest, values and manifest of the profile in force to each of `loggers`.

    `place_of` gives what a logger writes to: a run of MLflow or wandb, a SummaryWriter, or a path
    to a folder; a logger with another place is left out. One that refuses is said on standard
    error, and the program goes on.
    """
    # A framework is imported as fast with a profile as without: this is loaded when it is used.
    from torchrepro.manifest.contents import manifest
    from torchrepro.manifest.destinations import Entry, destination_of

    profile = in_force()
    entry = None
    for logger in loggers if profile is not None else ():
        with going_on_without(framework, f"writing the profile to {type(logger).__name__}"):
            place = place_of(logger)
            destination = destination_of(place)
            if destination is not None and profile is not None:
                entry = entry or Entry(manifest(profile.resolved, profile.report()))
                destination.write(place, entry)


def place_of_lightning(logger: Any) -> Any:
    """Return what a logger of Lightning writes to: a run, a SummaryWriter, a folder of files."""
    from torchrepro.manifest.destinations import destination_of

    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "get_run") and hasattr(logger, "run_id"):
        return experiment.get_run(logger.run_id)  # MLflow's client has the run under its id
    known = destination_of(experiment) is not None
    return experiment if known else getattr(logger, "log_dir", None) or experiment
