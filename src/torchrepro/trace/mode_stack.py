"""Takes dispatch modes off the stack of their thread while they have nothing to do.

A mode on the stack costs a call of Python for every op, whatever it does. Torch has no public way
to take one off that a program may have entered others above. The stack is read and changed by three
functions of its own; were one of them gone, a mode would stay on the stack and do nothing there.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from collections.abc import Collection

_read: Any = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
_push: Any = getattr(_python_dispatch, "_push_mode", None)
_pop: Any = getattr(_python_dispatch, "_pop_mode", None)
_IS_KNOWN = None not in (_read, _push, _pop)


class ModesTakenOff:
    """The modes that were taken off the stacks of their threads.

    A thread's stack can be changed on that thread alone.
    """

    def __init__(self) -> None:
        self._modes: dict[threading.Thread, Any] = {}
        self._is_allowed = _IS_KNOWN

    def take_off(self, modes: Collection[Any]) -> None:
        """Take the one of `modes` that this thread has off its stack, wherever in it."""
        own = next((mode for mode in _of_thread() if mode in modes), None) if _IS_KNOWN else None
        if self._is_allowed and own is not None:
            _remove(own)
            self._modes[threading.current_thread()] = own

    def put_back(self) -> bool:
        """Put all back at the bottom of their stacks; returns whether all of them are there.

        Whatever the program has entered meanwhile stays above: it is what the program leaves next.
        """
        mode = self._modes.pop(threading.current_thread(), None)
        if mode is not None:
            _insert(mode)
        # The steps of this program end on several threads.
        left = [thread for thread in self._modes if thread.is_alive()]
        self._is_allowed = self._is_allowed and not left
        return not left

    def end(self, mode: Any) -> None:
        """Have `mode` at the top of this thread's stack, where leaving it takes it off."""
        if _IS_KNOWN and _of_thread()[-1:] != [mode]:
            self._modes.pop(threading.current_thread(), None)
            _remove(mode)
            _push(mode)


def _of_thread() -> list[Any]:
    """Return the modes on this thread's stack that are not part of torch, the outermost first."""
    return [mode for mode in _read() if getattr(mode, "_mode_key", None) is None]


def _remove(mode: Any) -> None:
    modes = _of_thread()
    if mode not in modes:
        return
    above = []
    while (top := _pop()) is not mode:
        above.append(top)
    for each in reversed(above):
        _push(each)


def _insert(mode: Any) -> None:
    above = [_pop() for _ in _of_thread()]
    for each in (mode, *reversed(above)):
        _push(each)
