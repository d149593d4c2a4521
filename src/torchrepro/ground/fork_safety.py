"""Locks that are free in a forked child, even if another thread of the parent had acquired them.

The module also detects multiprocessing's fork server, a process that only forks children.

`import torchrepro` loads this module, so it imports only modules that Python has already loaded.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock
from _weakref import ref

loading = RLock()
"""Acquired while a public name is loaded. A fork waits for this lock, because a child
that is forked during the import would wait forever for the half-imported module."""

applying = RLock()  # acquired while a profile is applied or restored

_SECONDS = 0.05  # how long a fork that has acquired `loading` waits for `applying`

_locks: set[ref[RLock]] = set()


def comes_from_fork_server() -> bool:
    """Whether this process is the fork server of multiprocessing, or was forked by it."""
    return any("multiprocessing.forkserver" in word for word in sys.orig_argv)


def is_fork_server() -> bool:
    """Whether this process is the fork server of multiprocessing, and not one of its children."""
    from multiprocessing import current_process

    return comes_from_fork_server() and current_process().name == "MainProcess"


def fork_safe_lock() -> RLock:
    """Return a re-entrant lock that is free in a child, even if another thread had acquired it.

    Only the thread that forks exists in the child, so a lock of another thread would never be
    released (https://docs.python.org/3/library/os.html#os.register_at_fork).
    """
    lock = RLock()
    _locks.add(ref(lock, _locks.discard))
    return lock


def _acquire_both() -> None:
    # A thread that has `applying` may need `loading`. So a fork releases `loading` and tries again.
    while True:
        loading.acquire()
        if applying.acquire(timeout=_SECONDS):
            return
        loading.release()


def _release_both() -> None:
    applying.release()
    loading.release()


def _release_in_child() -> None:
    """Free the locks that other threads of the parent had acquired; this thread keeps its own.

    Uses the private ``_at_fork_reinit``, as Python's own modules do. If Python removes it, a child
    that is forked while another thread has the lock waits forever, as for any other lock.
    """
    _release_both()
    for lock in filter(None, [reference() for reference in tuple(_locks)]):
        if lock.acquire(blocking=False):
            lock.release()
            continue
        free = getattr(lock, "_at_fork_reinit", None)
        if free is not None:
            free()


if hasattr(os, "register_at_fork"):  # only POSIX has forks
    os.register_at_fork(
        before=_acquire_both, after_in_parent=_release_both, after_in_child=_release_in_child
    )
