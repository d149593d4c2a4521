"""Whether a program computes the same with torch.compile and without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.relations.related import Relation, Side
from torchrepro.verdict.criteria import ALIGNED, out_of_tolerance
from torchrepro.verdict.render import counted, short
from torchrepro.verdict.value import Advice, Compared, Divergence, Kind, Verdict
from torchrepro.verification.perturbations import RunEnvironment

if TYPE_CHECKING:
    from torchrepro.verification.result import Run

    Tolerance = tuple[float, float]

REGIONS = "relations.observers:note_regions"

OFF = RunEnvironment({"TORCHDYNAMO_DISABLE": "1"})

TOLERANCES: Mapping[str, Tolerance] = {
    "float64": (1e-7, 1e-7),
    "float32": ALIGNED,
    "float16": (1e-2, 1e-3),
    "bfloat16": (1.6e-2, 1e-3),
}
"""Dtype -> rtol and atol that its rounding earns, the finest dtype first.

That of float32 is `ALIGNED`, for its reasons; those of the others are in proportion to theirs in
https://docs.pytorch.org/docs/stable/testing.html, or what that page has.
"""

_MOST = 16  # children of a region that are tried


class Unit(NamedTuple):
    """What one region, or one module outside of all, returned in one call."""

    name: str
    where: str
    step: int
    phase: str
    outputs: Sequence[Any]  # dtype, digest and statistics of each tensor


class Compiled(Relation):
    """As it is, and with torch.compile off."""

    agreement = "it computes the same with torch.compile and without it"
    takes = frozenset(("rtol", "atol"))

    def plain(self, name: str) -> Run:
        """Run the program as it is, but for dropout: inductor draws what eager torch draws."""
        return self.run(name, observed={REGIONS: {}})

    def sides(self, plain: Run) -> Iterator[Side]:
        """Run it with torch.compile off; where that differs, look into the region."""
        notes = (note for notes in self.noted(plain) for note in notes)
        regions = {note["region"]: note["children"] for note in notes if "region" in note}
        if not regions:
            yield Side("eager", None, unknown="it compiles nothing by torch.compile")
            return
        run = self.run("eager", OFF, {REGIONS: {}})
        if run.status != plain.status:
            unknown = f"without torch.compile it ends otherwise: see {run.log}"
            yield Side("eager", run, unknown=unknown)
            return
        compiled, eager = self._units(plain), self._units(run)
        tolerance = self.runner.tolerance
        amount, first, said = _compare(compiled, eager, tolerance)
        amount = replace(amount, level=self.runner.request.level)
        verdict = Verdict(
            first is None, plain.folder, run.folder, amount, first, tolerance=tolerance
        )
        if first is not None and regions.get(first.module):
            verdict = self._look_inside(verdict, first, eager, regions[first.module])
        yield Side("eager", run, verdict, said=said)

    def _units(self, run: Run) -> list[Unit]:
        return [
            Unit(*(note[key] for key in ("unit", "where", "step", "phase", "outputs")))
            for notes in self.noted(run)
            for note in notes
            if "unit" in note
        ]

    def _look_inside(
        self,
        verdict: Verdict,
        first: Divergence,
        eager: Sequence[Unit],
        children: Mapping[str, Sequence[str]],
    ) -> Verdict:
        """Compile the children of a region one at a time, and those of one that differs likewise.

        Returns the verdict with the innermost that differs.
        """
        culprit = ""
        tried: list[str] = []
        paths = list(children.get("", ()))[:_MOST]
        while paths:
            path = paths.pop(0)
            tried.append(path)
            only = {REGIONS: {"only": [first.module, path]}}
            run = self.run(f"inside-{len(tried)}", observed=only)
            name = f"{first.module}.{path}"
            its = [each for each in self._units(run) if each.name == name]
            if _compare(its, eager, self.runner.tolerance)[1] is not None:
                culprit = name
                paths = list(children.get(path, ()))[:_MOST]
        if not tried:
            return verdict
        if not culprit:
            cause = f"None of its modules differs when it alone is compiled: {', '.join(tried)}."
            return replace(verdict, advice=Advice(cause=cause))
        cause = (
            f"{culprit} differs when it alone of {first.module} is compiled. Leave it out by "
            "torch.compiler.disable, or report it with this module alone."
        )
        found = replace(first, module=culprit)
        return replace(verdict, first=found, advice=Advice(cause=cause))


def _compare(
    compiled: Sequence[Unit], eager: Sequence[Unit], asked: Tolerance | None
) -> tuple[Compared, Divergence | None, str]:
    """Compare what both have, call by call in the order of the compiled run.

    The tolerance is that of the coarsest dtype up to there: what is computed from its numbers has
    its rounding.
    """
    others = defaultdict[tuple[str, int, str], list[Unit]](list)
    for unit in reversed(eager):
        others[unit.name, unit.step, unit.phase].append(unit)
    names = [*TOLERANCES]
    coarsest, compared, unequal, steps = 0, 0, "", set[int]()
    rtol, atol = asked or TOLERANCES[names[coarsest]]
    for unit in compiled:
        partners = others[unit.name, unit.step, unit.phase]
        if not partners:
            continue
        other = partners.pop()
        compared += 1
        steps.add(unit.step)
        for one, two in zip(unit.outputs, other.outputs, strict=False):
            (dtype, digest, *statistics), (_, other_digest, *others_statistics) = one, two
            if dtype in names:
                coarsest = max(coarsest, names.index(dtype))
                rtol, atol = asked or TOLERANCES[names[coarsest]]
            if digest == other_digest:
                continue
            unequal = unequal or f"{unit.name} ({short(unit.where)})"
            how = out_of_tolerance(tuple(statistics), tuple(others_statistics), rtol, atol)
            if how:
                within = f"rtol={rtol:g}, atol={atol:g}"
                first = Divergence(
                    *(0, unit.step, unit.phase, unit.name, "compiled region", unit.where),
                    kind=Kind.OUTPUTS,
                    what=f"compiled and eager: {how}, which is not within {within}",
                )
                return Compared(1, len(steps), compared, 0, ""), first, ""
    said = f"{counted(compared, 'call')} bit for bit"
    if unequal:
        why = "as was asked for" if asked else f"which {names[coarsest]} earns"
        said = f"within rtol={rtol:g}, atol={atol:g}, {why}; bits differ first in {unequal}"
    return Compared(1, len(steps), compared, 0, ""), None, said
