"""Runs a program and variants that should compute the same, and reports whether they do.

The plain program first runs twice. If these two runs differ, the variants cannot be judged.
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
"""The relations by their names on the command line; each is imported when it is requested."""


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
    """Run `command` and the variants of the relation `name`, and return whether all agree.

    `name` is a key of `RELATIONS`. `checkpoint` is a pattern for checkpoint files, and
    `resume_command` is a command that resumes from ``{checkpoint}``. All other parameters, and the
    exceptions, are as in `verify`.
    """
    if name not in RELATIONS:
        raise ProfileError.about(
            "no such relation",
            key="relation",
            found=name,
            near=near(name, RELATIONS),
            legal=", ".join(RELATIONS),
        )
    relation_class: type[Relation] = named(RELATIONS[name])
    options = {
        "checkpoint": checkpoint,
        "resume_command": resume_command,
        "rtol": rtol,
        "atol": atol,
        "ignore": tuple(ignore),
    }
    for key, value in options.items():
        if value not in (None, "", ()) and key not in relation_class.takes:
            what = f"the relation {name} does not use it"
            raise ProfileError.about(what, key=key, found=shown(value), todo="leave it out")
    resolved = None if profile is None else resolve(profile, overrides)
    tolerance = tolerance_of(rtol, atol)
    request = request_for(level, keep, every, max_size, tolerance)
    request = replace(request, loading=relation_class.loading)
    with output_directory(os.fspath(folder), say) as output, ExitStack() as stack:
        runner = Runner(tuple(command), output, request, tolerance, say, meanwhile, tuple(ignore))
        relation = relation_class(runner, resolved, stack, checkpoint, resume_command)
        try:
            plain = [relation.plain("plain-1")]
            runner.refuse_unrecorded(plain[0])
            plain.append(relation.plain("plain-2"))
            if not (relation.strayed and plain[0].recorded):
                runner.refuse_failed(plain, relation.strayed)
            verdict = runner.compare(*plain)
            variants = tuple(relation.variants(plain[0])) if verdict.same else ()
        except TorchreproError as error:
            reduced: Any = error.__reduce__()  # the class, and the arguments of its constructor
            raise reduced[0](*relation.with_users_paths(reduced[1])) from None
        verdict, variants = relation.with_users_paths((verdict, variants))
        line = command_line(profile, resolved, overrides, command)
        agreement, runs = relation_class.agreement, tuple(plain)
        related = Related(name, agreement, line, runs, verdict, variants, str(output))
    if related.status == 0 and not folder:
        shutil.rmtree(output, ignore_errors=True)
        return replace(related, folder="")
    return related
