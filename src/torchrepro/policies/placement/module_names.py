"""What the modules of a model are called, and which of them a profile's patterns mean."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ApplyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Segments of names that wrappers add: DDP, torch.compile, FSDP, activation checkpointing."""


def bare(name: str) -> str:
    """Return `name`, or a pattern of names, as in a model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def named(root: Any) -> dict[str, Any]:
    """Return the modules inside `root` by their bare names; of a wrapper, what it wraps."""
    found: dict[str, tuple[str, Any]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        short = bare(name)
        known, _ = found.get(short, ("", None))
        if name and (not known or name.startswith(f"{known}.")):
            found[short] = name, module
    return {short: module for short, (_, module) in found.items()}


@dataclass(frozen=True, slots=True)
class Match:
    """The modules of one model that the patterns mean."""

    patterns: set[str]
    """Those that mean something here."""

    devices: dict[Any, tuple[str, str]]
    """Module -> the name it goes by, and the device it is to run on."""


def match(root: Any, patterns: Mapping[str, str]) -> Match:
    """Return which modules inside `root` the patterns mean, and where each is to run.

    A name says more than a pattern, and a pattern for a module more than one for the list it is
    in. Raises `ApplyError` where two that say as much disagree.
    """
    names = named(root)
    claims: dict[Any, dict[tuple[int, str], str]] = {}
    called: dict[Any, str] = {}  # a module may have several names: the first that a pattern meant
    for name in names:
        for pattern, device in patterns.items():
            strength = _strength(name, bare(pattern))
            for path in _that_run(name, names) if strength else ():
                claim = strength * (2 if path == name else 1), pattern
                claims.setdefault(names[path], {})[claim] = device
                called.setdefault(names[path], path)
    return Match(
        {pattern for by_claim in claims.values() for _, pattern in by_claim},
        {module: (path, _decided(path, claims[module])) for module, path in called.items()},
    )


_BY_GLOB, _BY_NAME = 2, 3


def _strength(name: str, pattern: str) -> int:
    """Return how much `pattern` says about the module called `name`; 0 is nothing."""
    if pattern == name:
        return _BY_NAME
    # What a wrapper wraps as a whole is the model, which no pattern means by chance.
    is_model = all(part in WRAPPERS for part in name.split("."))
    return 0 if is_model or not fnmatchcase(name, pattern) else _BY_GLOB


def _that_run(name: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield `name`, or for a list of modules, which has no forward, the members that have one."""
    forward = getattr(names[name].forward, "__func__", None)
    if forward is not import_module("torch").nn.Module.forward:
        yield name
        return
    for child, _ in names[name].named_children():
        yield from _that_run(f"{name}.{child}", names)


def _decided(name: str, claims: Mapping[tuple[int, str], str]) -> str:
    strongest = max(strength for strength, _ in claims)
    devices = {
        pattern: device for (strength, pattern), device in claims.items() if strength == strongest
    }
    if len(set(devices.values())) > 1:
        said = ", ".join(f"{pattern}: {device}" for pattern, device in devices.items())
        raise ApplyError(f"device.modules: `{name}` is to run on several devices ({said})")
    return next(iter(devices.values()))
