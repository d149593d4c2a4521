"""Another value for an attribute or a variable of the environment, until it is undone.

Somebody else may wrap meanwhile what we have put in the place of an attribute. Their wrapper stays
at the undo, with ours within: what ours does then is for it to decide.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any


class MissingHookError(Exception):
    """What a hook wraps is not where it was: the library has another version."""


def patch(undo: ExitStack, owner: Any, name: str, value: Any, before: Any) -> None:
    """Give an attribute of `owner` another `value`, and that of `before` back as `undo` closes."""
    setattr(owner, name, value)

    def put_back() -> None:
        if getattr(owner, name, None) is value:
            setattr(owner, name, before)

    undo.callback(put_back)


def wrap(undo: ExitStack, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
    """Put ``wrapping(original)`` in the place of an attribute of `owner` until `undo` is closed.

    Raises `MissingHookError` where there is no such attribute.
    """
    original = vars(owner).get(name)
    if not callable(original):
        where = getattr(owner, "__qualname__", owner.__name__)
        raise MissingHookError(f"{where}.{name}")
    patch(undo, owner, name, wraps(original)(wrapping(original)), original)


def surround(undo: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Do as `wrap`: a call gives what ``around(original, *args, **kwargs)`` does."""
    wrap(undo, owner, name, lambda original: lambda *args, **more: around(original, *args, **more))


def surround_everywhere(
    undo: ExitStack,
    module: Any,
    name: str,
    around: Callable[..., Any],
    among: Collection[Any] | None = None,
) -> None:
    """Do as `surround` with a function of `module`, and where others have imported it by its name.

    The others are the modules `among`, or all: in a fork that copies memory of each of them.

    So it is undone: who has imported the wrapper by that name gets the function back. Who keeps it
    under another one keeps the wrapper, which has to ask for itself whether a profile is in force.
    Raises `MissingHookError` where there is no such function.
    """
    original = vars(module).get(name)
    surround(undo, module, name, around)
    wrapper = vars(module)[name]

    def replace_everywhere(present: Any, value: Any) -> None:
        for each in list(sys.modules.values() if among is None else among):
            if getattr(each, "__dict__", {}).get(name) is present:
                setattr(each, name, value)

    undo.callback(replace_everywhere, wrapper, original)
    replace_everywhere(original, wrapper)


def set_variable(name: str, text: str | None) -> None:
    """Give the variable `name` the value `text`, or take it away if that is None."""
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


@contextmanager
def variables_put_back(names: Iterable[str] | None = None) -> Iterator[None]:
    """Give the variables `names`, or all there are, back what they are now as the block ends."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in before.keys() | os.environ.keys() if names is None else names:
            if os.environ.get(name) != before.get(name):
                set_variable(name, before.get(name))
