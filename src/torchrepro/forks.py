"""What a fork waits for: a child never begins with what another thread has half done.

It is there as soon as the package is, and imports nothing that is not there already.
"""

import os
from _thread import RLock

loading = RLock()
"""Held while a public name is loaded: a child would wait for a half imported module for ever."""

applying = RLock()
"""Held while a profile is put in force or taken back."""

_SECONDS = 0.05


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


if hasattr(os, "register_at_fork"):  # POSIX alone has forks
    os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on)
