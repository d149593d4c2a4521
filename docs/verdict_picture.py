"""Draw the answer of a real `torchrepro verify` as a terminal shows it.

`python docs/verdict_picture.py` runs examples/diverging.py, whose runs differ. It writes what the
README shows: the text, and the pictures images/verdict-light.svg and images/verdict-dark.svg.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
PROGRAM = HERE.parent / "examples" / "diverging.py"
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}
COMMAND = "torchrepro verify debug-strict -- python diverging.py"
DIVERGED = 1
COLUMNS = 80
README = HERE.parent / "README.md"
_SHOWN = re.compile(r"(<!-- test: verdict -->\n```text\n)(.*?)(```\n)", re.DOTALL)
_FONT_FROM_THE_NETWORK = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def picture(theme: str) -> Path:
    """Return where the picture for this theme is."""
    return HERE / "images" / f"verdict-{theme}.svg"


def answer(variables: Mapping[str, str]) -> str:
    """Run the command in a terminal; return the command and what it answers, with colours."""
    environment = {**variables, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    with (
        tempfile.TemporaryDirectory(prefix="try-") as folder,
        tempfile.TemporaryFile("w+") as aside,
    ):
        shutil.copy(PROGRAM, folder)
        end, terminal = pty.openpty()
        with subprocess.Popen(  # noqa: S603 - the command above
            COMMAND.split(),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=aside,  # what is under way, which is gone at the end
        ) as verify:
            os.close(terminal)
            printed = b"".join(iter(lambda: _read(end), b""))
        os.close(end)
        if verify.returncode != DIVERGED:
            aside.seek(0)
            sys.exit(f"{COMMAND} ended with {verify.returncode}:\n{aside.read()}")
    text = printed.decode().replace("\r\n", "\n").rstrip()
    return f"$ {COMMAND}\n{text}"


def _read(end: int) -> bytes:
    """Return what comes next from the other side of a terminal; nothing once it is closed."""
    try:
        return os.read(end, 65536)
    except OSError:
        return b""


def drawn(text: str, theme: TerminalTheme) -> str:
    """Return the picture of a terminal with `text`, which needs no font from the network."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), legacy_windows=False)
    console.print(Text.from_ansi(text), "\n")  # rich cuts the last line
    picture = console.export_svg(title="", theme=theme, unique_id="verdict")
    return _FONT_FROM_THE_NETWORK.sub("", picture)


def main() -> None:
    """Write both pictures of one run, and the text in the README."""
    text = answer(os.environ)
    readme = README.read_text(encoding="utf-8")
    shown = re.sub(r"torchrepro-verify-\w+", "torchrepro-verify-a1b2c3", Text.from_ansi(text).plain)
    readme = _SHOWN.sub(lambda block: f"{block[1]}{shown}\n{block[3]}", readme)
    README.write_text(readme, encoding="utf-8")
    for name, theme in THEMES.items():
        picture(name).write_text(drawn(text, theme) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
