"""Hooks a running recording into the training loop, threads, the compiler, and loaders.

Optimizers have public hooks. Backward passes and batches have no hooks. During a recording, a
function of torch is therefore wrapped for each of these two. `parts_of` splits values of the
program into parts that can be compared.
"""

from __future__ import annotations

import _thread
import marshal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import islice
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrepro.ground.callers import frames, package, program_line
from torchrepro.ground.imports import AfterImport
from torchrepro.ground.patching import patch, surround
from torchrepro.trace.op_facts import shape_of
from torchrepro.trace.tensor_reads import fingerprint_of, size_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    Part = tuple[tuple[Any, ...], Any, Any]

_LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
"""Module -> the class of its loaders."""

_ITERATORS = dict.fromkeys(_LOADERS, "_BaseDataLoaderIter")
"""Module -> the class whose ``__next__`` returns every batch to the program. Private, because
loaders have no hook. Without it, batches are recorded when an op first reads them."""

_OBJECT_COLLECTIVES = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""https://docs.pytorch.org/docs/stable/distributed.html#collective-functions"""

_DISTRIBUTED = ("torch.distributed", "torch.distributed.distributed_c10d")
_HIGHER_ORDER = ("torch._higher_order_ops*", "torch.nn.attention*")  # where such ops are defined
_LEAVING = "numpy", "tolist", "__reduce_ex__", "__repr__", "__dlpack__"
_SAVING = {"safetensors.torch": ("save", "save_file")}
_GRAPHS = {
    "torch.cuda.graphs": "CUDAGraph",
    "torch.xpu.graphs": "XPUGraph",
    "torch_npu.npu.graphs": "NPUGraph",
}
"""Module -> the class of its graphs."""
_PINNING = "_pin_memory_loop"  # the function of the thread of torch's loader that pins memory
_HIDES = "_disable_current_modes"
_INDUCTOR, _DYNAMO = "torch._inductor.config", "torch._dynamo"
_WRAP_REGIONS = "wrap_inductor_compiled_regions"
_COMPILED = "torchrepro.seeding.observed_calls"
"""The module that a compiler may trace: it does nothing during tracing."""
_MOST = 64  # the most parts of one value
_LONGEST = 100_000  # items of a list or a dict
_DEEPEST = 4
_LARGEST = 1 << 26  # bytes; larger values, such as a whole dataset, are not read
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_digest = xxhash.xxh3_128_digest
_excluded: list[bool] = []  # not empty after the code was excluded in this process


def watch_training(undo: ExitStack, listener: Any) -> None:
    """Call methods of `listener` during training, until `undo` is closed:

    - `backward_begins(losses)` and `backward_ends()`;
    - `optimizer_begins(optimizer, closure if any)` and `optimizer_ends(optimizer)`;
    - `batch_begins(iterator of a loader)` and `batch_ends(iterator, batch, or None at the end)`.
    """

    def optimizer_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        listener.optimizer_begins(optimizer, args[1:] or kwargs)

    def around_backward(backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listener.backward_begins(tensors)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            listener.backward_ends()

    def around_batch(next_batch: Any, iterator: Any) -> Any:
        listener.batch_begins(iterator)
        batch = None
        try:
            batch = next_batch(iterator)
        finally:
            listener.batch_ends(iterator, batch)
        return batch

    undo.callback(register_optimizer_step_pre_hook(optimizer_begins).remove)
    optimizer_ends = register_optimizer_step_post_hook(
        lambda optimizer, *_: listener.optimizer_ends(optimizer)
    )
    undo.callback(optimizer_ends.remove)
    surround(undo, torch.autograd, "backward", around_backward)
    _surround_once_imported(undo, _ITERATORS, "__next__", around_batch)


def wrap_loader_iteration(
    undo: ExitStack, around: Callable[[Any], AbstractContextManager[None]]
) -> None:
    """Run ``iter(loader)`` of every loader within ``around(loader)``.

    During this call, a loader with workers draws the order of its first samples. A loader without
    workers draws the order at its first batch.
    """

    def within(begin: Any, loader: Any) -> Any:
        with around(loader):
            return begin(loader)

    _surround_once_imported(undo, _LOADERS, "__iter__", within)


def on_worker_started(undo: ExitStack, call: Callable[[], object]) -> None:
    """Call `call` if this process becomes a worker of a loader, before the worker loads a batch.

    A worker that is not forked has imported the program by that time, to unpickle the dataset. The
    call follows the creation of a `WorkerInfo`, which only workers create, also in torchdata.
    """

    def around(begin: Any, *args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        call()

    _surround_once_imported(
        undo, {"torch.utils.data._utils.worker": "WorkerInfo"}, "__init__", around
    )


def _surround_once_imported(
    undo: ExitStack, classes: Mapping[str, str], method: str, around: Callable[..., Any]
) -> None:
    watched: set[type] = set()  # both modules may have the same class

    def watch(module: str) -> None:
        owner = getattr(sys.modules[module], classes[module], None)
        if owner is not None and method in vars(owner) and owner not in watched:
            watched.add(owner)
            surround(undo, owner, method, around)

    _once_imported(undo, tuple(classes), watch)


def on_threads_started(undo: ExitStack, first: Callable[[], object]) -> None:
    """Call `first` at the start of each new thread, until `undo` is closed.

    Skips the thread of a loader that pins memory. That thread moves batches at any time. Batches
    are recorded when the program uses them.

    Sets the profile function, because a thread calls it at the first call of any function. No other
    public hook is as early. A profile function that was set before is restored.
    https://docs.python.org/3/library/threading.html#threading.setprofile
    """
    previous = threading.getprofile()

    def begin(frame: Any, event: Any, argument: Any) -> None:
        sys.setprofile(previous)
        if _PINNING not in threading.current_thread().name:
            first()
        if previous is not None:
            previous(frame, event, argument)

    def watched(start: Any, function: Any, *start_args: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            first()
            return function(*args, **kwargs)

        return start(run, *start_args)

    def restore_profile() -> None:
        if threading.getprofile() is begin:
            threading.setprofile(previous)

    threading.setprofile(begin)
    undo.callback(restore_profile)
    surround(undo, _thread, "start_new_thread", watched)  # for threads started without `threading`


def wrap_object_collectives(
    undo: ExitStack, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Run the collectives that send Python objects to other ranks within ``around()``.

    These collectives send pickled bytes, which may differ for equal objects. For example, an object
    may contain a name that is new in every run. If the object matters, the ops that use it show a
    difference.
    """

    def within(original: Any, *args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    for owner in map(sys.modules.get, _DISTRIBUTED):
        for name in _OBJECT_COLLECTIVES:
            if callable(getattr(owner, name, None)):  # absent if torch is built without distributed
                surround(undo, owner, name, within)


def allow_higher_order_ops(undo: ExitStack, mode: type[TorchDispatchMode]) -> None:
    """Let higher-order ops run under `mode`, including ops that are defined later.

    Newer torch reads `supports_higher_order_operators` of the mode. In older torch, such an op
    raises an error if it has no rule for the mode, so a rule is added to each op. The list of these
    ops is private. If the list is missing in an older torch, the ops raise torch's own error.
    """

    def rule(op: Any) -> Callable[..., Any]:
        return lambda active, *args, **kwargs: active.__torch_dispatch__(op, (), args, kwargs)

    def add_rules(_module: str) -> None:
        for op in getattr(getattr(torch, "_ops", None), "_higher_order_ops", {}).values():
            if mode not in op.python_key_table:
                op.py_impl(mode)(rule(op))

    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        _once_imported(undo, _HIGHER_ORDER, add_rules)


def note_hidden_ops(
    undo: ExitStack, before: Callable[[], object], note: Callable[[str], object]
) -> None:
    """Call `before` before ops are hidden from all modes, and `note` if the program hides them.

    `note` gets the line of the program as ``file:line``. It is not called for torch's own code,
    which hides ops in its compiler and when it prints a tensor. The wrapped function is private to
    torch. If it is missing, nothing is called.
    """

    def noticed(pop: Callable[..., Any], *args: Any) -> Any:
        callers = frames()
        # Search several frames: before Python 3.12, a comprehension that pops has its own frame.
        if any(frame.f_code.co_name == _HIDES for frame in islice(callers, 4)):
            before()
            caller = next(frame for frame in callers if package(frame) != "contextlib")
            if package(caller) != "torch":
                note(program_line(caller))
        return pop(*args)

    if hasattr(_python_dispatch, "_pop_mode"):
        surround(undo, _python_dispatch, "_pop_mode", noticed)


def before_unrecorded_writes(undo: ExitStack, call: Callable[[], object]) -> None:
    """Call `call` before kernels run that no op shows: of graphs, and of Triton in the program.

    Triton calls a list of hooks before each launch. Before Triton 3.4 it calls a single one.
    https://docs.pytorch.org/docs/stable/generated/torch.cuda.CUDAGraph.html
    """

    def launched(_metadata: Any) -> None:
        call()

    def add_hook(module: str) -> None:
        chain = sys.modules[module].runtime.launch_enter_hook
        chain.add(launched)
        undo.callback(chain.remove, launched)

    def replace_hook(module: str) -> None:
        kernel, name = sys.modules[module].CompiledKernel, "launch_enter_hook"
        if hasattr(kernel, name):
            only = getattr(kernel, name)
            both = partial(_calling_first(call), only) if only else launched
            patch(undo, kernel, name, both, only)

    for method in ("capture_begin", "replay"):
        _surround_once_imported(undo, _GRAPHS, method, _calling_first(call))
    _once_imported(undo, ("triton.knobs",), add_hook)
    _once_imported(undo, ("triton.compiler",), replace_hook)


def _calling_first(call: Callable[[], object]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    return around


def before_memory_is_shared(undo: ExitStack, call: Callable[[], object]) -> None:
    """Call `call` before another library, or a second storage of torch, gets memory of a tensor.

    https://docs.pytorch.org/docs/stable/dlpack.html
    """
    around = _calling_first(call)
    surround(undo, torch.Tensor, "__dlpack__", around)
    for module in (torch, torch.utils.dlpack):
        surround(undo, module, "to_dlpack", around)
    interface = torch.Tensor.__cuda_array_interface__
    shared = property(lambda tensor: around(interface.__get__, tensor))
    patch(undo, torch.Tensor, "__cuda_array_interface__", shared, interface)


def note_values_that_leave(undo: ExitStack, note: Callable[[Any], object]) -> None:
    """Call `note` with each tensor that is converted to numpy or Python, printed or saved.

    No recorded op shows such a conversion. This wraps the public methods that convert, and the
    functions of safetensors that save, because safetensors reads memory by address.
    """

    def leaves(leave: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = value.values() if isinstance(value, dict) else (value,)
        for tensor in tensors:
            if not torch.compiler.is_compiling():
                note(tensor)
        return leave(value, *args, **kwargs)

    def watch_saving(module: str) -> None:
        for name in _SAVING[module]:
            surround(undo, sys.modules[module], name, leaves)

    for name in _LEAVING:
        if name not in vars(torch.Tensor):  # an inherited method stays an attribute after `undo`
            setattr(torch.Tensor, name, getattr(torch.Tensor, name))
        surround(undo, torch.Tensor, name, leaves)
    _once_imported(undo, tuple(_SAVING), watch_saving)


def record_compiled_regions(undo: ExitStack) -> None:
    """Make each region that inductor compiles from now on run as one op of torch's dispatcher.

    This sets an option of inductor, which does not change the generated code. In an older torch
    without this option, only calls of library kernels are recorded, not generated kernels.
    """

    def wrap_regions(module: str) -> None:
        config = sys.modules[module]
        if hasattr(config, _WRAP_REGIONS):
            previous = getattr(config, _WRAP_REGIONS)
            patch(undo, config, _WRAP_REGIONS, value=True, before=previous)

    _once_imported(undo, (_INDUCTOR,), wrap_regions)


def exclude_from_compilation(undo: ExitStack, mode: type[TorchDispatchMode]) -> None:
    """Exclude torchrepro's own code from torch.compile.

    The compiler may reach this code between two compiled regions. ``trace_rules.add``, which
    excludes it, is not documented. If that function is missing, uses the documented
    ``torch.compiler.disable``, which costs a microsecond per op even without compilation.
    """

    def exclude(_module: str) -> None:
        if _excluded:
            return
        _excluded.append(True)
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is None or not hasattr(rules, "add"):
            dispatch: Any = mode.__torch_dispatch__
            mode.__torch_dispatch__ = torch.compiler.disable(dispatch)  # type: ignore[method-assign, no-untyped-call]
            return
        with ExitStack() as built:
            # Each call of `add` rebuilds one pattern, which takes a fifth of a second for all our
            # modules. If possible, postpone that and rebuild once.
            build = getattr(rules, "_recompile_re", None)
            if build is not None:
                built.callback(build)
                patch(built, rules, "_recompile_re", lambda: None, build)
            divided = _COMPILED.rpartition(".")[0]
            for parent in (__name__.partition(".")[0], divided):
                for module in iter_modules(import_module(parent).__path__):
                    name = f"{parent}.{module.name}"
                    if name not in (divided, _COMPILED):
                        rules.add(name)

    _once_imported(undo, (_DYNAMO,), exclude)


def _once_imported(undo: ExitStack, modules: Sequence[str], call: Callable[[str], None]) -> None:
    waiting = AfterImport(modules, call)
    undo.callback(waiting.unwatch)
    waiting.watch_all()


def parts_of(value: Any) -> list[Part]:
    """Return at most 64 parts of `value` that can be compared between runs.

    Parts are tensors, arrays, numbers, texts, and objects with `tobytes`, such as images. They may
    be in lists, tuples and dicts. A part has a shape, a dtype or type name, and a fingerprint.
    """
    try:
        return list(islice(_parts_at_depth(value, 0), _MOST))
    except Exception:  # noqa: BLE001 - a class of the program may raise any error
        return []


def _parts_at_depth(value: Any, depth: int) -> Iterator[Part]:
    value_type = type(value)
    if isinstance(value, torch.Tensor):
        if size_of(value) <= _LARGEST:
            shape, *rest = shape_of(value)
            yield (shape, " ".join(map(str, rest)), fingerprint_of(value))
    elif value_type in _PLAIN:
        if not isinstance(value, str | bytes) or len(value) <= _LARGEST:
            yield ((), value_type.__name__, _digest(marshal.dumps(value, 2)))
    elif (
        value_type is dict and len(value) <= _LONGEST
    ):  # other mappings may load their values lazily
        yield from _parts_of_sequence(list(value), depth)
        yield from _parts_of_sequence(list(value.values()), depth)
    elif isinstance(value, list | tuple) and len(value) <= _LONGEST:
        yield from _parts_of_sequence(list(value), depth)
    elif callable(getattr(value, "tobytes", None)):  # an array or an image
        dtype = getattr(value, "dtype", None)
        if not getattr(dtype, "hasobject", False) and getattr(value, "nbytes", 0) <= _LARGEST:
            data = value.tobytes()
            shape = getattr(value, "shape", None) or getattr(value, "size", ())
            name = value_type.__name__ if dtype is None else str(dtype)
            yield tuple(shape) if isinstance(shape, tuple) else (), name, _digest(data)


def _parts_of_sequence(values: list[Any], depth: int) -> Iterator[Part]:
    if values and all(type(value) in _PLAIN for value in values):
        yield ((len(values),), "list", _digest(marshal.dumps(values, 2)))
    elif depth < _DEEPEST:
        for value in values:
            yield from _parts_at_depth(value, depth + 1)
