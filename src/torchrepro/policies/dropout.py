"""Dropout as the identity, at torch's dispatcher, for every caller in the process.

An override of the composite ops reaches `F.dropout`, `nn.Dropout`, names imported before it,
recurrent layers and attention alike (https://docs.pytorch.org/docs/stable/library.html). Code
that torch.compile or torch.export captured, and fused attention kernels, call other ops: they
keep their dropout.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_OUT_OF_PLACE = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_IN_PLACE = tuple(f"{name}_" for name in _OUT_OF_PLACE)
_installed: list[Any] = []  # the torch.library.Library that holds the overrides, while it is there


@dataclass(frozen=True, slots=True)
class DropoutPolicy:
    """Whether dropout is zeroed: `keep` leaves torch's ops alone, `zero` overrides them."""

    def read(self) -> Any:
        return "zero" if _installed else "keep"

    def write(self, value: str) -> None:
        if value == self.read():
            return
        if value == "zero":
            _installed.append(_override())
        else:
            _installed.clear()  # dropping the library takes its overrides back

    save = read
    restore = write


def _override() -> Any:
    torch = import_module("torch")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these ops have an implementation
        for name in _OUT_OF_PLACE:
            library.impl(name, _identity, "CompositeImplicitAutograd")
        for name in _IN_PLACE:
            library.impl(name, _identity_in_place, "CompositeImplicitAutograd")
    return library


def _identity(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001 - aten's schema
    # A copy, because code after dropout may write to its result in place.
    return tensor.clone() if train else tensor


def _identity_in_place(tensor: Any, p: float, train: bool) -> Any:  # noqa: FBT001
    return tensor
