"""What a stranger sees first: the help of every command, and what to do first."""

import re
import shlex

import pytest
import typer

from torchrepro.cli import profile_commands, run_commands  # noqa: F401 - they register commands
from torchrepro.cli.app import FIRST_STEPS, ROWS, app

pytestmark = pytest.mark.usefixtures("clean_process")

EXAMPLES = [line for row in ROWS.values() for line, _ in row.examples]
COMMANDS = typer.main.get_command(app).commands


def ours(line):
    """The words of a command line that are torchrepro's own: without the shell's and COMMAND."""
    words = shlex.split(re.search(r"torchrepro([^>)]*)", line)[1])
    return words[: words.index("--")] if "--" in words else words


def one_line(text):
    """Help as one line, without the frames that it is wrapped in."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def test_every_command_has_a_row_and_every_row_a_command():
    """The help of the whole names every command, by group, in the order of the table."""
    assert set(ROWS) == set(COMMANDS)
    assert all(2 <= len(row.examples) <= 3 for row in ROWS.values())


def test_the_help_of_the_whole_is_grouped_and_ordered(command):
    """--help shows the groups, and in them the commands, in the order of the table."""
    status, out, err = command("--help")
    found = [re.match(r"│ ([a-z][a-z-]*) ", line) for line in out.splitlines()]
    titles = [title for title in re.findall(r"╭─ ([^─]+) ─", out) if title != "Options"]

    assert (status, err) == (0, "")
    assert [match[1] for match in found if match] == list(ROWS)
    assert titles == list(dict.fromkeys(row.group for row in ROWS.values()))
    assert "<bool>" not in out


@pytest.mark.parametrize("name", ROWS)
def test_the_help_of_a_command_shows_how_it_is_used(command, name):
    """The help of a command shows each example whole, what follows `--`, and no idle type."""
    status, out, err = command(name, "--help")
    usage = out.strip().splitlines()[0]

    assert (status, err) == (0, "")
    for line, what in ROWS[name].examples:
        assert f"{line} {what}" in one_line(out)
    assert ("-- COMMAND..." in usage) == bool(ROWS[name].starts)
    assert not any(word in out for word in ("<bool>", "<str>", "<list[", "<path>"))


@pytest.mark.parametrize("line", [*EXAMPLES, *(line for line, _ in FIRST_STEPS)])
def test_every_example_is_a_request_that_the_command_takes(line):
    """Every command line that the help shows has options and arguments that exist."""
    name, *words = ours(line)
    if name == "--help":
        return
    with COMMANDS[name].make_context(name, words) as context:
        values = {param.name for param in COMMANDS[name].params}
        assert context.params.keys() <= values


def test_alone_it_says_what_to_do_first(command):
    """`torchrepro` alone answers in five lines of at most 100 columns, and succeeds."""
    status, out, err = command()
    lines = out.splitlines()

    assert (status, err, len(lines)) == (0, "", 5)
    assert all(step in line for (step, _), line in zip(FIRST_STEPS, lines[1:], strict=True))
    assert max(map(len, lines)) <= 100


def test_the_version_is_that_of_the_package(command):
    """--version prints the name and the version, and nothing else."""
    import torchrepro

    assert command("--version") == (0, f"torchrepro {torchrepro.__version__}\n", "")
