"""The command about checkpoints. It prints what the functions of the package return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from torchrepro.cli.app import IMPORTING, answer, command, doing
from torchrepro.ground.console import table

if TYPE_CHECKING:
    from torchrepro.ground.console import Part

SHORT = 16
"""The digits of a digest in the table of tensors; `--json` has all of them."""


@command("digest")
def digest_checkpoints(files: list[str], *, as_json: bool = False) -> None:
    """Show digests of a checkpoint and its tensors, or the tensors that differ between checkpoints.

    A digest depends on names, dtypes, shapes and bits, and not on the file format. The first
    checkpoint is compared with each of the others; the exit status is 1 if any differs. A
    checkpoint that needs code is refused.
    """
    with doing(IMPORTING):
        from torchrepro.checkpoint_digest import differences, digest_checkpoint
    with doing("reading the checkpoints"):
        first, *later = checkpoints = [digest_checkpoint(file) for file in files]
        rows = [row for checkpoint in later for row in differences(first, checkpoint)]
    lines: list[Part] = [f"{checkpoint.digest}  {checkpoint.file}" for checkpoint in checkpoints]
    if rows:
        cells = [(row.name, row.change, row.file) for row in rows]
        lines.append(table(("different", f"from {first.file}", "in"), cells, fold=1))
    elif later:
        lines.append("same")
    else:
        cells = [(row.name, row.description, row.digest[:SHORT]) for row in first.entries]
        lines.append(table(("name", "type", "digest"), cells))
    document = {
        "same": not rows if later else None,
        "checkpoints": [checkpoint.to_json() for checkpoint in checkpoints],
        "differences": [vars(row) for row in rows],
    }
    answer(document, lines, as_json=as_json)
    raise typer.Exit(1 if rows else 0)
