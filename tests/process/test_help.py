"""The help of every command, and the first steps that `torchrepro` alone suggests."""

import re
import shlex

import pytest
import typer

from torchrepro.cli import (  # noqa: F401 - they register commands
    checkpoint_commands,
    demo_commands,
    profile_commands,
    run_commands,
)
from torchrepro.cli.app import FIRST_STEPS, ROWS, app

pytestmark = pytest.mark.usefixtures("clean_process")

EXAMPLES = [line for row in ROWS.values() for line, _ in row.examples]
COMMANDS = typer.main.get_command(app).commands


def own_words(line):
    """Return the arguments of torchrepro in a command line, without the shell and COMMAND."""
    words = shlex.split(re.search(r"torchrepro([^>)]*)", line)[1])
    return words[: words.index("--")] if "--" in words else words


def one_line(text):
    """Return the text of a help on one line, without frames."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_every_command_has_a_row_and_every_row_a_command():
    """Each row has two or three examples."""
    assert set(ROWS) == set(COMMANDS)
    assert all(2 <= len(row.examples) <= 3 for row in ROWS.values())


def test_the_main_help_is_grouped_and_ordered(command):
    """--help shows the groups, and in them the commands, in the order of the table."""
    status, out, err = command("--help")
    matches = [re.match(r"│ ([a-z][a-z-]*) ", line) for line in out.splitlines()]
    titles = [title for title in re.findall(r"╭─ ([^─]+) ─", out) if title != "Options"]

    assert (status, err) == (0, "")
    assert [match[1] for match in matches if match] == list(ROWS)
    assert titles == list(dict.fromkeys(row.group for row in ROWS.values()))
    assert "<bool>" not in out


@pytest.mark.parametrize("name", ROWS)
def test_the_help_of_a_command_shows_its_examples(command, name):
    """It also shows the part after `--`, and types only of options that have a value."""
    status, out, err = command(name, "--help")
    usage = out.strip().splitlines()[0]

    assert (status, err) == (0, "")
    for line, purpose in ROWS[name].examples:
        assert f"{line} {purpose}" in one_line(out)
    assert ("-- COMMAND..." in usage) == bool(ROWS[name].starts)
    assert not any(word in out for word in ("<bool>", "<str>", "<list[", "<path>"))


@pytest.mark.parametrize("line", [*EXAMPLES, *(line for line, _ in FIRST_STEPS)])
def test_every_example_is_a_legal_command_line(line):
    """The options and arguments of each example in a help exist."""
    name, *words = own_words(line)
    if name == "--help":
        return
    with COMMANDS[name].make_context(name, words) as context:
        values = {param.name for param in COMMANDS[name].params}
        assert context.params.keys() <= values


def test_torchrepro_alone_shows_the_first_steps(command):
    """They are five lines of at most 100 columns, with status 0."""
    status, out, err = command()
    lines = out.splitlines()

    assert (status, err, len(lines)) == (0, "", 5)
    assert all(step in line for (step, _), line in zip(FIRST_STEPS, lines[1:], strict=True))
    assert max(map(len, lines)) <= 100


def test_version_prints_the_version_of_the_package(command):
    """--version prints only the name and the version."""
    import torchrepro

    assert command("--version") == (0, f"torchrepro {torchrepro.__version__}\n", "")
