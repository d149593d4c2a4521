"""Who writes: torch's setters and the environment tell as they are written.

Nothing in torch says who changed a flag, so while a guard wants to know, the functions through
which flags and variables change are wrapped: those of torch's C module that torch itself looks up
whenever it needs them, those that the flags of ``torch.backends`` keep, the assignment to a setting
of the compiler, and the two methods behind `os.environ`.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.callers import frames, is_library, line, package
from torchrepro.guard.switch_functions import switch_of
from torchrepro.outcomes import Writer
from torchrepro.patching import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SETTERS = (
    "_set_cublas_*",
    "_set_cudnn_*",
    "_cuda_set_cudnn_*",
    "_set_mkldnn_*",
    "_set_onednn_*",
    "_set_sdp_use_*",
    "_set_deterministic_*",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_*_preferred_backend",
    "_set_default_dtype",
    "set_num_threads",
)
"""Patterns of the names of the functions of torch's C module that write what knobs read."""

_ENVIRONMENT = ("__setitem__", "__delitem__")
"""What every change of `os.environ` comes down to, `pop`, `update` and `clear` included."""

_CONFIG = "torch.utils._config_module"
_THEIRS = frozenset({"torch", "torch_npu", "torchrepro", *sys.stdlib_module_names})


UNSEEN = Writer()


def watch_writers(then: Callable[[], None]) -> ExitStack:
    """Have `then` called after every write; closing what is returned takes everything back.

    Changes attributes of ``torch._C``, of the flags of ``torch.backends``, of the class of torch's
    compiler settings and of the class of `os.environ`. A write that another name was kept of
    before, as by ``from torch import set_num_threads``, is not seen.
    """
    told = [then]
    with ExitStack() as undo:
        undo.callback(told.clear)  # our wrapper may stay, within somebody else's
        environment = ((type(os.environ), name) for name in _ENVIRONMENT)
        setters = (*_c_setters(), *_flag_setters(), *_setting_setters(), *environment)
        for owner, name in setters:
            wrap(undo, owner, name, partial(_followed, told=told))
        return undo.pop_all()


def present_writer() -> Writer:
    """Return who writes now."""
    nearest = _nearest()
    if nearest is None:
        return UNSEEN
    own = next(
        (each for each in frames(nearest) if not is_library(each.f_code.co_filename)), nearest
    )
    called = line(own) if own is not nearest else ""
    return Writer(line(nearest), called, _switch(nearest))


def switch_that_calls() -> Writer:
    """Return who writes now if it is a framework's determinism switch, else nobody."""
    nearest = _nearest()
    return present_writer() if nearest is not None and _switch(nearest) else UNSEEN


def _nearest() -> FrameType | None:
    """Return the nearest caller outside torch, Python and torchrepro."""
    return next((each for each in frames() if package(each) not in _THEIRS), None)


def _switch(frame: FrameType) -> str:
    return switch_of(frame.f_globals.get("__name__"), frame.f_code.co_name)


def _c_setters() -> Iterator[tuple[Any, str]]:
    """Yield the setters of torch's C module, and the public names that torch gives to them.

    Private (``torch._C._set_*``): torch offers no way to be told of a write. Where one is gone or
    renamed, the guard says before which step a knob was changed, and not by which line.
    """
    torch: Any = import_module("torch")
    for name, setter in list(vars(torch._C).items()):  # noqa: SLF001 - see above
        if any(fnmatchcase(name, pattern) for pattern in _SETTERS):
            yield torch._C, name  # noqa: SLF001 - see above
            if vars(torch).get(name) is setter:
                yield torch, name


def _flag_setters() -> Iterator[tuple[Any, str]]:
    """Yield the setters that the flags of ``torch.backends`` keep, such as ``cudnn.benchmark``.

    Undocumented (``torch.backends.ContextProp``): a flag calls the function that it was made with,
    whatever ``torch._C`` holds later. Where it is gone, the line of such a write is not seen.
    """
    flag = getattr(import_module("torch.backends"), "ContextProp", None)
    for name, module in list(sys.modules.items()):
        if flag is not None and name.startswith("torch.backends."):
            for value in vars(type(module)).values():
                if isinstance(value, flag):
                    yield value, "setter"


def _setting_setters() -> Iterator[tuple[Any, str]]:
    """Yield the assignment to a setting, such as ``torch._inductor.config.deterministic``.

    Private (``ConfigModule``): settings are no plain attributes and have no hook. Where it is
    gone, the line of such a write is not seen.
    """
    settings = getattr(import_module(_CONFIG), "ConfigModule", None)
    if settings is not None and "__setattr__" in vars(settings):
        yield settings, "__setattr__"


def _followed(setter: Callable[..., Any], told: list[Callable[[], None]]) -> Any:
    def writing(*args: Any, **kwargs: Any) -> Any:
        try:
            return setter(*args, **kwargs)
        finally:  # some setters assign first and refuse afterwards
            for then in told:
                then()

    # What torch.compile looks for to leave a function alone; importing it to say so takes a second.
    writing._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above
    return writing
