"""Sentences and names read as those of the field: patterns that readers stumble over get fewer.

`python -m tests.test_words` prints today's counts as the `limits` of `words.yaml`; with a title or
a name it prints each place.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[1]
TABLE = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))
PROSE = {row["title"]: re.compile(row["pattern"], re.I | re.M) for row in TABLE["prose"]}
INSTEAD = {row["title"]: row["instead"] for row in TABLE["prose"]}
SOURCES = sorted((REPO / "src").rglob("*.py"))
PAGES = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, comments and messages of a module, with their lines."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of its blocks of code."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def _bound(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the variables that a module assigns and the parameters that it declares."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def places() -> dict[str, dict[str, list[str]]]:
    """Return each use of a pattern or a name, in the source, on the pages, and as a name."""
    found: dict[str, dict[str, list[str]]] = {"source": {}, "pages": {}, "names": {}}
    for part, paths, texts in (("source", SOURCES, _texts), ("pages", PAGES, _prose)):
        for path in paths:
            for number, text in texts(path):
                for title, pattern in PROSE.items():
                    uses = [f"{path}:{number}: {use[0]}" for use in pattern.finditer(text)]
                    found[part].setdefault(title, []).extend(uses)
    names = {*TABLE["names"], *TABLE["pale"]}
    for path in SOURCES:
        for number, name in _bound(path):
            if name in names:
                found["names"].setdefault(name, []).append(f"{path}:{number}")
    return found


@pytest.mark.parametrize("part", ["source", "pages", "names"])
def test_no_pattern_or_name_that_is_read_twice_becomes_more_frequent(part):
    """Each stands at most as often as its limit in `words.yaml`."""
    limits = TABLE["limits"][part]

    over = {
        f"{title}: {len(uses)}, and {limits.get(title, 0)} are allowed": INSTEAD.get(title, "")
        for title, uses in places()[part].items()
        if len(uses) > limits.get(title, 0)
    }

    assert over == {}, "see each with: python -m tests.test_words TITLE"


if __name__ == "__main__":
    if sys.argv[1:]:
        print(
            *(place for part in places().values() for place in part.get(sys.argv[1], ())), sep="\n"
        )
    else:
        counts = {
            part: {title: len(uses) for title, uses in its.items()}
            for part, its in places().items()
        }
        print(yaml.safe_dump({"limits": counts}, sort_keys=False))
