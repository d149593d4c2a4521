"""How float32 matrix products and convolutions are computed, behind torch's several names for it.

Since torch 2.9 every (backend, operation) has its own setting, and the older booleans
(`allow_tf32`, `set_float32_matmul_precision`) are views that raise when they no longer fit it
(https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32). So a write sets the finest name and
brings the older one into step, which keeps code that still reads the older one working.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Missing

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
            raise Missing(f"this torch has no torch.backends.{self.owner}.fp32_precision")
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
        if older and set(covered) == {value} and not _readable(older):
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


def _readable(older: str) -> bool:
    """Whether torch still reads the older boolean: it raises where the finer ones disagree."""
    try:
        _ = _owner(older).allow_tf32
    except RuntimeError:
        return False
    return True


def _older(read: Callable[[], Any], fits: Mapping[Any, Mapping[str, str]]) -> Any:
    """Return what an older name holds, also where torch refuses to say.

    It answers again as soon as the finer settings fit, so they are made to fit each possible
    value for a moment.
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
