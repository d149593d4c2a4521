"""Starts the recording of a `with` block or of a process, and ends steps of a recording."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, NoReturn

from torchrepro.ground.errors import TraceError
from torchrepro.ground.fork_safety import fork_safe_lock, is_fork_server
from torchrepro.trace.request import RecordingRequest, bytes_of

if TYPE_CHECKING:
    from torchrepro.trace.recording import Recording


@contextmanager
def record(  # noqa: PLR0913 - one for each option of a recording
    folder: str | os.PathLike[str],
    *,
    level: str = "op",
    steps: tuple[int, int] | None = None,
    keep: Sequence[str] = (),
    statistics: bool = False,
    detail: bool = False,
    on_unwritable: str = "stop",
    every: int = 1,
    max_size: int | str | None = None,
) -> Iterator[Recording]:
    """Record the computations of the block into `folder`, which must be new or empty.

    Records this thread, and threads that start within the block. `level` is ``op``, ``module`` or
    ``step``. `steps` are the first and the last step to record. `keep` has patterns of modules, and
    the tensors of these modules are stored. `statistics` adds values that ``compare`` needs for a
    tolerance. `detail` reads every input again. With `every`, steps 0, `every`, 2 * `every` and so
    on are recorded at `level`, all other steps at ``step``. `max_size` limits the size on disk, in
    bytes or as in ``"500MB"``. Each rank has an equal share of `max_size`. To stay below the share,
    the oldest records are dropped: first steps at `level` except the last two, then steps at
    ``step``, then the last two steps at `level`.

    A step ends at each call of ``step()`` of an optimizer, of `torchrepro.end_step`, or of
    ``end_step`` of the recording. Steps are numbered from 0. Several backward passes before the
    call belong to one step. Two optimizers end two steps in one iteration. Ops after the last step
    are recorded under the next number, which is 0 in a program without steps. If the program ends
    within the block, the recording ends with it. Imports torch. Raises `TraceError` if the folder
    is not empty. If the trace cannot be written, raises `TraceError`, or only warns if
    `on_unwritable` is ``warn``.
    """
    request = RecordingRequest(
        *(os.fspath(folder), level, steps, tuple(keep), statistics, detail, on_unwritable),
        *(every, bytes_of(max_size)),
    )
    with _starting:
        active = [recording for recording in _running() if recording not in _of_process]
        if active:
            todo, found = "end that recording first", active[-1].request.folder
            raise TraceError.about("is being recorded already", found=found, todo=todo)
        request.prepare_folder()
        recording = _begin(request)
    atexit.register(recording.stop)
    try:
        yield recording
    finally:
        if atexit is not None:  # else Python has cleared this module, after the exit handler ran
            atexit.unregister(recording.stop)
            recording.stop()


_starting = fork_safe_lock()
_of_process: list[Recording] = []  # started by `run --record`; a program may also record itself


def end_step() -> None:
    """End the current step of all running recordings, in a program without an optimizer.

    Does nothing if no recording is running.
    """
    for recording in _running():
        recording.end_step()


def record_process(request: RecordingRequest, refuse: Callable[[TraceError], None]) -> None:
    """Record this process from now until it ends, for ``torchrepro run --record``.

    Calls `refuse` to end the program if the recording cannot start, or if the trace cannot be
    written and `on_unwritable` is ``stop``. Does not record the fork server of multiprocessing,
    because that server runs no code of the program.
    """
    if is_fork_server():
        return
    try:
        recording = _begin(request)
    except TraceError as error:
        refuse(error)
        return
    recording.refuse = refuse
    _of_process.append(recording)
    atexit.register(recording.finish)
    leave, process = os._exit, os.getpid()

    # The main thread calls `os._exit` to skip the exit handlers of libraries. The program has done
    # its work, so the trace is complete. Other threads call `os._exit` to end a hanging program.

    @wraps(leave)
    def finish_and_leave(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            try:
                recording.finish()
            except Exception:  # noqa: BLE001 - the program must end
                traceback.print_exc()
        leave(status)

    os._exit = finish_and_leave


def _begin(request: RecordingRequest) -> Recording:
    try:  # importing the modules of a recording fails if a private name of torch is missing
        from torchrepro.trace.recording import Recording
    except (ImportError, AttributeError) as missing:
        raise TraceError.about(
            "this Python or torch lacks a name that recording needs", found=str(missing)
        ) from missing
    from torchrepro.trace.store import check_share

    check_share(request)
    recording = Recording(request)
    recording.start()
    return recording


def _running() -> tuple[Recording, ...]:
    module = sys.modules.get("torchrepro.trace.recording")
    return module.running() if module is not None else ()
