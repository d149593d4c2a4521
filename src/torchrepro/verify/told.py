"""How a verification is told: in a terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.messages import printable, some
from torchrepro.verdict.as_json import verdict_json
from torchrepro.verdict.told import verdict_parts
from torchrepro.verdict.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.console import Part
    from torchrepro.verify.value import Stressed, Tried, Verification


def verification_parts(found: Verification) -> tuple[Part, ...]:
    """Return the lines and tables that tell a verification."""
    return (*verdict_parts(found.verdict, found.next_rung), *_more(found))


def _more(found: Verification) -> Iterator[str]:
    yield "\n".join(["", f"  {_counts(found)}", *(f"  {line}" for line in _lines(found))])


def _lines(found: Verification) -> Iterator[str]:
    yield f"{'certifies' if found.same else 'not certified'}: {printable(found.certifies)}"
    if found.own_profile:
        yield f"(run as it is; it was under {printable(found.own_profile)})"
    elif not found.profile:
        yield "(run as it is, under no profile)"
    if found.stressed is not None:
        yield from _perturbed(found.stressed)
    if found.climbed is not None:
        yield from _climbed(found)
    elif found.own_profile and not found.same:
        yield "a climb adds settings to a profile that `torchrepro verify PROFILE` puts in force"
    if found.folder:
        yield f"recordings and logs are in {found.folder}"


def _counts(found: Verification) -> str:
    runs = counted(len(found.runs), "run")
    pairs = zip(found.runs[1:], found.verdicts, strict=True)
    other = [run.name for run, verdict in pairs if not verdict.same]
    if not other:
        return f"{runs}, all the same"
    return f"{runs}: unlike {found.runs[0].name} {'are' if other[1:] else 'is'} {some(other)}"


def _perturbed(stressed: Stressed) -> Iterator[str]:
    yield f"perturbed: {', '.join(stressed.perturbed) or 'nothing'}"
    yield from (f"not perturbed: {name} ({reason})" for name, reason in stressed.skipped)


def _climbed(found: Verification) -> Iterator[str]:
    rung = found.equal_on
    if rung is None:
        yield "no rung of the ladder makes the runs the same:"
    else:
        overrides = " ".join(map(quote, rung.overrides))
        yield f"with {rung.name} the runs are the same: {rung.why}"
        yield f"    {overrides}"
    yield from (f"    {tried.rung.name}: {tried.what}" for tried in found.climbed or ())


def verification_json(found: Verification) -> dict[str, Any]:
    """Return a verification as plain JSON values: those of its verdict, and more."""
    rung = found.equal_on
    return {
        **verdict_json(found.verdict, found.next_rung),
        "asked": found.asked,
        "certifies": found.certifies,
        "profile": found.profile,
        "own_profile": found.own_profile,
        "runs": [
            {**asdict(run), "same": position == 0 or found.verdicts[position - 1].same}
            for position, run in enumerate(found.runs)
        ],
        "folder": found.folder or None,
        "stress": None if found.stressed is None else _stress_json(found.stressed),
        "climb": None
        if found.climbed is None
        else {
            "equal_on": rung.name if rung else None,
            "tried": [_tried_json(tried) for tried in found.climbed],
        },
    }


def _stress_json(stressed: Stressed) -> dict[str, Any]:
    return {
        "perturbed": list(stressed.perturbed),
        "skipped": dict(stressed.skipped),
        "culprits": list(stressed.culprits),
        "what": stressed.what,
    }


def _tried_json(tried: Tried) -> dict[str, Any]:
    return {
        "name": tried.rung.name,
        "overrides": list(tried.rung.overrides),
        "why": tried.rung.why,
        "same": tried.same,
        "what": tried.what,
    }
