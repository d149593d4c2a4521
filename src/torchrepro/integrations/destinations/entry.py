"""What a destination is given: the labels people search by, and the manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.profile.composition import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.applier import Applied

NAMESPACE = "torchrepro"
MANIFEST = "repro.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A profile in force and what its run has done so far, as plain JSON values.

    Everything here comes from the manifest, which holds no secret.
    """

    manifest: Mapping[str, Any]

    @classmethod
    def of(cls, applied: Applied) -> Entry:
        """Return the entry of `applied` as it is now."""
        from torchrepro.manifest.contents import manifest

        return cls(manifest(applied.resolved, applied.report))

    @property
    def profile(self) -> dict[str, Any]:
        """The resolved profile in its sections, with its name, guarantee and digest."""
        report = self.manifest["report"]
        asked = {"name": report["profile"], "guarantee": report["guarantee"]}
        return {"digest": self.manifest["digest"], **asked, **self.manifest["profile"]}

    @property
    def flat(self) -> dict[str, Any]:
        """The same under dotted keys, each a text, a number or a truth value."""
        return {key: _scalar(value) for key, value in flatten(self.profile).items()}

    @property
    def labels(self) -> dict[str, str]:
        """The same as texts."""
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.flat.items()
        }

    @property
    def text(self) -> str:
        """The manifest as JSON, ready to be a file."""
        from torchrepro.manifest.contents import as_text

        return as_text(self.manifest)


@dataclass(frozen=True, slots=True)
class Destination:
    """One tool, or one kind of place, that takes an entry."""

    name: str

    recognises: Callable[[Any], bool]
    """Whether an object that a program has in hand is a place of this kind."""

    is_tool: Callable[[Any], bool]
    """Whether it is the tool itself, which stands for what is active in it."""

    active: Callable[[], Any]
    """Return what is active now, or None; imports nothing."""

    write: Callable[[Any, Entry], str]
    """Write the entry, over what an earlier one left there, and return where that was."""

    takes: str
    """What the program hands over, in words."""

    would_be: str
    """What makes it active, in words."""


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)
