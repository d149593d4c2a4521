"""Locks that a forked child finds free, whatever other threads of its parent were doing.

Also which processes Python forks by its fork server, which are forked before they run the program.

The package imports this module at once, so it imports nothing that is not loaded already.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock
from _weakref import ref

loading = RLock()
"""Held while a public name is loaded: a child would wait for a half imported module for ever."""

applying = RLock()  # held while a profile is put in force or taken back

_SECONDS = 0.05  # how long a fork waits for the second of the two with the first one in hand

_locks: set[ref[RLock]] = set()


def comes_from_fork_server() -> bool:
    """Whether this process is the fork server of multiprocessing, or was forked by it."""
    return any("multiprocessing.forkserver" in word for word in sys.orig_argv)


def is_fork_server() -> bool:
    """Whether this process is the fork server: its children get another name as they begin."""
    from multiprocessing import current_process

    return comes_from_fork_server() and current_process().name == "MainProcess"


def fork_safe_lock() -> RLock:
    """Return a re-entrant lock that is free in a child that is forked while a thread holds it.

    Only the thread that forks lives on in the child: a lock that another one held would never be
    released there (https://docs.python.org/3/library/os.html#os.register_at_fork).
    """
    lock = RLock()
    _locks.add(ref(lock, _locks.discard))
    return lock


def _wait() -> None:
    # Whoever holds one of the two may need the other: a fork does not wait for it with one in hand.
    while True:
        loading.acquire()
        if applying.acquire(timeout=_SECONDS):
            return
        loading.release()


def _go_on() -> None:
    applying.release()
    loading.release()


def _go_on_in_child() -> None:
    """Free what other threads of the parent held; the thread that lives on keeps its own locks.

    Private (``_at_fork_reinit``), as Python's own modules do it. Where it is gone, a child that is
    forked while another thread holds a lock waits for it for ever, as with any other lock.
    """
    _go_on()
    for lock in filter(None, [reference() for reference in tuple(_locks)]):
        if lock.acquire(blocking=False):
            lock.release()
            continue
        free = getattr(lock, "_at_fork_reinit", None)
        if free is not None:
            free()


if hasattr(os, "register_at_fork"):  # POSIX alone has forks
    os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on_in_child)
