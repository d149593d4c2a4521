"""Helpers for imports: import torch, return versions of packages, call back after an import.

Every Python process below `torchrepro run` loads this module at its start, so it imports little.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

deferred_callbacks: list[Callable[[], object]] = []
"""Called at the import of torch, or earlier if code is about to change the same state."""


def import_torch() -> None:
    """Import torch and `numpy.random`, which are seeded together.

    Raises `ApplyError` if torch is not installed or cannot be imported.
    """
    try:
        import_module("numpy.random")
        import_module("torch")
    except (ImportError, RuntimeError) as error:
        from torchrepro.ground.errors import ApplyError

        reason = str(error).partition("\n")[0]
        raise ApplyError(
            f"torch cannot be imported: {reason}\n  `torchrepro doctor` shows more"
        ) from None


def named(path: str) -> Any:
    """Return the object of this package that `path` names, such as ``seeding.streams:stream``."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"torchrepro.{module}"), name)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution.

    Returns None if it is not installed, if its metadata has no version, or if `distribution` is
    not a legal name. See https://docs.python.org/3/library/importlib.metadata.html.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed: str | None = version(distribution)
    except (PackageNotFoundError, ValueError):
        return None
    return installed


def when_imported(module: ModuleType, call: Callable[[], None]) -> None:
    """Call `call` when the running import of `module` ends or fails, or now if it is not running.

    Python marks a running import in a private attribute of the module's spec (`_initializing`). If
    the attribute does not exist, `call` is called now.
    """
    spec: Any = module.__spec__
    if not getattr(spec, "_initializing", False):
        call()
        return
    original = type(spec)

    class ObservedSpec(original):  # type: ignore[misc, valid-type]  # a class known at run time
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = original
                call()

    spec.__class__ = ObservedSpec


class AfterImport:
    """Calls `call` with the name of a module after each import of one of `modules`.

    A name that ends in `*` matches every module whose name begins with the text before the `*`. A
    search without an import, as by `importlib.util.find_spec`, does not count as an import.
    """

    def __init__(self, modules: Iterable[str], call: Callable[[str], None]) -> None:
        names = [*modules]
        self.beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
        self.modules = dict.fromkeys(name for name in names if not name.endswith("*"))
        self.call = call

    def waits_for(self, module: str) -> bool:
        """Whether `module` is one of the modules whose import is reported."""
        return module in self.modules or module.startswith(self.beginnings)

    def watch(self) -> None:
        """Watch later imports; changes `sys.meta_path`."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def watch_all(self) -> None:
        """Watch later imports, and call back now for each module that is loaded already."""
        self.watch()
        for module in self.loaded():
            self.call(module)

    def loaded(self) -> list[str]:
        """Return the modules that are loaded already."""
        if self.beginnings:
            return [name for name in list(sys.modules) if self.waits_for(name)]
        return [name for name in self.modules if name in sys.modules]  # avoids a long loop

    def unwatch(self) -> None:
        """Stop watching; does nothing if other code removed this object from `sys.meta_path`."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.waits_for(fullname):
            return None
        # Ask only later finders: two watches of the same module would ask each other forever.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        finders = (finder for finder in later if hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = _AnnouncingLoader(spec.loader, lambda: self.call(fullname))
            spec.loader = loader
        return spec


class _AnnouncingLoader:
    def __init__(self, loader: Any, announce: Callable[[], None]) -> None:
        self._loader = loader
        self._announce = announce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module gets its original loader: code that reads resources needs its methods.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._announce()
