"""Functions of other libraries, and modules of a model, whose calls somebody listens to.

A function gets one stand-in, however many listen and under however many names it is known. The
stand-in calls the function first, so no listener is called for a call that is refused, but for
those of `listen_before`. What a listener returns changes what the caller gets. The last listener
that leaves puts the function itself back, unless the program has put another there since.

While torch.compile traces the program, a stand-in is the function and nothing more: it causes no
break in the graph, and no listener is called. Of all our code, a compiler may trace this module
alone: it leaves code out by its module.
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

Change = Callable[[Any], Any]  # what a program gets in place of what the function returned
Listener = Callable[[str, tuple[Any, ...], Mapping[str, Any], FrameType], Change | None]
"""Called with the function's first name, its arguments, and the frame that called it."""


@dataclass(slots=True, eq=False)
class _Heard:
    name: str  # its first, under which pickle finds the stand-in
    original: Any
    stand_in: Any = None
    undo: ExitStack = field(default_factory=ExitStack)  # for the modules and classes that show it
    listeners: list[Listener] = field(default_factory=list)
    early: list[Listener] = field(default_factory=list)


_heard: dict[tuple[str, str], _Heard] = {}


def listen(module: str, name: str, listener: Listener) -> None:
    """Call `listener` after each call of a function, if the package of its module is loaded.

    `name` may lead through a class, as in ``Thread.start``. A listener is called once for a call,
    by however many names it listens to the function.
    """
    heard = _heard_function(module, name)
    if heard is not None and listener not in heard.listeners:
        heard.listeners.append(listener)


def listen_before(module: str, name: str, listener: Listener) -> None:
    """Do as `listen`, before each call; what `listener` returns changes nothing."""
    heard = _heard_function(module, name)
    if heard is not None and listener not in heard.early:
        heard.early.append(listener)


def _heard_function(module: str, name: str) -> _Heard | None:
    owner, attribute = _owner(module, name)
    original = getattr(owner, attribute, None)
    if original is None:
        return None
    if (module, name) not in _heard:
        # A function that is known under another name keeps one stand-in.
        known = (each for each in _heard.values() if original in (each.original, each.stand_in))
        heard = next(known, None) or _Heard(f"{module}.{name}", original)
        _heard[module, name] = heard
        if heard.stand_in is None:
            is_bound = isinstance(original, MethodType) or not hasattr(type(original), "__get__")
            heard.stand_in = (_BuiltIn if is_bound else _function)(heard)
            heard.stand_in.__module__, heard.stand_in.__qualname__ = module, name
        patch(heard.undo, owner, attribute, heard.stand_in, heard.original)
    return _heard[module, name]


def stop_listening(listener: Listener) -> None:
    for key, heard in list(_heard.items()):
        for listeners in (heard.listeners, heard.early):
            if listener in listeners:
                listeners.remove(listener)
        if not heard.listeners and not heard.early:
            del _heard[key]
            heard.undo.close()


def put_by_name(listeners: Iterable[Listener]) -> None:
    """Put stand-ins where modules of the program hold functions by names of their own, for good."""
    ours = set(listeners)
    heard = {address(each.original): each for each in _heard.values() if ours & {*each.listeners}}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not is_library(file):
            for name, value in [*vars(module).items()]:
                if address(value) in heard:
                    setattr(module, name, heard[address(value)].stand_in)


def is_listening(listener: Listener) -> bool:
    return any(listener in heard.listeners for heard in _heard.values())


def _owner(module: str, name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    package, _, rest = module.partition(".")
    owner: Any = sys.modules.get(module)
    if owner is None and package in sys.modules and rest == "random":
        owner = import_module(module)
    for part in path:
        owner = getattr(owner, part, None)
    return owner, attribute


def _function(heard: _Heard) -> Any:
    original = heard.original

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if heard.early:
            _tell_early(heard, args, kwargs)
        return _tell(heard, args, kwargs, original(*args, **kwargs))

    return call


def _tell_early(heard: _Heard, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for listener in () if _is_compiling() else tuple(heard.early):
        with suppress(Exception):
            listener(heard.name, args, kwargs, sys._getframe(1))  # noqa: SLF001 - see below


def _tell(heard: _Heard, args: tuple[Any, ...], kwargs: Mapping[str, Any], done: Any) -> Any:
    if _is_compiling() or not heard.listeners:
        return done
    caller = sys._getframe(1).f_back  # noqa: SLF001 - documented; `inspect` takes 100 times as long
    if caller is None:
        return done  # a thread has begun with the function: no line of the program called it
    for listener in tuple(heard.listeners):
        try:
            change = listener(heard.name, args, kwargs, caller)
        except Exception:  # noqa: BLE001, S112 - the program's arguments may raise; its call has succeeded
            continue
        if change is not None:
            done = change(done)
    return done


class _BuiltIn:
    """Stands in for a function that never becomes a method, as one written in C."""

    def __init__(self, heard: _Heard) -> None:
        update_wrapper(self, heard.original)
        self._heard, self._original = heard, heard.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._heard.early:
            _tell_early(self._heard, args, kwargs)
        return _tell(self._heard, args, kwargs, self._original(*args, **kwargs))

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self._original == other)  # as in the sets of `os.supports_fd`

    def __hash__(self) -> int:
        return hash(self._original)

    def __repr__(self) -> str:
        return repr(self._original)


@contextmanager
def on_modules_called(call: Callable[[Any, Any], object]) -> Iterator[None]:
    """Call `call` with every module that has been called and what it returned; imports torch.

    Modules inside of a compiled region are not seen.
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
    # torch.compile cannot follow a look at the stack. Torch reads addresses and clocks while it is
    # being imported, when not all of it is there.
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    return hasattr(compiler, "is_compiling") and bool(compiler.is_compiling())
