"""Entry points for frameworks, which import this module with or without a profile.

To cost nothing, it only imports the standard library. Without an active profile there are no
callbacks.
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
