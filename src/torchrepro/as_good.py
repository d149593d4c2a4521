"""Whether another value of a knob is as good for the guarantee as the one that a profile asks for.

The one judgement of it: of what a user has exported, of what the program writes, and so of what is
drift. As good is not the same: two such values each repeat, and may give different numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.process_state import absent_hardware

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob

AS_GOOD = "as good"


def why_as_good(knob: Knob, value: Any) -> str:
    """Return in words why `value` serves as well as the profile's, or an empty string."""
    if not isinstance(value, str):
        return ""
    if knob.enough is not None and knob.enough(value) and not knob.legal.complaint(value):
        return AS_GOOD
    if value in knob.misspelt and knob.hardware in absent_hardware():
        return f"of no effect without {knob.hardware}, which refuses it"
    return ""
