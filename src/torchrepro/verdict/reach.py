"""Which of the differences between two runs reach a result, and which nothing reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchrepro.trace.format import INPUT, OUTPUT
from torchrepro.verdict.diagnosis import DRAWING, op_name

if TYPE_CHECKING:
    from torchrepro.trace.format import Site
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.matching import Array

MOST = 1 << 17  # records that differ which are followed

_VALUES = frozenset(f"{kind}[]" for kind in ("bool", "int", "float", "complex", "str", "bytes"))
"""The outputs of sites whose ops return a value of Python."""

_RESULTS = frozenset({"backward", "optimizer", "collective"})  # phases


class Reach:
    """Follows the values that differ through the main thread of a run.

    They reach a result where a value of Python, a gradient or a parameter differs, or what a module
    computes. Without steps that is its last call: an earlier one may be to build it.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.origins: list[tuple[int, int]] = []  # records that differ although they read the same
        self.drawn: list[bool] = []  # whether these are random numbers, outside of any module
        self.until = math.inf  # the record up to which all differences are known
        self._records: list[tuple[int, int, int, bool, bool, bool]] = []
        """Both ids, the kind of op, and whether it read the same, was called so, and differs."""
        self._last: dict[int, int] = {}  # by kind of op, the id of the last record
        self._has_steps = any(row.finished for row in trace.steps.values())
        self._loads = {its["where"] for its in trace.meta.get("loaders") or ()}

    def add(self, left: Array, right: Array, differs: Array) -> None:
        """Add pairs of records, in their order, and which of them differ."""
        if not self._has_steps:
            self._last.update(zip(left["key"].tolist(), left["id"].tolist(), strict=True))
        same = left["inputs"] == right["inputs"]
        alike = (left["argument"] == right["argument"]) & (left["shape"] == right["shape"])
        places = (differs | ~same).nonzero()[0][: MOST + 1 - len(self._records)]
        columns = left["id"], right["id"], left["key"], same, alike, differs
        rows = (column[places].tolist() for column in columns)
        self._records += zip(*rows, strict=True)
        if len(self._records) > MOST:
            self.until = min(self.until, self._records[MOST][0])
            del self._records[MOST:]

    def first(self) -> int | None:
        """Return the place of the first origin that reaches a result; None if none is known to."""
        origin_of: dict[bytes, int] = {}  # by the digest of a value
        viewed: int | None = None  # of the last view: no record has its digest
        reached, before = set[int](), ""
        for number, other, kind, same, alike, differs in self._records:
            its, site = self.trace.record(number), self.site(number)
            read = (its.inputs[at : at + INPUT] for at in range(0, len(its.inputs), INPUT))
            known = [origin_of[each] for each in read if each in origin_of]
            origin = min(known, default=None if same else viewed)
            if origin is None:
                origin = len(self.origins)
                self.origins.append((number, other))
                self.drawn.append(same and alike and draws_outside(site.op, site.module))
            is_last = self._has_steps or self._last[kind] == number
            if is_last if site.module else differs and self._is_result(site, before):
                reached.add(origin)
                if not origin:
                    break
            for at in range(0, len(its.outputs), OUTPUT):
                origin_of.setdefault(its.outputs[at : at + INPUT], origin)
            viewed, before = viewed if its.outputs else origin, site.op
        return min(reached, default=None)

    def site(self, number: int) -> Site:
        return self.trace.sites[self.trace.record(number).site]

    def _is_result(self, site: Site, before: str) -> bool:
        # A loader draws a seed for its workers, whatever they draw. What they load shows.
        is_base_seed = before == "aten::random_" and site.source in self._loads
        is_value = site.outputs in _VALUES and not (is_base_seed and site.phase == "forward")
        return is_value or site.phase in _RESULTS


def draws_outside(op: str, module: str) -> bool:
    """Whether an op draws random numbers outside of any module, as an initialisation does."""
    return op_name(op) in DRAWING and not module
