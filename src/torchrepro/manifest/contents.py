"""What a manifest and a lock hold: what a run was, and how it was started.

Writing a manifest, of a process too; finding it; reading either back.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchrepro.ground.console import say_once
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import some
from torchrepro.ground.redaction import secret_values, shareable, without_secrets
from torchrepro.ground.writing import write_atomically
from torchrepro.knobs.variables import RECORDED, other_variables
from torchrepro.manifest.environment import (
    compiler_settings,
    hardware,
    kind_of_machine,
    repository,
    software,
)
from torchrepro.profile.resolved import plain
from torchrepro.reporting.process_state import (
    FOLDER,
    inherited,
    is_interactive,
    launcher,
    set_before_start,
)
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import seeding_calls

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report


FORMAT = 1
KINDS = ("lock", "manifest")  # of such a file, by the key that holds its format
FILE = "repro.json"  # what a manifest's file is called, wherever it is kept
LARGEST = 16 * 2**20  # bytes of a file that is read

LOG_TO = "TORCHREPRO_LOG_TO"
"""Variable that holds the folder of `torchrepro run --log-to`, for every process below it."""

PARTS_OF_A_LOCK = (
    *("profile", "digest", "origins", "environment", "other_variables", "repository", "seal"),
    *("manifest", "named.profile", "named.overrides", "report.knobs", "versions.python"),
    *("versions.torch", "hardware.system", "hardware.machine", "hardware.cpu", "hardware.threads"),
)
"""Every part that a lock is written with, and what is in it on every machine."""


def manifest(
    resolved: ResolvedProfile, report: Report, hydra: DictConfig | None = None
) -> dict[str, Any]:
    """Return the manifest of a run under `resolved` as plain JSON values, without any secret.

    `hydra` is Hydra's own part of the config of its job, which is the one that runs now unless it
    is given: Hydra forgets it while a job ends.

    It includes what the run has done with random numbers so far: the streams it drew from, and
    where it seeded a generator itself.
    """
    secrets = secrets_here(resolved)
    hydra = hydra_job() if hydra is None else hydra
    others = other_variables({k: its for k, its in os.environ.items() if set_before_start(k)})
    return common_contents(
        resolved,
        report,
        other_variables=others,  # without those that libraries have set by now
        streams=list(streams.drawn_streams()),
        seeding_calls=[asdict(call) for call in seeding_calls()],
        command_line=shareable(sys.orig_argv, secrets),
        started=asdict(_started_here(resolved, hydra, secrets)),
    )


def common_contents(resolved: ResolvedProfile, report: Report, **more: Any) -> dict[str, Any]:
    """Return what a manifest and a lock have in common, and `more`, without any secret.

    Imports no library and never fails because of the machine.
    """
    compiler = compiler_settings()
    contents = {
        "manifest": FORMAT,
        "profile": plain(resolved.values),
        "digest": resolved.digest,
        "origins": {key: origin.to_json() for key, origin in resolved.origins.items()},
        "report": report.to_json(),
        "versions": software(),
        "hardware": hardware(),
        "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
        "other_variables": other_variables(os.environ),
        "repository": repository(),
        **({} if compiler is None else {"compiler": compiler}),
        **more,
    }
    cleaned: dict[str, Any] = without_secrets(contents, secrets_here(resolved))
    return cleaned


def seal_of(contents: Mapping[str, Any]) -> str:
    """Return a digest of a lock, without the one that it holds: an edited lock has another."""
    its = {key: value for key, value in contents.items() if key != "seal"}
    return f"sha256:{hashlib.sha256(as_text(its).encode()).hexdigest()}"


def secrets_here(*profiles: ResolvedProfile) -> tuple[str, ...]:
    """Return the secret values among the variables of this process and of the profiles."""
    of_each = [os.environ, *(resolved.environment() for resolved in profiles)]
    return tuple({value for variables in of_each for value in secret_values(variables)})


def write_manifest(folder: Path, contents: Mapping[str, Any]) -> Path:
    """Write a manifest into `folder`, which is created if missing, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomically(path, as_text(contents).encode())
    return path


def as_text(contents: Mapping[str, Any]) -> str:
    """Return a manifest or a lock as the text of its file; equal contents give equal texts."""
    return json.dumps(contents, indent=2, sort_keys=True) + "\n"


_NAME_ONE = (
    "write a lock, which later runs are held to: torchrepro lock PROFILE; or name a manifest, "
    "such as .hydra/repro.json"
)


class DamagedError(ProfileError):
    """A file that is neither a manifest nor a lock, or no longer."""


def read_contents(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of the file, ``lock`` or ``manifest``, and its contents.

    Raises `ProfileError` for a file that is neither, or of another format.
    """
    where = str(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ProfileError.about("not a regular file", where, todo=_NAME_ONE)
        size = status.st_size
        contents = json.loads(path.read_text(encoding="utf-8")) if size <= LARGEST else {}
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise ProfileError.about(what, where, todo=_NAME_ONE) from None
    except RecursionError:
        raise DamagedError.about("nested too deep", where) from None
    except ValueError:
        what = "neither a manifest nor a lock: not JSON"
        raise DamagedError.about(what, where, todo=_NAME_ONE) from None
    if size > LARGEST:
        raise DamagedError.about("too large for a manifest or a lock", where)
    kind = next((key for key in KINDS if isinstance(contents, dict) and key in contents), "")
    if not kind or not isinstance(contents.get("profile"), dict):
        what = "neither a manifest nor a lock: it holds no `profile`"
        raise DamagedError.about(what, where, todo=_NAME_ONE)
    for key in KINDS:
        if contents.get(key, FORMAT) != FORMAT:
            what, found = f"a {key} of another format", str(contents[key])[:80]
            todo = "read it with the torchrepro that wrote it"
            raise ProfileError.about(what, where, key, found, legal=str(FORMAT), todo=todo)
    return kind, contents


MACHINES = "machines"
"""The key of the sections of a lock that holds numbers, one for each kind of machine."""


class OtherMachineError(ProfileError):
    """A lock holds nothing of this kind of machine."""

    exit_status = 4


def read_complete(path: Path) -> tuple[str, dict[str, Any]]:
    """Return what `read_contents` does; a lock that is damaged is refused.

    `true_seal` is what its `seal` would be. Of a lock with sections it is that of this kind of
    machine, with what all sections share. Raises `OtherMachineError` if there is none, and
    `ProfileError` for a lock without one of `PARTS_OF_A_LOCK`: it would forbid less than it was
    written to forbid.
    """
    kind, contents = read_contents(path)
    if MACHINES in contents:
        sections, machine = contents[MACHINES], kind_of_machine()
        are_sections = isinstance(sections, dict) and all(
            isinstance(each, dict) for each in sections.values()
        )
        if not are_sections:
            raise ProfileError.about("damaged: no sections of machines", str(path), MACHINES)
        if machine not in sections:
            raise OtherMachineError.about(
                "the lock holds nothing of this kind of machine",
                str(path),
                found=machine,
                legal=some(sections),
                todo='add it: torchrepro check FILE --update "a machine of its own" -- COMMAND',
            )
        common = {key: contents[key] for key in contents.keys() - {MACHINES}}
        contents = {**common, **sections[machine]}
    contents = {**contents, "true_seal": seal_of(contents)}
    lacking = []
    for part in PARTS_OF_A_LOCK if kind == "lock" else ():
        section, _, key = part.partition(".")
        its = contents.get(section)
        if section not in contents or (key and isinstance(its, dict) and key not in its):
            lacking.append(part if section in contents else section)
    if lacking:
        what = f"damaged: these parts are missing: {some(dict.fromkeys(lacking))}"
        todo = "lock again: torchrepro lock PROFILE -o FILE"
        raise ProfileError.about(what, str(path), todo=todo)
    return kind, contents


def hydra_job() -> DictConfig | None:
    """Return Hydra's own part of the config of the job that runs in this process now, or None."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    config: DictConfig = module.HydraConfig.get()
    return config if config.runtime.get("output_dir", None) else None


def hydra_folder(config: DictConfig) -> Path:
    """Return the folder in which Hydra keeps the config of a job; `config` is Hydra's own part.

    It is ``.hydra`` also where Hydra keeps none. See https://hydra.cc/docs/configure_hydra/intro
    (hydra.runtime.output_dir, output_subdir).
    """
    return Path(config.runtime.output_dir) / (config.output_subdir or ".hydra")


def refuse_used_folder(folder: Path) -> None:
    """Raise `ProfileError` if `folder` is a file, or holds the manifest of another run.

    Only the process that writes it checks: the others may start after it has written.
    """
    what = ""
    if streams.world().rank == 0:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if (folder / FILE).exists():
            what = "holds the manifest of another run already"
        elif not there.is_dir():
            what = "cannot be a folder: there is a file"
    if what:
        todo = "name a new folder"
        raise ProfileError.about(what, key="--log-to", found=str(folder), todo=todo)


class ProcessManifest:
    """Written when torch is imported, and again, complete, when the process ends.

    One process of a run writes it: the first that imports torch, or else rank 0, whose launcher may
    have imported torch before it.
    """

    def __init__(self, folder: str, read: Callable[[], tuple[ResolvedProfile, Report]]) -> None:
        self._folder = Path(folder)
        self._read = read
        self._process = os.getpid()
        self._written = ""

    def write(self) -> None:
        """Write it, unless another process has; a folder that cannot be written is said."""
        if os.getpid() != self._process or streams.world().rank:
            return
        with suppress(OSError):
            ranked = any(rank in os.environ for rank, _ in streams.VARIABLES)
            ours = (self._folder / FILE).read_text(encoding="utf-8") == self._written
            if not ours and (self._written or not ranked):
                return
        its = manifest(*self._read())
        try:
            write_manifest(self._folder, its)
        except OSError as error:
            say_once(f"the manifest cannot be written: {self._folder}: {error.strerror}")
            return
        self._written = as_text(its)


def manifest_in(name: str, folder: Path) -> Path | None:
    """Return the manifest in the folder of a run, or None.

    Raises `ProfileError` for a folder with several, such as that of a sweep.
    """
    found = sorted(path for path in (folder / FILE, *folder.glob(f"*/{FILE}")) if path.is_file())
    if len(found) > 1:
        todo = f"name one of them: {some(map(str, found))}"
        raise ProfileError.about("holds several manifests", found=name, todo=todo)
    if not found and (jobs := sorted(folder.glob(f"*/.hydra/{FILE}"))):
        todo = f"name one of them: {jobs[0].parent.parent}"
        raise ProfileError.about("holds the jobs of a sweep", found=name, todo=todo)
    return found[0] if found else None


COMMAND = "TORCHREPRO_COMMAND"
"""Variable in which `torchrepro run` says what it started, and where, to the processes below."""

_RECORD = "TORCHREPRO_RECORD"  # as torchrepro.trace.request writes it, which builds on this

Way = Literal["run", "hydra", "code"]
RUN, HYDRA, CODE = get_args(Way)
"""How a profile came into force: `torchrepro run`, a Hydra app's `+repro=`, `torchrepro.apply`."""


@dataclass(frozen=True, slots=True)
class HydraJob:
    """What Hydra was asked for: its job may be one of a sweep."""

    task: tuple[str, ...]  # the overrides of this job, in which those of a sweep have one value
    own: tuple[str, ...]  # the overrides of Hydra's own config
    sweep: bool
    number: int | None  # of the job in its sweep
    subdir: str  # the folder in the run's output folder that holds the manifest
    choice: str  # the profile that the app's config chose, by its name there; empty for none


@dataclass(frozen=True, slots=True)
class Started:
    """How a run was started."""

    by: Way
    folder: str  # the working directory
    command: tuple[str, ...]  # with `(hidden)` for what may be secret; empty if there is none
    launcher: str  # that started this as one of several, if its command line is not known
    ranked: bool  # whether a launcher set variables, which the command does not have
    asked: tuple[str, ...]  # the profile's name or path, and overrides; empty for plain values
    hydra: HydraJob | None
    recording: dict[str, Any]  # what `torchrepro run --record` was asked for


_sweep: list[tuple[tuple[str, ...], str]] = []  # in a launcher's process: how the sweep was started


def note_sweep(command: Sequence[str], folder: str) -> None:
    """Note that a Hydra launcher runs jobs here of a sweep that was started so."""
    _sweep[:] = [(tuple(command), folder)]


def sweep_or_this() -> tuple[tuple[str, ...], str]:
    """Return the command line of the sweep whose jobs run here, or of this process; its folder."""
    return _sweep[0] if _sweep else (tuple(sys.orig_argv), FOLDER)


def _started_here(
    resolved: ResolvedProfile, hydra: DictConfig | None, secrets: tuple[str, ...]
) -> Started:
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


def _command_line() -> tuple[Sequence[str], str, str]:
    # The command, its folder, and the launcher if the command is unknown: a process of a launcher
    # has a command line of its own, which would start that process alone.
    if _sweep:
        return (*_sweep[0], "")
    if is_interactive():
        return (), FOLDER, ""
    if launcher() and COMMAND in os.environ:
        outer = json.loads(os.environ[COMMAND])
        return outer["command"], outer["folder"], ""
    return sys.orig_argv, FOLDER, launcher()


def _shown(words: Sequence[str], secrets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(shareable(("", *words), secrets)[1:])  # none of them is a program


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
