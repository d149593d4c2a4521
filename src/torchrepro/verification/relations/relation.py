"""Runs a program and variants that should compute the same, and reports whether they do.

The plain program first runs twice. If these two runs differ, the variants cannot be judged.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrepro.ground.errors import ProfileError, TorchreproError, near, shown
from torchrepro.ground.imports import named
from torchrepro.verification.relations.variants import Related

if TYPE_CHECKING:
    from torchrepro.verification.relations.variants import Relation
    from torchrepro.verification.runner import RunRequest

RELATIONS = {
    "resume": "verification.relations.resumed:Resumed",
    "workers": "verification.relations.workers:Workers",
    "compile": "verification.relations.compiled:Compiled",
}
"""The relations by their names on the command line; each is imported when it is requested."""


def relate(
    name: str, request: RunRequest, *, checkpoint: str = "", resume_command: str = ""
) -> Related:
    """Run a command and the variants of the relation `name`, and return whether all agree.

    `name` is a key of `RELATIONS`. `checkpoint` is a pattern for checkpoint files, and
    `resume_command` is a command that resumes from ``{checkpoint}``. The exceptions are as in
    `verify`.
    """
    if name not in RELATIONS:
        hint = {"near": near(name, RELATIONS), "legal": ", ".join(RELATIONS)}
        raise ProfileError.about("no such relation", key="relation", found=name, **hint)
    relation_class: type[Relation] = named(RELATIONS[name])
    options: dict[str, Any] = {"checkpoint": checkpoint, "resume_command": resume_command}
    options |= {"rtol": request.rtol, "atol": request.atol, "ignore": request.ignore}
    for key, value in options.items():
        if value not in (None, "", ()) and key not in relation_class.takes:
            what = f"the relation {name} does not use it"
            raise ProfileError.about(what, key=key, found=shown(value), todo="leave it out")
    running = request.runner(request.tolerance, loading=relation_class.loading)
    with running as runner, ExitStack() as stack:
        relation = relation_class(runner, request.resolved, stack, checkpoint, resume_command)
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
        line, runs = request.command_line, tuple(plain)
        agreement, folder = relation_class.agreement, str(runner.folder)
        related = Related(name, agreement, line, runs, verdict, variants, folder)
    if related.status == 0 and not request.folder:
        shutil.rmtree(runner.folder, ignore_errors=True)
        return replace(related, folder="")
    return related
