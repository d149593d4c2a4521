"""Tools for all policies: an on/off switch, a count of effects, handlers of errors, bare names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.fork_safety import fork_safe_lock

if TYPE_CHECKING:
    from torchrepro.ground.errors import ApplyError

Counts = Mapping[tuple[str, str, str, str], tuple[int, int]]
"""(Policy, subject, action, source line) -> (calls, bytes moved)."""

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that wrappers add: DDP, torch.compile, FSDP, activation checkpointing."""

_MANY = 1000  # the most lines that are counted, as a program may draw from ever new lines
_lock = fork_safe_lock()
_counted: dict[tuple[str, str, str, str], list[int]] = {}
_sources: list[Callable[[list[PolicyEffect]], Iterable[PolicyEffect]]] = []
_handlers: list[Callable[[ApplyError], None]] = []  # of the active profiles, innermost last


@dataclass(frozen=True, slots=True)
class Toggle:
    """A policy that is on or off, and changes the results of compiled code while it is on."""

    off: str
    on: str
    name: str
    """Part of the keys of compile caches, which separates code compiled under this policy.

    See https://docs.pytorch.org/docs/stable/torch.compiler_api.html.
    """

    install: Callable[[ExitStack], None]
    """Turns the policy on, and pushes its undo onto the stack."""

    _undo: list[ExitStack] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Return whether the policy is on."""
        return bool(self._undo)

    def read(self) -> str:
        return self.on if self.is_on else self.off

    def write(self, value: str) -> None:
        if value == self.read():
            return
        if value != self.on:
            self._undo.pop().close()
            return
        with ExitStack() as undo:
            config: Any = import_module("torch.compiler.config")
            config.cache_key_tag += self._tag
            undo.callback(self._remove_tag, config)
            self.install(undo)
            forget_compiled()
            self._undo.append(undo.pop_all())

    save = read
    restore = write

    @property
    def _tag(self) -> str:
        return f" torchrepro: {self.name}"

    def _remove_tag(self, config: Any) -> None:
        if not sys.is_finalizing():  # Python cannot import at exit
            config.cache_key_tag = config.cache_key_tag.replace(self._tag, "")
            forget_compiled()


def forget_compiled() -> None:
    """Make torch.compile compile all code again, if this process has used torch.compile."""
    if "torch._dynamo" in sys.modules:
        import_module("torch").compiler.reset()


class PolicyEffect(NamedTuple):
    """One action of a policy on an op or a module, and how often it happened."""

    policy: str
    """The knob: ``device.fallback``."""

    subject: str
    """The op or module: ``aten::put_``, ``encoder.layer.3``."""

    what: str
    """The action on the subject: ``ran on the CPU``."""

    where: str
    """The line of the program, or the module, that caused it; empty if unknown."""

    calls: int
    moved: int
    """Bytes that the action copied between devices."""

    def to_json(self) -> dict[str, Any]:
        """Return the effect as a dict of plain JSON values."""
        return self._asdict()


def count(policy: str, subject: str, action: str, line: str = "", moved: int = 0) -> None:
    """Count one `action` of `policy` on `subject`, and add `moved` to the bytes moved so far."""
    key = policy, subject, action, line
    with _lock:
        if key not in _counted and len(_counted) >= _MANY:
            key = policy, subject, action, "other places"
        counts = _counted.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += moved


def counts_so_far() -> Counts:
    """Return a copy of the counts. A later call of `effects` accepts this copy as `since`."""
    with _lock:
        return {key: (calls, moved) for key, (calls, moved) in _counted.items()}


def reset_counts() -> None:
    """Reset all counts to zero."""
    with _lock:
        _counted.clear()


def effects(since: Counts = MappingProxyType({})) -> tuple[PolicyEffect, ...]:
    """Return the effects of the policies since `counts_so_far` returned `since`."""
    counted = []
    for key, (calls, moved) in sorted(counts_so_far().items()):
        calls_before, moved_before = since.get(key, (0, 0))
        if calls > calls_before:
            counted.append(PolicyEffect(*key, calls - calls_before, moved - moved_before))
    return (*counted, *(effect for source in _sources for effect in source(counted)))


def add_effects(source: Callable[[list[PolicyEffect]], Iterable[PolicyEffect]]) -> None:
    """Let `effects` also return `source(counted)`. `counted` is the list of counted effects."""
    _sources.append(source)


def handle_with(handler: Callable[[ApplyError], None]) -> Callable[[], None]:
    """Pass later errors of policies to `handler`, and return a function to undo this."""
    _handlers.append(handler)
    return lambda: _handlers.remove(handler)


def refuse(error: ApplyError) -> None:
    """Pass `error` to the handler of the innermost profile, or raise it if no profile is active."""
    if not _handlers:
        raise error
    _handlers[-1](error)


def bare(name: str) -> str:
    """Return a module name, or pattern of names, without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name
