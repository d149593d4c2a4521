"""Checks whether a program computes the same with and without torch.compile."""

from __future__ import annotations

from ast import parse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.knobs.torch_state import inductor_reads
from torchrepro.verdict.criteria import ALIGNED, out_of_tolerance
from torchrepro.verdict.diagnosis import IS_COMPILED, PAGES
from torchrepro.verdict.render import counted, short, source_line
from torchrepro.verdict.value import Advice, Compared, Divergence, Edit, Kind, Verdict
from torchrepro.verification.perturbations import RunEnvironment
from torchrepro.verification.relations.variants import AGREE, Relation, Variant

if TYPE_CHECKING:
    from torchrepro.verification.result import Run

    Tolerance = tuple[float, float]

REGIONS = "verification.relations.region_observer:note_regions"
OPTIONS = "verification.relations.region_observer:set_options"

OFF = RunEnvironment({"TORCHDYNAMO_DISABLE": "1"})

TOLERANCES: Mapping[str, Tolerance] = {
    "float64": (1e-7, 1e-7),
    "float32": ALIGNED,
    "float16": (1e-2, 1e-3),
    "bfloat16": (1.6e-2, 1e-3),
}
"""Dtype -> the default rtol and atol for its rounding, the finest dtype first.

float32 has the values of `ALIGNED`. The others are from
https://docs.pytorch.org/docs/stable/testing.html, or in the same proportion to float32 as there.
"""

_MOST = 16  # the most children of a region that are tried


class Unit(NamedTuple):
    """The outputs of one call of a compiled region, or of a module outside of all regions."""

    name: str
    where: str
    step: int
    phase: str
    outputs: Sequence[Any]  # dtype, digest and statistics of each tensor


class Option(NamedTuple):
    """An option of torch.compile that makes compiled code compute as eager code does."""

    name: str
    value: bool | str
    without: str  # what compiled code does without the option
    variable: str = ""  # the option's environment variable; empty if every torch has the option


OF_TORCH = Option(
    "torch._inductor.config.fallback_random",
    value=True,
    without="inductor draws other random numbers than eager code",
)
OF_NUMPY = Option(
    "torch._dynamo.config.use_numpy_random_stream",
    value=True,
    without="compiled code draws numpy's random numbers from torch's generator",
)
RANDOM_NUMBERS = (OF_TORCH, OF_NUMPY)
ROUNDING = (
    Option(
        "torch._inductor.config.emulate_precision_casts",
        value=True,
        without="inductor rounds to float16 and bfloat16 less often than eager code",
    ),
    Option(
        "torch._inductor.config.numerics",
        "strict",
        "inductor rounds, and orders the terms of a sum, differently from eager code",
        variable="TORCHINDUCTOR_NUMERICS",
    ),
)
"""The option with the least effect on speed first."""


class Compiled(Relation):
    """The relation between a program and the same program without torch.compile."""

    agreement = "it computes the same with torch.compile and without it"
    takes = frozenset(("rtol", "atol"))

    def plain(self, name: str) -> Run:
        return self.run(name, observers={REGIONS: {}})

    def variants(self, plain: Run) -> Iterator[Variant]:
        """Run the program without torch.compile. If the results differ, look for the reason."""
        notes = chain(*self.notes_of(plain))
        regions = {note["region"]: note["children"] for note in notes if "region" in note}
        if not regions:
            yield Variant("eager", None, unknown="it never calls torch.compile")
            return
        run = self.run("eager", OFF, {REGIONS: {}})
        if run.status != plain.status:
            unknown = f"without torch.compile it ends with another exit status: see {run.log}"
            yield Variant("eager", run, unknown=unknown)
            return
        as_it_is = self._variant("as it is", plain, run)
        if as_it_is.status == AGREE:
            yield as_it_is
            return
        options, with_options = self._with_options_of(run)
        verdict, decides = with_options.verdict, as_it_is.verdict
        if verdict and verdict.first and regions.get(verdict.first.module):
            children = regions[verdict.first.module]
            verdict = self._look_inside(verdict, verdict.first, self._units(run), children)
        elif verdict and verdict.same and decides and decides.first:
            decides = replace(decides, advice=_advice(decides.first, options, with_options.note))
        yield replace(with_options, verdict=verdict)
        yield replace(as_it_is, verdict=decides)

    def _with_options_of(self, eager: Run) -> tuple[Sequence[Option], Variant]:
        """Return the fewest options that make the program agree with its run `eager`.

        If no options help, returns the options for random numbers. Also returns the comparison.
        """

        of_random_numbers, of_rounding = "with eager's random numbers", "with eager's rounding"
        roundings = (
            (of_rounding, (*RANDOM_NUMBERS, option))
            for option in ROUNDING
            if not option.variable or inductor_reads(option.variable)
        )
        groups = (of_random_numbers, (OF_TORCH,)), (of_random_numbers, RANDOM_NUMBERS)
        by_options: dict[Sequence[Option], Variant] = {}
        for name, options in chain(groups, roundings):
            by_options[options] = together = self._with_options(name, options, eager)
            if together.status != AGREE:
                continue
            last = options[-1:]
            alone = together if last == options else self._with_options(name, last, eager)
            return (last, alone) if alone.status == AGREE else (options, together)
        return RANDOM_NUMBERS, by_options[RANDOM_NUMBERS]

    def _with_options(self, name: str, options: Sequence[Option], eager: Run) -> Variant:
        run_name = "-and-".join(option.name.rpartition(".")[2] for option in options)
        run = self.run(run_name, observers={REGIONS: {}, **_setting(options)})
        return replace(self._variant(name, run, eager), run=run)

    def _variant(self, name: str, compiled: Run, eager: Run) -> Variant:
        if compiled.status != eager.status:
            reason = f"it ends with another exit status: see {compiled.log}"
            return Variant(name, compiled, unknown=reason)
        tolerance = self.runner.tolerance
        amount, first, note = _compare(self._units(compiled), self._units(eager), tolerance)
        amount = replace(amount, level=self.runner.request.level)
        runs = compiled.folder, eager.folder
        verdict = Verdict(first is None, *runs, amount, first, tolerance=tolerance)
        return Variant(name, eager, verdict, note=note)

    def _units(self, run: Run) -> list[Unit]:
        notes = chain(*self.notes_of(run))
        return [Unit(**note) for note in notes if "outputs" in note]

    def _look_inside(
        self,
        verdict: Verdict,
        first: Divergence,
        eager: Sequence[Unit],
        children: Mapping[str, Sequence[str]],
    ) -> Verdict:
        """Compile only one child of a region at a time, and descend into a child that differs.

        Returns `verdict` with the innermost module that differs.
        """
        culprit = ""
        tried: list[str] = []
        paths = list(children.get("", ()))[:_MOST]
        while paths:
            path = paths.pop(0)
            tried.append(path)
            only = {"only": [first.module, path]}
            observers = {REGIONS: only, **_setting(RANDOM_NUMBERS)}
            run = self.run(f"inside-{len(tried)}", observers=observers)
            name = f"{first.module}.{path}"
            units = [unit for unit in self._units(run) if unit.name == name]
            if _compare(units, eager, self.runner.tolerance)[1] is not None:
                culprit = name
                paths = list(children.get(path, ()))[:_MOST]
        if not tried:
            return verdict
        if not culprit:
            cause = f"No module differs when it alone is compiled: {', '.join(tried)}."
            return replace(verdict, advice=Advice(cause, cause_id=PAGES[IS_COMPILED]))
        cause = (
            f"{culprit} differs when it alone of {first.module} is compiled. Exclude it with "
            "torch.compiler.disable, or report it with this module alone."
        )
        advice = Advice(cause, cause_id=PAGES[IS_COMPILED])
        return replace(verdict, first=replace(first, module=culprit), advice=advice)


def _setting(options: Sequence[Option]) -> dict[str, Any]:
    """Return the observer that sets `options` in the process of a run."""
    return {OPTIONS: {"options": {option.name: option.value for option in options}}}


def _advice(first: Divergence, options: Sequence[Option], note: str) -> Advice:
    """Return advice that names the cause, and the lines of code that set the `options`."""
    lines = "; ".join(f"{option.name} = {option.value!r}" for option in options)
    cause = " and ".join(option.without for option in options)
    edit, before = None, source_line(first.source)
    with suppress(SyntaxError):  # the lines cannot precede a decorator or the head of a block
        parse(after := f"{lines}; {before}")
        edit = Edit(first.source, before, after)
    cause = f"{cause[:1].upper()}{cause[1:]}. To compute as eager code does: {lines}"
    tried = f"with these options it agrees, {note}"
    return Advice(cause, edit, tried=tried, cause_id=PAGES[IS_COMPILED])


def _compare(
    compiled: Sequence[Unit], eager: Sequence[Unit], tolerance: Tolerance | None
) -> tuple[Compared, Divergence | None, str]:
    """Compare the calls that occur in both runs, in the order of the compiled run.

    Without a tolerance, uses the default for the coarsest dtype so far, because the rounding of
    this dtype affects all later results.
    """
    eager_calls = defaultdict[tuple[str, int, str], list[Unit]](list)
    for unit in reversed(eager):
        eager_calls[unit.name, unit.step, unit.phase].append(unit)
    dtypes = [*TOLERANCES]
    coarsest, compared, unequal, steps = 0, 0, "", set[int]()
    rtol, atol = tolerance or TOLERANCES[dtypes[coarsest]]
    for unit in compiled:
        partners = eager_calls[unit.name, unit.step, unit.phase]
        if not partners:
            continue
        partner = partners.pop()
        compared += 1
        steps.add(unit.step)
        for left, right in zip(unit.outputs, partner.outputs, strict=False):
            (dtype, digest, *statistics), (_, eager_digest, *eager_statistics) = left, right
            if dtype in dtypes:
                coarsest = max(coarsest, dtypes.index(dtype))
                rtol, atol = tolerance or TOLERANCES[dtypes[coarsest]]
            if digest == eager_digest:
                continue
            unequal = unequal or f"{unit.name} ({short(unit.where)})"
            how = out_of_tolerance(tuple(statistics), tuple(eager_statistics), rtol, atol)
            if how:
                within = f"rtol={rtol:g}, atol={atol:g}"
                first = Divergence(
                    *(0, unit.step, unit.phase, unit.name, "compiled region", unit.where),
                    kind=Kind.OUTPUTS,
                    what=f"compiled and eager: {how}, which is not within {within}",
                )
                return Compared(1, len(steps), compared, 0, ""), first, ""
    note = f"{counted(compared, 'call')} bit for bit"
    if unequal:
        reason = "as requested" if tolerance else f"the default for {dtypes[coarsest]}"
        note = f"within rtol={rtol:g}, atol={atol:g}, {reason}; bits differ first in {unequal}"
    return Compared(1, len(steps), compared, 0, ""), None, note
