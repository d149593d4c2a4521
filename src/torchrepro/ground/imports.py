"""Importing other packages: torch, what is installed, and a call back after an import.

Every Python below `torchrepro run` loads this module as it starts: it imports next to nothing.
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

put_off: list[Callable[[], object]] = []
"""What begins with the import of torch, or as somebody else is about to change the same state."""


def import_torch() -> None:
    """Import torch, and numpy's random numbers, which are seeded with it.

    Raises `ApplyError` where torch is not installed or does not load.
    """
    try:
        import_module("numpy.random")
        import_module("torch")
    except (ImportError, RuntimeError) as error:
        from torchrepro.ground.errors import ApplyError

        words = str(error).partition("\n")[0]
        raise ApplyError(
            f"torch cannot be imported: {words}\n  `torchrepro doctor` says more"
        ) from None


def named(path: str) -> Any:
    """Return the object of this package that `path` names, such as ``seeding.streams:stream``."""
    module, _, name = path.partition(":")
    return getattr(import_module(f"torchrepro.{module}"), name)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution.

    None for one that is not installed, for what is not the name of one, and for one whose
    metadata holds no version. See https://docs.python.org/3/library/importlib.metadata.html.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        found: str | None = version(distribution)
    except (PackageNotFoundError, ValueError):
        return None
    return found


def when_imported(module: ModuleType, call: Callable[[], None]) -> None:
    """Call `call` now, or where `module` is just being imported, once that has ended.

    Python keeps that in an attribute of the module's spec (`_initializing`), which is not public.
    Without it this is now. An import that fails calls as well.
    """
    spec: Any = module.__spec__
    if not getattr(spec, "_initializing", False):
        call()
        return
    original = type(spec)

    class Ending(original):  # type: ignore[misc, valid-type]  # what Python has made
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                self.__class__ = original
                call()

    spec.__class__ = Ending


class AfterImport:
    """Calls back once each of some modules has been imported.

    A name that ends in `*` stands for every module whose name begins with the rest of it. A module
    that is only looked for, as by `importlib.util.find_spec`, is waited for on.
    """

    def __init__(self, modules: Iterable[str], call: Callable[[str], None]) -> None:
        names = [*modules]
        self.beginnings = tuple(name[:-1] for name in names if name.endswith("*"))
        self.modules = dict.fromkeys(name for name in names if not name.endswith("*"))
        self.call = call

    def waits_for(self, module: str) -> bool:
        """Whether the import of `module` is one of those called back for."""
        return module in self.modules or module.startswith(self.beginnings)

    def watch(self) -> None:
        """Begin to wait; changes `sys.meta_path`."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def watch_all(self) -> None:
        """Begin to wait, and call back now for each that was imported before."""
        self.watch()
        for module in self.loaded():
            self.call(module)

    def loaded(self) -> list[str]:
        """Return those that were imported before."""
        if self.beginnings:
            return [name for name in list(sys.modules) if self.waits_for(name)]
        return [name for name in self.modules if name in sys.modules]  # of thousands

    def unwatch(self) -> None:
        """Wait no longer; does nothing if somebody else has taken this out of `sys.meta_path`."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.waits_for(fullname):
            return None
        # Only those behind this one: two that wait for one module would ask each other forever.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        finders = (each for each in behind if hasattr(each, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = _Announcing(spec.loader, lambda: self.call(fullname))
            spec.loader = loader
        return spec


class _Announcing:
    def __init__(self, loader: Any, announce: Callable[[], None]) -> None:
        self._loader = loader
        self._announce = announce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: code that reads resources through it must not notice.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._announce()
