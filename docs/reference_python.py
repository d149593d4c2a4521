"""The public names of the package, each documented by its docstring."""

from __future__ import annotations

import inspect

import torchrepro


def public_names() -> str:
    """Return the documentation of every public name: functions, classes, exceptions."""
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": []}
    for name in torchrepro.__all__:
        value = getattr(torchrepro, name)
        if not inspect.isclass(value):
            kinds["Functions"].append(f".. autofunction:: torchrepro.{name}")
        elif issubclass(value, Exception):
            kinds["Exceptions"].append(
                f".. autoexception:: torchrepro.{name}\n   :show-inheritance:"
            )
        else:
            kinds["Classes"].append(f".. autoclass:: torchrepro.{name}\n   :members:")
    return "\n\n".join(
        f"## {kind}\n\n```{{eval-rst}}\n" + "\n\n".join(entries) + "\n```"
        for kind, entries in kinds.items()
    )
