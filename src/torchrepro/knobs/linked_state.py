"""State with several names, which are kept in step: float32 precision, inductor's options.

Since torch 2.9 every (backend, operation) has its own setting, and the older booleans
(`allow_tf32`, `set_float32_matmul_precision`) are views that raise when they no longer fit it
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32). So a write sets the finest name and
brings the older one into step, which keeps code that still reads the older one working.

Inductor reads its variables once, when it is imported, which takes 0.7 s that a program without
torch.compile never needs. Until then the variable is the state, and from then on the option is.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import MissingState, Variable
from torchrepro.patching import set_variable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_FINEST = (  # owners below torch.backends
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_OLDER = {"cuda.matmul": "cuda.matmul", "cudnn.conv": "cudnn", "cudnn.rnn": "cudnn"}
"""Finest name -> the owner of the older boolean `allow_tf32` that covers it."""

_MATMUL_FITS = {  # older word -> the finest settings of matrix products that it stands for
    "highest": {"cuda.matmul": "ieee", "mkldnn.matmul": "ieee"},
    "high": {"cuda.matmul": "tf32", "mkldnn.matmul": "tf32"},
    "medium": {"cuda.matmul": "tf32", "mkldnn.matmul": "bf16"},
}
_CUDNN_FITS = {
    True: {"cudnn.conv": "tf32", "cudnn.rnn": "tf32"},
    False: {"cudnn.conv": "ieee", "cudnn.rnn": "ieee"},
}


@dataclass(frozen=True, slots=True)
class Fp32Precision:
    """The float32 precision of one operation on one backend, such as ``cudnn.conv``."""

    owner: str

    def read(self) -> Any:
        value = _finest(self.owner)
        if value is not None:
            return value
        if self.owner not in _OLDER:
            raise MissingState(f"this torch has no torch.backends.{self.owner}.fp32_precision")
        return "tf32" if _owner(_OLDER[self.owner]).allow_tf32 else "ieee"

    def write(self, value: str) -> None:
        if _finest(self.owner) is None:
            _owner(_OLDER[self.owner]).allow_tf32 = value == "tf32"
            return
        older = _OLDER.get(self.owner)
        if older == "cudnn" and import_module("torch").backends.flags_frozen():
            # The finer setting could be written, and the older name would no longer be readable.
            raise RuntimeError("cuDNN's flags are frozen by disable_global_flags")
        _owner(self.owner).fp32_precision = value
        covered = [_finest(name) for name in _FINEST if _OLDER.get(name) == older]
        if older and set(covered) == {value} and not _is_readable(older):
            settings = _all_finest()
            _owner(older).allow_tf32 = value == "tf32"
            _set_finest(settings)

    def save(self) -> Any:
        self.read()
        torch = import_module("torch")
        return (
            _all_finest(),
            _older(torch.get_float32_matmul_precision, _MATMUL_FITS),
            _older(lambda: torch.backends.cudnn.allow_tf32, _CUDNN_FITS),
        )

    def restore(self, saved: Any) -> None:
        finest, matmul_precision, cudnn_allow_tf32 = saved
        settings = _all_finest() | {self.owner: finest[self.owner]}
        # The older names go first: each of them also moves the finer settings.
        if _OLDER.get(self.owner) == "cuda.matmul":
            import_module("torch").set_float32_matmul_precision(matmul_precision)
        elif _OLDER.get(self.owner) == "cudnn":
            import_module("torch").backends.cudnn.allow_tf32 = cudnn_allow_tf32
        _set_finest(settings)


def _owner(path: str) -> Any:
    owner: Any = import_module("torch").backends
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def _finest(path: str) -> Any:
    return getattr(_owner(path), "fp32_precision", None)


def _all_finest() -> dict[str, Any]:
    return {path: _finest(path) for path in _FINEST}


def _set_finest(values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        if value is not None:
            _owner(path).fp32_precision = value


def _is_readable(older: str) -> bool:
    try:
        _ = _owner(older).allow_tf32
    except RuntimeError:  # as torch raises where the finer settings disagree
        return False
    return True


def _older(read: Callable[[], Any], fits: Mapping[Any, Mapping[str, str]]) -> Any:
    """Return the value of an older name, even where torch raises instead.

    torch answers once the finer settings agree, so they are set to fit each possible value for
    a moment.
    """
    with suppress(RuntimeError):
        return read()
    settings = _all_finest()
    try:
        for value, fitting in fits.items():
            _set_finest(fitting)
            with suppress(RuntimeError):
                if read() == value:
                    return value
    finally:
        _set_finest(settings)
    raise RuntimeError("torch does not say which float32 precision its older names hold")


_CONFIGS = ("torch.compiler.config", "torch._inductor.config")  # newer torch: some in the first


@dataclass(frozen=True, slots=True)
class InductorVariable(Variable):
    """A variable with the values 0 and 1 and the option that starts from it."""

    option: str

    def read(self) -> Any:
        text, option = os.environ.get(self.name), self.present()
        if option is None and _CONFIGS[-1] in sys.modules:
            raise MissingState(f"this torch's inductor has no {self.option}")
        return text if option in (None, text == "1") else "1" if option else "0"

    def holds(self, value: Any) -> bool:
        return os.environ.get(self.name) == value and self.present() in (None, value == "1")

    def write(self, value: str) -> None:
        os.environ[self.name] = value
        self._set(value == "1", {"default": value == "1"})

    def save(self) -> Any:
        option = self.present()
        start = None if option is None else _start(self._config(), self.option)
        return os.environ.get(self.name), option, start

    def restore(self, saved: Any) -> None:
        text, option, start = saved
        set_variable(self.name, text)
        if option is None:  # loaded since, if at all: it started from what is undone now
            option, start = text == "1", {"default": text == "1"}
        self._set(option, start)

    def present(self) -> bool | None:
        """Return the option, or None while the variable can still become it."""
        config = self._config()
        return None if config is None else bool(getattr(config, self.option))

    def _config(self) -> Any:
        loaded = (sys.modules.get(name) for name in _CONFIGS)
        return next((config for config in loaded if hasattr(config, self.option)), None)

    def _set(self, value: bool, start: Mapping[str, Any]) -> None:  # noqa: FBT001
        config = self._config()
        if config is None:
            return
        moves = bool(getattr(config, self.option)) != value
        _start_from(config, self.option, start)
        if moves:
            setattr(config, self.option, value)


class InductorSwitch(InductorVariable):
    """The same state by the option's own values."""

    __slots__ = ()

    def read(self) -> Any:
        if not _inductor_reads(self.name):
            raise MissingState(f"this torch's inductor has no {self.option} mode")
        return InductorVariable.read(self) == "1"

    def holds(self, value: Any) -> bool:
        return bool(self.read() == value)

    def write(self, value: bool) -> None:  # type: ignore[override]  # noqa: FBT001
        InductorVariable.write(self, "1" if value else "0")


_START = ("default", "env_value_default", "env_value_force")


def _start(config: Any, option: str) -> dict[str, Any]:
    """Return the values of `option` from which every thread starts.

    Private, because an assignment to an option reaches the present thread only, and an option
    that its variable forces ignores assignments. Where torch keeps these values elsewhere, other
    threads keep those of the import, and a forced option is reported as ineffective.
    """
    entry = getattr(config, "_config", {}).get(option)
    return {name: vars(entry)[name] for name in _START if name in getattr(entry, "__dict__", ())}


def _start_from(config: Any, option: str, start: Mapping[str, Any]) -> None:
    entry = getattr(config, "_config", {}).get(option)
    if hasattr(entry, "__dict__"):
        for name in _START:
            vars(entry).pop(name, None)
        vars(entry).update(start)


@cache
def _inductor_reads(variable: str) -> bool:
    """Whether inductor knows `variable`, looked up in its source: importing it takes 0.7 s."""
    source = Path(str(import_module("torch").__file__)).parent / "_inductor" / "config.py"
    return source.is_file() and variable in source.read_text(encoding="utf-8")
