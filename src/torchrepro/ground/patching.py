"""Replace an attribute or an environment variable until an undo.

Other code may wrap our replacement of an attribute before the undo. The undo then keeps that
wrapper, which still calls our replacement. So a replacement must also work after the undo. If that
wrapper is ours as well, its own undo removes both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import finalize

_undone: dict[tuple[int, str, int], Any] = {}
"""Owner, attribute and replacement, if that was wrapped when it was undone -> what it replaced."""


class MissingHookError(Exception):
    """The function to be wrapped does not exist, because the library has another version."""


def patch(undo: ExitStack, owner: Any, name: str, value: Any, before: Any) -> None:
    """Set the attribute `name` of `owner` to `value`. When `undo` closes, set it to `before`."""
    setattr(owner, name, value)

    def restore() -> None:
        if getattr(owner, name, None) is value:
            setattr(owner, name, _still_in_force(owner, name, before))
        elif callable(value):
            key = id(owner), name, id(value)
            _undone[key] = before
            finalize(value, _undone.pop, key)

    undo.callback(restore)


def _still_in_force(owner: Any, name: str, value: Any) -> Any:
    while (key := (id(owner), name, id(value))) in _undone:
        value = _undone[key]
    return value


def wrap(undo: ExitStack, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Replace the attribute `name` of `owner` by ``wrapping(original)`` until `undo` closes.

    Raises `MissingHookError` if `owner` has no such callable.
    """
    original = vars(owner).get(name)
    if not callable(original):
        path = getattr(owner, "__qualname__", owner.__name__)
        raise MissingHookError(f"{path}.{name}")
    patch(undo, owner, name, wraps(original)(wrapping(original)), original)


def surround(undo: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Do as `wrap`, with a wrapper that returns ``around(original, *args, **kwargs)``."""
    wrap(undo, owner, name, lambda original: lambda *args, **kw: around(original, *args, **kw))


def surround_everywhere(
    undo: ExitStack,
    module: Any,
    name: str,
    around: Callable[..., Any],
    among: Collection[Any] | None = None,
) -> None:
    """Do as `surround`, also in other modules that imported the function under the same name.

    Searches the modules in `among`, by default all modules. In a forked child, a search of all
    modules would copy their memory.

    The undo restores the function in the same modules. A module that imported the wrapper under
    another name keeps it, so the wrapper itself must check whether a profile is active. Raises
    `MissingHookError` if `module` has no such function.
    """
    original = vars(module).get(name)
    surround(undo, module, name, around)
    wrapper = vars(module)[name]

    def replace_everywhere(present: Any, value: Any) -> None:
        for importer in list(sys.modules.values() if among is None else among):
            if getattr(importer, "__dict__", {}).get(name) is present:
                setattr(importer, name, value)

    undo.callback(lambda: replace_everywhere(wrapper, _still_in_force(module, name, original)))
    replace_everywhere(original, wrapper)


def set_variable(name: str, text: str | None) -> None:
    """Set the environment variable `name` to `text`, or remove it if `text` is None."""
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


@contextmanager
def variables_restored(names: Iterable[str] | None = None) -> Iterator[None]:
    """Restore the environment variables `names`, by default all, at the end of the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        restored = before.keys() | os.environ.keys() if names is None else names
        for name in restored:
            if os.environ.get(name) != before.get(name):
                set_variable(name, before.get(name))
