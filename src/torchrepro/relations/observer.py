"""What each process of a run observes of itself, for a relation.

Each kind of observation is a module, which is loaded once torch has been imported. What a process
notes goes into a file of its own, a line of JSON each.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from torchrepro.imports import AfterImport, named
from torchrepro.relations.observations import VARIABLE, Notes

if TYPE_CHECKING:
    from collections.abc import Mapping

OBSERVERS = {
    "regions": "relations.region_observer:observe",
    "state": "relations.state_observer:observe",
}
"""What is observed -> the function that begins to."""


def observe(environment: Mapping[str, str]) -> None:
    """Begin to observe what `VARIABLE` in `environment` names, once torch has been imported."""
    text = environment.get(VARIABLE)
    if not text:
        return
    told = json.loads(text)
    notes = Notes(told.pop("folder"))

    def begin(_module: str) -> None:
        waiting.unwatch()
        for name, values in told.items():
            named(OBSERVERS[name])(notes, values)

    waiting = AfterImport(["torch"], begin)
    waiting.watch()
    if "torch" in sys.modules:
        begin("torch")
