"""Put the inherited profile in force in a process that `torchrepro run` started.

The environment was set before this process began. What is left is set as soon as the library
that holds it has been imported, so that a program which never imports torch pays nothing for it.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torchrepro.applier import Applied

# A library's generators are seeded once its own module is there, torch's flags with torch.
_STAGES = {"random": "python", "numpy.random": "numpy", "torch": "everything else"}
_state: dict[str, Applied] = {}


def put_in_force_on_import() -> None:
    """Wait for the imports of random, numpy.random and torch; changes `sys.meta_path`."""
    waiting = [module for module in _STAGES if module not in sys.modules]
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting, _carry_out))
    for module in _STAGES:
        if module in sys.modules:
            _carry_out(module)


def _carry_out(module: str) -> None:
    """Set the knobs that become reachable with `module`, or end the process with status 3."""
    from torchrepro.errors import TorchreproError

    try:
        applied = _applied()
        target = _STAGES[module]
        own = [s for s in applied.plan.steps if s.knob.target in _STAGES.values()]
        rest = [s for s in applied.plan.steps if s not in own]
        applied.carry_out(rest if module == "torch" else [])
        applied.carry_out(step for step in own if step.knob.target == target)
    except TorchreproError as error:
        # An exception could be caught by whoever imports the module; a run that is not under its
        # profile must not go on.
        sys.stderr.write(f"torchrepro: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_status)
    if module == "torch" and os.environ.get("TORCHREPRO_FIRST") == str(os.getpid()):
        from torchrepro.tables import announce

        announce(applied.report)


def _applied() -> Applied:
    from torchrepro.applier import begin
    from torchrepro.process import inherited

    if "applied" not in _state:
        resolved = inherited()
        if resolved is None:
            raise RuntimeError("this process was not started by `torchrepro run`")
        _state["applied"] = begin(resolved, "the process was started by `torchrepro run`")
    return _state["applied"]


class _AfterImport(MetaPathFinder):
    """Calls back once each of some modules has been imported."""

    def __init__(self, modules: Sequence[str], call: Callable[[str], None]) -> None:
        self.waiting = set(modules)
        self.call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        self.waiting.discard(fullname)
        spec = next(
            filter(None, (_spec(finder, fullname, path, target) for finder in sys.meta_path)), None
        )
        if spec is not None and spec.loader is not None:
            spec.loader = _Announcing(spec.loader, lambda: self.call(fullname))
        return spec


def _spec(finder: Any, name: str, path: Any, target: Any) -> ModuleSpec | None:
    find = getattr(finder, "find_spec", PathFinder.find_spec)
    found: ModuleSpec | None = find(name, path, target)
    return found


class _Announcing(Loader):
    """A loader that announces when its module is ready."""

    def __init__(self, loader: Any, announce: Callable[[], None]) -> None:
        self._loader = loader
        self._announce = announce

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: code that reads resources through it must not notice.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._announce()
