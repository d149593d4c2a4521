"""Put the inherited profile in force in a process that `torchrepro run` started.

The environment was set before this process began. What is left is set as soon as the library
that holds it has been imported. Until torch is, that takes no more than a seed, which `run` hands
over as a plain number: a program which never imports torch loads nothing else of this package, so
this module imports next to nothing itself.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib import import_module

from torchrepro.ground.imports import AfterImport, put_off

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from typing import Any, NoReturn

    from torchrepro.application.applier import Applied
    from torchrepro.application.planner import Step
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report

_MODULES = ("random", "numpy.random", "torch")  # with torch comes all but their two seeds
_BEFORE_ALL = ""  # the knobs on which all seeds depend wait for no module
_NOT_IN_FORCE = 3
_BY_RANK = "by rank"  # the seed is this process's own to work out, from the whole profile
_state: dict[str, Any] = {}
_seeded_alone: list[str] = []


def put_in_force_on_import() -> None:
    """Wait for the imports of random, numpy.random, torch and Ray; changes `sys.meta_path`."""
    put_off.append(_begin)
    _watch_sources_if_asked()
    AfterImport(_MODULES, _when_imported).watch_all()
    AfterImport(["ray"], _reach_workers).watch_all()


def put_in_force_in_worker() -> None:
    """Put the profile that came with a worker of Ray in force there, and below it.

    Ray calls this before the first task. The Python of a worker may have started without our
    sitecustomize, as that of a cluster which ran before the program does.
    """
    if _begin in put_off or not os.environ.get("TORCHREPRO_PROFILE"):
        return
    from pathlib import Path  # Ray has imported it

    below = [str(Path(__file__).parent / "boot"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, below))
    put_in_force_on_import()


def _reach_workers(module: str) -> None:
    from torchrepro.application.ray_workers import reach_workers

    reach_workers(_inherited, _end)


def _inherited() -> ResolvedProfile:
    from torchrepro.ground.errors import ApplyError
    from torchrepro.reporting.process_state import inherited

    resolved = inherited()
    if resolved is None:
        raise ApplyError("no profile came with this process")
    return resolved


def record_on_import() -> None:
    """Wait for the import of torch and record from then on, in a process without a profile.

    Nothing else of the process changes.
    """

    def begin(module: str) -> None:
        waiting.unwatch()
        _record_if_asked()

    _watch_sources_if_asked()
    waiting = AfterImport(["torch"], begin)
    waiting.watch()


def in_force_now() -> Applied | None:
    """Import what is still waited for, and return the profile that is then wholly in force."""
    if _begin not in put_off:
        return None
    for module in _MODULES:
        import_module(module)
        _when_imported(module)
    return _applied()


def agreeing_run(resolved: ResolvedProfile, asker: str) -> Applied | None:
    """Return what `torchrepro run` applied in this process, or None if it did not start it.

    Raises `ApplyError` if that is another profile than `resolved`, for which `asker` asks.
    """
    from torchrepro.reporting.process_state import outer_run

    return in_force_now() if outer_run(resolved, asker) is not None else None


def _when_imported(module: str) -> None:
    if module in _state:
        return
    _state[module] = True
    number = os.environ.get("TORCHREPRO_SEED", _BY_RANK)
    if module != "torch" and number != _BY_RANK and "applied" not in _state:
        # Until torch is there, a seed is all there is to do.
        if number:
            sys.modules[module].seed(int(number))
            _seeded_alone.append(module)
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
        atexit.register(_tell_of_the_end, announced, os.getpid())


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
        from torchrepro.seeding.nondeterministic_reads import watch_from_the_start

        watch_from_the_start(request.folder, in_detail=request.detail)
        if request.detail:
            from torchrepro.trace.followed_lines import follow

            follow(request.folder, request.steps, os.environ)


def _record_if_asked() -> None:
    from torchrepro.trace.request import RecordingRequest

    request = RecordingRequest.inherited(os.environ)
    if request is not None:
        from torchrepro.trace.recorder import record_process

        record_process(request, _end)


def _tell_of_the_end(announced: Report, process: int) -> None:
    if os.getpid() != process:
        return  # a copy of the process, of whose end nobody asked
    from torchrepro.reporting.report import announce_effects, announce_end

    report = _applied().report
    announce_effects(report)
    announce_end(report, announced)


def _applied() -> Applied:
    """Return the profile in force; the first call begins it, with what was seeded up to now."""
    from torchrepro.application.applier import begin

    if "applied" in _state:
        found: Applied = _state["applied"]
        return found
    applied = begin(_inherited(), "the process was started by `torchrepro run`")
    _state["applied"] = applied
    applied.refuse = _refuse
    applied.carry_out(_steps_for(_BEFORE_ALL, applied))
    for module in _seeded_alone:
        # A generator that has its seed is left where it has got to since.
        steps = _steps_for(module, applied)
        reached = [(step.knob.access, step.knob.access.save()) for step in steps]
        applied.carry_out(steps)
        for access, state in reached:
            access.restore(state)
    return applied


def _steps_for(module: str, applied: Applied) -> list[Step]:
    return [step for step in applied.plan.steps if step.knob.set_on_import == module]


def _refuse(error: TorchreproError) -> None:
    """End a run whose profile turns out not to hold, after what the program has said so far."""
    from contextlib import suppress

    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stdout.flush()
    _end(error, error.exit_status)


def _end(error: TorchreproError, status: int = _NOT_IN_FORCE) -> NoReturn:
    # An exception could be caught by whoever imports the module; a run that is not under its
    # profile must not go on.
    from torchrepro.ground.console import say

    say(error)
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(status)
