"""The command that starts a pack of profiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrepro.cli.app import Json, app, print_json

if TYPE_CHECKING:
    from torchrepro.new_pack.writing import NewPack


@app.command("new-pack")
def new_pack(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The pack, or the path of its new folder.")
    ],
    as_json: Json = False,  # noqa: FBT002 - an option of the command line
) -> None:
    """Write a package of profiles that is tested and ready to publish into the new folder NAME."""
    from torchrepro.new_pack.writing import write_pack

    pack = write_pack(Path(name))
    if as_json:
        print_json(
            {
                "folder": str(pack.folder),
                "name": pack.name.text,
                "distribution": pack.name.distribution,
                "profiles": list(pack.profiles),
                "files": list(pack.files),
            }
        )
    else:
        sys.stdout.write(_told(pack))


def _told(pack: NewPack) -> str:
    folder = pack.folder if pack.folder.is_absolute() else f"./{pack.folder}"
    words = [f"{pack.folder}/ holds the pack {pack.name.text}:"]
    words += [f"  {path}" for path in pack.files]
    words += [
        "next:",
        f'  pip install -e "{folder}[test]"',
        f"  pytest {pack.folder}",
        f"  python train.py +repro={pack.name.text}/strict",
    ]
    return "\n".join(words) + "\n"
