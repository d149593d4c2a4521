"""Propagation of the differences between two runs: does any of them affect a result?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchrepro.trace.format import INPUT, OUTPUT
from torchrepro.verdict.diagnosis import DRAWING, op_name

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.matching import Array

MOST = 1 << 17  # the most differing records that are traced

_VALUES = frozenset(f"{dtype}[]" for dtype in ("bool", "int", "float", "complex", "str", "bytes"))
"""The outputs of sites whose ops return a Python value."""

_RESULTS = frozenset({"backward", "optimizer", "collective"})  # phases


class Reach:
    """Traces differing values forward through the main thread of a run.

    Results are Python values, outputs of modules, gradients, parameters and collectives. In a run
    without steps, only the last call of a module counts: earlier calls may initialize the module.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.origins: list[tuple[int, int]] = []  # ids of paired records where a difference begins
        self.drawn: list[bool] = []  # whether each origin draws random numbers outside all modules
        self.until = math.inf  # the record up to which all differences are known
        self._records: list[tuple[int, int, int, bool, bool, bool]] = []
        """Both ids, the key of the op, and whether inputs are equal, arguments are equal, and the
        pair differs."""
        self._last: dict[int, int] = {}  # key of an op -> id of its last record
        self._has_steps = any(row.finished for row in trace.steps.values())
        self._loads = {loader["where"] for loader in trace.meta.get("loaders") or ()}

    def add(self, left: Array, right: Array, differs: Array) -> None:
        """Add paired records, in order. `differs` is true for each pair that differs."""
        if not self._has_steps:
            self._last.update(zip(left["key"].tolist(), left["id"].tolist(), strict=True))
        same = left["inputs"] == right["inputs"]
        same_call = (left["argument"] == right["argument"]) & (left["shape"] == right["shape"])
        places = (differs | ~same).nonzero()[0][: MOST + 1 - len(self._records)]
        columns = left["id"], right["id"], left["key"], same, same_call, differs
        rows = (column[places].tolist() for column in columns)
        self._records += zip(*rows, strict=True)
        if len(self._records) > MOST:
            self.until = min(self.until, self._records[MOST][0])
            del self._records[MOST:]

    def first(self) -> int | None:
        """Return the index of the first origin that is known to reach a result, or None."""
        origin_of: dict[bytes, int] = {}  # digest of a value -> index of its origin
        viewed: int | None = None  # origin of the last view, whose digest is not recorded
        reached, before = set[int](), ""
        for left_id, right_id, op_key, same, same_call, differs in self._records:
            record, site = self.trace.record(left_id), self.site(left_id)
            read = (record.inputs[at : at + INPUT] for at in range(0, len(record.inputs), INPUT))
            known = [origin_of[fingerprint] for fingerprint in read if fingerprint in origin_of]
            origin = min(known, default=None if same else viewed)
            if origin is None:
                origin = len(self.origins)
                self.origins.append((left_id, right_id))
                self.drawn.append(same and same_call and draws_outside(site.op, site.module))
            is_last = self._has_steps or self._last[op_key] == left_id
            if is_last if site.module else differs and self._is_result(site, before):
                reached.add(origin)
                if not origin:
                    break
            for at in range(0, len(record.outputs), OUTPUT):
                origin_of.setdefault(record.outputs[at : at + INPUT], origin)
            viewed, before = viewed if record.outputs else origin, site.op
        return min(reached, default=None)

    def site(self, number: int) -> Site:
        return self.trace.sites[self.trace.record(number).site]

    def _is_result(self, site: Site, before: str) -> bool:
        # The base seed that a loader draws for its workers counts only if batches differ.
        is_base_seed = before == "aten::random_" and site.source in self._loads
        is_value = site.outputs in _VALUES and not (is_base_seed and site.phase == "forward")
        return is_value or site.phase in _RESULTS


def draws_outside(op: str, module: str) -> bool:
    """Whether an op draws random numbers outside of all modules, as an initialization does."""
    return op_name(op) in DRAWING and not module
