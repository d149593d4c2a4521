"""How a run was started, as its manifest holds it: what starting it again needs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchrepro.errors import ProfileError
from torchrepro.process_state import FOLDER, inherited
from torchrepro.redaction import HIDDEN, shareable
from torchrepro.relaunch import is_interactive, launcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from omegaconf import DictConfig

    from torchrepro.profile.resolved import ResolvedProfile


COMMAND = "TORCHREPRO_COMMAND"
"""Variable in which `torchrepro run` says what it started, and where, to the processes below."""

_RECORD = "TORCHREPRO_RECORD"  # as torchrepro.trace.request writes it, which builds on this

Way = Literal["run", "hydra", "code"]
RUN, HYDRA, CODE = get_args(Way)
"""How a profile came into force: `torchrepro run`, a Hydra app's `+repro=`, `torchrepro.apply`."""


@dataclass(frozen=True, slots=True)
class HydraJob:
    """What Hydra was asked for: its job may be one of a sweep."""

    task: tuple[str, ...]
    """The overrides of this job, in which those of a sweep have one value."""
    own: tuple[str, ...]
    """The overrides of Hydra's own config."""
    sweep: bool
    number: int | None
    """The number of the job in its sweep."""
    subdir: str
    """The folder in the run's output folder that holds the manifest."""
    choice: str
    """The profile that the app's config chose, by its name there; empty if it chose none."""


@dataclass(frozen=True, slots=True)
class Started:
    """How a run was started."""

    by: Way
    folder: str
    """The working directory."""
    command: tuple[str, ...]
    """The command line, with `(hidden)` for what may be secret; empty if there is none."""
    launcher: str
    """What started the process, perhaps as one of several, if its command line is not known."""
    ranked: bool
    """Whether a launcher started the process, and set variables that the command does not have."""
    asked: tuple[str, ...]
    """The profile's name or path, and the overrides of it; empty where it came as values."""
    hydra: HydraJob | None
    recording: dict[str, Any]
    """What `torchrepro run --record` was asked for."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


_sweep: list[tuple[tuple[str, ...], str]] = []  # in a launcher's process: how the sweep was started


def note_sweep(command: Sequence[str], folder: str) -> None:
    """Note that a Hydra launcher runs jobs here of a sweep that was started so."""
    _sweep[:] = [(tuple(command), folder)]


def sweep_or_this() -> tuple[tuple[str, ...], str]:
    """Return the command line of the sweep whose jobs run here, or of this process; its folder."""
    return _sweep[0] if _sweep else (tuple(sys.orig_argv), FOLDER)


def started_here(
    resolved: ResolvedProfile, hydra: DictConfig | None, secrets: Iterable[str]
) -> Started:
    """Return how this process was started under `resolved`, without any secret.

    `hydra` is Hydra's own part of the config of the job that runs, if one does.
    """
    secrets = tuple(secrets)
    command, folder, unknown = _command_line()
    recording = os.environ.get(_RECORD)
    return Started(
        by=RUN if inherited() is not None else CODE if hydra is None else HYDRA,
        folder=str(hydra.runtime.cwd) if hydra is not None else folder,
        command=tuple(shareable(command, secrets)),
        launcher=unknown,
        ranked=bool(launcher()) and not _sweep,
        asked=_shown(resolved.asked, secrets),
        hydra=_hydra_job(hydra, secrets) if hydra is not None else None,
        recording=dict(json.loads(recording)) if recording else {},
    )


APP = "this app's config"
"""The place of values that the config of a Hydra app sets."""


def _command_line() -> tuple[Sequence[str], str, str]:
    """Return the command that started the run, its folder, and who started it if that is unknown.

    A process of a launcher has a command line of its own, which would start that process alone.
    """
    if _sweep:
        return (*_sweep[0], "")
    if is_interactive():
        return (), FOLDER, ""
    by = launcher()
    if by and COMMAND in os.environ:
        outer = json.loads(os.environ[COMMAND])
        return outer["command"], outer["folder"], ""
    return sys.orig_argv, FOLDER, by


def _shown(words: Sequence[str], secrets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(shareable(("", *words), secrets)[1:])


def _hydra_job(hydra: DictConfig, secrets: tuple[str, ...]) -> HydraJob:
    from omegaconf import OmegaConf

    from torchrepro.profile.load import SECTION

    # Unresolved: an override shows what was written, never what a resolver makes of it.
    written: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    sweep = getattr(hydra.mode, "name", str(hydra.mode)) == "MULTIRUN"
    number = hydra.job.get("num") if sweep else None
    choice = str((hydra.runtime.get("choices") or {}).get(SECTION) or "")
    return HydraJob(
        task=_shown(written["task"], secrets),
        own=_shown(written["hydra"], secrets),
        sweep=sweep,
        number=number if isinstance(number, int) else None,
        subdir=hydra.output_subdir or ".hydra",
        choice=_shown([choice], secrets)[0],
    )


def started_in(path: Path, contents: Mapping[str, Any]) -> Started:
    """Return how the run of the manifest `path` was started.

    Raises `ProfileError` for a damaged one.
    """
    from pydantic import TypeAdapter, ValidationError  # a run starts without it

    try:
        return TypeAdapter(Started).validate_python(contents.get("started"))
    except ValidationError:
        what = "damaged: it does not say how the run was started"
        raise ProfileError.about(what, str(path), "started") from None


def hidden_in(words: Sequence[str]) -> list[str]:
    """Return every argument that is hidden, each with the option before it."""
    return [
        f"{words[at - 1]} {word}" if word == HIDDEN and words[at - 1].startswith("-") else word
        for at, word in enumerate(words)
        if HIDDEN in word
    ]
