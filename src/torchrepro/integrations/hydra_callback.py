"""The callback that applies a job's profile before the job and restores the state after it.

Steps 3 and 4 of those that `hydra` describes. Hydra turns an exception in a callback into a warning
and runs the task all the same, so whatever stops a run here leaves as `SystemExit`, which Hydra
lets through.

Hydra calls callbacks for the jobs of an app, unless the app removes ours, and none for
`hydra.compose` (https://hydra.cc/docs/advanced/compose_api), whose caller applies the profile. What
was composed and never applied is refused before a job of a sweep, or reported at exit.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from torchrepro.applier import Applied, applied_names, apply_resolved, in_force, stop_or_relaunch
from torchrepro.bootstrap import agreeing_run, in_force_now
from torchrepro.callers import frames
from torchrepro.console import note, say
from torchrepro.errors import ApplyError, DriftError, ExitStatus, TorchreproError
from torchrepro.integrations.hydra_profile import (
    CALLBACK,
    GROUP,
    lines_on_changed_files,
    note_on_the_apps_own,
    resolved_profile,
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
from torchrepro.messages import near, some
from torchrepro.patching import variables_put_back
from torchrepro.planner import plan
from torchrepro.process_state import inherited, other_than_original
from torchrepro.redaction import shareable
from torchrepro.report import Report, announce, announce_end, random_number_lines
from torchrepro.seeding.streams import drawn_streams, never_drawn, world

if TYPE_CHECKING:
    from collections.abc import Iterator


_OPTION = "--experimental-rerun"
_REFUSED_STATUS = 3
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
        raise SystemExit(_REFUSED_STATUS)
    return _NoRerun()


def _rerun_values() -> list[str]:
    found = []
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, _, value = word.partition("=")
        if name.startswith("--e") and _OPTION.startswith(name):
            found.append(value or following)
    return found


_REQUEST = re.compile(rf"\+{GROUP}(/\w+)?(@[^=]*)?=.")
_SEPARATORS = re.compile(r"[\s,()\[\]'\"]+")
_TODO = {
    "compose": f"call torchrepro.apply(config.{GROUP}) before the program's first random number",
    "main": f"let Hydra call torchrepro's callback: this app, or a ~hydra.callbacks.{CALLBACK} on "
    "the command line, takes it away",
}


@dataclass
class _Unapplied:
    """What was composed in this process and not applied yet."""

    names: dict[str, str] = field(default_factory=dict)
    """What each calls itself, by the name that Hydra knows it by."""
    composer: str = ""
    sweeping: bool = False
    """Whether our callback has seen the start of the sweep whose jobs are composed now."""

    sweep_words: list[str] | None = None
    """In a launcher's process, which has its own command line: the requests of the sweep's."""

    reporter: int = 0  # the process that reports at its end what is left


_unapplied = _Unapplied()


def note_composed(name: str, own_name: str) -> None:
    """Note that Hydra has composed the profile `name`, for a job or for a caller of `compose`.

    Ends the process before a job of a sweep that our callback cannot protect.
    """
    # Hydra gives a source only the name of a config, so its public callers tell for whom it is:
    # hydra.compose, and ConfigLoader.load_sweep_config, by which launchers compose each job.
    composer = "main"
    for frame in frames():
        if frame.f_globals.get("__name__") == "hydra.compose":
            composer = "compose"
        elif frame.f_code.co_name == "load_sweep_config":
            composer = "sweep"
        if composer != "main":
            break
    if composer == "sweep":
        if not _unapplied.sweeping and inherited() is None:
            say(_unprotected([name], "main"))
            raise SystemExit(_REFUSED_STATUS)
        return  # its job may run in another process, where the callback takes it
    if composer == "main":  # another program begins; a job of a sweep may compose for itself
        _unapplied.sweeping = False
    _unapplied.composer = composer
    _unapplied.names[name] = own_name
    if _unapplied.reporter != os.getpid():
        _unapplied.reporter = os.getpid()
        atexit.register(_report_unapplied, os.getpid(), ExitStatus())


def requesting_words() -> list[str]:
    """Return the words of the command line that request a profile."""
    if _unapplied.sweep_words is not None:
        return _unapplied.sweep_words
    return [word for word in sys.argv[1:] if _REQUEST.match(word)]


def requested_names() -> frozenset[str]:
    """Return the names after ``+repro=`` and ``+repro/with=``, those of a sweep included."""
    values = (word.partition("=")[2] for word in requesting_words())
    return frozenset(name for value in values for name in _SEPARATORS.split(value) if name)


def _report_unapplied(process: int, status: ExitStatus) -> None:
    if os.getpid() != process or inherited() is not None:
        return
    applied = applied_names()
    names = [name for name, own in _unapplied.names.items() if own not in applied]
    if not names or (applied and _unapplied.composer == "main"):
        return
    if _unapplied.composer == "main":
        # Hydra sets its HydraConfig for a job and unsets it afterwards. A command that only shows
        # a config leaves it set, and one that ends with an error before never makes it.
        made = HydraConfig in Singleton.get_state()["instances"]
        if not made or HydraConfig.initialized():
            return
    say(_unprotected(names, _unapplied.composer))
    if requesting_words() and not applied:
        status.value = _REFUSED_STATUS


_NULL = re.compile(rf"\+*{GROUP}(@[^=]*)?=(.*,)?(null)?(,.*)?")
_SHOWING = re.compile(r"-c|-i|--cfg(=.*)?|--info(=.*)?")


def refuse_null() -> None:
    """End the process where the command line gives the group no profile: Hydra takes no null."""
    word = next((each for each in sys.argv[1:] if _NULL.fullmatch(each)), "")
    if word:
        say(
            f"{word}: null is no profile, and Hydra takes it for no group\n"
            f"    to do: leave the profile out, or take out the one of the app: ~{GROUP}"
        )
        raise SystemExit(_REFUSED_STATUS)


def refuse_if_shown(error: TorchreproError) -> None:
    """End the process if Hydra is only to show the config: it calls no callback then."""
    if any(map(_SHOWING.fullmatch, sys.argv[1:])):
        with _exit_on_error():
            raise error


def _unprotected(names: list[str], composer: str) -> str:
    return (
        f"{GROUP}={', '.join(names)} was composed by Hydra, and nothing put it in force: the "
        f"program is not protected\n    to do: {_TODO[composer]}, or start with "
        f"`torchrepro run {names[0]} -- COMMAND`"
    )


@dataclass
class ReproCallback(Callback):
    """Applies the profile of each job; does nothing without one."""

    _convert_: str = "object"  # Hydra makes an instance of this class from a config of its type

    def __getstate__(self) -> dict[str, Any]:
        """Take the requests along: a launcher's processes have other command lines."""
        command, folder = sweep_or_this()
        more = {"words": requesting_words(), "command": command, "folder": folder}
        return {**self.__dict__, **more}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process in which a launcher composes and runs jobs of a sweep."""
        _unapplied.sweep_words = state.pop("words")
        note_sweep(state.pop("command"), state.pop("folder"))
        self.__dict__.update(state)
        _unapplied.names.clear()
        _unapplied.sweeping = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile, and relaunch if it says so: no work has been done yet.

        A sweep is never relaunched: its jobs may need different variables.
        """
        with _exit_on_error():
            _unapplied.names.clear()
            _unapplied.sweeping = False
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
        with _exit_on_error():
            _unapplied.names.clear()
            _unapplied.sweeping = True
            _restore()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Apply the job's profile and write its manifest."""
        with _exit_on_error():
            _restore()
            resolved = resolved_profile(config)
            if resolved is None:
                _start_without_profile(config)
                return
            note(*lines_on_changed_files(), *filter(None, [other_than_original(resolved)]))
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
        with _exit_on_error(), _environment_of_the_job(config):
            outer = inherited() is not None and config.hydra.mode is RunMode.RUN
            # torch is never imported for the manifest of a job that asks for no profile.
            asks_for_none = not _job and "torch" in sys.modules
            if outer and asks_for_none and (applied := in_force_now()) is not None:
                _record(_Job(config, applied, applied.report, from_run=True))
            _end()
            _restore()


@contextmanager
def _environment_of_the_job(config: DictConfig) -> Iterator[None]:
    """Have the variables that Hydra has set for the job, which it has taken back by now."""
    its = {str(name): str(value) for name, value in config.hydra.job.env_set.items()}
    with variables_put_back(its):
        os.environ.update(its)
        yield


@dataclass(frozen=True, slots=True)
class _Job:
    config: DictConfig
    applied: Applied
    announced: Report
    from_run: bool = False
    """Whether `torchrepro run` applied the profile, which then reports its end as well."""


_job: list[_Job] = []  # the present one
_notes: set[str] = set()  # those that this process has printed once


def _start_without_profile(config: DictConfig) -> None:
    words = note_on_the_apps_own(config)
    if words and words not in _notes:
        _notes.add(words)
        note(f"note: {words}")
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
    with _exit_on_error():
        raise error


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Turn whatever torchrepro refuses, and any error of its own, into exit status 3.

    A profile that has drifted by the end of the job is status 1.
    """
    try:
        yield
    except TorchreproError as error:
        say(error)
        drifted = isinstance(error, DriftError)  # the job has run: nothing was refused
        raise SystemExit(error.exit_status if drifted else _REFUSED_STATUS) from None
    except Exception as error:  # noqa: BLE001 - Hydra would warn and run the task
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(_REFUSED_STATUS) from None
