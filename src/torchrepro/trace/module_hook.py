"""The hook on what modules return; the one part of a recording that a compiler may trace.

It has a module of its own because torch.compile leaves code out by its module.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def on_modules_called(call: Callable[[Any, Any], object]) -> Iterator[None]:
    """Call `call` with every module that has been called and what it returned.

    The hook does nothing while torch.compile traces a model: it causes no break in the graph, and
    modules inside of a compiled region are not seen.
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
