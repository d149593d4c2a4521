"""Hooks while a recording runs: the training loop, threads, the compiler, the loading of a batch.

Optimizers have public hooks. Backward passes and batches have none, so one function of torch
each is wrapped while anything is recorded. What the program's own functions return while a loader
prepares a batch is seen only where that is in the main process, and asked for: the profile function
that sees every call costs more than the rest of a recording.
"""

from __future__ import annotations

import _thread
import marshal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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

from torchrepro.ground.callers import frames, package, program_place
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
"""Module -> the class whose ``__next__`` hands every batch to the program. Private: a loader has
no hook; were the class gone, batches would be recorded where an op first reads them."""

_OBJECT_COLLECTIVES = (
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""https://docs.pytorch.org/docs/stable/distributed.html#collective-functions"""

_DISTRIBUTED = ("torch.distributed", "torch.distributed.distributed_c10d")
_HIGHER_ORDER = ("torch._higher_order_ops*", "torch.nn.attention*")  # where such ops are defined
_LEAVING = "numpy", "tolist", "__reduce_ex__", "__repr__", "__dlpack__"
_SAVING = {"safetensors.torch": ("save", "save_file")}
_PINNING = "_pin_memory_loop"  # what torch's loader runs on a thread of its own
_HIDES = "_disable_current_modes"
_INDUCTOR, _DYNAMO = "torch._inductor.config", "torch._dynamo"
_WRAP_REGIONS = "wrap_inductor_compiled_regions"
_COMPILED = "torchrepro.seeding.observed_calls"
"""The module that a compiler may trace: it does nothing while one does."""
_MOST = 64  # parts of one value
_LONGEST = 100_000  # items of a list or a dict
_DEEPEST = 4
_LARGEST = 1 << 26  # bytes: a dataset that a function passes on is not read again and again
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_GENERATOR = 0x20  # the flag of a generator's code, see the documentation of `inspect`
_digest = xxhash.xxh3_128_digest
_left_out: list[bool] = []  # once is enough for a process


def watch_training(undo: ExitStack, listener: Any) -> None:
    """Call `listener` at each backward pass, optimizer step and batch, until `undo` is closed.

    Its methods are `backward_begins` (losses), `backward_ends`, `optimizer_begins` (optimizer,
    its closure if any), `optimizer_ends` (optimizer), `batch_begins` (the loader's iterator)
    and `batch_ends` (the iterator, and its batch, None if there was none).
    """

    def optimizer_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        listener.optimizer_begins(optimizer, args[1:] or kwargs)

    def around_backward(backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listener.backward_begins(tensors)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            listener.backward_ends()

    def around_batch(following: Any, iterator: Any) -> Any:
        listener.batch_begins(iterator)
        batch = None
        try:
            batch = following(iterator)
        finally:
            listener.batch_ends(iterator, batch)
        return batch

    undo.callback(register_optimizer_step_pre_hook(optimizer_begins).remove)
    optimizer_ends = register_optimizer_step_post_hook(lambda its, *_: listener.optimizer_ends(its))
    undo.callback(optimizer_ends.remove)
    surround(undo, torch.autograd, "backward", around_backward)
    _surround_once_imported(undo, _ITERATORS, "__next__", around_batch)


def within_loaders_begun(
    undo: ExitStack, around: Callable[[Any], AbstractContextManager[None]]
) -> None:
    """Have loaders begin to be iterated within ``around(loader)``.

    One with workers draws the order of its first samples then, one without them at its first batch.
    """

    def within(begin: Any, loader: Any) -> Any:
        with around(loader):
            return begin(loader)

    _surround_once_imported(undo, _LOADERS, "__iter__", within)


def on_worker_begun(undo: ExitStack, call: Callable[[], object]) -> None:
    """Call `call` where this process turns out to be a worker of a loader, before it loads a batch.

    A worker that is not forked has by then imported the program, whose class the dataset is of.
    What torch tells a worker of itself is made there and nowhere else, torchdata's included.
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
    watched: set[type] = set()  # both modules may hold the same class

    def watch(module: str) -> None:
        owner = getattr(sys.modules[module], classes[module], None)
        if owner is not None and method in vars(owner) and owner not in watched:
            watched.add(owner)
            surround(undo, owner, method, around)

    _once_imported(undo, tuple(classes), watch)


def on_threads_started(undo: ExitStack, first: Callable[[], object]) -> None:
    """Call `first` on each thread that is started until `undo` is closed, before its own code.

    Left out is the thread on which a loader pins memory: it moves batches at any time, and they are
    recorded where they are used.

    A thread calls its profile function at its first call of anything. No other public way comes as
    early. A profile function that is set already gets its place back.
    https://docs.python.org/3/library/threading.html#threading.setprofile
    """
    before = threading.getprofile()

    def begin(frame: Any, event: Any, argument: Any) -> None:
        sys.setprofile(before)
        if _PINNING not in threading.current_thread().name:
            first()
        if before is not None:
            before(frame, event, argument)

    def watched(start: Any, function: Any, *given: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            first()
            return function(*args, **kwargs)

        return start(run, *given)

    def put_back() -> None:
        if threading.getprofile() is begin:
            threading.setprofile(before)

    threading.setprofile(begin)
    undo.callback(put_back)
    surround(undo, _thread, "start_new_thread", watched)  # which needs no `threading`


def objects_sent_within(undo: ExitStack, around: Callable[[], AbstractContextManager[Any]]) -> None:
    """Send Python objects to other ranks within `around`.

    They are sent as pickled bytes, and equal objects need not have equal ones: a name in them may
    be new in every run. What a program makes of them shows in what it computes.
    """

    def within(original: Any, *args: Any, **more: Any) -> Any:
        with around():
            return original(*args, **more)

    for owner in map(sys.modules.get, _DISTRIBUTED):
        for name in _OBJECT_COLLECTIVES:
            if callable(getattr(owner, name, None)):  # a torch may be built without
                surround(undo, owner, name, within)


def higher_order_ops_run(undo: ExitStack, mode: type[TorchDispatchMode]) -> None:
    """Have higher-order ops run under `mode`, those that are defined later as well.

    Newer torch asks a mode once, by `supports_higher_order_operators`. Older torch refuses a
    higher-order op under a mode that the op has no rule for. The list of all such ops is private;
    were it gone where it is needed, such an op would raise torch's own error.
    """

    def rule(op: Any) -> Callable[..., Any]:
        return lambda own, *args, **kwargs: own.__torch_dispatch__(op, (), args, kwargs)

    def give_rules(_module: str) -> None:
        for op in getattr(getattr(torch, "_ops", None), "_higher_order_ops", {}).values():
            if mode not in op.python_key_table:
                op.py_impl(mode)(rule(op))

    if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        _once_imported(undo, _HIGHER_ORDER, give_rules)


def hidden_ops_noted(undo: ExitStack, note: Callable[[str], object]) -> None:
    """Call `note` with each line of the program that hides its ops from all modes.

    Torch itself does so where it prints a tensor and within its compiler. The functions are
    private; were they gone, nothing would be noted.
    """

    def noticed(pop: Callable[..., Any], *args: Any) -> Any:
        callers = frames()
        # It is called in a list comprehension, which has a frame of its own before Python 3.12.
        if any(each.f_code.co_name == _HIDES for each in islice(callers, 4)):
            by = next(frame for frame in callers if package(frame) != "contextlib")
            if package(by) != "torch":
                note(program_place(by))
        return pop(*args)

    if hasattr(_python_dispatch, "_pop_mode"):
        surround(undo, _python_dispatch, "_pop_mode", noticed)


def values_that_leave_noted(undo: ExitStack, note: Callable[[Any], object]) -> None:
    """Call `note` with each tensor that becomes numpy's or Python's, or is printed or saved.

    No op shows that. These methods are the public ways; safetensors reads memory by its address.
    """

    def leaves(leave: Callable[..., Any], value: Any, *args: Any, **more: Any) -> Any:
        for each in value.values() if isinstance(value, dict) else (value,):
            if not torch.compiler.is_compiling():
                note(each)
        return leave(value, *args, **more)

    def watch_saving(module: str) -> None:
        for name in _SAVING[module]:
            surround(undo, sys.modules[module], name, leaves)

    for name in _LEAVING:
        if name not in vars(torch.Tensor):  # inherited, and found there once this is undone
            setattr(torch.Tensor, name, getattr(torch.Tensor, name))
        surround(undo, torch.Tensor, name, leaves)
    _once_imported(undo, tuple(_SAVING), watch_saving)


def compiled_regions_seen(undo: ExitStack) -> None:
    """Have regions that inductor compiles from now on pass through the dispatcher as one op.

    The option is inductor's own and leaves the generated code as it is. Without it (older torch)
    the kernels that inductor wrote are not seen; those of libraries that it calls are.
    """

    def wrap_regions(module: str) -> None:
        config = sys.modules[module]
        if hasattr(config, _WRAP_REGIONS):
            before = getattr(config, _WRAP_REGIONS)
            patch(undo, config, _WRAP_REGIONS, value=True, before=before)

    _once_imported(undo, (_INDUCTOR,), wrap_regions)


def left_out_of_compilation(undo: ExitStack, mode: type[TorchDispatchMode]) -> None:
    """Have torch.compile leave torchrepro's own code out where it finds it between two regions.

    ``trace_rules.add`` is not documented. The documented ``torch.compiler.disable`` costs a
    microsecond per op even where nothing is compiled; it is used where the other is gone.
    """

    def leave_out(_module: str) -> None:
        if _left_out:
            return
        _left_out.append(True)
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is None or not hasattr(rules, "add"):
            dispatch: Any = mode.__torch_dispatch__
            mode.__torch_dispatch__ = torch.compiler.disable(dispatch)  # type: ignore[method-assign, no-untyped-call]
            return
        with ExitStack() as built:
            # It builds its one pattern anew for each module that is added: a fifth of a second for
            # all of ours. Where that can be put off, it is built once.
            build = getattr(rules, "_recompile_re", None)
            if build is not None:
                built.callback(build)
                patch(built, rules, "_recompile_re", lambda: None, build)
            divided = _COMPILED.rpartition(".")[0]
            for parent in (__name__.partition(".")[0], divided):
                for module in iter_modules(import_module(parent).__path__):
                    own = f"{parent}.{module.name}"
                    if own not in (divided, _COMPILED):
                        rules.add(own)

    _once_imported(undo, (_DYNAMO,), leave_out)


def _once_imported(undo: ExitStack, modules: Sequence[str], call: Callable[[str], None]) -> None:
    waiting = AfterImport(modules, call)
    undo.callback(waiting.unwatch)
    waiting.watch_all()


def parts_of(value: Any) -> list[Part]:
    """Return the parts of `value` that can be compared between runs; a few of very many.

    Each is its shape, its dtype or the name of its type, and its fingerprint. Parts are tensors,
    arrays, numbers, texts, and what has `tobytes` as an image does, alone and in lists, tuples and
    mappings.
    """
    try:
        return list(islice(_parts(value, 0), _MOST))
    except Exception:  # noqa: BLE001 - a class of the program's may raise what it likes
        return []


def _parts(value: Any, depth: int) -> Iterator[Part]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if size_of(value) <= _LARGEST:
            shape, *rest = shape_of(value)
            yield (shape, " ".join(map(str, rest)), fingerprint_of(value))
    elif kind in _PLAIN:
        if not isinstance(value, str | bytes) or len(value) <= _LARGEST:
            yield ((), kind.__name__, _digest(marshal.dumps(value, 2)))
    elif kind is dict and len(value) <= _LONGEST:  # another mapping may load what it is asked
        yield from _of_several(list(value), depth)
        yield from _of_several(list(value.values()), depth)
    elif isinstance(value, list | tuple) and len(value) <= _LONGEST:
        yield from _of_several(list(value), depth)
    elif callable(getattr(value, "tobytes", None)):  # an array or an image
        dtype = getattr(value, "dtype", None)
        if not getattr(dtype, "hasobject", False) and getattr(value, "nbytes", 0) <= _LARGEST:
            data = value.tobytes()
            shape = getattr(value, "shape", None) or getattr(value, "size", ())
            name = kind.__name__ if dtype is None else str(dtype)
            yield tuple(shape) if isinstance(shape, tuple) else (), name, _digest(data)


def _of_several(values: list[Any], depth: int) -> Iterator[Part]:
    if values and all(type(each) in _PLAIN for each in values):
        yield ((len(values),), "list", _digest(marshal.dumps(values, 2)))
    elif depth < _DEEPEST:
        for each in values:
            yield from _parts(each, depth + 1)
