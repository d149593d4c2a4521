"""Each row of the table of libraries fixes a program that differs because of that library.

A comment in each of the `programs` names the function that the next line calls:
``# calls: polars.col``.
"""

import ast
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchrepro.verdict.libraries import LIBRARIES, edits_of, library_row
from torchrepro.verdict.program_text import module_of

PROGRAMS = Path(__file__).with_name("programs")
CALLS = "# calls: "
MAY_REPEAT = ("thread", "the order of")
"""Words of what is left open to timing, which may give the same in each run of some machine."""

HOWS = {"keyword", "function", "after_making", "after_import"}
ENOUGH = 20  # rows whose programs the weekly job runs


def called_in(program):
    """Return the line of a program that calls a library, as ``file:line``, and the function."""
    lines = enumerate(program.read_text(encoding="utf-8").splitlines(), 1)
    [(number, called)] = [(n, line.removeprefix(CALLS)) for n, line in lines if CALLS in line]
    return f"{program}:{number + 1}", called


FOUND = {path.stem: called_in(path) for path in PROGRAMS.glob("*.py") if path.stem != "training"}
OF_ROW = {row.function: name for name, (_, called) in FOUND.items() if (row := library_row(called))}
of_each_row = pytest.mark.parametrize("row", LIBRARIES, ids=lambda row: row.function)


@pytest.fixture
def started_for_libraries(pytestconfig):
    """Skip unless the command asked for these tests, which are slow and need libraries."""
    if "libraries" not in pytestconfig.option.markexpr:
        pytest.skip("needs many libraries: pip install .[libraries], pytest -m libraries")


def digest(program, package):
    """Run a program and return the digest that it prints; skip if its library does not load."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    run = partial(subprocess.run, capture_output=True, text=True, env=env, check=False)
    done = run([sys.executable, "-W", "ignore", str(program)])
    if done.returncode:
        loaded = run([sys.executable, "-c", f"import {package}"])
        if loaded.returncode:
            pytest.skip(loaded.stderr.rstrip().rpartition("\n")[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def edited(program, edit, folder):
    """Return a copy of a program in a folder with one line changed by an edit."""
    lines = program.read_text(encoding="utf-8").splitlines(keepends=True)
    number = int(edit.where.rpartition(":")[2]) - 1
    assert lines[number].strip() == edit.before
    lines[number] = lines[number].replace(edit.before, edit.after)
    copy = folder / program.name
    copy.write_text("".join(lines), encoding="utf-8")
    shutil.copy(PROGRAMS / "training.py", folder)
    return copy


@of_each_row
def test_every_row_has_a_program_whose_line_it_can_edit(row, tmp_path):
    """A row is complete and is found by the called function; its edit of the program compiles."""
    name = OF_ROW[row.function]
    where, called = FOUND[name]

    assert row.package == called.partition(".")[0]
    assert row.how in HOWS
    assert row.documentation.startswith("https://")
    assert all((row.leaves_open, row.remedy))

    copy = edited(PROGRAMS / f"{name}.py", next(edits_of(row, where)), tmp_path)
    compile(copy.read_text(encoding="utf-8"), copy, "exec")


def test_every_program_tests_one_row():
    """Each program tests another row."""
    assert len(LIBRARIES) == len(OF_ROW) == len(FOUND) >= 30


def test_functions_without_a_row_have_no_advice():
    """A function of a library without a row, and one of the same name elsewhere."""
    assert library_row("numpy.random.rand") is None
    assert library_row("mypolars.DataFrame.group_by") is None
    assert library_row("polars") is None


TEXTS = {
    "added": ("x.group_by('a')", "x.group_by('a', maintain_order=True)"),
    "the only argument": ("x.group_by()", "x.group_by(maintain_order=True)"),
    "after a comma": ("x.group_by('a',)", "x.group_by('a',maintain_order=True)"),
    "changed": ("x.group_by('é', maintain_order=0)", "x.group_by('é', maintain_order=True)"),
    "several lines": ("x.group_by(\n    'a',\n)", "x.group_by(\n    'a',\nmaintain_order=True)"),
    "within another": ("f(x.group_by('a'), 1)", "f(x.group_by('a', maintain_order=True), 1)"),
}


@pytest.mark.parametrize(("before", "after"), TEXTS.values(), ids=TEXTS)
def test_a_keyword_is_added_to_a_call_however_it_is_written(before, after, tmp_path):
    """The edited call has the keyword once, with the value of the row, and is valid Python."""
    file = tmp_path / "program.py"
    file.write_text(before + "\n", encoding="utf-8")

    edit = next(edits_of(library_row("polars.DataFrame.group_by"), f"{file}:1"))

    lines = before.split("\n")
    lines[int(edit.where.rpartition(":")[2]) - 1] = edit.after
    assert "\n".join(lines) == after
    ast.parse(after)


def test_the_nearest_call_above_the_line_is_edited_first(tmp_path):
    """If an object is made several times, its last call above the line is edited first."""
    file = tmp_path / "program.py"
    made = "forest = RandomForestRegressor()\n"
    file.write_text(f"{made}{made}forest.fit(x, y)\n{made}", encoding="utf-8")

    edits = edits_of(library_row("sklearn.RandomForestRegressor.fit"), f"{file}:3")

    assert [edit.where for edit in edits] == [f"{file}:{line}" for line in (2, 1, 4)]


def test_a_program_with_the_fix_or_without_the_call_has_no_edit(tmp_path):
    """Nor has a program whose file was deleted."""
    file = tmp_path / "program.py"
    file.write_text("x.group_by('a', maintain_order=True)\n", encoding="utf-8")
    row = library_row("polars.DataFrame.group_by")

    assert module_of(str(file)) is not None
    for where in (f"{file}:1", f"{tmp_path / 'gone.py'}:1", str(file), "<string>:1", ""):
        assert [*edits_of(row, where)] == []


@pytest.mark.libraries
@of_each_row
def test_the_fix_of_a_row_makes_its_program_reproducible(row, tmp_path, started_for_libraries):
    """A program that differs because of one library is reproducible after the edit of its line."""
    if find_spec(row.package) is None:
        pytest.skip(f"{row.package} is not installed")
    name = OF_ROW[row.function]
    program = PROGRAMS / f"{name}.py"
    as_it_is = {digest(program, row.package) for _ in range(2)}
    if len(as_it_is) == 1 and any(words in row.leaves_open for words in MAY_REPEAT):
        as_it_is |= {digest(program, row.package) for _ in range(2)}
        if len(as_it_is) == 1:
            pytest.skip(f"{row.function}: four runs agree on this machine, by their timing")

    program = edited(program, next(edits_of(row, FOUND[name][0])), tmp_path)
    with_remedy = {digest(program, row.package) for _ in range(2)}

    assert len(as_it_is) > 1
    assert len(with_remedy) == 1


@pytest.mark.libraries
def test_enough_libraries_are_installed(started_for_libraries):
    """A run of these tests needs the libraries of at least 20 rows."""
    missing = [row.function for row in LIBRARIES if find_spec(row.package) is None]
    print(f"{len(LIBRARIES)} rows, of {len(missing)} the library is missing: {', '.join(missing)}")

    assert len(LIBRARIES) - len(missing) >= ENOUGH
