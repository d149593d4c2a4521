"""Reads and writes knobs of torch and torch_npu that need more than an attribute or two functions.

Since torch 2.9 each operation of each backend has its own float32 precision. Reading an older
setting (`allow_tf32`, `set_float32_matmul_precision`) raises an error if the new ones disagree
with it (https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32). So a write sets the new setting
first, and then updates the older one for code that still reads it.

Inductor reads its variables once, when it is imported. The import takes 0.7 s, and a program
without torch.compile never needs it. So a knob of inductor is the environment variable before the
import, and the option of inductor after the import.

Some settings of torch_npu never reach a device. Functions such as `determinism_blocked` return
why, or an empty string. Their argument `wanted` maps each knob of the profile to its value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torchrepro.ground.patching import set_variable
from torchrepro.knobs.knob import Attribute, Calls, MissingState, Variable, object_at

_FINEST = (  # the attributes of torch.backends that have a float32 precision
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_OLDER = {"cuda.matmul": "cuda.matmul", "cudnn.conv": "cudnn", "cudnn.rnn": "cudnn"}
"""Finest name -> the owner of the older boolean `allow_tf32` that includes it."""

_FITS = (("ieee", "ieee"), ("tf32", "tf32"), ("tf32", "bf16"))
"""Values of two new settings. With one of these pairs any value of the older setting agrees."""


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
            # Only the new setting can be written now, and then reading the older one would raise.
            raise RuntimeError("cuDNN's flags are frozen by disable_global_flags")
        _owner(self.owner).fp32_precision = value
        covered = [_finest(name) for name in _FINEST if _OLDER.get(name) == older]
        if older and set(covered) == {value}:
            try:
                _ = _owner(older).allow_tf32
            except RuntimeError:  # torch raises if the new settings disagree
                settings = _all_finest()
                _owner(older).allow_tf32 = value == "tf32"
                _set_finest(settings)

    def save(self) -> Any:
        self.read()
        torch = import_module("torch")
        return (
            _all_finest(),
            _older(torch.get_float32_matmul_precision, "cuda.matmul", "mkldnn.matmul"),
            _older(lambda: torch.backends.cudnn.allow_tf32, "cudnn.conv", "cudnn.rnn"),
        )

    def restore(self, saved: Any) -> None:
        finest, matmul_precision, cudnn_allow_tf32 = saved
        settings = _all_finest() | {self.owner: finest[self.owner]}
        # The older settings come first, because a write of an older one also changes the new ones.
        if _OLDER.get(self.owner) == "cuda.matmul":
            import_module("torch").set_float32_matmul_precision(matmul_precision)
        elif _OLDER.get(self.owner) == "cudnn":
            import_module("torch").backends.cudnn.allow_tf32 = cudnn_allow_tf32
        _set_finest(settings)


def _owner(path: str) -> Any:
    return object_at(f"torch.backends:{path}")


def _finest(path: str) -> Any:
    return getattr(_owner(path), "fp32_precision", None)


def _all_finest() -> dict[str, Any]:
    return {path: _finest(path) for path in _FINEST}


def _set_finest(values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        if value is not None:
            _owner(path).fp32_precision = value


def _older(read: Callable[[], Any], *covered: str) -> Any:
    """Return the value of an older setting, even if `read` raises an error.

    `read` works while the new settings in `covered` agree with the older one. So these settings
    are changed for a moment, until they agree with the value of the older setting.
    """
    with suppress(RuntimeError):
        return read()
    settings = _all_finest()
    try:
        for fitting in _FITS:
            _set_finest(dict(zip(covered, fitting, strict=True)))
            with suppress(RuntimeError):
                return read()
    finally:
        _set_finest(settings)
    raise RuntimeError("torch does not show the float32 precision of its older names")


_CONFIGS = ("torch.compiler.config", "torch._inductor.config")  # torch moved some to the first


@dataclass(frozen=True, slots=True)
class InductorVariable(Variable):
    """An environment variable with the values 0 and 1, and the inductor option that it sets."""

    option: str

    def read(self) -> Any:
        text, option = os.environ.get(self.name), self.loaded_value()
        if option is None and _CONFIGS[-1] in sys.modules:
            raise MissingState(f"this torch's inductor has no {self.option}")
        if option in (None, text == "1"):
            return text
        return "1" if option else "0"

    def holds(self, value: Any) -> bool:
        return os.environ.get(self.name) == value and self.loaded_value() in (None, value == "1")

    def write(self, value: str) -> None:
        os.environ[self.name] = value
        self._set(value == "1", {"default": value == "1"})

    def save(self) -> Any:
        option = self.loaded_value()
        start = None if option is None else _start(self._config(), self.option)
        return os.environ.get(self.name), option, start

    def restore(self, saved: Any) -> None:
        text, option, start = saved
        set_variable(self.name, text)
        if option is None:  # if inductor was imported since, it has read the value now undone
            option, start = text == "1", {"default": text == "1"}
        self._set(option, start)

    def loaded_value(self) -> bool | None:
        """Return the value of the option, or None if inductor has not read the variable yet."""
        config = self._config()
        return None if config is None else bool(getattr(config, self.option))

    def _config(self) -> Any:
        loaded = (sys.modules.get(name) for name in _CONFIGS)
        return next((config for config in loaded if hasattr(config, self.option)), None)

    def _set(self, value: bool, start: Mapping[str, Any]) -> None:  # noqa: FBT001
        config = self._config()
        if config is None:
            return
        is_change = bool(getattr(config, self.option)) != value
        entry = getattr(config, "_config", {}).get(self.option)  # see `_start`
        if hasattr(entry, "__dict__"):
            for name in _START:
                vars(entry).pop(name, None)
            vars(entry).update(start)
        if is_change:
            setattr(config, self.option, value)


class InductorSwitch(InductorVariable):
    """An `InductorVariable` whose values in a profile are true and false."""

    def read(self) -> Any:
        if not inductor_reads(self.name):
            raise MissingState(f"this torch's inductor has no {self.option} mode")
        return InductorVariable.read(self) == "1"

    def holds(self, value: Any) -> bool:
        return bool(self.read() == value)

    def write(self, value: bool) -> None:  # type: ignore[override]  # noqa: FBT001
        InductorVariable.write(self, "1" if value else "0")


_START = ("default", "env_value_default", "env_value_force")


def _start(config: Any, option: str) -> dict[str, Any]:
    """Return torch's private values with which `option` starts in new threads.

    An assignment does not suffice: it changes the current thread only, and an environment variable
    can make torch ignore it. If a new torch stores these values elsewhere, other threads keep the
    values of the import, and an option that ignores assignments is reported as ineffective.
    """
    entry = getattr(config, "_config", {}).get(option)
    return {name: vars(entry)[name] for name in _START if name in getattr(entry, "__dict__", ())}


@cache
def inductor_reads(variable: str) -> bool:
    """Return whether inductor's source file mentions `variable`. An import would take 0.7 s."""
    source = Path(str(import_module("torch").__file__)).parent / "_inductor" / "config.py"
    return source.is_file() and variable in source.read_text(encoding="utf-8")


MODES = ("none", "warn", "error")  # of deterministic algorithms, at the index that torch uses


class DeterministicAlgorithms(Calls):
    """Torch's flag for deterministic algorithms. An NPU gets the flag if torch_npu forwards it."""

    def save(self) -> Any:
        warns_only = import_module("torch").is_deterministic_algorithms_warn_only_enabled()
        return Calls.save(self), warns_only

    def restore(self, saved: Any) -> None:
        mode, warns_only = saved
        Calls.restore(self, mode)
        # Restore `warn_only` even while the flag is off. The public setter would import inductor
        # (0.7 s) and change inductor's flag. Without the private setter, `warn_only` is lost.
        setter = getattr(import_module("torch")._C, "_set_deterministic_algorithms", None)  # noqa: SLF001 - see above
        if not mode and warns_only and setter:
            setter(False, warn_only=True)  # noqa: FBT003 - torch's own signature

    def inert(self, value: Any, wanted: Mapping[str, Any]) -> str:
        return determinism_blocked(wanted) if value != "none" else ""


DETERMINISTIC_ALGORITHMS = DeterministicAlgorithms(
    "torch",
    "get_deterministic_debug_mode",
    "set_deterministic_debug_mode",
    to_profile=MODES.__getitem__,
    to_library=MODES.index,
)


class FillUninitializedMemory(Attribute):
    """Torch's switch `fill_uninitialized_memory`, and torch_npu's copy of the switch.

    The copy starts as false, and only a write of the switch updates the copy. Until the first
    write the switch has no effect on an NPU, although reading the switch returns true
    (https://github.com/Ascend/pytorch, torch_npu/utils/_deterministic.py).
    """

    def holds(self, value: bool) -> bool:  # noqa: FBT001 - the value of a boolean knob
        return bool(self.read() == value and self._copy() in (value, None))

    def save(self) -> Any:
        return self.read(), self._copy()

    def restore(self, saved: Any) -> None:
        flag, copy = saved
        Attribute.restore(self, flag)
        setter = native("_npu_set_fill_uninitialized_memory")
        if setter and copy is not None:
            setter(copy)

    def _copy(self) -> bool | None:
        getter = native("_npu_get_fill_uninitialized_memory")
        return bool(getter()) if getter else None


class OptEinsum(Attribute):
    """A setting for opt_einsum. Torch refuses a write if that package is not installed."""

    def read(self) -> Any:
        if not import_module("torch.backends.opt_einsum").is_available():
            raise MissingState("the package opt_einsum is missing: einsum contracts left to right")
        return Attribute.read(self)

    save = read


class ReducedPrecision(Attribute):
    """A switch for sums in low precision. Newer torch joins it with a switch for split-k."""

    def save(self) -> Any:
        matmul = import_module("torch").backends.cuda.matmul
        split_k = getattr(matmul, f"{self.name}_split_k", None)
        value = self.read()
        return value if split_k is None else (value, split_k)


def npu() -> Any:
    """Return ``torch.npu``. Raises `MissingState` if torch_npu is not loaded."""
    module = getattr(import_module("torch"), "npu", None)
    if module is None:
        raise MissingState("no torch_npu in this process")
    return module


def npu_with_devices() -> Any:
    """Return ``torch.npu`` if this process has an NPU, otherwise None."""
    module = getattr(sys.modules.get("torch"), "npu", None)
    return module if module is not None and module.is_available() else None


def native(name: str) -> Any:
    """Return the private function `name` of torch_npu's C module, or None if it does not exist.

    The public functions initialise the device, write the value that they read, or do not exist.
    Without the private function, a knob is unsupported or relies on the flag of torch.
    """
    return getattr(getattr(sys.modules.get("torch_npu"), "_C", None), name, None)


def option_text(name: str) -> str:
    """Return the text of torch_npu's option `name`, or an empty string if the option is not set.

    Raises `MissingState` if this torch_npu does not know the option.
    """
    if not hasattr(npu(), "set_option"):
        raise MissingState("this torch.npu has no set_option")
    getter = native("_npu_getOption")
    raw = getter(name) if getter else None
    if raw is None:
        raise MissingState(f"this torch_npu has no option {name}")
    return str(raw.decode())


_OLDEST_DETERMINISTIC_CANN = (8, 5)


def determinism_blocked(wanted: Mapping[str, Any]) -> str:
    """Return why ops on this process's NPUs would not be deterministic, or an empty string."""
    if npu_with_devices() is None:
        return ""
    return cann_too_old() or compiled_ops_blocked(wanted)


def cann_too_old() -> str:
    """Return why this version of CANN never makes an NPU deterministic, or an empty string.

    Below CANN 8.5, a torch_npu that knows determinism level 3 sends "off" with every op
    (https://github.com/Ascend/pytorch, torch_npu/csrc/framework/OpParamMaker.cpp).
    """
    get_version = getattr(getattr(npu(), "utils", None), "get_cann_version", None)
    version = str(get_version("RUNTIME")).split(".")[:2] if get_version else []
    runtime = tuple(int(number) for number in version if number.isdigit())
    # A private function, because level 3 has no public name, and this function came with it. If
    # the function is missing, torch_npu is older and is assumed to forward determinism.
    knows_level_3 = hasattr(npu(), "_sync_deterministic_level")
    is_known = len(runtime) == len(_OLDEST_DETERMINISTIC_CANN)
    if not is_known or runtime >= _OLDEST_DETERMINISTIC_CANN or not knows_level_3:
        return ""
    return (
        f"CANN runtime {runtime[0]}.{runtime[1]}: below 8.5 this torch_npu always turns "
        "determinism off on the NPU; upgrade CANN"
    )


def compiled_ops_blocked(wanted: Mapping[str, Any]) -> str:
    """Return why ops compiled at first call would not be deterministic, or an empty string."""
    # Before device init, a call of a getter would fix the value of its variable permanently.
    used: Any = npu() if hasattr(npu(), "is_initialized") and npu().is_initialized() else None
    jit_compile, queue = map(wanted.get, ("backends.npu.jit_compile", "backends.npu.task_queue"))
    if jit_compile is None and hasattr(used, "is_jit_compile_false"):
        jit_compile = not used.is_jit_compile_false()
    if jit_compile is None:
        jit_compile = text_if_known("jitCompile") == "enable"
    if queue is None and hasattr(used, "get_task_queue_enable"):
        queue = used.get_task_queue_enable()
    if queue is None:
        blocking, enabled = (
            str(wanted.get(f"env.{name}", os.environ.get(name, default)))
            for name, default in (("ASCEND_LAUNCH_BLOCKING", "0"), ("TASK_QUEUE_ENABLE", "1"))
        )
        queue = blocking in ("", "0") and enabled != "0"
    if not jit_compile or int(queue) == 0:
        return ""
    return (
        "with jit_compile on and the task queue on, ops do not forward determinism to the NPU; "
        "set backends.npu.jit_compile to false, or backends.npu.task_queue to 0"
    )


def text_if_known(name: str) -> str:
    """Return the text of torch_npu's option `name`; empty if it is not set or does not exist."""
    try:
        return option_text(name)
    except MissingState:
        return ""
