"""A long-lived process that has the device, and runs functions of test files on request."""

import importlib.util
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TIMEOUT = 300
ENDING = 60
POLICE = Path(__file__).parents[2] / "conftest.py"


class ChildError(Exception):
    """What went wrong in the child, where the error itself cannot come over."""


class Task(NamedTuple):
    """A function at the top of a test file, by the place from which the child can load it."""

    module: str
    path: str
    name: str
    args: tuple[Any, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...]) -> "Task":
        """Name `function`; raises `TypeError` where it is not at the top of its file."""
        if not function.__qualname__.isidentifier():
            raise TypeError(f"{function.__qualname__} has to be a function at the top of its file")
        path = function.__code__.co_filename
        return cls(function.__module__, path, function.__name__, args)

    def run(self) -> Any:
        """Load the file, unless that is done, and call the function."""
        if self.module not in sys.modules:
            load(self.module, Path(self.path))
        return getattr(sys.modules[self.module], self.name)(*self.args)


class Child:
    """The process: started at the first call, and anew at the call after it was lost."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> Any:
        """Run `function` in the child and return what it returns, or raise what it raises.

        Raises `ChildError` where the child ends, takes longer than `timeout` seconds, raises what
        cannot be pickled, or is left with a profile in force or another flag than before.
        """
        task = Task.of(function, args)
        if self._process is None:
            self._start()
        answer, error, leftovers = self._asked(task, timeout)
        if leftovers:
            self.stop()
            raise ChildError(f"{task.name}{args} left behind: {leftovers}") from error
        if error is not None:
            raise error
        return answer

    def _asked(self, task: Task, timeout: float) -> Any:
        self._connection.send_bytes(pickle.dumps(task))
        if not wait([self._connection, self._process.sentinel], timeout):
            self.stop()
            raise ChildError(f"{task.name}{task.args}: no answer in {timeout} s")
        if self._connection.poll():
            with suppress(EOFError, ConnectionError):  # it ended before it had answered
                return pickle.loads(self._connection.recv_bytes())
        self._process.join(ENDING)
        raise ChildError(f"{task.name}{task.args}: the child ended with {self.stop()}")

    def stop(self) -> int | None:
        """End the process, if there is one, and return its exit status."""
        if self._process is None:
            return None
        self._process.kill()
        self._process.join()
        status = self._process.exitcode
        self._connection.close()
        self._process = self._connection = None
        return status

    def _start(self) -> None:
        # No daemon, which could not start the workers of a DataLoader; it ends with the connection.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()


def load(name: str, path: Path) -> ModuleType:
    """Import the file `path` under `name`, as pytest's `importlib` mode does."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _serve(connection: Connection) -> None:
    """Answer tasks until the other end is closed."""
    import simulated_npu

    simulated_npu.install()
    police = load("police", POLICE)
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        before = police._flags_and_variables()
        answer, error = _outcome(task)
        simulated_npu.reset()
        simulated_npu.log.clear()
        leftovers = _leftovers(before, police._flags_and_variables())
        # By value: torch teaches connections to share tensors instead, and the child may not last.
        connection.send_bytes(pickle.dumps((answer, error, leftovers)))


def _outcome(task: Task) -> tuple[Any, BaseException | None]:
    try:
        answer = task.run()
        pickle.dumps(answer)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return None, _sendable(error)
    return answer, None


def _sendable(error: BaseException) -> BaseException:
    text = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - some errors can be pickled but not read back
        return ChildError(text)
    error.add_note(f"in the process with the simulated npu:\n{text}")
    return error


def _leftovers(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    from torchrepro.applier import in_force

    profiles = [f"a profile in force: {applied.resolved.name}" for applied in in_force()]
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    return profiles + [f"{name}: {before.get(name)} -> {after.get(name)}" for name in changed]
