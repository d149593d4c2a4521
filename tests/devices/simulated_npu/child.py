"""A long-lived process with the device, which runs functions of test files on request."""

import importlib.util
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any

from simulated_npu import faults, kernels, registration

TIMEOUT = 300
POLICE = Path(__file__).parents[2] / "conftest.py"


class ChildError(Exception):
    """A function ended its process, took too long, or left a change behind in it."""


class Child:
    """The process; it starts at the first call, and again at the first call after it was lost."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> Any:
        """Run the module-level `function` in the child; return its result or raise its error.

        Raises `ChildError` if the child ends, takes longer than `timeout` seconds, or is left
        with an active profile or another flag than before.
        """
        name = function.__qualname__
        if not name.isidentifier():
            raise TypeError(f"{name} has to be a function at the top of its file")
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, registration.install)
        # By value: torch teaches multiprocessing to share tensors, and the child may not last.
        task = pickle.dumps((function.__module__, function.__code__.co_filename, name, args))
        try:
            return pickle.loads(self._pool.submit(_run, task).result(timeout))
        except (TimeoutError, BrokenProcessPool, ChildError) as error:
            self.stop()
            why = f"no answer in {timeout} s" if isinstance(error, TimeoutError) else str(error)
            raise ChildError(f"{name}{args}: {why}") from error

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._pool is not None:
            for process in [*(self._pool._processes or {}).values()]:
                process.kill()
            self._pool.shutdown()
            self._pool = None


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


def _run(task: bytes) -> bytes:
    from torchrepro.application.applier import active_profiles

    module, path, name, args = pickle.loads(task)
    police = sys.modules.get("police") or load("police", POLICE)
    if module not in sys.modules:
        load(module, Path(path))
    before = police._flags_and_variables()
    try:
        return pickle.dumps(getattr(sys.modules[module], name)(*args))
    finally:
        faults.reset()
        kernels.log.clear()
        after = police._flags_and_variables()
        left = [f"a profile in force: {applied.resolved.name}" for applied in active_profiles()]
        changed = [key for key in before | after if before.get(key) != after.get(key)]
        left += [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed]
        if left:
            raise ChildError(f"left behind: {left}")
