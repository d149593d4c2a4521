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
from typing import Any

from torchrepro.knobs.knob import Missing

# owner below torch.backends, in the order in which a restore may set them
_FINEST = (
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_LEGACY = {  # finest names -> the older boolean that covers them
    "cuda.matmul": ("cuda.matmul", ("cuda.matmul",)),
    "cudnn.conv": ("cudnn", ("cudnn.conv", "cudnn.rnn")),
    "cudnn.rnn": ("cudnn", ("cudnn.conv", "cudnn.rnn")),
}


@dataclass(frozen=True, slots=True)
class Fp32Precision:
    """The float32 precision of one operation on one backend, such as ``cudnn.conv``."""

    owner: str

    def read(self) -> Any:
        value = _finest(self.owner)
        if value is not None:
            return value
        if self.owner not in _LEGACY:
            raise Missing(f"this torch has no torch.backends.{self.owner}.fp32_precision")
        return "tf32" if _owner(_LEGACY[self.owner][0]).allow_tf32 else "ieee"

    def write(self, value: str) -> None:
        if _finest(self.owner) is None:
            _owner(_LEGACY[self.owner][0]).allow_tf32 = value == "tf32"
            return
        others = {name: _finest(name) for name in _FINEST if name != self.owner}
        if self.owner in _LEGACY:
            boolean, covered = _LEGACY[self.owner]
            settings = {others.get(name, value) for name in covered}
            if settings == {value}:
                _owner(boolean).allow_tf32 = value == "tf32"
        _set_finest(others | {self.owner: value})

    def save(self) -> Any:
        self.read()
        return {name: _finest(name) for name in _FINEST}, _legacy_views()

    def restore(self, saved: Any) -> None:
        finest, (matmul_precision, cudnn_allow_tf32, matmul_allow_tf32) = saved
        torch = import_module("torch")
        others = {name: _finest(name) for name in _FINEST if name != self.owner}
        if self.owner == "cuda.matmul":
            # The older names go first: each of them also moves the finer settings.
            if matmul_precision is not None:
                torch.set_float32_matmul_precision(matmul_precision)
            if matmul_allow_tf32 is not None and finest[self.owner] is None:
                torch.backends.cuda.matmul.allow_tf32 = matmul_allow_tf32
        elif self.owner.startswith("cudnn") and cudnn_allow_tf32 is not None:
            torch.backends.cudnn.allow_tf32 = cudnn_allow_tf32
        _set_finest(others | {self.owner: finest[self.owner]})


def _owner(path: str) -> Any:
    owner: Any = import_module("torch").backends
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def _finest(path: str) -> Any:
    return getattr(_owner(path), "fp32_precision", None)


def _set_finest(values: dict[str, Any]) -> None:
    for path, value in values.items():
        if value is not None:
            _owner(path).fp32_precision = value


def _legacy_views() -> tuple[Any, Any, Any]:
    """Return the older names' values; None where torch refuses to read them."""
    torch = import_module("torch")
    views: list[Any] = [None, None, None]
    # torch raises RuntimeError when an older name no longer fits the finer settings.
    with suppress(RuntimeError):
        views[0] = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        views[1] = torch.backends.cudnn.allow_tf32
    with suppress(RuntimeError):
        views[2] = torch.backends.cuda.matmul.allow_tf32
    return views[0], views[1], views[2]
