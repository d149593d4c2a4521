"""Hooks on a training loop: backward passes, optimizer steps, batches, modules, new threads.

Optimizers have public hooks for all of them; the other two do not, so one function of torch each
is wrapped while anything is recorded.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchrepro.imports import AfterImport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


BATCHES = {
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torchdata.stateful_dataloader.stateful_dataloader": "_BaseDataLoaderIter",
}
"""Module -> the class whose ``__next__`` hands every batch to the program. Private: a loader has
no hook; were the class gone, batches would be recorded where an op first reads them."""


class Listener(Protocol):
    """Who is told what passes through the doors."""

    def backward_begins(self, losses: Any) -> None:
        """A backward pass is about to begin from `losses`."""

    def backward_ends(self) -> None:
        """The backward pass has ended, or has failed."""

    def optimizer_begins(self, optimizer: Any, with_closure: bool) -> None:  # noqa: FBT001 - a fact, not a switch
        """An optimizer is about to make a step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has made a step."""

    def batch_begins(self, workers: int) -> None:
        """A loader that has so many worker processes is about to hand over a batch."""

    def batch_ends(self, batch: Any) -> None:
        """A loader has handed over a batch, or nothing if `batch` is None."""


def watch_training(listener: Listener) -> ExitStack:
    """Have `listener` told; closing what is returned takes everything back."""
    doors = ExitStack()
    before = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: listener.optimizer_begins(
            optimizer, bool(args[1:] or kwargs)
        )
    )
    doors.callback(before.remove)
    after = register_optimizer_step_post_hook(
        lambda optimizer, _args, _kwargs: listener.optimizer_ends(optimizer)
    )
    doors.callback(after.remove)
    _wrap(doors, torch.autograd, "backward", _announced(listener))
    watched: set[type] = set()  # both modules may hold the same class
    waiting = AfterImport(
        BATCHES, lambda module: _watch_batches(doors, listener, import_module(module), watched)
    )
    waiting.watch()
    doors.callback(waiting.unwatch)
    for module in BATCHES:
        if module in sys.modules:
            _watch_batches(doors, listener, sys.modules[module], watched)
    return doors


def _wrap(doors: ExitStack, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    wrapper = wraps(original)(wrapping(original))
    setattr(owner, name, wrapper)

    def put_back() -> None:
        if getattr(owner, name) is wrapper:  # somebody else's wrapper around ours stays
            setattr(owner, name, original)

    doors.callback(put_back)


def _announced(listener: Listener) -> Callable[[Any], Any]:
    def wrapping(backward: Any) -> Any:
        def announced(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            listener.backward_begins(tensors)
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                listener.backward_ends()

        return announced

    return wrapping


def _watch_batches(doors: ExitStack, listener: Listener, module: Any, watched: set[type]) -> None:
    def wrapping(following: Any) -> Any:
        def announced(iterator: Any) -> Any:
            listener.batch_begins(getattr(iterator, "_num_workers", 0))
            batch = None
            try:
                batch = following(iterator)
            finally:
                listener.batch_ends(batch)
            return batch

        return announced

    iterators = getattr(module, BATCHES[module.__name__], None)
    if iterators is not None and iterators not in watched:
        watched.add(iterators)
        _wrap(doors, iterators, "__next__", wrapping)


@contextmanager
def on_modules_called(call: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `call` with every module that has been called and what it returned.

    While torch.compile traces a model, the hook is nothing: it leaves no break in the graph, and
    what is inside of a compiled region is not seen.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_forward_hook.html
    """

    def hook(module: Any, _args: Any, returned: Any) -> None:
        if not torch.compiler.is_compiling():
            call(module, returned)

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def on_threads_started(first: Callable[[], None]) -> Iterator[None]:
    """Call `first` on each thread that `threading` starts within the block, before its own code.

    A thread calls its profile function at its first call of anything, which is the one public way
    to be there first; one that is set already gets its place back.
    https://docs.python.org/3/library/threading.html#threading.setprofile
    """
    before = threading.getprofile()

    def begin(frame: Any, event: Any, argument: Any) -> None:
        sys.setprofile(before)
        first()
        if before is not None:
            before(frame, event, argument)

    threading.setprofile(begin)
    try:
        yield
    finally:
        if threading.getprofile() is begin:
            threading.setprofile(before)
