"""Nondeterministic ops, as real devices have them, with and without an alert."""

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
    """Remove the deterministic implementation of `ops`, such as "aten::cumsum".

    Until `reset`, every overload raises the `RuntimeError` of torch if deterministic algorithms
    are required, and runs otherwise.
    """
    _alerting.update(map(_known, ops))


def vary(*ops: str) -> None:
    """Let the floating-point results of `ops` differ a little from call to call, without an error.

    Until `reset`, the n-th call adds n * 1e-7 to every element, on all overloads of an op.
    """
    _varying.update((_known(op), itertools.count(1)) for op in ops)


def reset() -> None:
    """Make every kernel deterministic again."""
    _alerting.clear()
    _varying.clear()


def alert(op: torch._ops.OpOverload) -> None:
    """Raise as a kernel without a deterministic implementation does, if `op` is one."""
    name = _without_overload(op.name())
    refuses = torch.get_deterministic_debug_mode() == 2
    if name in _alerting and refuses:
        raise RuntimeError(ALERT.format(kernel=f"{name.removeprefix('aten::')}_npu"))


def disturb(op: torch._ops.OpOverload, results: Iterator[torch.Tensor]) -> None:
    """Add to `results`, which are on the host, if `op` varies."""
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
    """Return `op`; raises `ValueError` if it is not an op of aten without an overload."""
    namespace, _, name = op.partition("::")
    if namespace != "aten" or not hasattr(torch.ops.aten, name):
        raise ValueError(f"no op called {op!r}: write it like 'aten::cumsum'")
    return op
