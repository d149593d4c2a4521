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
from functools import update_wrapper, wraps
from importlib import import_module
from types import FrameType, MethodType
from typing import Any

from torchrepro.ground.callers import address, is_library
from torchrepro.ground.patching import patch

Change = Callable[[Any], Any]  # from the result of the function to the result for the caller
Listener = Callable[[str, tuple[Any, ...], Mapping[str, Any], FrameType], Change | None]
"""Called with the function's first name, its arguments, and the frame that called it."""


class _Observed:
    """A function with its wrapper, which all modules and classes with the function get."""

    def __init__(self, module: str, name: str, original: Any) -> None:
        self.name = f"{module}.{name}"  # the first observed name
        self.original = original
        self.undo = ExitStack()
        self.listeners: list[Listener] = []
        self.early: list[Listener] = []
        is_bound = isinstance(original, MethodType) or not hasattr(type(original), "__get__")
        wrap: Callable[[_Observed], Any] = _BuiltIn if is_bound else _function
        self.wrapper = wrap(self)
        # Pickle uses these to find the wrapper.
        self.wrapper.__module__, self.wrapper.__qualname__ = module, name


class ObservedFunctions:
    """The functions that have a wrapper, each from its first listener until its last one stops."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], _Observed] = {}  # by module and name

    def listen(self, module: str, name: str, listener: Listener) -> None:
        """Call `listener` after each call of a function, if the package of its module is loaded.

        `name` may contain a class, as in ``Thread.start``. A listener that listens to several names
        of one function is called once per call.
        """
        observed = self._observe(module, name)
        if observed is not None and listener not in observed.listeners:
            observed.listeners.append(listener)

    def listen_before(self, module: str, name: str, listener: Listener) -> None:
        """Call `listener` before each call of a function, and ignore the listener's result."""
        observed = self._observe(module, name)
        if observed is not None and listener not in observed.early:
            observed.early.append(listener)

    def stop_listening(self, listener: Listener) -> None:
        for key, observed in list(self._by_name.items()):
            for listeners in (observed.listeners, observed.early):
                if listener in listeners:
                    listeners.remove(listener)
            if not observed.listeners and not observed.early:
                del self._by_name[key]
                observed.undo.close()

    def is_listening(self, listener: Listener) -> bool:
        return any(listener in observed.listeners for observed in self._by_name.values())

    def replace_imported_names(self, listeners: Iterable[Listener]) -> None:
        """Also observe functions that the program's modules imported by name; cannot be undone."""
        ours = set(listeners)
        wrappers = {
            address(observed.original): observed.wrapper
            for observed in self._by_name.values()
            if ours & {*observed.listeners}
        }
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not is_library(file):
                for name, value in [*vars(module).items()]:
                    if address(value) in wrappers:
                        setattr(module, name, wrappers[address(value)])

    def _observe(self, module: str, name: str) -> _Observed | None:
        owner, attribute = _owner(module, name)
        original = getattr(owner, attribute, None)
        if original is None:
            return None
        observed = self._by_name.get((module, name))
        if observed is None:
            # A function with several names keeps one wrapper.
            known = (
                seen for seen in self._by_name.values() if original in (seen.original, seen.wrapper)
            )
            observed = next(known, None) or _Observed(module, name, original)
            self._by_name[module, name] = observed
            patch(observed.undo, owner, attribute, observed.wrapper, observed.original)
        return observed


_functions = ObservedFunctions()
listen = _functions.listen
listen_before = _functions.listen_before
stop_listening = _functions.stop_listening
is_listening = _functions.is_listening
replace_imported_names = _functions.replace_imported_names


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
