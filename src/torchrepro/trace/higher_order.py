"""Higher-order ops under a recording on torch that asks each of them about each mode."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrepro.imports import AfterImport
from torchrepro.trace.mode import RecordingMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HOMES = ("torch._higher_order_ops*", "torch.nn.attention*")
_DEFINED = "_higher_order_ops"


@contextmanager
def higher_order_ops_run() -> Iterator[None]:
    """Have higher-order ops run under the recording, those that are defined later as well.

    Newer torch asks a mode once, by `supports_higher_order_operators`; older torch refuses a
    higher-order op under a mode that the op has no rule for. The list of them all is private; were
    it gone where it is needed, such an op would raise torch's own error.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        yield
        return
    _give_rules()
    waiting = AfterImport(_HOMES, lambda _: _give_rules())
    waiting.watch()
    try:
        yield
    finally:
        waiting.unwatch()


def _give_rules() -> None:
    for op in getattr(torch._ops, _DEFINED, {}).values():  # noqa: SLF001 - see above
        if RecordingMode not in op.python_key_table:
            op.py_impl(RecordingMode)(_rule(op))


def _rule(op: Any) -> Callable[..., Any]:
    def run(mode: RecordingMode, *args: Any, **kwargs: Any) -> Any:
        return mode.__torch_dispatch__(op, (), args, kwargs)

    return run
