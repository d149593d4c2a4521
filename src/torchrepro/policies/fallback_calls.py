"""What is done at one call of an op that a profile decides about.

Each act stands in front of one op (see `interposed`) and takes the overload, `proceed`, which goes
on to the kernel, and the arguments of the call.

The flag is a question that a kernel's author asks and answers
(https://docs.pytorch.org/docs/stable/notes/randomness.html): an op from another package may not
ask it, and a Triton kernel cannot.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.callers import place
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.policies import interpose
from torchrepro.policies.deterministic_ops import IMPLEMENTATIONS, implementation, is_alert, row_of
from torchrepro.policies.interpose import op_names, packet_name
from torchrepro.policies.on_cpu import fit_to, is_on_device, on_cpu
from torchrepro.policies.policy import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


if TYPE_CHECKING:
    Proceed = Callable[..., Any]
    Act = Callable[..., Any]

KNOB = "device.fallback"
ON_CPU = "ran on the CPU"
OWN = "ran in a deterministic implementation of torchrepro's"
NATIVE = "ran non-deterministically, as the profile allows"

_handled = threading.local()  # .names: the ops that this thread is already handling
_modes = fork_safe_lock()
_varying: list[int] = []  # the mode to go back to, once for every call that may vary just now


def advise(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel; where torch refuses, say what to do instead after torch's own words."""
    try:
        return proceed(*args, **kwargs)
    except RuntimeError as error:
        if not is_alert(error):
            raise
        message = _with_advice(op, str(error))
    raise RuntimeError(message)


def cpu_when_refused(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel; where torch refuses, compute the same deterministically elsewhere."""
    try:
        return proceed(*args, **kwargs)
    except RuntimeError as error:
        if not is_alert(error):
            raise
        message = str(error)
    own = implementation(packet_name(op), args, kwargs)
    if own is not None:
        result = filling_outputs(op, own)(*args, **kwargs)
        _count(op, OWN)
        return result
    if not is_on_device(args, kwargs):
        raise RuntimeError(_with_advice(op, message))
    return _moved(op, args, kwargs)


def native_when_refused(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel; where torch refuses, run it all the same."""
    try:
        return proceed(*args, **kwargs)
    except RuntimeError as error:
        if not is_alert(error):
            raise
    return native(op, proceed, *args, **kwargs)


def cpu(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Compute on the CPU what a device is asked for, whether its kernel is deterministic or not."""
    if not is_on_device(args, kwargs):
        return cpu_when_refused(op, proceed, *args, **kwargs)
    if is_handled(op):
        return proceed(*args, **kwargs)
    return _moved(op, args, kwargs)


def native(op: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run whatever kernel torch takes when nobody asks for a deterministic one."""
    with _may_vary():
        result = proceed(*args, **kwargs)
    _count(op, NATIVE)
    return result


def refuse(op: Any, _: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Raise `RuntimeError` for whatever arguments."""
    del args, kwargs
    name = op.name()
    raise RuntimeError(_with_advice(op, f"{name} may not run: the profile says so ({KNOB})"))


def replaced(
    fn: Callable[..., Any],
    what: str,
    otherwise: Act,
    op: Any,
    proceed: Proceed,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `fn` in place of the kernel, and `otherwise` where `fn` itself calls the op."""
    if is_handled(op):
        return otherwise(proceed, *args, **kwargs)
    with handling(op), import_module("torch").no_grad():
        result = fn(*args, **kwargs)
    _count(op, what)
    return result


def let_pass(_: Any, proceed: Proceed, /, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel."""
    return proceed(*args, **kwargs)


WHEN_REFUSED: dict[str, Act] = {
    "error": advise,
    "cpu": cpu_when_refused,
    "native": native_when_refused,
}
"""What a word makes of an op at those calls that torch refuses."""

ALWAYS: dict[str, Act] = {"error": refuse, "cpu": cpu, "native": native}
"""What a word makes of every call of an op."""


def filling_outputs(op: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` for the overload `op`, whose ``out=`` is filled with what `fn` returns."""
    arguments = op._schema.arguments  # noqa: SLF001 - a schema has no public reader
    names = [argument.name for argument in arguments if argument.is_out]
    if not names:
        return fn

    def filling(*args: Any, **kwargs: Any) -> Any:
        outputs = tuple(kwargs.pop(name) for name in names)
        results = fn(*args, **kwargs)
        for output, result in zip(
            outputs, results if isinstance(results, list | tuple) else (results,), strict=True
        ):
            fit_to(output, result)
            output.copy_(result)
        return outputs if len(outputs) > 1 else outputs[0]

    return filling


def _moved(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with handling(op):
        result, moved = on_cpu(op, args, kwargs)
    _count(op, ON_CPU, moved)
    return result


def is_handled(op: Any) -> bool:
    """Whether this thread is within an act of `op` already."""
    return packet_name(op) in getattr(_handled, "names", ())


@contextmanager
def handling(op: Any) -> Iterator[None]:
    """Mark `op` as being handled by this thread for the length of the block."""
    before = getattr(_handled, "names", ())
    _handled.names = (*before, packet_name(op))
    try:
        yield
    finally:
        _handled.names = before


@contextmanager
def _may_vary() -> Iterator[None]:
    """Let torch take any kernel within the block.

    The mode is the process's: an op that another thread runs meanwhile may vary as well. Of calls
    in several threads the last to end puts the mode back.
    """
    torch = import_module("torch")
    with _modes:
        before = _varying[0] if _varying else torch.get_deterministic_debug_mode()
        _varying.append(before)
        torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        with _modes:
            _varying.pop()
            if not _varying:
                torch.set_deterministic_debug_mode(before)


def _with_advice(op: Any, message: str) -> str:
    """Return `message` and what to do, unless an op within this one has said it already."""
    if "torchrepro:" in message:
        return message
    name = packet_name(op)
    row = row_of(name)
    ways = [row.instead] if row else []
    if name in IMPLEMENTATIONS:
        ways.append(f"set {KNOB}: cpu, and torchrepro computes it in order")
    elif row is None:
        ways.append(f"set {KNOB}: {{ops: {{{name}: cpu}}}}, and it runs on the CPU")
    elif row.on_cpu:
        ways.append(f"set {KNOB}: cpu, and it runs on the CPU")
    ways.append(f"or let it vary with {KNOB}: {{ops: {{{name}: native}}}}")
    return f"{message}\ntorchrepro: {op.name()}: {'; '.join(ways)}"


def _count(op: Any, what: str, moved: int = 0) -> None:
    count(KNOB, op.name(), what, _where(), moved)


def _where() -> str:
    """Return the line of the program that called the op, empty in a thread of torch's own."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as inspect does
    caller = None
    while frame is not None:
        if frame.f_globals.get("__name__") == interpose.__name__:
            caller = frame.f_back
        frame = frame.f_back
    return place(caller) if caller is not None else ""


FEW = 3  # ops of one package that are named one by one

TORCHS_OWN = frozenset(
    {
        *("_", "_c10d_functional", "_c10d_functional_autograd", "_caffe2", "_dtensor", "_native"),
        *("_inductor_debug", "_inductor_test", "_quantized", "_test", "_torch_testing", "ao"),
        *("aten", "bucketing", "c10d", "c10d_functional", "cplib", "debug_mode_ops"),
        *("debugprims", "device_mesh", "export", "flex_lib", "fsdp", "inductor"),
        *("inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "onnx"),
        *("onnx_symbolic", "pippy", "prepacked", "prim", "prims", "profiler", "quantization"),
        *("quantized", "quantized_decomposed", "rngprims", "rpc", "semi_structured", "sparse"),
        *("static_runtime", "streams", "symm_mem", "torch_attn", "xnnpack"),
    }
)
"""Namespaces of the ops that come with torch itself, in whichever of its modules."""

_KERNELS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))


def unseen_kernels() -> tuple[str, ...]:
    """Return the custom ops and the Triton kernels in this process, packages of many as a count.

    Imports nothing: what is not loaded yet is not in the answer.
    """
    return (*sorted(_custom_ops()), *sorted(_triton_kernels()))


def _custom_ops() -> Iterator[str]:
    if "torch" not in sys.modules:
        return
    ops: dict[str, set[str]] = defaultdict(set)
    for name in op_names():
        namespace, _, rest = name.partition("::")
        if namespace not in TORCHS_OWN:
            ops[namespace].add(rest.partition(".")[0])
    for namespace, names in ops.items():
        if len(names) > FEW:
            yield f"{namespace}: {len(names)} custom ops"
        else:
            yield from (f"{namespace}::{name}" for name in names)


def _triton_kernels() -> Iterator[str]:
    kinds = tuple(filter(None, (_loaded(*kernel) for kernel in _KERNELS)))
    if not kinds:
        return
    named = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("triton", "torch", "torchrepro"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, kinds) and id(value) not in named:
                named.add(id(value))
                yield f"{module_name}.{name} (Triton)"


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
