"""What was imported before a profile could be put in force, and by which pytest plugin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

LIBRARIES = ("torch", "torch_npu", "transformer_engine")
"""What reads environment variables, or fixes other state, while it is imported."""


def imported_early(config: pytest.Config) -> tuple[str, ...]:
    """Return a line for each of the libraries that is loaded already."""
    return tuple(_line(library, config) for library in LIBRARIES if library in sys.modules)


def _line(library: str, config: pytest.Config) -> str:
    """Say by whom `library` was imported, as far as the order of imports tells.

    Python moves a module to the end of `sys.modules` when its import is complete, and an importer
    is complete after what it imports: the first plugin behind the library has imported it. This
    is how CPython's importlib goes about it, not a promise; elsewhere the name may be wrong,
    which is why the line says how it is known.
    """
    order = list(sys.modules)
    behind = set(order[order.index(library) :])
    if "pytest" in behind:
        return f"imported too early: {library}, before pytest itself"
    plugins = sorted(_plugins(config), key=lambda module: order.index(module.__name__))
    for module in plugins:
        if module.__name__ in behind and module.__name__ != _OWN:
            file = getattr(module, "__file__", None) or "built in"
            return (
                f"imported too early: {library}, by the pytest plugin {module.__name__} ({file}), "
                "as the order of imports tells"
            )
    return f"imported too early: {library}, by a pytest plugin after its own import"


_OWN = "torchrepro.integrations.pytest_plugin"


def _plugins(config: pytest.Config) -> Iterator[Any]:
    for _, plugin in config.pluginmanager.list_name_plugin():
        name = getattr(plugin, "__name__", None)
        if name in sys.modules and sys.modules[name] is plugin:
            yield plugin
