"""Applies the inherited profile in a process that `torchrepro run` started.

The environment variables were set before the process started. Every other knob is set as soon as
the library of the knob has been imported. Before torch is imported, only seeds are set, and `run`
passes the seed as a plain number. So a program that never imports torch loads no other module of
this package, and this module imports very little.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module

from torchrepro import WORKERS
from torchrepro.ground.imports import AfterImport, deferred_callbacks, named

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from typing import NoReturn

    from torchrepro.application.applier import Applied
    from torchrepro.application.planner import Step
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report

_MODULES = ("random", "numpy.random", "torch")  # with torch: all knobs except seeds of the others
_BEFORE_ALL = ""  # in place of a module, for knobs that all seeds depend on
_NOT_APPLIED = 3
_BY_RANK = "by rank"  # this process derives its seed from the whole profile and its rank


class _Progress:
    """How much of the inherited profile this process has applied.

    The only object of this class lives as long as the process. Before the profile is applied, the
    imports of random and numpy only seed these modules.
    """

    def __init__(self) -> None:
        self.imported: set[str] = set()  # the modules in `_MODULES` that were handled
        self.seeded_alone: list[str] = []  # the modules that were seeded before the profile
        self.applied: Applied | None = None


_progress = _Progress()


def apply_on_import() -> None:
    """Apply the profile at the import of random, numpy.random and torch. Changes `sys.meta_path`.

    Also watches the libraries in `WORKERS`, so that they start workers under the profile.
    """
    deferred_callbacks.append(_begin)
    _watch_sources_if_asked()
    AfterImport(_MODULES, _when_imported).watch_all()
    AfterImport(WORKERS, _reach_workers).watch_all()


def apply_in_ray_worker() -> None:
    """Apply the inherited profile in a Ray worker and its child processes.

    Ray calls this before the first task. The worker may have started without our sitecustomize,
    for example if the cluster was started before the program.
    """
    if _begin in deferred_callbacks or not os.environ.get("TORCHREPRO_PROFILE"):
        return
    from pathlib import Path  # imported by Ray already

    search_path = [str(Path(__file__).parent / "boot"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    apply_on_import()


def _reach_workers(library: str) -> None:
    named(WORKERS[library])(_inherited, _end)


def _inherited() -> ResolvedProfile:
    from torchrepro.ground.errors import ApplyError
    from torchrepro.reporting.process_state import inherited

    resolved = inherited()
    if resolved is None:
        raise ApplyError("this process has not inherited a profile")
    return resolved


def record_on_import() -> None:
    """In a process without a profile, start recording when torch is imported."""

    def begin(module: str) -> None:
        waiting.unwatch()
        _record_if_asked()

    _watch_sources_if_asked()
    waiting = AfterImport(["torch"], begin)
    waiting.watch()


def finish_applying() -> Applied | None:
    """Import torch and numpy, and return the fully applied profile of `run`, or None without it."""
    if _begin not in deferred_callbacks:
        return None
    for module in _MODULES:
        import_module(module)
        _when_imported(module)
    return _applied()


def agreeing_run(resolved: ResolvedProfile, asker: str) -> Applied | None:
    """Return the profile that `torchrepro run` applied in this process, or None without `run`.

    Raises `ApplyError` if that profile differs from `resolved`, which `asker` requests.
    """
    from torchrepro.reporting.process_state import outer_run

    return finish_applying() if outer_run(resolved, asker) is not None else None


def _when_imported(module: str) -> None:
    if module in _progress.imported:
        return
    _progress.imported.add(module)
    number = os.environ.get("TORCHREPRO_SEED", _BY_RANK)
    if module != "torch" and number != _BY_RANK and _progress.applied is None:
        # Set only the seed, because loading the whole profile takes long.
        if number:
            sys.modules[module].seed(int(number))
            _progress.seeded_alone.append(module)
        return
    _begin(module)
    if module != "torch":
        return
    _record_if_asked()
    folder = os.environ.get("TORCHREPRO_LOG_TO")
    if folder:
        from torchrepro.manifest.contents import ProcessManifest

        manifest = ProcessManifest(folder, lambda: (_applied().resolved, _applied().report))
        manifest.write()
        atexit.register(manifest.write)
    if os.environ.get("TORCHREPRO_FIRST") == str(os.getpid()):
        from torchrepro.reporting.report import announce

        announced = _applied().report
        announce(announced)
        atexit.register(_announce_end, announced, os.getpid())


def _begin(module: str = _BEFORE_ALL) -> None:
    from torchrepro.ground.errors import TorchreproError

    try:
        applied = _applied()
        if module:
            applied.carry_out(_steps_for(module, applied))
    except TorchreproError as error:
        _end(error)


def _watch_sources_if_asked() -> None:
    if "TORCHREPRO_RECORD" not in os.environ:
        return
    from torchrepro.trace.request import RecordingRequest

    request = RecordingRequest.inherited(os.environ)
    if request is not None:
        from torchrepro.seeding.nondeterministic_reads import recorded_watches

        recorded_watches.begin_early(request.folder, in_detail=request.detail)
        if request.detail:
            from torchrepro.trace.followed_lines import follow

            follow(request.folder, request.steps, os.environ)


def _record_if_asked() -> None:
    from torchrepro.trace.request import RecordingRequest

    request = RecordingRequest.inherited(os.environ)
    if request is not None:
        from torchrepro.trace.recorder import record_process

        record_process(request, _end)


def _announce_end(announced: Report, process: int) -> None:
    if os.getpid() != process:
        return  # a fork: only the original process announces its end
    from torchrepro.reporting.report import announce_effects, announce_end

    report = _applied().report
    announce_effects(report)
    announce_end(report, announced)


def _applied() -> Applied:
    """Return the active profile. The first call applies it, but seeds no generator again."""
    if _progress.applied is not None:
        return _progress.applied
    from torchrepro.application.applier import begin

    applied = begin(_inherited(), "the process was started by `torchrepro run`")
    _progress.applied = applied
    applied.refuse = _refuse
    applied.carry_out(_steps_for(_BEFORE_ALL, applied))
    for module in _progress.seeded_alone:
        # A generator that is seeded already keeps its state: the program may have drawn from it.
        steps = _steps_for(module, applied)
        saved = [(step.knob.access, step.knob.access.save()) for step in steps]
        applied.carry_out(steps)
        for access, state in saved:
            access.restore(state)
    return applied


def _steps_for(module: str, applied: Applied) -> list[Step]:
    return [step for step in applied.plan.steps if step.knob.set_on_import == module]


def _refuse(error: TorchreproError) -> None:
    """End a run whose profile is violated, after flushing the output of the program."""
    from contextlib import suppress

    with suppress(OSError, ValueError):  # stdout is closed
        sys.stdout.flush()
    _end(error, error.exit_status)


def _end(error: TorchreproError, status: int = _NOT_APPLIED) -> NoReturn:
    # The importing code could catch an exception, and a run without its profile must not continue.
    from torchrepro.ground.console import say

    say(error)
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(status)
