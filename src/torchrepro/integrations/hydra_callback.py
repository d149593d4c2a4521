"""The callback that applies a job's profile before the job and restores the state after it.

Step 3 of the way of a job, which `hydra` describes. Hydra turns an exception in a callback into a
warning and runs the task all the same, so whatever stops a run here leaves as `SystemExit`, which
gets through.

Hydra 1.3's `--experimental-rerun` only reads the pickled config of the job and calls the task: no
plugin, no source and no callback takes part. So the profile travels in the pickle, as an entry of
the cache that OmegaConf keeps with a config (OmegaConf.get_cache), and applies itself when it is
read for a rerun. Hydra 1.4 composes anew, as for any run.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict, read_write

from torchrepro.applier import Applied, apply_resolved, in_force, stop_or_relaunch
from torchrepro.bootstrap import agreeing_run, in_force_now
from torchrepro.console import note, say
from torchrepro.errors import ApplyError, DriftError, TorchreproError
from torchrepro.integrations.hydra_config import (
    CALLBACK,
    lines_on_changed_files,
    note_on_the_apps_own,
    resolved_profile,
)
from torchrepro.integrations.hydra_unapplied import note_callback, note_launched, requesting_words
from torchrepro.manifest.contents import FILE, hydra_folder, manifest, write_manifest
from torchrepro.manifest.started import note_sweep, sweep_or_this
from torchrepro.messages import near, some
from torchrepro.planner import plan
from torchrepro.process_state import inherited, other_than_then
from torchrepro.profile.resolved import ResolvedProfile
from torchrepro.report import announce, announce_end, random_number_lines
from torchrepro.seeding.ranks import world
from torchrepro.seeding.streams import drawn_streams, never_drawn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from omegaconf import DictConfig

    from torchrepro.report import Report


_OPTION = "--experimental-rerun"
_ENTRY = "torchrepro"


class _PickledProfile:
    """The profile of a job as plain values; unpickling it for a rerun applies it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.content,)

    def __deepcopy__(self, memo: Any) -> _PickledProfile:
        return self


def _unpickle(content: Mapping[str, Any]) -> _PickledProfile:
    if _is_rerun() and not in_force():
        _apply_for_rerun(ResolvedProfile.from_json(content))
    return _PickledProfile(content)


def _is_rerun() -> bool:
    """Whether Hydra runs a job again here, rather than a program that has such an option itself.

    Hydra reads its options in the function that `hydra.main` makes, unless it is given a config.
    """
    if not any(map(_is_rerun_option, sys.argv[1:])):
        return False
    frame = sys._getframe(1)  # noqa: SLF001 - documented, if only for CPython
    while frame is not None:
        of_hydra = frame.f_globals.get("__name__") == "hydra.main"
        if of_hydra and frame.f_locals.get("cfg_passthrough") is None:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_rerun_option(word: str) -> bool:
    name = word.partition("=")[0]
    return name.startswith("--e") and _OPTION.startswith(name)  # argparse takes a shorter one too


_REFUSED_STATUS = 3


def _refuse_rerun_without_profile() -> None:
    """Raise `ApplyError` for a rerun of Hydra 1.4 whose job had the profile of `torchrepro run`.

    What Hydra composes anew does not hold that.
    """
    words = [*sys.argv[1:], ""]
    options = [at for at, word in enumerate(words) if _is_rerun_option(word)]
    for at in options:
        folder = words[at].partition("=")[2] or words[at + 1]
        if (Path(folder) / ".hydra" / FILE).is_file():
            raise ApplyError(
                f"the job in {folder} was under a profile of `torchrepro run`, and this run is "
                f"under none\n    to do: torchrepro rerun {folder}"
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
        note_launched(state.pop("words"))
        note_sweep(state.pop("command"), state.pop("folder"))
        self.__dict__.update(state)
        note_callback(sweeping=True)

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the profile, and relaunch if it says so: no work has been done yet.

        A sweep is never relaunched: its jobs may need different variables.
        """
        with _exit_on_error():
            note_callback()
            _restore()
            resolved = resolved_profile(config)
            if resolved is not None and inherited() is None:
                why = stop_or_relaunch(plan(resolved), "", by_itself=True)
                if why and world().rank == 0:
                    say(f"not started again in time, because {why}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Start the sweep from a clean state."""
        with _exit_on_error():
            note_callback(sweeping=True)
            _restore()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Apply the job's profile and write its manifest."""
        with _exit_on_error():
            _restore()
            resolved = resolved_profile(config)
            if resolved is None:
                words = note_on_the_apps_own(config)
                if words and words not in _notes:
                    _notes.add(words)
                    note(f"note: {words}")
                outer = inherited()
                if outer is None:
                    _refuse_rerun_without_profile()
                    _make_picklable(config)
                else:
                    _put_into_pickle(outer, config)
                return
            note(*lines_on_changed_files(), *filter(None, [other_than_then(resolved)]))
            _put_into_pickle(resolved, config)
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
        with _exit_on_error():
            if not _job:
                _record_outer_run(config)
            _end()
            _restore()


@dataclass(frozen=True, slots=True)
class _Job:
    """A job under a profile."""

    config: DictConfig | None
    """None for a rerun: the manifest of the run before stays in its folder."""

    applied: Applied
    announced: Report
    from_run: bool = False
    """Whether `torchrepro run` applied the profile, which then reports its end as well."""


_job: list[_Job] = []  # the present one
_notes: set[str] = set()  # those that this process has printed once


def _begin(job: _Job) -> None:
    """Write the manifest of a job that starts, which is completed when it ends."""
    _job.append(job)
    _record(job)
    atexit.register(_end_at_exit, os.getpid())


def _end() -> None:
    """Complete the manifest of the present job, and report what did not stay as announced."""
    for job in _job:
        _record(job)
        if not job.from_run:
            _report_random_numbers(job.applied)
            announce_end(job.applied.report, job.announced)


def _end_at_exit(process: int) -> None:
    """Do the same for a job that left by `sys.exit`, after which Hydra calls no callback."""
    if os.getpid() == process:
        try:
            _end()
        except TorchreproError as error:
            say(error)


def _apply_for_rerun(resolved: ResolvedProfile) -> None:
    """Apply the profile of a job that Hydra 1.3 runs again, until the process ends."""
    with _exit_on_error():
        if agreeing_run(resolved, "job") is None:
            applied = apply_resolved(resolved, "")
            applied.refuse = _exit
            announce(applied.report)
            _begin(_Job(None, applied, applied.report))


def _put_into_pickle(resolved: ResolvedProfile, config: DictConfig) -> None:
    # With Hydra's own part, which is never in the config that the task gets and may save.
    OmegaConf.get_cache(config.hydra)[_ENTRY] = _PickledProfile(resolved.to_json())


def _record_outer_run(config: DictConfig) -> None:
    """Write the manifest of a job that asks for no profile and had that of `torchrepro run`.

    Only where it used torch: a program that does without is not made to import it.
    """
    if inherited() is None or "torch" not in sys.modules or config.hydra.mode is not RunMode.RUN:
        return
    applied = in_force_now()
    if applied is not None:
        _record(_Job(config, applied, applied.report, from_run=True))


def _make_picklable(config: DictConfig) -> None:
    """Make the configs of a job without a profile readable for Pythons without torchrepro.

    Hydra has made its callbacks already, and other callbacks may pickle the config.
    """
    configs: tuple[Any, ...] = (config, HydraConfig.instance().cfg)
    for each in filter(None, configs):
        callbacks = each.hydra.callbacks
        with read_write(callbacks), open_dict(callbacks):
            callbacks[CALLBACK] = dict(callbacks[CALLBACK])


def _restore() -> None:
    """Restore the state after a job: the one that ends, or one that left by `sys.exit`."""
    atexit.unregister(_end_at_exit)
    while _job:
        job = _job.pop()
        if not job.from_run:
            job.applied.restore()


def _report_random_numbers(applied: Applied) -> None:
    """Print the seeds and unseeded draws of the job, and the streams that it never drew from."""
    lines = [f"seeded by the program itself: {call}" for call in applied.seeding_calls]
    lines += random_number_lines(applied.report)
    lines += [
        f"streams.{name} was not drawn from in this process; "
        f"drawn: {some(drawn_streams()) or 'none'}"
        + (f"; did you mean {close}?" if (close := near(name, drawn_streams())) else "")
        for name in never_drawn()
    ]
    if world().rank == 0:
        note(*lines)


def _record(job: _Job) -> None:
    """Write the job's manifest; if that fails, nothing stays applied."""
    if job.config is None:
        return
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
