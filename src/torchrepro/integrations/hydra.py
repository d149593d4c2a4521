"""`+repro=NAME` on any Hydra app, with no change to its code.

What becomes of a job:

1. Hydra starts and loads its plugins. `ReproSearchPath` puts a config source of our own before all
   others and adds one callback to Hydra's own config.
2. Hydra composes the job's config. The source (`hydra_source`) answers for the group `repro` alone
   and leaves the app's own files there to Hydra. It reads every profile as data, because a file
   that Hydra composes by itself can place callbacks and run code. It notes what was chosen.
3. Hydra calls `ReproCallback`. It gets the profile that the composed config requests
   (`hydra_source.resolved_profile`), applies it and writes the manifest. After the job it restores
   the state. Without a profile it does nothing.
4. The process ends. `hydra_source` reports a profile that was composed and never applied.

Hydra turns an exception in a callback into a warning and runs the task all the same, so whatever
stops a run leaves as `SystemExit`, which Hydra lets through. It calls callbacks for the jobs of an
app, unless the app removes ours, and none for `hydra.compose`, whose caller applies the profile.

See https://hydra.cc/docs/advanced/plugins/develop, https://hydra.cc/docs/experimental/callbacks and
https://hydra.cc/docs/advanced/compose_api.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from torchrepro.application.applier import Applied, apply_resolved, in_force, stop_or_relaunch
from torchrepro.application.planner import plan
from torchrepro.ground.console import note, say
from torchrepro.ground.errors import ApplyError, TorchreproError
from torchrepro.ground.messages import near, some
from torchrepro.ground.patching import variables_put_back
from torchrepro.ground.redaction import shareable
from torchrepro.integrations.hydra_source import (
    APPS_OWN,
    CALLBACK,
    REFUSED_STATUS,
    SCHEME,
    SEPARATOR,
    chosen,
    exit_on_error,
    note_on_the_apps_own,
    refuse_switched_off,
    resolved_profile,
    unapplied,
    words_of_group,
)
from torchrepro.manifest.contents import (
    FILE,
    hydra_folder,
    manifest,
    note_sweep,
    secrets_here,
    sweep_or_this,
    write_manifest,
)
from torchrepro.reporting.process_state import inherited, other_than_original
from torchrepro.reporting.report import Report, announce, announce_end, random_number_lines
from torchrepro.seeding.streams import drawn_streams, never_drawn, world
from torchrepro.start.bootstrap import agreeing_run, in_force_now

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath


SWITCH = "TORCHREPRO_HYDRA"
"""Variable that is 0 where an app is to be as it is without torchrepro, in its help as well."""


class ReproSearchPath(SearchPathPlugin):
    """Puts our config source before every other place that Hydra looks in."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the source and the callback, or neither; called by Hydra at every start."""
        if os.environ.get(SWITCH) == "0":
            refuse_switched_off(SWITCH)
            return
        elements: list[Any] = search_path.get_path()  # type: ignore[assignment]
        elements.insert(0, _ProfilesElement(search_path))
        # As the first entry in the defaults list of Hydra's own config, the callback starts before
        # every other one and ends after it. The entry is a structured config, which Hydra turns
        # into the callback itself: a `_target_` would have to be on the whitelist of every app.
        store = ConfigStore.instance()
        own = store.load("hydra/config.yaml")
        defaults = own.node.get("defaults") or []
        if CALLBACK in defaults:
            return
        with open_dict(own.node):
            own.node.defaults = [CALLBACK, *defaults]
        # Hydra 1.4 warns of an entry that is replaced by accident; 1.3 has no such argument.
        replace = {"replace": True} if "replace" in signature(store.store).parameters else {}
        store.store("config", own.node, "hydra", own.package, own.provider, **replace)
        place = f"hydra.callbacks.{CALLBACK}"
        store.store(CALLBACK, ReproCallback, "hydra", place, SCHEME, **replace)


@dataclass
class _ProfilesElement:
    """An element of Hydra's search path whose `path` names all the other elements.

    Hydra makes a source from an element's `provider` and `path` each time the search path has
    changed. `path` is worked out at that moment, so that it includes `hydra.searchpath` and
    `--config-dir`, which come later than this plugin.
    """

    owner: ConfigSearchPath
    provider: str = SCHEME

    @property
    def path(self) -> str:
        others = [
            (APPS_OWN if each.provider == "main" else "") + each.path
            for each in self.owner.get_path()
            if not isinstance(each, _ProfilesElement) and each.path
        ]
        return f"{SCHEME}://{SEPARATOR.join(others)}"


_OPTION = "--experimental-rerun"
_MARKER = "torchrepro"


class _NoRerun:
    """Refuses `--experimental-rerun` of Hydra 1.3, in the pickled config of a job with a profile.

    Hydra 1.3 reads the pickle and calls the task: no plugin, no source and no callback takes part.
    Hydra 1.4 composes anew, as for any run. The marker lies in the cache that OmegaConf keeps with
    a config (OmegaConf.get_cache).
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_rerun, ()

    def __deepcopy__(self, memo: Any) -> _NoRerun:
        return self


def _no_rerun() -> _NoRerun:
    pickles = [Path(each) for each in _rerun_values() if Path(each).is_file()]
    if pickles and not in_force():
        say(
            "--experimental-rerun runs this job without the profile that it had\n"
            f"    to do: torchrepro rerun {pickles[0].parent.parent}"
        )
        raise SystemExit(REFUSED_STATUS)
    return _NoRerun()


def _rerun_values() -> list[str]:
    found = []
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, _, value = word.partition("=")
        if name.startswith("--e") and _OPTION.startswith(name):
            found.append(value or following)
    return found


@dataclass
class ReproCallback(Callback):
    """Applies the profile of each job; does nothing without one."""

    _convert_: str = "object"  # Hydra makes an instance of this class from a config of its type

    def __getstate__(self) -> dict[str, Any]:
        """Take the requests along: a launcher's processes have other command lines."""
        command, folder = sweep_or_this()
        more = {"words": words_of_group(), "command": command, "folder": folder}
        return {**self.__dict__, **more}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process in which a launcher composes and runs jobs of a sweep."""
        unapplied.sweep_words = state.pop("words")
        note_sweep(state.pop("command"), state.pop("folder"))
        self.__dict__.update(state)
        unapplied.names.clear()
        unapplied.sweeping = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile, and relaunch if it says so: no work has been done yet.

        A sweep is never relaunched: its jobs may need different variables.
        """
        with exit_on_error():
            unapplied.names.clear()
            unapplied.sweeping = False
            _restore()
            resolved = resolved_profile(config)
            if resolved is not None and inherited() is None:
                why = stop_or_relaunch(plan(resolved), "", by_itself=True)
                if why and world().rank == 0:
                    words = shareable(
                        ["torchrepro", "run", *resolved.asked], secrets_here(resolved)
                    )
                    instead = f"; `{shlex.join(words)} -- COMMAND` starts it in time"
                    instead *= bool(resolved.asked)  # else no command line can name it
                    say(f"not started again in time, because {why}{instead}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the sweep from a clean state."""
        with exit_on_error():
            unapplied.names.clear()
            unapplied.sweeping = True
            _restore()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Apply the job's profile and write its manifest."""
        with exit_on_error():
            _restore()
            resolved = resolved_profile(config)
            if resolved is None:
                _start_without_profile(config)
                return
            note(*dict.fromkeys(chosen.changed), *filter(None, [other_than_original(resolved)]))
            OmegaConf.get_cache(config.hydra)[_MARKER] = _NoRerun()
            started_under = agreeing_run(resolved, "job")
            if started_under is not None and config.hydra.mode is RunMode.RUN:
                # `run` has applied this very profile: there is nothing to change.
                _begin(_Job(config, started_under, started_under.report, from_run=True))
                return
            applied = apply_resolved(resolved, "Hydra has started the job")
            applied.refuse = _exit
            _begin(_Job(config, applied, applied.report))
            if started_under is None or applied.report.guarantee.lowered:
                announce(applied.report)  # otherwise `run` has said all of it

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Complete the manifest and restore the state: the next job starts clean."""
        with exit_on_error():
            # Those that Hydra has set for the job, and taken back by now.
            its = {str(name): str(value) for name, value in config.hydra.job.env_set.items()}
            with variables_put_back(its):
                os.environ.update(its)
                outer = inherited() is not None and config.hydra.mode is RunMode.RUN
                # torch is never imported for the manifest of a job that asks for no profile.
                asks_for_none = not _job and "torch" in sys.modules
                if outer and asks_for_none and (applied := in_force_now()) is not None:
                    _record(_Job(config, applied, applied.report, from_run=True))
                _end()
                _restore()


@dataclass(frozen=True, slots=True)
class _Job:
    config: DictConfig
    applied: Applied
    announced: Report
    from_run: bool = False  # whether `torchrepro run` applied it, and reports its end as well


_job: list[_Job] = []  # the present one


@cache
def _note_once(words: str) -> None:
    if words:
        note(f"note: {words}")


def _start_without_profile(config: DictConfig) -> None:
    _note_once(note_on_the_apps_own(config))
    if inherited() is not None:
        OmegaConf.get_cache(config.hydra)[_MARKER] = _NoRerun()
        return
    for folder in _rerun_values():  # of Hydra 1.4, which composes the job anew
        if (Path(folder) / ".hydra" / FILE).is_file():
            raise ApplyError(
                f"the job in {folder} was under a profile of `torchrepro run`, and this run is "
                f"under none\n    to do: torchrepro rerun {folder}"
            )
    # Hydra has made its callbacks already, and other callbacks may pickle the config for a Python
    # without torchrepro.
    configs: tuple[Any, ...] = (config, HydraConfig.instance().cfg)
    for each in filter(None, configs):
        callbacks = each.hydra.callbacks
        with read_write(callbacks), open_dict(callbacks):
            callbacks[CALLBACK] = dict(callbacks[CALLBACK])


def _begin(job: _Job) -> None:
    _job.append(job)
    _record(job)
    atexit.register(_end_at_exit, os.getpid())


def _end() -> None:
    for job in _job:
        _record(job)
        if job.from_run:
            continue
        if world().rank == 0:
            note(*(f"seeded by the program itself: {each}" for each in job.applied.seeding_calls))
            note(*random_number_lines(job.applied.report))
            for name in never_drawn():
                close = near(name, drawn_streams())
                drawn = some(drawn_streams()) or "none"
                note(
                    f"streams.{name} was not drawn from in this process; drawn: {drawn}"
                    + f"; did you mean {close}?" * bool(close)
                )
        announce_end(job.applied.report, job.announced)


def _end_at_exit(process: int) -> None:
    """Do the same for a job that left by `sys.exit`, after which Hydra calls no callback."""
    if os.getpid() == process:
        try:
            _end()
        except TorchreproError as error:
            say(error)


def _restore() -> None:
    """Restore the state after a job: the one that ends, or one that left by `sys.exit`."""
    atexit.unregister(_end_at_exit)
    while _job:
        job = _job.pop()
        if not job.from_run:
            job.applied.restore()


def _record(job: _Job) -> None:
    folder = hydra_folder(job.config.hydra)
    try:
        its = manifest(job.applied.resolved, job.applied.report, job.config.hydra)
        write_manifest(folder, its)
    except OSError as error:
        _restore()
        path = folder / FILE
        raise ApplyError(f"the manifest cannot be written: {path}: {error.strerror}") from None


def _exit(error: TorchreproError) -> None:
    """End the job: an exception would look like an error of the program."""
    with exit_on_error():
        raise error
