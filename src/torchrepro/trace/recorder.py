"""Public functions: record a `with` block, and end a step. Also records a whole process."""

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
    """Record what the program computes within the block into `folder`, which is new or empty.

    Records this thread and threads started within the block. `level` is ``op``, ``module`` or
    ``step``; `steps` are the first and last step to record; `keep` are patterns of modules whose
    tensors are kept; `statistics` adds the numbers that ``compare`` needs for tolerances; `detail`
    reads every input again. With `every`, steps 0, `every`, 2 * `every` and so on are recorded at
    `level`, all others at ``step``. `max_size`, in bytes or as in ``"500MB"``, limits the size of
    the recording on disk; each rank has an equal share. To stay below it, the records of the oldest
    steps are dropped: steps in full first, except the last two, which are dropped last.

    A step ends at each call of an optimizer's ``step()``, or of `torchrepro.end_step` (or the
    recording's ``end_step``). Steps are numbered from 0: several backward passes before the call
    belong to one step, and two optimizers end two steps in one iteration. Ops after the last step
    are recorded with the number of the step that would follow; in a program without steps, with 0.
    Imports torch. Raises `TraceError` if the folder is not empty, or if the trace cannot be
    written, unless `on_unwritable` is ``warn``.
    """
    request = RecordingRequest(
        *(os.fspath(folder), level, steps, tuple(keep), statistics, detail, on_unwritable),
        every=every,
        max_size=None if max_size is None else bytes_of(max_size),
    )
    with _starting:
        active = [recording for recording in _running() if recording not in _of_process]
        if active:
            todo, found = "end that recording first", active[-1].request.folder
            raise TraceError.about("is being recorded already", found=found, todo=todo)
        request.prepare_folder()
        recording = _begin(request)
    try:
        yield recording
    finally:
        recording.stop()


_starting = fork_safe_lock()
_of_process: list[Recording] = []  # of `run --record`; a program may also record itself


def end_step() -> None:
    """End a step of all running recordings, for a program without an optimizer.

    Does nothing if no recording is running.
    """
    for recording in _running():
        recording.end_step()


def record_process(request: RecordingRequest, refuse: Callable[[TraceError], None]) -> None:
    """Record this process from now until it ends, for ``torchrepro run --record``.

    `refuse` is called to end the program if its trace cannot be written, unless `on_unwritable` is
    ``warn``. The fork server of multiprocessing is not recorded, as it runs no code of the program.
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

    # If the main thread calls `os._exit`, to skip the exit handlers of libraries, the program has
    # done its work, so its trace is complete. Other threads call it to end a program that hangs.

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
