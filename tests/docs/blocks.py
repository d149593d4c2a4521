"""The fenced blocks of the README and the documentation, and what is said about running them.

Every block of Python, shell or console is run by a test. A comment directly above a block says
what a reader does not see of that, one `<!-- key: value -->` a line:

    not run: REASON   the block is not run, for this reason
    test: NAME        a test of its own runs it, which finds it by this name
    run: NAME         `.ci/run` and the set-up of a newcomer run it
    file: PATH        the block, of any language, is written to this file of the page's folder
    folder: PATH      the page's folder is first filled with this folder of the repository
    given: NAME, ...  pieces of `PIECES` in `test_blocks.py` that come before this Python block
    steps: WHICH      the steps of this GitHub workflow are run, but those of pip
    ends: STATUS      the exit status of the block; 0 where nothing is said
    cause: NAME       the program or the dialogue of a page of `docs/causes` (`test_causes.py`)
    needs: THING      what this program needs; `HAS` of `test_causes.py` says where it is
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REPO = Path(__file__).parents[2]
PAGES = tuple(
    page
    for page in (REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")))
    if "_build" not in page.parts
)
RUN = ("python", "sh", "console")
SHOWN = ("yaml", "text", "json", "toml", "html", "dockerfile")
KEYS = ("not run", "test", "run", "file", "folder", "given", "steps", "ends", "cause", "needs")
ELSEWHERE = ("not run", "test", "run", "cause")
_FENCE = re.compile(r"^( *)(`{3,})(.*)$")
_MARK = re.compile(r"^ *<!-- ([a-z ]+): (.+) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """The number of the line on which its text begins."""

    language: str
    text: str
    marks: Mapping[str, str]

    @property
    def place(self):
        """Where it is, as editors take it."""
        return f"{self.page.relative_to(REPO)}:{self.line}"

    @property
    def is_run_with_its_page(self):
        """Whether the test of its page does something with it."""
        if set(self.marks) & set(ELSEWHERE):
            return False
        return bool({"file", "steps"} & set(self.marks)) or self.language in RUN


def blocks(page):
    """Yield the blocks of a page in order, without the directives of Sphinx."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if opened is None:
            number += 1
            continue
        indent, fence, language = opened.groups()
        end = next(
            at for at in range(number + 1, len(lines)) if lines[at].strip() == fence
        )  # a fence that is never closed is an error here
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
        if not language.startswith("{"):
            yield Block(page, number + 2, language.strip(), text, _marks(lines, number))
        number = end + 1


def _marks(lines, fence):
    marks: dict[str, str] = {}
    for line in reversed(lines[:fence]):
        mark = _MARK.match(line)
        if mark is None:
            break
        marks[mark[1]] = mark[2]
    return marks


def every_block():
    """Return the blocks of all pages."""
    return [block for page in PAGES for block in blocks(page)]


def block_named(name):
    """Return the one block with the mark `test: NAME`."""
    [found] = [block for block in every_block() if block.marks.get("test") == name]
    return found
