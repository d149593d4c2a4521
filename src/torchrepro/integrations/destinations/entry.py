"""What a destination is given: the labels people search by, and the manifest."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.manifest.contents import as_text, manifest
from torchrepro.profile.composition import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.applier import Applied

NAMESPACE = "torchrepro"


@dataclass(frozen=True, slots=True)
class Entry:
    """A profile in force and what its run has done so far, as plain JSON values.

    Everything here comes from the manifest, which holds no secret.
    """

    manifest: Mapping[str, Any]

    @classmethod
    def of(cls, applied: Applied) -> Entry:
        """Return the entry of `applied` as it is now."""
        return cls(manifest(applied.resolved, applied.report))

    @property
    def profile(self) -> dict[str, Any]:
        """The resolved profile in its sections, with its digest and the guarantee that is held."""
        report = self.manifest["report"]
        held = {"name": report["profile"], "guarantee": report["guarantee"]["held"]}
        return {"digest": self.manifest["digest"], **self.manifest["profile"], **held}

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
        return as_text(self.manifest)


@dataclass(frozen=True, slots=True)
class Destination:
    """One tool, or one kind of place, that takes an entry."""

    name: str

    takes: str
    """What the program hands over, in words."""

    write: Callable[[Any, Entry], str]
    """Write the entry, over what an earlier one left there, and return where that was."""

    modules: tuple[str, ...] = ()
    """The modules that are the tool itself, which stands for what is active in it."""

    recognises: Callable[[Any], bool] | None = None
    """Whether an object that a program has in hand is a place of this kind; None if none is."""

    active: Callable[[], Any] | None = None
    """Return what is active now, or None; imports nothing. None if the tool cannot say."""

    would_be: str = "nothing: hand over the place itself"
    """What makes it active, in words."""

    def is_place(self, target: Any) -> bool:
        """Whether `target` is a place of this kind."""
        return self.recognises is not None and self.recognises(target)

    def is_tool(self, target: Any) -> bool:
        """Whether `target` is the tool itself."""
        loaded = (sys.modules.get(name) for name in self.modules)
        return target is not None and any(target is module for module in loaded)

    def active_now(self) -> Any:
        """Return what is active now, or None; imports nothing."""
        return self.active() if self.active else None


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)
