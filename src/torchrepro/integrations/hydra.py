"""Hydra plugin: `+repro=NAME` applies a profile to any Hydra app, with no change to its code.

The steps of a job:

1. Hydra starts and loads its plugins. `ReproSearchPath` inserts our config source before all others
   and adds a callback to Hydra's own config.
2. Hydra composes the job's config. Our source (`hydra_source`) serves only the group `repro`, and
   leaves the app's own files in that group to Hydra. It reads every profile as data, because a file
   that Hydra composes can install callbacks and run code. It notes which profiles were chosen.
3. Hydra calls `ReproCallback`. The callback gets the profile that the composed config requests
   (`RequestedProfile.resolved`), applies the profile and writes the manifest. After the job, it
   restores the state. Without a profile it does nothing.
4. The process ends. `hydra_source` reports a profile that was composed and never applied.

Hydra turns an exception in a callback into a warning and runs the task anyway. So our callback
stops a run by `SystemExit`, which Hydra does not catch. Hydra calls our callback for every job of
an app that does not remove it. After `hydra.compose`, the program itself applies the profile.

See https://hydra.cc/docs/advanced/plugins/develop, https://hydra.cc/docs/experimental/callbacks and
https://hydra.cc/docs/advanced/compose_api.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from torchrepro.application.applier import (
    Applied,
    active_profiles,
    apply_resolved,
    stop_or_relaunch,
)
from torchrepro.application.planner import feasible_plan
from torchrepro.ground.console import note, say
from torchrepro.ground.errors import (
    ApplyError,
    DriftError,
    ProfileError,
    TorchreproError,
    near,
    some,
)
from torchrepro.ground.patching import variables_restored
from torchrepro.ground.redaction import shareable
from torchrepro.integrations.hydra_source import (
    APP_PREFIX,
    CALLBACK,
    GROUP,
    REFUSED_STATUS,
    SCHEME,
    SEPARATOR,
    RequestedProfile,
    names_in,
    plain_section,
    process,
    refuse,
)
from torchrepro.manifest.contents import (
    FILE,
    command_and_folder,
    hydra_folder,
    known_secrets,
    manifest,
    note_sweep,
    write_manifest,
)
from torchrepro.profile.search_path import find, piece_named, search_path
from torchrepro.reporting.process_state import inherited, other_than_original
from torchrepro.reporting.report import Report, announce, announce_end, random_number_lines
from torchrepro.seeding.streams import drawn_streams, unused_streams, world
from torchrepro.start.bootstrap import agreeing_run, finish_applying

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath


SWITCH = "TORCHREPRO_HYDRA"
"""Environment variable; 0 disables the plugin, so that even the app's help is unchanged."""


class ReproSearchPath(SearchPathPlugin):
    """Hydra plugin that adds our config source and our callback to every app."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the source and the callback, if not disabled. Hydra calls this at every start."""
        if os.environ.get(SWITCH) == "0":
            _refuse_switched_off()
            return
        elements: list[Any] = search_path.get_path()  # type: ignore[assignment]
        elements.insert(0, _ProfilesElement(search_path))
        # As the first entry in the defaults list of Hydra's own config, the callback starts before
        # all others and ends after them. It is a structured config, which Hydra turns into the
        # callback without a `_target_`, since a `_target_` needs an entry in an app's whitelist.
        store = ConfigStore.instance()
        config = store.load("hydra/config.yaml")
        defaults = config.node.get("defaults") or []
        if CALLBACK in defaults:
            return
        with open_dict(config.node):
            config.node.defaults = [CALLBACK, *defaults]
        # Hydra 1.4 warns of an entry that is replaced without this argument; 1.3 does not have it.
        replace = {"replace": True} if "replace" in signature(store.store).parameters else {}
        store.store("config", config.node, "hydra", config.package, config.provider, **replace)
        package = f"hydra.callbacks.{CALLBACK}"
        store.store(CALLBACK, ReproCallback, "hydra", package, SCHEME, **replace)


@dataclass
class _ProfilesElement:
    """An element of Hydra's search path whose `path` names all the other elements.

    Hydra creates a source from an element's `provider` and `path` whenever the search path has
    changed. `path` is computed at that moment, so that it includes `hydra.searchpath` and
    `--config-dir`, which Hydra adds after this plugin.
    """

    owner: ConfigSearchPath
    provider: str = SCHEME

    @property
    def path(self) -> str:
        paths = [
            (APP_PREFIX if element.provider == "main" else "") + element.path
            for element in self.owner.get_path()
            if not isinstance(element, _ProfilesElement) and element.path
        ]
        return f"{SCHEME}://{SEPARATOR.join(paths)}"


_OPTION = "--experimental-rerun"
_MARKER = "torchrepro"


class _NoRerun:
    """A marker in a job's pickled config that makes Hydra 1.3 refuse `--experimental-rerun`.

    With that option, Hydra 1.3 loads the pickle and calls the task without our callback.
    Hydra 1.4 composes the config again, as for any run. The marker is stored in the cache that
    OmegaConf keeps with a config (OmegaConf.get_cache).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_rerun, ()

    def __deepcopy__(self, memo: Any) -> _NoRerun:
        return self


def _no_rerun() -> _NoRerun:
    pickles = [Path(value) for value in _rerun_values() if Path(value).is_file()]
    if pickles and not active_profiles():
        refuse(
            "--experimental-rerun would run this job without its original profile\n"
            f"    to do: torchrepro rerun {pickles[0].parent.parent}"
        )
    return _NoRerun()


def _rerun_values() -> list[str]:
    """Return the values of `--experimental-rerun`, or an abbreviation, on the command line."""
    values = []
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, _, value = word.partition("=")
        if name.startswith("--e") and _OPTION.startswith(name):
            values.append(value or following)
    return values


@dataclass
class ReproCallback(Callback):
    """Hydra callback that applies the profile of each job, if the job requests one."""

    _convert_: str = "object"  # Hydra makes an instance of this class from a config of its type

    def __getstate__(self) -> dict[str, Any]:
        """Add the command line of this process, because a launcher's processes have other ones."""
        command, folder = command_and_folder()
        words = [override.text for override in process.typed()]
        return {**self.__dict__, "words": words, "command": command, "folder": folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the sweep's command line, in a process that runs jobs for a launcher."""
        process.sweep_words = state.pop("words")
        note_sweep(state.pop("command"), state.pop("folder"))
        self.__dict__.update(state)
        process.begin(is_sweeping=True)

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile before the task starts, and relaunch if the profile requests it.

        A sweep is never relaunched, because its jobs may need different environment variables.
        """
        with _exit_on_error():
            process.begin(is_sweeping=False)
            _Job.restore()
            resolved = process.request.resolved(config)
            if resolved is not None and inherited() is None:
                obstacle = stop_or_relaunch(feasible_plan(resolved), "", by_itself=True)
                if obstacle and world().rank == 0:
                    alternative = ""
                    if resolved.asked:  # otherwise no command line can name the profile
                        words = shareable(
                            ["torchrepro", "run", *resolved.asked], known_secrets(resolved)
                        )
                        command = f"{shlex.join(words)} -- COMMAND"
                        alternative = f"; `{command}` sets everything in time"
                    say(f"not relaunched, because {obstacle}{alternative}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the sweep from a clean state."""
        with _exit_on_error():
            process.begin(is_sweeping=True)
            _Job.restore()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Apply the job's profile and write its manifest."""
        with _exit_on_error():
            _Job.restore()
            resolved = process.request.resolved(config)
            if resolved is None:
                _start_without_profile(config)
                return
            note(
                *dict.fromkeys(process.request.changed),
                *filter(None, [other_than_original(resolved)]),
            )
            OmegaConf.get_cache(config.hydra)[_MARKER] = _NoRerun()
            started_under = agreeing_run(resolved, "job")
            if started_under is not None and config.hydra.mode is RunMode.RUN:
                # `torchrepro run` has applied the same profile already.
                _Job(config, started_under, started_under.report, from_run=True).begin()
                return
            applied = apply_resolved(resolved, "Hydra has started the job")
            applied.refuse = _exit
            _Job(config, applied, applied.report).begin()
            if started_under is None or applied.report.guarantee.lowered:
                announce(applied.report)  # otherwise `torchrepro run` has announced it

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Complete the manifest and restore the state, so that the next job starts clean."""
        with _exit_on_error():
            # Hydra set these variables for the job, and has restored them already.
            env_set = {str(name): str(value) for name, value in config.hydra.job.env_set.items()}
            with variables_restored(env_set):
                os.environ.update(env_set)
                under_run = inherited() is not None and config.hydra.mode is RunMode.RUN
                # Records a job without a profile, if that needs no import of torch.
                needs_manifest = _Job.running is None and "torch" in sys.modules
                if under_run and needs_manifest and (applied := finish_applying()) is not None:
                    _Job(config, applied, applied.report, from_run=True).record()
                if _Job.running is not None:
                    _Job.running.end()
                _Job.restore()


@dataclass(frozen=True, slots=True)
class _Job:
    """A job under a profile, from `begin` until `restore`. A process runs one job at a time.

    Hydra makes a new callback for each app, and a job can end by `sys.exit`, after which Hydra
    calls no callback. So the class has the running job, not the callback.
    """

    running: ClassVar[_Job | None] = None
    config: DictConfig
    applied: Applied
    announced: Report
    from_run: bool = False  # whether `torchrepro run` applied the profile, and reports its end

    def begin(self) -> None:
        _Job.running = self
        self.record()
        atexit.register(_end_at_exit, os.getpid())

    def record(self) -> None:
        """Write the manifest. If that fails, restore the state and raise `ApplyError`."""
        folder = hydra_folder(self.config.hydra)
        try:
            contents = manifest(self.applied.resolved, self.applied.report, self.config.hydra)
            write_manifest(folder, contents)
        except OSError as error:
            self.restore()
            path = folder / FILE
            message = f"the manifest cannot be written: {path}: {error.strerror}"
            raise ApplyError(message) from None

    def end(self) -> None:
        """Complete the manifest, and report what the job did beside the profile."""
        self.record()
        if self.from_run:
            return
        if world().rank == 0:
            note(*(f"seeded by the program itself: {call}" for call in self.applied.seeding_calls))
            note(*random_number_lines(self.applied.report))
            for name in unused_streams():
                close = near(name, drawn_streams())
                drawn = some(drawn_streams()) or "none"
                note(
                    f"streams.{name} was not drawn from in this process; drawn: {drawn}"
                    + f"; did you mean {close}?" * bool(close)
                )
        announce_end(self.applied.report, self.announced)

    @classmethod
    def restore(cls) -> None:
        """Restore the state from before the job, which ended normally or by `sys.exit`."""
        atexit.unregister(_end_at_exit)
        job, cls.running = cls.running, None
        if job is not None and not job.from_run:
            job.applied.restore()


def _end_at_exit(owner: int) -> None:
    if os.getpid() == owner and _Job.running is not None:
        try:
            _Job.running.end()
        except TorchreproError as error:
            say(error)


_note_once = cache(note)


def _start_without_profile(config: DictConfig) -> None:
    words = names_in(str(plain_section(config)))
    named = [name for folder in search_path() for name in folder.names() if name in words]
    if named:
        _note_once(
            f"note: `{GROUP}` in this app's config belongs to the app and requests no profile "
            f"(to run under one: torchrepro run {named[0]} -- COMMAND)"
        )
    if inherited() is not None:
        OmegaConf.get_cache(config.hydra)[_MARKER] = _NoRerun()
        return
    for folder in _rerun_values():  # of Hydra 1.4, which composes the job again
        if (Path(folder) / ".hydra" / FILE).is_file():
            raise ApplyError(
                f"the job in {folder} ran under a profile of `torchrepro run`, and this run has no "
                f"profile\n    to do: torchrepro rerun {folder}"
            )
    # Other callbacks may pickle the config for a Python without torchrepro, so it must not contain
    # a class of ours. Hydra has created its callbacks already.
    configs: tuple[Any, ...] = (config, HydraConfig.instance().cfg)
    for job_config in filter(None, configs):
        callbacks = job_config.hydra.callbacks
        with read_write(callbacks), open_dict(callbacks):
            callbacks[CALLBACK] = dict(callbacks[CALLBACK])


def _exit(error: TorchreproError) -> None:
    """Report `error` and end the process: an exception would look like the program's error."""
    with _exit_on_error():
        raise error


def _refuse_switched_off() -> None:
    """End the process if the command line requests a profile, but the plugin is disabled."""
    for name in RequestedProfile(typed=process.typed()).typed_names:
        for profile in (name, piece_named(name)):
            with suppress(ProfileError):
                find(profile)
                refuse(
                    f"{SWITCH}=0 disables profiles in this app, and the command line requests "
                    f"{name}\n    to do: unset {SWITCH}, or start with "
                    "`torchrepro run PROFILE -- COMMAND`"
                )


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Report any error of the block, also an internal error, and exit with status 3.

    If the profile has drifted by the end of the job, the exit status is 1.
    """
    try:
        yield
    except TorchreproError as error:
        say(error)
        drifted = isinstance(error, DriftError)  # the job has run already
        raise SystemExit(error.exit_status if drifted else REFUSED_STATUS) from None
    except Exception as error:  # noqa: BLE001 - Hydra would warn and run the task
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(REFUSED_STATUS) from None
