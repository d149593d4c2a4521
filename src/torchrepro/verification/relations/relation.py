"""Runs a program in two ways that ought to agree, and says whether they do.

The plain program is run twice first: where it does not agree with itself, nothing can be said.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError, TorchreproError
from torchrepro.ground.imports import named
from torchrepro.ground.messages import near, shown
from torchrepro.profile.load import resolve
from torchrepro.verdict.comparison import tolerance_of
from torchrepro.verification.relations.variants import Related
from torchrepro.verification.runner import Runner, output_directory
from torchrepro.verification.verifier import command_line, request_for

if TYPE_CHECKING:
    from torchrepro.verification.relations.variants import Relation

RELATIONS = {
    "resume": "verification.relations.resumed:Resumed",
    "workers": "verification.relations.workers:Workers",
    "compile": "verification.relations.compiled:Compiled",
}
"""The relations, as the command line calls them; each is loaded when it is asked for."""


def relate(  # noqa: PLR0913 - each is an option of the command
    name: str,
    profile: Any,
    command: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    folder: str | os.PathLike[str] = "",
    level: str = "op",
    keep: Sequence[str] = (),
    every: int = 1,
    max_size: int | str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Sequence[str] = (),
    checkpoint: str = "",
    resume_command: str = "",
    say: Callable[[str], object] = lambda text: None,
    meanwhile: Callable[[str], object] | None = None,
) -> Related:
    """Run `command` as it is, and in the other ways of the relation `name`; say whether all agree.

    The relations are those of `RELATIONS`. Parameters are as of `verify`; `checkpoint` says which
    files are one, and `resume_command` what goes on from ``{checkpoint}``. Raises what
    `verify` raises.
    """
    if name not in RELATIONS:
        raise ProfileError.about(
            "no such relation",
            key="relation",
            found=name,
            near=near(name, RELATIONS),
            legal=", ".join(RELATIONS),
        )
    kind: type[Relation] = named(RELATIONS[name])
    given = {
        "checkpoint": checkpoint,
        "resume_command": resume_command,
        "rtol": rtol,
        "atol": atol,
        "ignore": tuple(ignore),
    }
    for key, value in given.items():
        if value not in (None, "", ()) and key not in kind.takes:
            what = f"the relation {name} has no use for it"
            raise ProfileError.about(what, key=key, found=shown(value), todo="leave it out")
    resolved = None if profile is None else resolve(profile, overrides)
    tolerance = tolerance_of(rtol, atol)
    request = request_for(level, keep, every, max_size, tolerance)
    request = replace(request, loading=kind.loading)
    with output_directory(os.fspath(folder), say) as output, ExitStack() as stack:
        runner = Runner(tuple(command), output, request, tolerance, say, meanwhile, tuple(ignore))
        relation = kind(runner, resolved, stack, checkpoint, resume_command)
        try:
            plain = [relation.plain("plain-1")]
            runner.refuse_unrecorded(plain[0])
            plain.append(relation.plain("plain-2"))
            if not (relation.strayed and plain[0].recorded):
                runner.refuse_failed(plain, relation.strayed)
            agreed = runner.compare(*plain)
            sides = tuple(relation.sides(plain[0])) if agreed.same else ()
        except TorchreproError as error:
            reduced: Any = error.__reduce__()  # its class, and what it was made of
            raise reduced[0](*relation.in_own(reduced[1])) from None
        agreed, sides = relation.in_own((agreed, sides))
        line = command_line(profile, resolved, overrides, command)
        found = Related(name, kind.agreement, line, tuple(plain), agreed, sides, str(output))
    if found.status == 0 and not folder:
        shutil.rmtree(output, ignore_errors=True)
        return replace(found, folder="")
    return found
