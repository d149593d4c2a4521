"""Where the value of a key comes from, and what it replaced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from torchrepro.imports import installed_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Origin:
    """The place that set a value, and the one before it."""

    set_by: str
    """``file:line``, the override, or the argument."""

    package: str = ""
    """The distribution that the file belongs to; with its version, if it comes from elsewhere."""

    value: Any = None
    replaced: Origin | None = None
    """The origin of the value that stood there before."""

    def earlier(self) -> Iterator[Origin]:
        """Yield the origins of the values that this one replaced, the nearest first."""
        before = self.replaced
        while before is not None:
            yield before
            before = before.replaced

    def to_json(self) -> dict[str, Any]:
        """Return the origin as plain JSON values."""
        return {
            "set_by": self.set_by,
            "package": versioned(self.package),
            "replaced": [
                {"value": each.value, "set_by": each.set_by, "package": versioned(each.package)}
                for each in self.earlier()
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Origin:
        """Return the origin that `to_json` wrote."""
        before: Origin | None = None
        for each in reversed(content["replaced"]):
            before = cls(each["set_by"], each["package"], each["value"], before)
        return cls(content["set_by"], content["package"], None, before)


@cache
def versioned(distribution: str) -> str:
    """Return a distribution with the version that is installed, as in ``acme-profiles 1.2.0``."""
    version = installed_version(distribution)
    return f"{distribution} {version}" if version else distribution
