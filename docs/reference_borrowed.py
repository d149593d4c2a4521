"""What torchrepro borrows from other libraries, from the rows that its tests hold it to."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from reference_markdown import code, prose

ROWS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent.parent / "tests" / "borrowed.yaml").read_text(encoding="utf-8")
)


def borrowed() -> str:
    """Return every row, under the library that it is about."""
    lines = []
    for library, rows in groupby(ROWS, itemgetter("library")):
        lines += [f"## {library}", "", *map(_entry, rows), ""]
    return "\n".join(lines)


def _entry(row: dict[str, Any]) -> str:
    names, modules = (", ".join(map(code, row[key])) for key in ("names", "used_by"))
    return (
        f"- **{prose(row['title'])}**: {names}. Expected: {prose(row['expected'])}. "
        f"Used by {modules}. Where it is gone: {prose(row['gone'])}."
    )
