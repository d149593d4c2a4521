"""Ops that cannot be deterministic, as real devices have them, and say so or do not."""

import itertools
from collections.abc import Iterator

import torch

# Torch's own words, at::Context::alertNotDeterministic; a test holds them to the installed torch.
ALERT = (
    "{kernel} does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
    "operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
    "application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help "
    "us prioritize adding deterministic support for this operation."
)
NOISE = 1e-7
_alerting: set[str] = set()
_varying: dict[str, Iterator[int]] = {}


def alert_on(*ops: str) -> None:
    """Let the kernels of `ops`, such as "aten::cumsum", have no deterministic implementation.

    Until `reset`, every overload raises torch's own `RuntimeError` for that while deterministic
    algorithms are set to, and runs as ever otherwise.
    """
    _alerting.update(map(_known, ops))


def vary(*ops: str) -> None:
    """Let the floating-point results of `ops` differ a little from call to call, without a word.

    Until `reset`, the n-th call adds n * 1e-7 to every element, on all overloads of an op.
    """
    _varying.update((_known(op), itertools.count(1)) for op in ops)


def reset() -> None:
    """Let every kernel be deterministic again."""
    _alerting.clear()
    _varying.clear()


def alert(op: torch._ops.OpOverload) -> None:
    """Do what a kernel without a deterministic implementation does first, where `op` has none."""
    name = _without_overload(op.name())
    refuses = torch.get_deterministic_debug_mode() == 2
    if name in _alerting and refuses:
        raise RuntimeError(ALERT.format(kernel=f"{name.removeprefix('aten::')}_npu"))


def disturb(op: torch._ops.OpOverload, results: Iterator[torch.Tensor]) -> None:
    """Add to `results`, which are on the host, where `op` varies."""
    calls = _varying.get(_without_overload(op.name()))
    if calls is None:
        return
    noise = NOISE * next(calls)
    for result in results:
        if result.is_floating_point():
            result.add_(noise)


def _without_overload(name: str) -> str:
    return name.partition(".")[0]


def _known(op: str) -> str:
    """Return `op`; raises `ValueError` where it names no op of aten, without an overload."""
    namespace, _, name = op.partition("::")
    if namespace != "aten" or not hasattr(torch.ops.aten, name):
        raise ValueError(f"no op called {op!r}: write it like 'aten::cumsum'")
    return op
