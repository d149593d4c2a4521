"""Entry points from which frameworks get our callbacks.

Frameworks import this module in every run, so it imports only the standard library. Without an
active profile, each function returns an empty list.
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
    """Return the callbacks for a `Fabric` of either package."""
    return _callback("ProfileLogged")


def _callback(name: str) -> "list[Any]":
    hooked = sys.modules.get("torchrepro.frameworks.lightning")
    return [] if hooked is None or hooked.active_profile() is None else [getattr(hooked, name)()]
