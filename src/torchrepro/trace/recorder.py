"""Public functions that record a `with` block, record a process, and end a step."""

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

    Takes records on this thread and on those started within the block. `level` is ``op``,
    ``module`` or ``step``; `steps` are the first and last step to record; `keep` are patterns of
    modules whose tensors are kept; `statistics` adds what ``compare`` needs for tolerances;
    `detail` reads every input again. With `every`, steps 0, `every`, 2 * `every` and so on are
    recorded at `level` and all others at ``step``. `max_size`, in bytes or as in ``"500MB"``, is
    what the recording may take on disk, of which each rank has an equal share: the records of the
    oldest steps are dropped, those in full before the others, but the last two in full at the end.

    A step is one call of an optimizer's ``step()``, or of `torchrepro.end_step` (``end_step`` of
    the returned recording), with all that led to it, and is numbered from 0: several backward
    passes before the call belong to it, and two optimizers end two steps in one iteration. What
    comes after the last step is recorded too, with the number that the next step would have had.
    So is a program that has no steps, with the number 0. Imports torch. Raises `TraceError` for a
    folder that is not empty, and where the trace cannot be written, unless `on_unwritable` is
    ``warn``.
    """
    request = RecordingRequest(
        *(os.fspath(folder), level, steps, tuple(keep), statistics, detail, on_unwritable),
        every=every,
        max_size=None if max_size is None else bytes_of(max_size),
    )
    with _starting:
        others = [recording for recording in _running() if recording not in _of_process]
        if others:
            todo, found = "end that recording first", others[-1].request.folder
            raise TraceError.about("is being recorded already", found=found, todo=todo)
        request.prepare_folder()
        recording = _begin(request)
    try:
        yield recording
    finally:
        recording.stop()


_starting = fork_safe_lock()
_of_process: list[Recording] = []  # those of `run --record`, which go on beside a program's own


def end_step() -> None:
    """End a step of the recordings that are running, for a program without an optimizer.

    Does nothing where nothing is recorded.
    """
    for recording in _running():
        recording.end_step()


def record_process(request: RecordingRequest, refuse: Callable[[TraceError], None]) -> None:
    """Record this process from now until it ends, as ``torchrepro run --record`` asks.

    `refuse` ends the program where its trace cannot be written, unless it is to go on. The fork
    server of multiprocessing is not recorded: it computes nothing that the program asks for.
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

    # A program whose main thread calls `os._exit`, to skip the exit handlers of its libraries, has
    # done its work, so its trace is complete. A call from another thread ends a program that hangs.

    @wraps(leave)
    def finish_and_leave(status: int) -> NoReturn:
        if os.getpid() == process and threading.current_thread() is threading.main_thread():
            try:
                recording.finish()
            except Exception:  # noqa: BLE001 - the program ends all the same
                traceback.print_exc()
        leave(status)

    os._exit = finish_and_leave


def _begin(request: RecordingRequest) -> Recording:
    try:  # what recording borrows from torch is asked for as its modules are imported
        from torchrepro.trace.recording import Recording
    except (ImportError, AttributeError) as missing:
        raise TraceError.about(
            "recording needs what is not in this Python or torch", found=str(missing)
        ) from missing
    from torchrepro.trace.store import check_share

    check_share(request)
    recording = Recording(request)
    recording.start()
    return recording


def _running() -> tuple[Recording, ...]:
    module = sys.modules.get("torchrepro.trace.recording")
    return module.running() if module is not None else ()
