"""What a framework imports by itself, with or without a profile: it has to cost nothing.

It loads the standard library only, and gives nothing where no profile is in force.
"""

import sys

TYPE_CHECKING = False  # type checkers know the name; importing typing would cost 5 ms

if TYPE_CHECKING:
    from typing import Any


def lightning() -> "list[Any]":
    """Return the callbacks for a `Trainer` of the package `lightning`."""
    return _callback("LightningRunState")


def pytorch_lightning() -> "list[Any]":
    """Return the callbacks for a `Trainer` of the package `pytorch_lightning`."""
    return _callback("PytorchLightningRunState")


def fabric() -> "list[Any]":
    """Return the callbacks for a `Fabric`, of whichever package."""
    return _callback("ProfileLogged")


def _callback(name: str) -> "list[Any]":
    hooked = sys.modules.get("torchrepro.frameworks.lightning")
    return [] if hooked is None or hooked.in_force() is None else [getattr(hooked, name)()]
