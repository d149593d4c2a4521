"""A command that a page names in the middle of a sentence exists, with the options it is given."""

import pkgutil
import re
import shlex
from importlib import import_module

import pytest
import typer

from torchrepro import cli
from torchrepro.cli.app import app

from .blocks import PAGES, REPO

for _module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}."):
    import_module(_module.name)  # each adds its commands to the app
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(torchrepro\s[^`]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_a_command_within_a_sentence_exists(page):
    """Its name is one of the commands, and its options are theirs, up to `--`."""
    commands = typer.main.get_command(app).commands

    for line in _INLINE.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        name, *words = shlex.split(line)[1:]
        ours = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in ours if word.startswith("--")}
        if name.startswith("--"):
            continue
        known = {option for parameter in commands[name].params for option in parameter.opts}

        assert options <= known, line
