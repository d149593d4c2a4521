"""Runs `verify` as a user would on the programs next to this file, and scores its answers.

`python -m tests.advice.scoring FOLDER [NAME...]` prints the table, and keeps the answers in FOLDER.
Answers that are already there are reused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

from torchrepro.verdict.value import Edit

from .table import CAUSES, GUESSES, REPEATING, VARYING, Line, Repeating, Varying

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = Path(__file__).parent / "programs"
PLACE = re.compile(r"([\w./~-]+\.py):(\d+)")
LABELLED = re.compile(r"^  (\S.*?)(?: {2,}(\S.*))?$")
CONTINUED = re.compile(r"^ {3,}(\S.*)$")
BEGIN, END = "<!-- scores -->", "<!-- end of scores -->"
"""Lines of a page between which the scores stand."""

TRIES = 4
"""Verifications of a program whose runs differ by chance; one of them has to differ."""

LIMIT = 900
"""Seconds that one command may take."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The contents of a printed answer of `verify`."""

    lines: tuple[tuple[str, int], ...]
    """Each file and line that it names."""
    cause: str
    edit: Edit | None
    command: str | None


def read_answer(text: str) -> Answer:
    """Return the contents of the printed answer `text`; only this function knows its format."""
    blocks: dict[str, list[str]] = {}
    label = ""
    for line in text.splitlines():
        if match := LABELLED.match(line):
            label = match[1]
            blocks.setdefault(label, []).append(match[2] or "")
        elif label and (match := CONTINUED.match(line)):
            blocks[label].append(match[1])
        else:
            label = ""
    edit = None
    if words := blocks.get("edit"):
        where, _, before = words[0].partition("   ")
        edit = Edit(where, before, blocks["becomes"][0])
    lines = tuple((file, int(number)) for file, number in PLACE.findall(text))
    cause, command = " ".join(blocks.get("cause", ())), blocks.get("try", (None,))[-1]
    return Answer(lines, cause, edit, command)


@dataclass(frozen=True, slots=True)
class Score:
    """The answer of `verify` for one program, compared with the expected one."""

    name: str
    status: int
    line: bool
    """It names the file and the number of an expected line."""
    cause: bool
    remedy: str
    """`none`, or the outcomes of its advice: `edit works`, `command fails`."""
    reaches_nothing: bool | None = None
    """Whether its JSON says that the difference reaches no result; None if not checked."""

    @property
    def works(self) -> bool:
        return "works" in self.remedy

    @property
    def false(self) -> bool:
        return "fails" in self.remedy


def fresh_copy(name: str, within: Path) -> Path:
    """Return a new folder with the program `name`, and nothing that a run has left there."""
    folder = Path(tempfile.mkdtemp(dir=within)) / name
    shutil.copytree(PROGRAMS / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run_in_shell(line: str, folder: Path) -> CompletedProcess[str]:
    """Type `line` into a shell in `folder`, without what this process has in its environment."""
    ours = ("TORCHREPRO_", "PYTEST_", "OMP_NUM_THREADS", "PYTHONHASHSEED", "COLUMNS", "FORCE_COLOR")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["OMP_WAIT_POLICY"] = "PASSIVE"  # the same bits, and less of a shared machine
    environment["TMPDIR"] = str(folder.parent)
    environment["PYTHONPATH"] = str(_torchvision(folder.parent))
    try:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CompletedProcess(line, 124, "", f"more than {LIMIT} s")


def _torchvision(within: Path) -> Path:
    """Return a folder with a torchvision that Lightning can import: no program uses the real one,
    and a wheel of it that was built for another torch cannot be imported.
    """
    package = within / "importable" / "torchvision"
    package.mkdir(parents=True, exist_ok=True)
    anything = (
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    return type(name, (), {})\n"
    )
    (package / "__init__.py").write_text("from torchvision import models, transforms\n")
    for module in ("models", "transforms"):
        (package / f"{module}.py").write_text(anything)
    return package.parent


def verify_command(row: Varying | Repeating, *options: str) -> str:
    """Return the command line that verifies the program of `row`."""
    return shlex.join(["torchrepro", "verify", *options, "--", *row.command])


def plain_results(row: Varying | Repeating, within: Path) -> Iterator[str]:
    """Run the program of `row` by itself, again and again in one folder, and yield its results."""
    folder = fresh_copy(row.name, within)
    while True:
        done = run_in_shell(shlex.join(row.command), folder)
        printed = [line for line in done.stdout.splitlines() if line.startswith("result ")]
        assert done.returncode == 0, done.stderr
        assert printed, done.stdout
        yield printed[-1]


def _number(name: str, line: Line) -> int:
    text = (PROGRAMS / name / line.file).read_text(encoding="utf-8")
    return [written.strip() for written in text.splitlines()].index(line.text) + 1


def _is_end_of(left: str, right: str) -> bool:
    return f"/{left}".endswith(f"/{right}") or f"/{right}".endswith(f"/{left}")


def names_line(answer: Answer, row: Varying | Repeating, lines: tuple[Line, ...]) -> bool:
    """Return whether `answer` names one of `lines`: by a whole path, or by the end of it."""
    return any(
        number == _number(row.name, line) and _is_end_of(line.file, file)
        for line in lines
        for file, number in answer.lines
    )


def names_cause(cause: str, row: Varying) -> bool:
    """Return whether the text `cause` names a true cause, and is not a list of guesses."""
    offered = sum(bool(re.search(guess, cause, re.I)) for guess in GUESSES)
    true = any(re.search(CAUSES[key], cause, re.I) for key in row.causes)
    return true and offered < 3


def _remedy(row: Varying, answer: Answer, within: Path) -> str:
    outcomes = []
    if answer.edit:
        works = _apply(answer.edit, folder := fresh_copy(row.name, within))
        works = works and run_in_shell(verify_command(row), folder).returncode == 0
        outcomes.append(f"edit {'works' if works else 'fails'}")
    if answer.command:
        works = run_in_shell(answer.command, fresh_copy(row.name, within)).returncode == 0
        outcomes.append(f"command {'works' if works else 'fails'}")
    return ", ".join(outcomes) or "none"


def _apply(edit: Edit, folder: Path) -> bool:
    """Apply `edit` literally; return False if its line in the file is another one."""
    path, _, number = edit.where.rpartition(":")
    file, at = folder / path, int(number) - 1
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    if [line.strip() for line in lines[at : at + 1]] != [edit.before]:
        return False
    lines[at] = lines[at].replace(edit.before, edit.after)
    file.write_text("\n".join(lines), encoding="utf-8")
    return True


def score(row: Varying | Repeating, within: Path, answers: Path | None = None) -> Score:
    """Verify the program of `row`, follow the advice of the answer, and score it."""
    done = run_in_shell(verify_command(row), fresh_copy(row.name, within))
    if answers:
        text = f"{done.stdout}\nexit {done.returncode}\n\n{done.stderr}"
        (answers / f"{row.name}.txt").write_text(text, encoding="utf-8")
    answer = read_answer(done.stdout)
    if isinstance(row, Varying):
        return Score(
            row.name,
            done.returncode,
            names_line(answer, row, row.lines),
            names_cause(answer.cause, row),
            _remedy(row, answer, within),
        )
    reaches_nothing = None
    for _ in range(TRIES if row.differs else 0):  # two runs may by chance have the same ops
        as_json = run_in_shell(verify_command(row, "--json"), fresh_copy(row.name, within))
        if as_json.returncode:
            differs = as_json.returncode == 1
            reaches_nothing = differs and json.loads(as_json.stdout)["reaches"] is False
            break
    line = names_line(answer, row, row.differs)
    return Score(row.name, done.returncode, line, False, "none", reaches_nothing)


def is_alarm(row: Repeating, result: Score) -> bool:
    """Return whether `verify` raises a false alarm for a program that repeats.

    If ops differ and reach no result, two runs may by chance have the same ops.
    """
    return result.status != 0 and not (result.status == 1 and result.reaches_nothing)


def score_all(
    within: Path, answers: Path | None = None, names: tuple[str, ...] = (), jobs: int = 2
) -> dict[str, Score]:
    """Score every program, or only `names`, `jobs` at a time."""

    def score_or_reuse(row: Varying | Repeating) -> Score:
        kept = answers / f"{row.name}.json" if answers else None
        if kept and kept.exists():
            return Score(**json.loads(kept.read_text(encoding="utf-8")))
        result = score(row, within, answers)
        if kept:
            kept.write_text(json.dumps(asdict(result)), encoding="utf-8")
        return result

    rows = [row for row in (*VARYING, *REPEATING) if not names or row.name in names]
    with ThreadPoolExecutor(jobs) as pool:
        return {result.name: result for result in pool.map(score_or_reuse, rows)}


@dataclass(frozen=True, slots=True)
class Total:
    """The scores of all programs in total, as tests check them."""

    lines: int
    causes: int
    remedies: int
    false: tuple[str, ...]
    """The programs whose advice does not help, or cannot be followed as printed."""
    missed: tuple[str, ...]
    """The programs that vary but are reported as the same, or could not be verified."""
    alarms: tuple[str, ...]


def total(results: dict[str, Score]) -> Total:
    """Add up `results`."""
    varying = [results[row.name] for row in VARYING if row.name in results]
    repeating = [row for row in REPEATING if row.name in results]
    return Total(
        sum(result.line for result in varying),
        sum(result.cause for result in varying),
        sum(result.works for result in varying),
        tuple(result.name for result in varying if result.false),
        tuple(result.name for result in varying if result.status != 1),
        tuple(row.name for row in repeating if is_alarm(row, results[row.name])),
    )


def markdown(results: dict[str, Score]) -> str:
    """Return the scores as a table in Markdown, with a sentence of their totals."""

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    rows = ["| program | does not repeat because of | exit | line | cause | edit or command |"]
    rows.append("|---|---|---|---|---|---|")
    for row in VARYING:
        if result := results.get(row.name):
            cells = f"{result.status} | {yes(result.line)} | {yes(result.cause)} | {result.remedy}"
            rows.append(f"| `{row.name}` | {row.causes[0]} | {cells} |")
    rows += ["", "| program | repeats, and looks as if not | exit | alarm |", "|---|---|---|---|"]
    for row in REPEATING:
        if result := results.get(row.name):
            cells = f"{result.status} | {yes(is_alarm(row, result))}"
            rows.append(f"| `{row.name}` | {row.looks_like} | {cells} |")
    sums = total(results)
    varying = len([row for row in VARYING if row.name in results])
    rows += [
        "",
        f"Of {varying} programs that do not repeat, {len(sums.missed)} were not found to; the line "
        f"of {sums.lines} is named, a true cause of {sums.causes}, and an edit or a command that "
        f"works of {sums.remedies}; {len(sums.false)} say to do what does not help. Of "
        f"{len(results) - varying} that repeat, {len(sums.alarms)} raise an alarm.",
    ]
    return "\n".join(rows)


def main() -> None:
    """Score the programs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", type=Path, help="a page of the documentation to write them to")
    args = parser.parse_intermixed_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as within:
        results = score_all(Path(within), args.folder, tuple(args.names), args.jobs)
    print(markdown(results))
    if args.page:
        before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        page = f"{before}{BEGIN}\n{markdown(results)}\n{END}{after}"
        args.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
