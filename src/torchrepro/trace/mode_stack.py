"""Takes dispatch modes off the stack of their thread while they have nothing to do.

A mode on the stack costs a call of Python for every op, whatever it does. Torch has no public way
to take one off that a program may have entered others above. The stack is read and changed by three
functions of its own, and a fourth one says whether a backward pass runs; were one of them gone, a
mode would stay on the stack and do nothing there.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from collections.abc import Collection

_read: Any = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
_push: Any = getattr(_python_dispatch, "_push_mode", None)
_pop: Any = getattr(_python_dispatch, "_pop_mode", None)
_backward_pass: Any = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001 - see above
_IS_KNOWN = None not in (_read, _push, _pop, _backward_pass)
_NO_PASS = -1


class ModesTakenOff:
    """The modes that were taken off the stacks of their threads.

    A thread's stack can be changed on that thread alone, and not within a backward pass: autograd
    puts back the stack with which the pass began. Modes stay where they are in a program whose
    steps end within backward passes, or on several threads.
    """

    def __init__(self) -> None:
        self._modes: WeakKeyDictionary[threading.Thread, Any] = WeakKeyDictionary()
        self._is_allowed = _IS_KNOWN

    def take_off(self, modes: Collection[Any]) -> None:
        """Take the one of `modes` that this thread has off its stack, wherever in it."""
        if self._is_allowed and _is_within_backward():
            self._is_allowed = False
        if not self._is_allowed:
            return
        own = next((mode for mode in _of_thread() if mode in modes), None)
        if own is not None:
            _remove(own)
            self._modes[threading.current_thread()] = own

    def put_back(self) -> bool:
        """Put all back at the bottom of their stacks; returns whether all of them are there.

        Whatever the program has entered meanwhile stays above: it is what the program leaves next.
        """
        self._put_back_own()
        # Another thread may put its own back meanwhile: `keyrefs` is a copy.
        threads = (known() for known in self._modes.keyrefs())
        left = any(thread is not None and thread.is_alive() for thread in threads)
        self._is_allowed = self._is_allowed and not left
        return not left

    def before_backward(self) -> None:
        """Put the mode of this thread back if steps end within the pass that is about to begin."""
        if not self._is_allowed:
            self._put_back_own()

    def end(self, mode: Any) -> None:
        """Have `mode` at the top of this thread's stack, where leaving it takes it off."""
        self._modes.pop(threading.current_thread(), None)
        if _IS_KNOWN:
            _remove(mode)
            _push(mode)

    def _put_back_own(self) -> None:
        if self._modes and not _is_within_backward():
            mode = self._modes.pop(threading.current_thread(), None)
            if mode is not None:
                _insert(mode)


def _is_within_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return bool(_backward_pass() != _NO_PASS)


def _of_thread() -> list[Any]:
    """Return the modes on this thread's stack that are not part of torch, the outermost first."""
    return [mode for mode in _read() if getattr(mode, "_mode_key", None) is None]


def _remove(mode: Any) -> None:
    """Take every copy of a mode off this thread's stack."""
    modes = _of_thread()
    if mode in modes:
        _replace(modes, [each for each in modes if each is not mode])


def _insert(mode: Any) -> None:
    """Put a mode at the bottom of this thread's stack, unless it is on it."""
    modes = _of_thread()
    if mode not in modes:
        _replace(modes, [mode, *modes])


def _replace(modes: list[Any], others: list[Any]) -> None:
    for _ in modes:
        _pop()
    for each in others:
        _push(each)
