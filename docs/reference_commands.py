"""The commands, from the application and its table, and the statuses that they end with."""

from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import typer
from reference_markdown import code, prose, records

import torchrepro
from torchrepro import cli
from torchrepro.cli.app import ROWS, app
from torchrepro.ground.errors import EXIT_STATUSES, TorchreproError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEXT = re.compile(r" <(str|list\[str\])>")
"""What the help says of an argument that is any text: its type in Python, which tells nothing."""


def commands() -> str:
    """Return every command by group, in the order of the help."""
    registered = registered_commands()
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in ROWS.values()):
        lines.append(f"## {group}")
        for name, row in ROWS.items():
            if row.group == group:
                lines += _command(name, registered[name])
    return "\n\n".join(lines)


def registered_commands() -> dict[str, Any]:
    """Return every command of the application by its name."""
    for module in iter_modules(cli.__path__):
        if module.name.endswith("_commands"):  # they register commands
            import_module(f"{cli.__name__}.{module.name}")
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def _command(name: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=f"torchrepro {name}")
    usage = " ".join(["torchrepro", name, *command.collect_usage_pieces(context)])
    yield f"### torchrepro {name}"
    yield f"Usage: {code(usage)}"
    yield "\n\n".join(prose(paragraph) for paragraph in (command.help or "").split("\n\n"))
    shown = [param.get_help_record(context) for param in command.get_params(context)]
    yield records(
        (code(_TEXT.sub("", label.strip())), prose(text)) for label, text in filter(None, shown)
    )
    yield "Examples:"
    yield "\n".join(f"- {code(line)}: {prose(what)}" for line, what in ROWS[name].examples)


def exit_statuses() -> str:
    """Return every exit status with the exceptions that a command ends with it for."""
    public = [getattr(torchrepro, name) for name in torchrepro.__all__]
    errors = [
        each for each in public if isinstance(each, type) and issubclass(each, TorchreproError)
    ]
    lines = []
    for status, meaning in EXIT_STATUSES.items():
        raised = [
            f"[`{error.__name__}`](python.md#exceptions)"
            for error in errors
            if error.exit_status == status
        ]
        of = f" In Python: {', '.join(raised)}." if raised else ""
        lines.append(f"- **`{status}`**: {prose(meaning)}.{of}")
    return "\n".join(lines)
