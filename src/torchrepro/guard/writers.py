"""Who writes: torch's setters and the environment are wrapped, and say so as they are written.

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
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.callers import frames, is_library, line, package
from torchrepro.outcomes import Writer
from torchrepro.patching import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
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

_THEIRS = frozenset({"torch", "torch_npu", "torchrepro", *sys.stdlib_module_names})

UNSEEN = Writer()


class SwitchFunction(NamedTuple):
    """One function of a framework that switches determinism on or off."""

    module: str
    function: str
    name: str
    """What its users call it."""

    variables: Mapping[str, str] = {}
    """What it sets in the environment, where that tells it from others."""


_FULL_DETERMINISM = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
}
_HUGGING_FACE = "transformers.trainer_utils"
_LIGHTNING = "trainer.connectors.accelerator_connector"
_RAY_TRAIN = "train_loop_utils"

SWITCH_FUNCTIONS = (
    SwitchFunction(
        _HUGGING_FACE,
        "enable_full_determinism",
        "transformers' enable_full_determinism",
        _FULL_DETERMINISM,
    ),
    SwitchFunction(_HUGGING_FACE, "set_seed", "transformers' set_seed(deterministic)"),
    SwitchFunction("accelerate.utils.random", "set_seed", "accelerate's set_seed(deterministic)"),
    *(
        SwitchFunction(module, "_set_torch_flags", "Lightning's Trainer(deterministic)")
        for module in (f"lightning.pytorch.{_LIGHTNING}", f"pytorch_lightning.{_LIGHTNING}")
    ),
    *(
        SwitchFunction(module, "enable_reproducibility", "Ray Train's enable_reproducibility")
        for module in (f"ray.train.torch.{_RAY_TRAIN}", f"ray.train.v2.torch.{_RAY_TRAIN}")
    ),
)
"""The functions by which frameworks switch determinism on or off.

Nothing depends on a row but the name: what a switch writes is judged as any other write is.
"""

_NAMES = {(row.module, row.function): row.name for row in SWITCH_FUNCTIONS}


def watch_writers(notify: Callable[[], None]) -> ExitStack:
    """Have `notify` called after every write; closing what is returned takes everything back.

    Changes attributes of ``torch._C``, of the flags of ``torch.backends``, of the class of torch's
    compiler settings and of the class of `os.environ`. A write that another name was kept of
    before, as by ``from torch import set_num_threads``, is not seen.
    """
    listeners = [notify]

    def followed(setter: Callable[..., Any]) -> Any:
        def writing(*args: Any, **kwargs: Any) -> Any:
            try:
                return setter(*args, **kwargs)
            finally:  # some setters assign first and refuse afterwards
                for listener in listeners:
                    listener()

        # What torch.compile looks for to leave a function alone; importing it takes a second.
        writing._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        return writing

    with ExitStack() as undo:
        undo.callback(listeners.clear)  # our wrapper may stay, within somebody else's
        for owner, name in tuple(setters()):
            wrap(undo, owner, name, followed)
        return undo.pop_all()


def setters() -> Iterator[tuple[Any, str]]:
    """Yield everything through which torch and the environment are written: owner and attribute.

    Torch offers no way to hear of a write, so these are private: the setters of its C module
    (``torch._C._set_*``), what the flags of ``torch.backends`` keep of them (``ContextProp``) and
    the assignment to a setting of the compiler (``ConfigModule``). Where one is gone or renamed,
    the guard says before which step a knob was changed, and not by which line.
    """
    torch: Any = import_module("torch")
    for name, setter in list(vars(torch._C).items()):  # noqa: SLF001 - see above
        if any(fnmatchcase(name, pattern) for pattern in _SETTERS):
            yield torch._C, name  # noqa: SLF001 - see above
            if vars(torch).get(name) is setter:
                yield torch, name
    flag = getattr(import_module("torch.backends"), "ContextProp", None)
    for name, module in list(sys.modules.items()):
        if flag is not None and name.startswith("torch.backends."):
            # A flag calls the function that it was made with, whatever torch._C holds later.
            flags = (value for value in vars(type(module)).values() if isinstance(value, flag))
            yield from ((value, "setter") for value in flags)
    settings = getattr(import_module("torch.utils._config_module"), "ConfigModule", None)
    if settings is not None and "__setattr__" in vars(settings):
        yield settings, "__setattr__"
    # What every change of `os.environ` comes down to, `pop`, `update` and `clear` included.
    yield from ((type(os.environ), name) for name in ("__setitem__", "__delitem__"))


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
    return _NAMES.get((str(frame.f_globals.get("__name__")), frame.f_code.co_name), "")


def switch_that_sets(variable: str, text: str) -> str:
    """Return the switch all of whose variables now read as it sets them, or an empty string.

    Its module is loaded, and `variable` with this `text` is among them.
    """
    for row in SWITCH_FUNCTIONS:
        as_set = (os.environ.get(name) == its for name, its in row.variables.items())
        if row.variables.get(variable) == text and row.module in sys.modules and all(as_set):
            return row.name
    return ""
