"""Reading what a machine has, row by row, so that no row can fail a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

UNKNOWN = "unknown: "
"""How a value begins that could not be read; the reason follows."""


class NotKnownYetError(Exception):
    """Nobody can say yet: the library that knows is not loaded, or the device is not in use."""


def read_rows(rows: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what each of `rows` reads by its name: null for what is not here.

    Rows of which nobody can say anything yet are left out; one that fails is ``unknown: `` and
    the reason.
    """
    found = {}
    for name, read in rows.items():
        try:
            found[name] = read()
        except NotKnownYetError:
            continue
        except Exception as error:  # noqa: BLE001 - a machine that is odd must not fail the run
            words = str(error).partition("\n")[0]
            found[name] = f"{UNKNOWN}{type(error).__name__}{f': {words}' if words else ''}"
    return found


def loaded(module: str) -> Any:
    """Return a module that the program has loaded; raises `NotKnownYetError` for another."""
    found = sys.modules.get(module)
    if found is None:
        raise NotKnownYetError(module)
    return found
