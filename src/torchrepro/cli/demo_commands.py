"""The command `demo`: a program that does not repeat, the line, and a profile that repeats it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from shlex import join
from tempfile import TemporaryDirectory
from typing import Any

from torchrepro.cli.app import answer, command, doing
from torchrepro.ground.console import Part, parts
from torchrepro.ground.errors import ProfileError

LONGEST = 1 << 20
"""Bytes. Longer files are not searched for a program."""

PROGRAMS = ("train.py", "main.py", "run.py")
"""Names of files that are searched first."""

NEXT: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    (
        r"^@hydra\.main\b|\bhydra\.main\(",
        (
            ("python {} +repro=debug-strict", "your Hydra app under a profile"),
            ("torchrepro verify -- python {}", "do two runs of it agree?"),
            ("torchrepro verify debug-strict -- python {}", "do they agree under the profile?"),
        ),
    ),
    (
        r"^\s*(?:import|from)\s+(?:torch|lightning|transformers)\b",
        (
            ("torchrepro verify -- python {}", "do two runs of your program agree?"),
            ("torchrepro verify debug-strict -- python {}", "do they agree under a profile?"),
            ("torchrepro run debug-strict -- python {}", "run it under the profile"),
        ),
    ),
)
"""A pattern in a program of this folder -> the commands to run next, with what each shows."""

ELSEWHERE = (
    ("torchrepro quickstart", "write this program and its profile here"),
    ("torchrepro list", "the profiles that you can use"),
    ("torchrepro verify -- python PROGRAM.py", "do two runs of a program of yours agree?"),
)
"""The commands to run next in a folder without a program."""


@command("demo")
def demo(*, keep: str = "", as_json: bool = False) -> None:
    """Run a small program that does not repeat, name its line, and make it repeat by a profile.

    Needs no file and no network, and takes half a minute. The program and the profile are those of
    `torchrepro quickstart`. If DIR has them already, they are used as they are: change the program,
    and run the demo again.
    """
    from torchrepro.scaffold import this_python
    from torchrepro.verification.result import verification_json
    from torchrepro.verification.runner import RunRequest
    from torchrepro.verification.verifier import verified

    following = commands_for(Path())
    document: dict[str, Any] = {"folder": keep or None, "verified": []}
    with nullcontext(keep) if keep else TemporaryDirectory(prefix="torchrepro-demo-") as name:
        folder = Path(name)
        profile, program = _files(folder)
        lines = (folder / program).read_text(encoding="utf-8").splitlines()
        shown: list[Part] = [f"{program} is a training program of {len(lines)} lines:", ""]
        shown += [f"{number:4}  {line}" for number, line in enumerate(lines, start=1)]
        command_line = [this_python(), program]
        runs = {
            f"torchrepro verify -- python {program}": (None, "unchanged"),
            f"torchrepro verify {profile} -- python {program}": (profile, "under-profile"),
        }
        for line, (applied, recordings) in runs.items():
            with doing(f"{line}: two runs"), chdir(folder):
                kept = "" if keep else recordings
                request = RunRequest(command_line, profile=applied, folder=kept)
                outcome = verified(request, closer=False)
                shown += ["", f"$ {line}", *parts(outcome)]
                answered = verification_json(outcome)
            document["verified"].append({"command": line, "answer": answered})
    width = max(len(line) for line, _ in following)
    shown += ["", "Next, in this folder:"]
    shown += [f"  {line:{width}}  # {purpose}" for line, purpose in following]
    document["next"] = [{"command": line, "what": purpose} for line, purpose in following]
    if not keep:
        shown += ["", "The files are removed. To change the program: torchrepro demo --keep DIR"]
    answer(document, shown, as_json=as_json)


def commands_for(folder: Path) -> Sequence[tuple[str, str]]:
    """Return the commands to run next in `folder`, each with what it shows."""
    paths = [folder / name for name in PROGRAMS]
    paths += [path for path in sorted(folder.glob("*.py")) if path not in paths]
    texts = {
        path.name: path.read_text(encoding="utf-8", errors="replace")
        for path in paths
        if path.is_file() and path.stat().st_size <= LONGEST
    }
    for pattern, commands in NEXT:
        for name, text in texts.items():
            if re.search(pattern, text, re.MULTILINE) and not name.startswith("test_"):
                return [(line.format(join([name])), purpose) for line, purpose in commands]
    return ELSEWHERE


def _files(folder: Path) -> tuple[str, str]:
    """Return the profile and the program in `folder`; write them if both are missing."""
    from torchrepro.scaffold import QUICKSTART, write_quickstart

    present = [name for name in QUICKSTART if (folder / name).is_file()]
    if not present:
        write_quickstart(folder)
    elif len(present) < len(QUICKSTART):
        missing = next(name for name in QUICKSTART if name not in present)
        todo = "name a new or empty folder, or one that an earlier demo has written"
        problem = f"has {present[0]} and no {missing}"
        raise ProfileError.about(problem, found=str(folder), todo=todo)
    return QUICKSTART
