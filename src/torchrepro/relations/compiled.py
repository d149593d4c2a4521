"""Whether a program computes the same with torch.compile and without it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchrepro.relations.observations import noted
from torchrepro.relations.related import Side
from torchrepro.trace.reader import read_run
from torchrepro.verdict.criteria import ALIGNED, out_of_tolerance
from torchrepro.verdict.render import counted, short
from torchrepro.verdict.value import Advice, Compared, Divergence, Kind, Verdict
from torchrepro.verification.perturbations import RunEnvironment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.relations.experiment import Experiment
    from torchrepro.trace.request import Request
    from torchrepro.verification.result import Run

    Tolerance = tuple[float, float]

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

_DTYPE, _DIGEST, _STATISTICS = 0, 1, slice(2, None)
_MOST = 16  # children of a region that are tried


@dataclass(frozen=True, slots=True)
class Unit:
    """What one region, or one module outside of all, returned in one call."""

    name: str
    where: str
    step: int
    phase: str
    outputs: Sequence[Any]
    """Dtype, digest and statistics of each tensor."""


class Compiled:
    """As it is, and with torch.compile off."""

    agreement = "it computes the same with torch.compile and without it"
    takes = frozenset(("rtol", "atol"))

    def recorded(self, request: Request) -> Request:
        """Record as it is asked for."""
        return request

    def plain(self, experiment: Experiment, name: str) -> Run:
        """Run the program as it is, but for dropout: inductor draws what eager torch draws."""
        return experiment.run(name, {"regions": {}})

    def sides(self, experiment: Experiment, plain: Run) -> Iterator[Side]:
        """Run it with torch.compile off; where that differs, look into the region."""
        found = _regions(experiment, plain)
        if not found:
            yield Side("eager", None, unknown="it compiles nothing by torch.compile")
            return
        run = experiment.run("eager", {"regions": {}}, OFF)
        if run.status != plain.status:
            unknown = f"without torch.compile it ends otherwise: see {run.log}"
            yield Side("eager", run, unknown=unknown)
            return
        compiled, eager = (_units(experiment, each) for each in (plain, run))
        compared = _compare(compiled, eager, experiment.runner.tolerance)
        verdict = _verdict(experiment, plain, run, compared)
        first = compared.first
        if first is not None and found.get(first.name):
            inside, tried = _look_inside(experiment, eager, first, found[first.name])
            verdict = _within(verdict, first, inside, tried)
        yield Side("eager", run, verdict, said=compared.said)


@dataclass(frozen=True, slots=True)
class _Comparison:
    units: int
    steps: int
    first: Unit | None
    how: str
    said: str


def _regions(experiment: Experiment, run: Run) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the children of each module in each region, by the region and the module's path."""
    return {
        note["region"]: note["children"]
        for notes in noted(experiment.observed(run.name))
        for note in notes
        if "region" in note
    }


def _units(experiment: Experiment, run: Run) -> list[Unit]:
    return [
        Unit(note["unit"], note["where"], note["step"], note["phase"], note["outputs"])
        for notes in noted(experiment.observed(run.name))
        for note in notes
        if "unit" in note
    ]


def _compare(
    compiled: Sequence[Unit], eager: Sequence[Unit], asked: Tolerance | None
) -> _Comparison:
    """Compare what both have, call by call in the order of the compiled run.

    The tolerance is that of the coarsest dtype up to there: what is computed from its numbers has
    its rounding.
    """
    others = defaultdict[tuple[str, int, str], list[Unit]](list)
    for unit in reversed(eager):
        others[unit.name, unit.step, unit.phase].append(unit)
    names = [*TOLERANCES]
    coarsest, compared, unequal, steps = 0, 0, "", set[int]()
    for unit in compiled:
        partners = others[unit.name, unit.step, unit.phase]
        if not partners:
            continue
        other = partners.pop()
        compared += 1
        steps.add(unit.step)
        for one, two in zip(unit.outputs, other.outputs, strict=False):
            if one[_DTYPE] in names:
                coarsest = max(coarsest, names.index(one[_DTYPE]))
            if one[_DIGEST] == two[_DIGEST]:
                continue
            unequal = unequal or f"{unit.name} ({short(unit.where)})"
            rtol, atol = asked or TOLERANCES[names[coarsest]]
            how = out_of_tolerance(tuple(one[_STATISTICS]), tuple(two[_STATISTICS]), rtol, atol)
            if how:
                within = f"rtol={rtol:g}, atol={atol:g}"
                how = f"compiled and eager: {how}, which is not within {within}"
                return _Comparison(compared, len(steps), unit, how, "")
    said = f"{counted(compared, 'call')} bit for bit"
    if unequal:
        rtol, atol = asked or TOLERANCES[names[coarsest]]
        why = "as was asked for" if asked else f"which {names[coarsest]} earns"
        said = f"within rtol={rtol:g}, atol={atol:g}, {why}; bits differ first in {unequal}"
    return _Comparison(compared, len(steps), None, "", said)


def _verdict(experiment: Experiment, plain: Run, run: Run, compared: _Comparison) -> Verdict:
    unit = compared.first
    first = None
    if unit is not None:
        first = Divergence(
            *(0, unit.step, unit.phase, unit.name, "compiled region", unit.where),
            *(Kind.OUTPUTS, "", None, None),
            what=compared.how,
        )
    meta = read_run(plain.folder, records=False)[0].meta
    level = str(meta.get("level") or "op")
    tolerance = experiment.runner.tolerance
    return Verdict(
        first is None,
        plain.folder,
        run.folder,
        Compared(1, compared.steps, compared.units, 0, level),
        first,
        tolerance=tolerance,
    )


def _look_inside(
    experiment: Experiment,
    eager: Sequence[Unit],
    first: Unit,
    children: Mapping[str, Sequence[str]],
) -> tuple[Unit | None, list[str]]:
    """Compile the children of a region one at a time, and those of one that differs likewise.

    Returns the innermost that differs, None if none does, and those that were tried.
    """
    culprit: Unit | None = None
    tried: list[str] = []
    paths = list(children.get("", ()))[:_MOST]
    while paths:
        path = paths.pop(0)
        name = f"inside-{len(tried) + 1}"
        tried.append(path)
        run = experiment.run(name, {"regions": {"only": [first.name, path]}})
        its = [each for each in _units(experiment, run) if each.name == f"{first.name}.{path}"]
        found = _compare(its, eager, experiment.runner.tolerance)
        if found.first is not None:
            culprit = found.first
            paths = list(children.get(path, ()))[:_MOST]
    return culprit, tried


def _within(verdict: Verdict, first: Unit, inside: Unit | None, tried: Sequence[str]) -> Verdict:
    if not tried or verdict.first is None:
        return verdict
    if inside is None:
        cause = f"None of its modules differs when it alone is compiled: {', '.join(tried)}."
        return replace(verdict, advice=Advice(cause=cause))
    cause = (
        f"{inside.name} differs when it alone of {first.name} is compiled. Leave it out by "
        "torch.compiler.disable, or report it with this module alone."
    )
    found = replace(verdict.first, module=inside.name)
    return replace(verdict, first=found, advice=Advice(cause=cause))
