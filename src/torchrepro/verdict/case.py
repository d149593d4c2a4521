"""What a divergence comes with, in the words in which the rows of causes ask about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.trace.reading import INPUT, UNINITIALISED
from torchrepro.verdict.op_families import OVERWRITING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.verdict.value import Divergence, Setting, Side

MAIN_THREADS = ("", "MainThread", "main")
DECLARED = ("guarantee", "profile", "digest", "program", "level")
"""Settings that say what was asked for; their effect is in other settings."""

SET_BY = {"hardware: threads": "env.OMP_NUM_THREADS"}
"""What a recording found that is a knob's doing."""

_NOT_SET = UNINITIALISED.hex()
_PROBABILITY = re.compile(r"(?<![=\w.])0?\.\d*[1-9]\d*")
NO_VALUE = (None, "", "-", "null", "None")


@dataclass(frozen=True, slots=True)
class Case:
    """The first divergence, and what is known of the two runs."""

    first: Divergence
    settings: tuple[Setting, ...] = ()
    """In what the runs differ from the start."""

    knobs: Mapping[str, str] = field(default_factory=dict)
    """The knobs that were in force, as text."""

    accelerator: str = ""
    """The type of device that computed besides the CPU; empty if there was none."""

    tolerance: bool = False
    """Whether statistics were compared rather than bits."""

    @property
    def op(self) -> str:
        """The op's name without namespace and overload, as in ``add``."""
        return self.first.op.rpartition("::")[2].partition(".")[0]

    @property
    def namespace(self) -> str:
        """``aten`` in ``aten::add.Tensor``; empty for what is no op of torch."""
        return self.first.op.rpartition("::")[0]

    @property
    def sides(self) -> tuple[Side, ...]:
        """What the runs have there, of those that have the op."""
        return tuple(side for side in (self.first.left, self.first.right) if side is not None)

    @property
    def writes_in_place(self) -> bool:
        """Whether the op writes into a tensor that it was given."""
        return self.op.endswith("_") and not self.op.startswith("__")

    @property
    def on_another_thread(self) -> bool:
        """Whether the op ran neither on the main thread nor on one of autograd's."""
        return self.first.thread not in MAIN_THREADS and self.first.phase != "backward"

    @property
    def reads_memory_that_nothing_wrote(self) -> bool:
        """Whether an input of the op is memory as the allocator gave it."""
        if self.op in OVERWRITING or self.first.op.endswith("out"):
            return False
        return any(
            text[: 2 * INPUT] == _NOT_SET for side in self.sides for text in side.input_fingerprints
        )

    @property
    def reads_something(self) -> bool:
        """Whether the op has an input that is more than memory to write into."""
        return any(text != _NOT_SET for side in self.sides for text in side.input_fingerprints)

    @property
    def drops_with_a_probability(self) -> bool:
        """Whether a positional argument lies between 0 and 1, as a probability does."""
        return any(_PROBABILITY.search(side.argument) for side in self.sides)

    @property
    def has_other_dtypes(self) -> bool:
        """Whether the two runs computed in other types."""
        return len({_dtypes(side.outputs) for side in self.sides}) > 1

    @property
    def differing_knobs(self) -> tuple[Setting, ...]:
        """The settings that are knobs of the catalogue, or that one of them sets."""
        keys = {name for knob in CATALOGUE for name in (knob.name, knob.profile_key)}
        named = [replace(each, name=SET_BY.get(each.name, each.name)) for each in self.settings]
        return tuple({each.name: each for each in named if each.name in keys}.values())

    @property
    def differing_surroundings(self) -> tuple[Setting, ...]:
        """The settings that no profile sets: versions and hardware."""
        known = {each.name for each in self.differing_knobs}
        return tuple(
            each
            for each in self.settings
            if each.name not in DECLARED and SET_BY.get(each.name, each.name) not in known
        )

    def differs_in(self, *names: str) -> bool:
        """Whether the runs differ in one of the settings `names`."""
        return any(each.name in names for each in self.settings)

    def value(self, key: str) -> str | None:
        """Return the value in force of the knob, or of the key of a profile; None if there is none.

        Values of both spellings, ``True`` and ``true``, count as one.
        """
        names = [key, *(knob.name for knob in CATALOGUE if knob.profile_key == key)]
        texts = [str(self.knobs[name]) for name in names if name in self.knobs]
        given = [text for text in texts if text not in NO_VALUE]
        return {"True": "true", "False": "false"}.get(given[0], given[0]) if given else None


def _dtypes(outputs: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(\w+)\[", outputs))
