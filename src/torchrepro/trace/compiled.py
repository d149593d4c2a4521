"""Compiled code under a recording: it stays compiled, and each region of it is one record."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import torch

from torchrepro.imports import AfterImport
from torchrepro.trace.mode import RecordingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OPTION = "wrap_inductor_compiled_regions"
_INDUCTOR, _DYNAMO = "torch._inductor.config", "torch._dynamo"
_LOOKED_INTO = "module_hook"  # says itself what it is while a compiler looks at it
_left_out: list[bool] = []  # once is enough for a process


@contextmanager
def left_out_of_compilation() -> Iterator[None]:
    """Have torch.compile leave torchrepro's own code out where it meets it between two regions."""
    with _once_imported(_DYNAMO, _leave_out):
        yield


@contextmanager
def compiled_regions_seen() -> Iterator[None]:
    """Have regions that inductor compiles from now on pass through the dispatcher as one op.

    The option is inductor's own and leaves the generated code as it is; without it (older torch)
    the kernels that inductor wrote are not seen, those of libraries that it calls are.
    """
    with ExitStack() as back:
        back.enter_context(_once_imported(_INDUCTOR, lambda: _wrap_regions(back)))
        yield


@contextmanager
def _once_imported(module: str, call: Callable[[], None]) -> Iterator[None]:
    """Call back when `module` has been imported, at once if it is."""
    waiting = AfterImport((module,), lambda _: call())
    waiting.watch()
    if module in sys.modules:
        call()
    try:
        yield
    finally:
        waiting.unwatch()


def _wrap_regions(back: ExitStack) -> None:
    config = sys.modules[_INDUCTOR]
    if hasattr(config, _OPTION):
        back.callback(setattr, config, _OPTION, getattr(config, _OPTION))
        setattr(config, _OPTION, True)


def _leave_out() -> None:
    """Name our modules to torch.compile.

    ``trace_rules.add`` is not documented; the documented ``torch.compiler.disable`` costs a
    microsecond per op even where nothing is compiled, and is what remains were it gone.
    """
    if _left_out:
        return
    _left_out.append(True)
    rules = import_module("torch._dynamo.trace_rules")
    if hasattr(rules, "add"):
        for module in _own_modules():
            rules.add(module)
        return
    taken = RecordingMode.__torch_dispatch__
    RecordingMode.__torch_dispatch__ = torch.compiler.disable(taken)  # type: ignore[method-assign, no-untyped-call]


def _own_modules() -> list[str]:
    whole, part = (name.rpartition(".")[0] for name in (__package__, __name__))
    found = []
    for package in (whole, part):
        path = import_module(package).__path__
        found += [f"{package}.{module.name}" for module in iter_modules(path)]
    return [name for name in found if name not in (part, f"{part}.{_LOOKED_INTO}")]
