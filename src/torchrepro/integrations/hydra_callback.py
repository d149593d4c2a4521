"""The callback that puts a job's profile in force and takes it back, in a rerun of a job as well.

Hydra 1.3's `--experimental-rerun` reads that config and calls the task: no plugin, no source and
no callback of anybody takes part. All that is read is the pickle, so the profile travels in it, as
an entry of the cache that OmegaConf keeps with a config (OmegaConf.get_cache), and puts itself in
force as soon as it is read for a rerun. Hydra 1.4 composes anew, as for any run.

Hydra turns an exception in a callback into a warning and runs the task all the same, so whatever
stops a run here leaves as `SystemExit`, which gets through.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict, read_write

from torchrepro.applier import Applied, apply_resolved, in_force, stop_or_relaunch
from torchrepro.bootstrap import agreeing_run
from torchrepro.console import say
from torchrepro.errors import ApplyError, DriftError, TorchreproError
from torchrepro.integrations.hydra_config import CALLBACK, note_on_the_apps_own, resolved_profile
from torchrepro.integrations.hydra_exit import note_callback, note_launched, words_that_ask
from torchrepro.manifest.contents import FILE, hydra_folder, manifest, write_manifest
from torchrepro.messages import near, some
from torchrepro.planner import plan
from torchrepro.process_state import inherited
from torchrepro.profile.resolved import ResolvedProfile
from torchrepro.report import announce, announce_end
from torchrepro.seeding.ranks import world
from torchrepro.seeding.streams import drawn_streams, never_drawn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

    from torchrepro.report import Report


_OPTION = "--experimental-rerun"
_ENTRY = "torchrepro"


def send_with(config: DictConfig, resolved: ResolvedProfile) -> None:
    """Have the pickled `config` of a job carry its profile.

    It lies with Hydra's own part, which is never in the config that the task gets and may save.
    """
    OmegaConf.get_cache(config.hydra)[_ENTRY] = _Passenger(resolved.to_json())


class _Passenger:
    """The profile of a job as plain values; reading it from a pickle may put it in force."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self.content,)

    def __deepcopy__(self, memo: Any) -> _Passenger:
        return self


def _read(content: Mapping[str, Any]) -> _Passenger:
    if _is_a_rerun() and not in_force():
        protect(ResolvedProfile.from_json(content))
    return _Passenger(content)


def _is_a_rerun() -> bool:
    """Whether this program was started to run a job again; argparse takes a shorter option too."""
    words = [word.partition("=")[0] for word in sys.argv[1:]]
    return any(word.startswith("--e") and _OPTION.startswith(word) for word in words)


REFUSED_STATUS = 3


@dataclass
class ReproCallback(Callback):
    """Puts the profile of each job in force; does nothing without one."""

    _convert_: str = "object"  # Hydra makes an instance of this class from a config of its type

    def __getstate__(self) -> dict[str, Any]:
        """Take along what was asked for: a launcher's processes have other command lines."""
        return {**self.__dict__, "words": words_that_ask()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process, where a launcher composes and runs jobs of a sweep."""
        note_launched(state.pop("words"))
        self.__dict__.update(state)
        note_callback(sweeping=True)

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile, and relaunch if it asks for that: no work has been done yet.

        A sweep has no such moment: its jobs may ask for different variables.
        """
        with _StopOnRefusal():
            note_callback()
            _take_back()
            resolved = resolved_profile(config)
            if resolved is not None and inherited() is None:
                why = stop_or_relaunch(plan(resolved), "", by_itself=True)
                if why and world().rank == 0:
                    say(f"not started again in time, because {why}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the sweep from a clean state."""
        with _StopOnRefusal():
            note_callback(sweeping=True)
            _take_back()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Put the job's profile in force and write its manifest."""
        with _StopOnRefusal():
            _take_back()
            resolved = resolved_profile(config)
            if resolved is None:
                _leave_alone(config)
                _forget_the_type(config)
                return
            send_with(config, resolved)
            started_under = agreeing_run(resolved, "job")
            if started_under is not None and config.hydra.mode is RunMode.RUN:
                # `run` has put this very profile in force: there is nothing to change.
                _begin(_Job(config, started_under, started_under.report, from_run=True))
                return
            applied = apply_resolved(resolved, "Hydra has started the job")
            applied.refuse = _exit
            _begin(_Job(config, applied, applied.report))
            announce(applied.report)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Complete the manifest and take the job's profile back: the next job starts clean."""
        with _StopOnRefusal():
            _end()
            _take_back()


@dataclass(frozen=True, slots=True)
class _Job:
    """A job under a profile."""

    config: DictConfig
    applied: Applied
    announced: Report
    from_run: bool = False
    """Whether `torchrepro run` put the profile in force, which then tells of its end as well."""


_job: list[_Job] = []  # the present one
_notes: set[str] = set()  # what this process has said once


def _begin(job: _Job) -> None:
    """Write the manifest of a job that starts, which is completed when it ends."""
    _job.append(job)
    _record(job)
    atexit.register(_end_at_exit, os.getpid())


def _end() -> None:
    """Complete the manifest of the present job, and tell what did not stay as it was announced."""
    for job in _job:
        _record(job)
        if not job.from_run:
            _tell_of_the_end(job.applied, job.announced)


def _end_at_exit(process: int) -> None:
    """Do the same for a job that has left by `sys.exit`, of whose end Hydra does not tell."""
    if os.getpid() == process:
        try:
            _end()
        except TorchreproError as error:
            say(error)


def protect(resolved: ResolvedProfile) -> None:
    """Put the profile of a job that Hydra runs again in force, until the process ends.

    Its folder holds the manifest of the run before, and keeps it.
    """
    with _StopOnRefusal():
        if agreeing_run(resolved, "job") is None:
            applied = apply_resolved(resolved, "")
            applied.refuse = _exit
            announce(applied.report)
            atexit.register(_tell_at_exit, os.getpid(), applied, applied.report)


def _tell_at_exit(process: int, applied: Applied, announced: Report) -> None:
    if os.getpid() == process:
        _tell_of_the_end(applied, announced)


def _tell_of_the_end(applied: Applied, announced: Report) -> None:
    _tell_of_random_numbers(applied)
    announce_end(applied.report, announced)


def _leave_alone(config: DictConfig) -> None:
    """Say once that no profile is in force where the app's config may look as if there were."""
    note = note_on_the_apps_own(config)
    if note and note not in _notes:
        _notes.add(note)
        say(f"note: {note}")


def _forget_the_type(config: DictConfig) -> None:
    """Leave a job without a profile configs that can be pickled for Pythons without torchrepro.

    Hydra has made its callbacks already, and other callbacks may write the config to a file.
    """
    configs: tuple[Any, ...] = (config, HydraConfig.instance().cfg)
    for each in filter(None, configs):
        callbacks = each.hydra.callbacks
        with read_write(callbacks), open_dict(callbacks):
            callbacks[CALLBACK] = dict(callbacks[CALLBACK])


def _take_back() -> None:
    """Undo what a job left in force: the one that ends, or one that left by `sys.exit`."""
    atexit.unregister(_end_at_exit)
    while _job:
        job = _job.pop()
        if not job.from_run:
            job.applied.restore()


def _tell_of_random_numbers(applied: Applied) -> None:
    """Tell standard error what the job did with random numbers that its profile does not say."""
    lines = [f"seeded by the program itself: {call}" for call in applied.seeding_calls]
    lines += [
        f"streams.{name} was not drawn from in this process; "
        f"drawn: {some(drawn_streams()) or 'none'}"
        + (f"; did you mean {close}?" if (close := near(name, drawn_streams())) else "")
        for name in never_drawn()
    ]
    if world().rank == 0:
        say(*lines)


def _record(job: _Job) -> None:
    """Write the job's manifest; where that fails, nothing stays in force."""
    folder = hydra_folder(job.config.hydra)
    try:
        write_manifest(folder, manifest(job.applied.resolved, job.applied.report))
    except OSError as error:
        _take_back()
        path = folder / FILE
        raise ApplyError(f"the manifest cannot be written: {path}: {error.strerror}") from None


def _exit(error: TorchreproError) -> None:
    """End the job: an exception would be shown as a fault of the program."""
    with _StopOnRefusal():
        raise error


class _StopOnRefusal:
    """Turns whatever torchrepro refuses, and any fault of its own, into exit status 3.

    A profile that has not held until the end of the job is status 1.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if isinstance(error, TorchreproError):
            say(error)
            drifted = isinstance(error, DriftError)  # the job has run: nothing was refused
            raise SystemExit(error.exit_status if drifted else REFUSED_STATUS) from None
        if isinstance(error, Exception):
            # Hydra would warn and run the task unprotected.
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(REFUSED_STATUS) from None
