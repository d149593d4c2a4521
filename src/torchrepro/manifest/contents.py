"""The contents of manifests and locks: the environment of a run, and how the run was started.

Writes, finds and reads manifests, and reads locks. `ProcessManifest` writes one automatically.
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
from torchrepro.ground.errors import ProfileError, some
from torchrepro.ground.redaction import secret_values, shareable, without_secrets
from torchrepro.ground.writing import write_atomically
from torchrepro.knobs.variables import RECORDED, other_variables
from torchrepro.manifest.environment import (
    compiler_settings,
    hardware,
    platform_name,
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
from torchrepro.seeding.call_records import IN_MANIFEST
from torchrepro.seeding.seeding_calls import seeding_calls

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report


FORMAT = 1
KINDS = ("lock", "manifest")  # kinds of files; the key of this name contains the format
FILE = "repro.json"  # the file name of every manifest
LARGEST = 16 * 2**20  # bytes; a larger file is refused

LOG_TO = "TORCHREPRO_LOG_TO"
"""Environment variable that passes the folder of `torchrepro run --log-to` to the command."""

PARTS_OF_A_LOCK = (
    *("profile", "digest", "origins", "environment", "other_variables", "repository", "seal"),
    *("manifest", "named.profile", "named.overrides", "report.knobs", "versions.python"),
    *("versions.torch", "hardware.system", "hardware.machine", "hardware.cpu", "hardware.threads"),
)
"""The sections of every lock, and the keys in them that every machine has."""


def manifest(
    resolved: ResolvedProfile, report: Report, hydra: DictConfig | None = None
) -> dict[str, Any]:
    """Return the manifest of a run under `resolved` as plain JSON values, without secrets.

    `hydra` is Hydra's own config of the job, by default of the running job. A caller at the end of
    a job has to pass it, because Hydra clears the config at the end.

    The manifest also lists the streams of random numbers that the run drew from so far, and the
    lines of the program that seeded a generator.
    """
    secrets = known_secrets(resolved)
    hydra = hydra_job() if hydra is None else hydra
    at_start = {name: text for name, text in os.environ.items() if set_before_start(name)}
    return common_contents(
        resolved,
        report,
        other_variables=other_variables(at_start),  # libraries may have set more since the start
        streams=list(streams.drawn_streams()),
        seeding_calls=[call.to_json(IN_MANIFEST) for call in seeding_calls.calls()],
        command_line=shareable(sys.orig_argv, secrets),
        started=asdict(_started_here(resolved, hydra, secrets)),
    )


def common_contents(resolved: ResolvedProfile, report: Report, **sections: Any) -> dict[str, Any]:
    """Return the contents that manifests and locks share, plus `sections`, without secrets.

    Imports no library, and does not raise if a fact of the machine cannot be read.
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
        **sections,
    }
    cleaned: dict[str, Any] = without_secrets(contents, known_secrets(resolved))
    return cleaned


def seal_of(contents: Mapping[str, Any]) -> str:
    """Return the digest of a lock without `seal`. The digest shows whether the lock was edited."""
    sealed = {key: value for key, value in contents.items() if key != "seal"}
    return f"sha256:{hashlib.sha256(as_text(sealed).encode()).hexdigest()}"


def known_secrets(*profiles: ResolvedProfile) -> tuple[str, ...]:
    """Return the secrets among the environment variables of this process and of `profiles`."""
    environments = [os.environ, *(resolved.environment() for resolved in profiles)]
    return tuple({value for variables in environments for value in secret_values(variables)})


def write_manifest(folder: Path, contents: Mapping[str, Any]) -> Path:
    """Write a manifest into `folder`, and return the file's path. Creates a missing folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    write_atomically(path, as_text(contents).encode())
    return path


def as_text(contents: Mapping[str, Any]) -> str:
    """Return the text of a manifest or a lock with `contents`. Equal contents give equal texts."""
    return json.dumps(contents, indent=2, sort_keys=True) + "\n"


_NAME_ONE = (
    "write a lock to check later runs against: torchrepro lock PROFILE; or name a manifest, such "
    "as .hydra/repro.json"
)


class DamagedError(ProfileError):
    """The file is damaged, or is not a manifest or a lock."""


def read_contents(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of the file, ``lock`` or ``manifest``, and the contents.

    Raises `ProfileError` for any other file, or if the file has another format version.
    """
    file = str(path)
    try:
        status = path.stat()
        is_special = not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))
        is_read = not is_special and status.st_size <= LARGEST
        contents = json.loads(path.read_text(encoding="utf-8")) if is_read else {}
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ProfileError.about(message, file, todo=_NAME_ONE) from None
    except RecursionError:
        raise DamagedError.about("nested too deep", file) from None
    except ValueError:
        message = "neither a manifest nor a lock: not JSON"
        raise DamagedError.about(message, file, todo=_NAME_ONE) from None
    if is_special:
        raise ProfileError.about("not a regular file", file, todo=_NAME_ONE)
    if not is_read:
        raise DamagedError.about("too large for a manifest or a lock", file)
    written_as = next((key for key in KINDS if isinstance(contents, dict) and key in contents), "")
    if not written_as or not isinstance(contents.get("profile"), dict):
        message = "neither a manifest nor a lock: it has no `profile`"
        raise DamagedError.about(message, file, todo=_NAME_ONE)
    for key in KINDS:
        if contents.get(key, FORMAT) != FORMAT:
            message, version = f"a {key} of another format", str(contents[key])[:80]
            todo = "read it with the torchrepro that wrote it"
            raise ProfileError.about(message, file, key, version, legal=str(FORMAT), todo=todo)
    return written_as, contents


MACHINES = "machines"
"""The key of a lock under which the results are, in one section for each platform."""


class OtherMachineError(ProfileError):
    """A lock has no section for this platform."""

    exit_status = 4


def read_complete(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind and the contents of a manifest or a complete lock, plus a `true_seal`.

    The `true_seal` is the seal that the contents should have. If a lock has sections for
    platforms, the contents are the common contents and the section of this platform. Raises
    `OtherMachineError` if this platform has no section. Raises `ProfileError` if the lock lacks
    one of `PARTS_OF_A_LOCK`, because a check against it would compare less than was locked.
    """
    written_as, contents = read_contents(path)
    if MACHINES in contents:
        sections, machine = contents[MACHINES], platform_name()
        are_sections = isinstance(sections, dict) and all(
            isinstance(section, dict) for section in sections.values()
        )
        if not are_sections:
            raise ProfileError.about("damaged: no sections of machines", str(path), MACHINES)
        if machine not in sections:
            raise OtherMachineError.about(
                "the lock has no results of this platform",
                str(path),
                found=machine,
                legal=some(sections),
                todo='add it: torchrepro check FILE --update "a new platform" -- COMMAND',
            )
        common = {key: contents[key] for key in contents.keys() - {MACHINES}}
        contents = {**common, **sections[machine]}
    contents = {**contents, "true_seal": seal_of(contents)}
    lacking = _missing_parts(contents) if written_as == "lock" else []
    if lacking:
        message = f"damaged: these parts are missing: {some(dict.fromkeys(lacking))}"
        todo = "lock again: torchrepro lock PROFILE -o FILE"
        raise ProfileError.about(message, str(path), todo=todo)
    return written_as, contents


def _missing_parts(contents: Mapping[str, Any]) -> list[str]:
    lacking = []
    for part in PARTS_OF_A_LOCK:
        name, _, key = part.partition(".")
        section = contents.get(name)
        if name not in contents:
            lacking.append(name)
        elif key and isinstance(section, dict) and key not in section:
            lacking.append(part)
    return lacking


def hydra_job() -> DictConfig | None:
    """Return Hydra's own config of the job that runs in this process, or None."""
    module: Any = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    config: DictConfig = module.HydraConfig.get()
    return config if config.runtime.get("output_dir", None) else None


def hydra_folder(config: DictConfig) -> Path:
    """Return the folder where Hydra stores the job's config, whose section `hydra` is `config`.

    The folder is ``.hydra`` if Hydra does not store the config. See hydra.runtime.output_dir and
    output_subdir in https://hydra.cc/docs/configure_hydra/intro.
    """
    return Path(config.runtime.output_dir) / (config.output_subdir or ".hydra")


def refuse_used_folder(folder: Path) -> None:
    """Raise `ProfileError` if `folder` is a file, or contains the manifest of another run.

    Only rank 0 checks, because rank 0 writes the manifest, and other ranks may start later.
    """
    message = ""
    if streams.world().rank == 0:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if (folder / FILE).exists():
            message = "it already contains the manifest of another run"
        elif not nearest.is_dir():
            message = f"cannot be a folder: {nearest} is a file"
    if message:
        todo = "name a new folder"
        raise ProfileError.about(message, key="--log-to", found=str(folder), todo=todo)


class ProcessManifest:
    """Writes a manifest when torch is imported, and the complete manifest when the process ends.

    Only one process of a run writes the manifest: the first process that imports torch. If a
    launcher set ranks, rank 0 writes it, because the launcher itself may import torch first.
    """

    def __init__(self, folder: str, read: Callable[[], tuple[ResolvedProfile, Report]]) -> None:
        self._folder = Path(folder)
        self._read = read
        self._process = os.getpid()
        self._written = ""

    def write(self) -> None:
        """Write the manifest if no other process has written it. Reports a failure on stderr."""
        if os.getpid() != self._process or streams.world().rank:
            return
        with suppress(OSError):
            ranked = any(rank in os.environ for rank, _ in streams.VARIABLES)
            ours = (self._folder / FILE).read_text(encoding="utf-8") == self._written
            if not ours and (self._written or not ranked):
                return
        contents = manifest(*self._read())
        try:
            write_manifest(self._folder, contents)
        except OSError as error:
            say_once(f"the manifest cannot be written: {self._folder}: {error.strerror}")
            return
        self._written = as_text(contents)


def manifest_in(name: str, folder: Path) -> Path | None:
    """Return the path of the manifest in a run's `folder`, or None.

    Raises `ProfileError` if the folder has several manifests, such as the folder of a sweep.
    """
    candidates = (folder / FILE, *folder.glob(f"*/{FILE}"))
    manifests = sorted(path for path in candidates if path.is_file())
    if len(manifests) > 1:
        todo = f"name one of them: {some(map(str, manifests))}"
        raise ProfileError.about("holds several manifests", found=name, todo=todo)
    if not manifests and (jobs := sorted(folder.glob(f"*/.hydra/{FILE}"))):
        todo = f"name one of them: {jobs[0].parent.parent}"
        raise ProfileError.about("holds the jobs of a sweep", found=name, todo=todo)
    return manifests[0] if manifests else None


COMMAND = "TORCHREPRO_COMMAND"
"""Environment variable that passes the command and folder of `torchrepro run` to children."""

_RECORD = "TORCHREPRO_RECORD"  # defined in torchrepro.trace.request, which imports this module

Way = Literal["run", "hydra", "code"]
RUN, HYDRA, CODE = get_args(Way)
"""How a profile was applied: `torchrepro run`, a Hydra app's `+repro=`, `torchrepro.apply`."""


@dataclass(frozen=True, slots=True)
class HydraJob:
    """The overrides, the profile and the folder of a Hydra job, which may belong to a sweep."""

    task: tuple[str, ...]  # the overrides of this job; an override of a sweep has this job's value
    own: tuple[str, ...]  # the overrides of Hydra's own config
    sweep: bool
    number: int | None  # the number of the job in the sweep
    subdir: str  # the folder of the manifest, within the run's output folder
    choice: str  # the name of the profile that the app's config chose, or empty


@dataclass(frozen=True, slots=True)
class Started:
    """The command, the folder and the request that started a run."""

    by: Way
    folder: str  # the working directory
    command: tuple[str, ...]  # `(hidden)` replaces possible secrets; empty if there is no command
    launcher: str  # the launcher of several processes, if the launcher's command is not known
    ranked: bool  # whether a launcher set variables for ranks
    asked: tuple[str, ...]  # the profile's name or path, and overrides; empty for plain values
    hydra: HydraJob | None
    recording: dict[str, Any]  # the request of `torchrepro run --record`


_sweep: list[tuple[tuple[str, ...], str]] = []  # at most one: the command and folder of a sweep


def note_sweep(command: Sequence[str], folder: str) -> None:
    """Store the command and the folder of a sweep whose jobs a launcher runs in this process."""
    _sweep[:] = [(tuple(command), folder)]


def command_and_folder() -> tuple[tuple[str, ...], str]:
    """Return the command line and folder of this process, or of the sweep that runs in it."""
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
    """Return command and folder of the run, and the launcher if the launcher's command is unknown.

    The launcher's command starts all processes of the run. The command line of one process starts
    only this process.
    """
    if _sweep:
        return (*_sweep[0], "")
    if is_interactive():
        return (), FOLDER, ""
    if launcher() and COMMAND in os.environ:
        outer = json.loads(os.environ[COMMAND])
        return outer["command"], outer["folder"], ""
    return sys.orig_argv, FOLDER, launcher()


def _shown(words: Sequence[str], secrets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(shareable(("", *words), secrets)[1:])  # the first word counts as the program


def _hydra_job(hydra: DictConfig, secrets: tuple[str, ...]) -> HydraJob:
    from omegaconf import OmegaConf

    from torchrepro.profile.load import SECTION

    # Unresolved: an override is recorded as written, never with the value of a resolver.
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
    """Return how a run was started, as recorded in the `contents` of the manifest `path`.

    Raises `ProfileError` for a damaged manifest.
    """
    from pydantic import TypeAdapter, ValidationError  # not needed at the start of a run

    try:
        return TypeAdapter(Started).validate_python(contents.get("started"))
    except ValidationError:
        message = "damaged: it does not record how the run was started"
        raise ProfileError.about(message, str(path), "started") from None
