"""Wrappers that call a listener at each call of a library's function or of a model's module.

A function has one wrapper for all its listeners and all its names. The wrapper first calls the
function and then the listeners. So a call that raises is not observed, except by `listen_before`. A
listener may return a function that changes the result for the caller. After the last
`stop_listening` the original function is restored, unless the program has replaced it since.

While torch.compile traces the program, a wrapper only calls the function: it causes no graph break
and calls no listener. A compiler may trace this module; it skips all other modules of torchrepro.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import update_wrapper, wraps
from importlib import import_module
from types import FrameType, MethodType
from typing import Any

from torchrepro.ground.callers import address, is_library
from torchrepro.ground.patching import patch

Change = Callable[[Any], Any]  # from the result of the function to the result for the caller
Listener = Callable[[str, tuple[Any, ...], Mapping[str, Any], FrameType], Change | None]
"""Called with the function's first name, its arguments, and the frame that called it."""


@dataclass(slots=True, eq=False)
class _Observed:
    name: str  # the first observed name; pickle uses it to find the wrapper
    original: Any
    wrapper: Any = None
    undo: ExitStack = field(default_factory=ExitStack)  # for all modules and classes that have it
    listeners: list[Listener] = field(default_factory=list)
    early: list[Listener] = field(default_factory=list)


_observed: dict[tuple[str, str], _Observed] = {}


def listen(module: str, name: str, listener: Listener) -> None:
    """Call `listener` after each call of a function, if the package of its module is loaded.

    `name` may contain a class, as in ``Thread.start``. A listener that listens to several names of
    one function is called once per call.
    """
    observed = _observe(module, name)
    if observed is not None and listener not in observed.listeners:
        observed.listeners.append(listener)


def listen_before(module: str, name: str, listener: Listener) -> None:
    """Call `listener` before each call of a function, and ignore the listener's return value."""
    observed = _observe(module, name)
    if observed is not None and listener not in observed.early:
        observed.early.append(listener)


def _observe(module: str, name: str) -> _Observed | None:
    owner, attribute = _owner(module, name)
    original = getattr(owner, attribute, None)
    if original is None:
        return None
    if (module, name) not in _observed:
        # A function with several names keeps one wrapper.
        known = (seen for seen in _observed.values() if original in (seen.original, seen.wrapper))
        observed = next(known, None) or _Observed(f"{module}.{name}", original)
        _observed[module, name] = observed
        if observed.wrapper is None:
            is_bound = isinstance(original, MethodType) or not hasattr(type(original), "__get__")
            observed.wrapper = (_BuiltIn if is_bound else _function)(observed)
            observed.wrapper.__module__, observed.wrapper.__qualname__ = module, name
        patch(observed.undo, owner, attribute, observed.wrapper, observed.original)
    return _observed[module, name]


def stop_listening(listener: Listener) -> None:
    for key, observed in list(_observed.items()):
        for listeners in (observed.listeners, observed.early):
            if listener in listeners:
                listeners.remove(listener)
        if not observed.listeners and not observed.early:
            del _observed[key]
            observed.undo.close()


def replace_imported_names(listeners: Iterable[Listener]) -> None:
    """Also observe functions that the program's modules imported by name; cannot be undone."""
    ours = set(listeners)
    observed = {
        address(seen.original): seen for seen in _observed.values() if ours & {*seen.listeners}
    }
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not is_library(file):
            for name, value in [*vars(module).items()]:
                if address(value) in observed:
                    setattr(module, name, observed[address(value)].wrapper)


def is_listening(listener: Listener) -> bool:
    return any(listener in observed.listeners for observed in _observed.values())


def _owner(module: str, name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    package, _, rest = module.partition(".")
    owner: Any = sys.modules.get(module)
    if owner is None and package in sys.modules and rest == "random":
        owner = import_module(module)
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute


def _function(observed: _Observed) -> Any:
    original = observed.original

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if observed.early:
            _call_early(observed, args, kwargs)
        return _call_listeners(observed, args, kwargs, original(*args, **kwargs))

    return call


def _call_early(observed: _Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if _is_compiling():
        return
    for listener in tuple(observed.early):
        with suppress(Exception):
            listener(observed.name, args, kwargs, sys._getframe(1))  # noqa: SLF001 - see below


def _call_listeners(
    observed: _Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any], returned: Any
) -> Any:
    if _is_compiling() or not observed.listeners:
        return returned
    caller = sys._getframe(1).f_back  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    if caller is None:
        return returned  # a thread runs the function: no line of the program called it
    for listener in tuple(observed.listeners):
        try:
            change = listener(observed.name, args, kwargs, caller)
        except Exception:  # noqa: BLE001, S112 - the program's arguments may raise; its call has succeeded
            continue
        if change is not None:
            returned = change(returned)
    return returned


class _BuiltIn:
    """The wrapper of a function that never becomes a method, such as a function written in C."""

    def __init__(self, observed: _Observed) -> None:
        update_wrapper(self, observed.original)
        self._observed, self._original = observed, observed.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._observed.early:
            _call_early(self._observed, args, kwargs)
        return _call_listeners(self._observed, args, kwargs, self._original(*args, **kwargs))

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])

    def __eq__(self, compared: object) -> bool:
        return compared is self or bool(self._original == compared)  # for `in os.supports_fd`

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)


@contextmanager
def on_modules_called(call: Callable[[Any, Any], object]) -> Iterator[None]:
    """Call ``call(module, returned)`` after every call of a module of torch; imports torch.

    Calls of modules within a compiled region are not seen.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_forward_hook.html
    """
    import torch

    def hook(module: Any, _args: Any, returned: Any) -> None:
        if not torch.compiler.is_compiling():
            call(module, returned)

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _is_compiling() -> bool:
    # torch.compile cannot trace `sys._getframe`. Torch reads addresses and clocks during its own
    # import, when `torch.compiler` may not exist yet.
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    return hasattr(compiler, "is_compiling") and bool(compiler.is_compiling())
