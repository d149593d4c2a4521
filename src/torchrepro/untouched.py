"""Leaving a process as it was, for the command that will take its place."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def untouched() -> Iterator[None]:
    """Put variables and usable CPUs back to what they are now when the block ends.

    Libraries that torch loads may export variables, and OpenMP binds the thread that loads it if
    OMP_PROC_BIND says so: a command started in this process's place would inherit both.
    https://www.openmp.org/spec-html/5.2/openmpse57.html
    """
    variables = dict(os.environ)
    get = getattr(os, "sched_getaffinity", None)
    cpus = get(0) if get else None
    try:
        yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        for name, value in variables.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
