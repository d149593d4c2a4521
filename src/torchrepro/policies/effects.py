"""What the policies in force have done so far: counted here, shown in reports and manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchrepro.locks import fork_safe_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Counts = Mapping[tuple[str, str, str, str], tuple[int, int]]

_MANY = 1000  # places; a program that draws from ever new lines does not fill the memory
_lock = fork_safe_lock()
_counted: dict[tuple[str, str, str, str], list[int]] = {}
_sources: list[Callable[[list[Effect]], Iterable[Effect]]] = []


@dataclass(frozen=True, slots=True)
class Effect:
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
        return asdict(self)


def count(policy: str, subject: str, what: str, where: str = "", moved: int = 0) -> None:
    """Count one more time that `policy` did `what` to `subject`, and the bytes it moved."""
    key = policy, subject, what, where
    with _lock:
        if key not in _counted and len(_counted) >= _MANY:
            key = policy, subject, what, "other places"
        counts = _counted.setdefault(key, [0, 0])
        counts[0] += 1
        counts[1] += moved


def so_far() -> Counts:
    """Return what has been counted, for `effects` to leave out."""
    with _lock:
        return {key: (calls, moved) for key, (calls, moved) in _counted.items()}


def effects(since: Counts = MappingProxyType({})) -> tuple[Effect, ...]:
    """Return what the policies have done, but for what they had done at `since`."""
    nothing = (0, 0)
    counted = [
        Effect(*key, calls - since.get(key, nothing)[0], moved - since.get(key, nothing)[1])
        for key, (calls, moved) in sorted(so_far().items())
        if calls > since.get(key, nothing)[0]
    ]
    return (*counted, *(effect for source in _sources for effect in source(counted)))


def tell_also(source: Callable[[list[Effect]], Iterable[Effect]]) -> None:
    """Have `effects` tell what `source` makes of those counted as well: of no calls yet, say."""
    _sources.append(source)


def forget() -> None:
    """Begin to count anew."""
    with _lock:
        _counted.clear()
