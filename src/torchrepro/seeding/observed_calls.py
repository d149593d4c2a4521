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
from typing import Any, NamedTuple

from torchrepro.ground.callers import address, is_library
from torchrepro.ground.patching import patch


class Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    function: str  # the first observed name
    frame: FrameType  # that made the call

    def argument(self, position: int, *keywords: str) -> Any:
        """Return the argument at `position`, or under the first of `keywords`, or None."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in keywords if name in self.kwargs), None)


Change = Callable[[Any], Any]  # from the result of the function to the result for the caller
Listener = Callable[[Call], Change | None]


class _Observed:
    """A function with its wrapper, which all modules and classes with the function get."""

    def __init__(self, module: str, name: str, original: Any) -> None:
        self.name = f"{module}.{name}"  # the first observed name
        self.original = original
        self.undo = ExitStack()
        self.listeners: dict[Listener, bool] = {}  # whether one is called before the function
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
        self._observe(module, name, listener, before=False)

    def listen_before(self, module: str, name: str, listener: Listener) -> None:
        """Call `listener` before each call of a function, and ignore the listener's result."""
        self._observe(module, name, listener, before=True)

    def stop_listening(self, listener: Listener) -> None:
        for key, observed in list(self._by_name.items()):
            observed.listeners.pop(listener, None)
            if not observed.listeners:
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
            if ours & observed.listeners.keys()
        }
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not is_library(file):
                for name, value in [*vars(module).items()]:
                    if address(value) in wrappers:
                        setattr(module, name, wrappers[address(value)])

    def _observe(self, module: str, name: str, listener: Listener, *, before: bool) -> None:
        owner, attribute = _owner(module, name)
        original = getattr(owner, attribute, None)
        if original is None:
            return
        observed = self._by_name.get((module, name))
        if observed is None:
            # A function with several names keeps one wrapper.
            known = (
                seen for seen in self._by_name.values() if original in (seen.original, seen.wrapper)
            )
            observed = next(known, None) or _Observed(module, name, original)
            self._by_name[module, name] = observed
            patch(observed.undo, owner, attribute, observed.wrapper, observed.original)
        observed.listeners.setdefault(listener, before)


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
    @wraps(observed.original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(observed, args, kwargs)

    return call


def _call(observed: _Observed, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if _is_compiling() or not observed.listeners:
        return observed.original(*args, **kwargs)
    wrapper = sys._getframe(1)  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    # The file of `Call.__new__` is `<string>`, which an observer of lines takes for the program.
    call = Call._make((args, kwargs, observed.name, wrapper.f_back or wrapper))
    for listener, is_before in tuple(observed.listeners.items()):
        if is_before:
            with suppress(Exception):
                listener(call)
    returned = observed.original(*args, **kwargs)
    if wrapper.f_back is None:
        return returned  # a thread runs the function: no line of the program called it
    for listener, is_before in tuple(observed.listeners.items()):
        change = None
        with suppress(Exception):  # the program's arguments may raise; its call has succeeded
            change = None if is_before else listener(call)
        if change is not None:
            returned = change(returned)
    return returned


class _BuiltIn:
    """The wrapper of a function that never becomes a method, such as a function written in C."""

    def __init__(self, observed: _Observed) -> None:
        update_wrapper(self, observed.original)
        self._observed, self._original = observed, observed.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self._observed, args, kwargs)

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
