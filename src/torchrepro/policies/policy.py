"""What policies share: a switch, a count of what they did, an answer when one does not hold."""

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
"""Policy, subject, what was done and where -> calls, and bytes moved."""

_MANY = 1000  # places; a program that draws from ever new lines does not fill the memory
_lock = fork_safe_lock()
_counted: dict[tuple[str, str, str, str], list[int]] = {}
_sources: list[Callable[[list[PolicyEffect]], Iterable[PolicyEffect]]] = []
_tags: list[str] = []  # one for every policy in force that changes what compiled code computes
_handlers: list[Callable[[ApplyError], None]] = []  # of the profiles in force, innermost last


@dataclass(frozen=True, slots=True)
class Toggle:
    """A policy with two values, whose installation changes what compiled code computes."""

    off: str
    on: str
    name: str
    """The name by which compiled code of this policy is kept from other code, also on disk."""

    install: Callable[[ExitStack], None]
    """Puts the policy in force, and pushes its undo onto the stack."""

    _undo: list[ExitStack] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether the policy is in force."""
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
            _put_tags([*_tags, self.name])
            undo.callback(self._take_tag_back)
            self.install(undo)
            forget_compiled()
            self._undo.append(undo.pop_all())

    save = read
    restore = write

    def _take_tag_back(self) -> None:
        if not sys.is_finalizing():  # an ending interpreter imports nothing, and compiles nothing
            left = [*_tags]
            left.remove(self.name)
            _put_tags(left)
            forget_compiled()


def _put_tags(tags: list[str]) -> None:
    """Have what is compiled from now on belong to the policies `tags`, in caches on disk too.

    See https://docs.pytorch.org/docs/stable/torch.compiler_api.html.
    """
    config: Any = import_module("torch.compiler.config")
    before, after = (f" torchrepro: {', '.join(names)}" if names else "" for names in (_tags, tags))
    config.cache_key_tag = config.cache_key_tag.removesuffix(before) + after
    _tags[:] = tags


def forget_compiled() -> None:
    """Have torch.compile compile everything anew; does nothing where it was never used."""
    if "torch._dynamo" in sys.modules:
        import_module("torch").compiler.reset()


class PolicyEffect(NamedTuple):
    """One thing that a policy has done, and how often."""

    policy: str
    """The knob: ``device.fallback``."""

    subject: str
    """The op or module: ``aten::put_``, ``encoder.layer.3``."""

    what: str
    """What was done with it: ``ran on the CPU``."""

    where: str
    """The line of the program or the module it came from, where that is known."""

    calls: int
    moved: int
    """Bytes that were copied from one device to another for it."""

    def to_json(self) -> dict[str, Any]:
        """Return the effect as plain JSON values."""
        return self._asdict()


def count(policy: str, subject: str, what: str, where: str = "", moved: int = 0) -> None:
    """Count one more time that `policy` did `what` to `subject`, and the bytes it moved."""
    key = policy, subject, what, where
    with _lock:
        if key not in _counted and len(_counted) >= _MANY:
            key = policy, subject, what, "other places"
        counts = _counted.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += moved


def counts_so_far() -> Counts:
    """Return what has been counted, for `effects` to leave out."""
    with _lock:
        return {key: (calls, moved) for key, (calls, moved) in _counted.items()}


def reset_counts() -> None:
    """Begin to count anew."""
    with _lock:
        _counted.clear()


def effects(since: Counts = MappingProxyType({})) -> tuple[PolicyEffect, ...]:
    """Return what the policies have done, except for what they had done at `since`."""
    counted = []
    for key, (calls, moved) in sorted(counts_so_far().items()):
        calls_before, moved_before = since.get(key, (0, 0))
        if calls > calls_before:
            counted.append(PolicyEffect(*key, calls - calls_before, moved - moved_before))
    return (*counted, *(effect for source in _sources for effect in source(counted)))


def add_effects(source: Callable[[list[PolicyEffect]], Iterable[PolicyEffect]]) -> None:
    """Have `effects` end with what `source` makes of those counted, such as effects of no calls."""
    _sources.append(source)


def handle_with(handler: Callable[[ApplyError], None]) -> Callable[[], None]:
    """Pass what policies refuse from now on to `handler`; return the undo."""
    _handlers.append(handler)
    return lambda: _handlers.remove(handler)


def refuse(error: ApplyError) -> None:
    """Pass `error` to the innermost profile in force; raises it where nobody handles it."""
    if not _handlers:
        raise error
    _handlers[-1](error)
