"""The tables that come from rows: knobs, keys, needs, outcomes, variables, the trace."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from reference_markdown import attribute_docs, code, linked, prose, records

from torchrepro.application.launch import AUTOMATIC_OBSTACLES, OBSTACLES
from torchrepro.knobs.catalogue import CATALOGUE, explanations, rows_for_key
from torchrepro.knobs.knob import PHASES
from torchrepro.knobs.variables import WITHOUT_EFFECT, allowed
from torchrepro.profile.load import resolve
from torchrepro.profile.needs import NEEDS, WEAKER
from torchrepro.profile.resolved import EXTRA, flatten
from torchrepro.profile.schema import json_schema
from torchrepro.profile.search_path import SHIPPED, ProfileFolder
from torchrepro.reporting.outcomes import STOPPING, Outcome
from torchrepro.trace.format import FORMAT, SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.knobs.knob import Knob
    from torchrepro.profile.needs import Need

_HEADINGS = {
    "env": "Environment variables",
    "torch": "torch",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "cpu": "CPU (oneDNN and threads)",
    "npu": "Ascend NPU",
    "": "Policies",
    "streams": "Seed plan",
    "seed": "Generators",
}
"""A part of the names of knobs, and their heading; a last part goes before a first one."""

_ELSEWHERE = {
    **dict.fromkeys(("ranks", "seed.streams"), "streams"),
    **dict.fromkeys(("seed.libraries", "seed.calls"), "torch"),
}
_LABELS = (
    ("values", "Values"),
    ("latches", "Latches"),
    ("reaches", "Reaches"),
    ("costs", "Costs"),
    ("profile key", "Key in a profile"),
    ("also called", "Also called"),
    ("since", "Since"),
)


def shipped() -> dict[str, dict[str, Any]]:
    """Return the values that each shipped profile sets, by dotted key, without its pieces."""
    names = [name for name in ProfileFolder(SHIPPED, "").names() if "/" not in name]
    return {name: flatten(resolve(name).values) for name in names}


def knobs() -> str:
    """Return every row of the catalogue, by whose state it is."""
    profiles = shipped()
    lines: list[str] = []
    for part, heading in _HEADINGS.items():
        lines.append(f"## {heading}")
        for knob in CATALOGUE:
            name = _ELSEWHERE.get(knob.name, knob.name)
            if part == next((p for p in reversed(name.split(".")) if p in _HEADINGS), ""):
                lines += _knob(knob, profiles)
    return "\n\n".join(lines)


def _knob(knob: Knob, profiles: dict[str, dict[str, Any]]) -> Iterator[str]:
    [said] = explanations(knob.name)
    values = {name: values.get(knob.profile_key) for name, values in profiles.items()}
    used = [f"{name} {code(value)}" for name, value in values.items() if value is not None]
    yield f"### {knob.name}"
    yield prose(said["does"])
    yield records(
        [
            *((label, prose(said[key])) for key, label in _LABELS),
            ("Set by", ", ".join(used)),
            ("Source", linked(said["source"])),
        ]
    )


def phases() -> str:
    """Return the moments at which knobs latch, each with the knobs that do."""
    lines = []
    for phase in dict.fromkeys(PHASES.values()):
        names = [knob.name for knob in CATALOGUE if PHASES[knob.door] == phase]
        shown = ", ".join(map(code, names)) if phase != PHASES[""] else ""
        many = f"{len(names)} knob{'s' * (len(names) > 1)}"
        lines.append(f"- **{phase}** ({many}){': ' if shown else ''}{shown}")
    return "\n".join(lines)


def obstacles() -> str:
    """Return what keeps a process from starting its command line again, surest first."""
    always = [f"- **{prose(words)}**" for words in OBSTACLES]
    automatic = [f"- {prose(words)}" for words in AUTOMATIC_OBSTACLES]
    return "\n".join([*always, *automatic])


def profile_keys() -> str:
    """Return every key of a profile with what it takes and what it means."""
    lines: list[str] = []
    for key, entry in json_schema()["properties"].items():
        lines += [f"## {key}", prose(entry.get("description", "").partition(" Cost: ")[0])]
        below = entry.get("properties", {})
        if key == EXTRA:
            lines.append("The variables are in [Allowed variables](variables.md).")
        elif below:
            lines.append("\n".join(_keys(below, f"{key}.")))
        else:
            lines.append(f"Takes: {_takes(key, entry)}")
    return "\n\n".join(lines)


def _keys(properties: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, entry in properties.items():
        key = f"{prefix}{name}"
        if entry.get("properties"):
            yield from _keys(entry["properties"], f"{key}.")
        else:
            does = prose(entry.get("description", "").partition(" Cost: ")[0])
            yield f"- **`{key}`**: {_takes(key, entry)}. {does}"


def _takes(key: str, entry: dict[str, Any]) -> str:
    """Return the legal values of a key in words: those of its row, or those of the schema."""
    rows = rows_for_key(key)
    if rows:
        return prose(rows[0].legal.words)
    words = entry.get("enum")
    if words:
        return ", ".join(code(word) for word in words if word is not None)
    kinds = entry.get("type", "string")
    named = [kinds] if isinstance(kinds, str) else kinds
    kind = " or ".join(
        {"null": "null", "object": "mapping", "array": "list"}.get(k, k) for k in named
    )
    bounds = [
        f"{word} {entry[end]}"
        for word, end in (("from", "minimum"), ("to", "maximum"))
        if end in entry
    ]
    return " ".join([kind, *bounds])


def needs() -> str:
    """Return what each guarantee needs, the weakest guarantee first."""
    lines = []
    for guarantee in sorted(WEAKER, key=lambda name: len(WEAKER[name])):
        known = [need for need in NEEDS if set(need.guarantees) & set(WEAKER[guarantee][-1:])]
        rows = [need for need in NEEDS if guarantee in need.guarantees and need not in known]
        lines.append(f"### What {guarantee} needs")
        if known:
            lines.append(f"All that `{WEAKER[guarantee][-1]}` needs, and:")
        lines.append("\n".join(map(_need, rows)))
    return "\n\n".join(lines)


_KINDS = {
    "numpy": "numpy",
    "onednn": "oneDNN",
    "cuda": "CUDA",
    "npu": "Ascend NPU",
    "several": "several ranks",
    "transformer_engine": "Transformer Engine",
}
"""How a page calls the kinds of device, library and run that needs depend on."""


def _need(need: Need) -> str:
    where = f" ({', '.join(_KINDS[kind] for kind in need.kinds)})" if need.kinds else ""
    open_ = f": without it, {prose(need.left_open)} may differ" if need.left_open else ""
    values = " or ".join(code(value) for value in need.broken_by)
    broken = f"; {values} is refused: {prose(need.because)}" if values else ""
    return f"- `{need.knob}`{where}{open_}{broken}"


def outcomes() -> str:
    """Return every outcome of a knob."""
    docs = attribute_docs("torchrepro.reporting.outcomes")
    return "\n".join(
        f"- **`{outcome}`**: {prose(docs['Outcome', outcome.name])}"
        + (" A strict profile stops." if outcome in STOPPING else "")
        for outcome in Outcome
    )


def allowed_variables() -> str:
    """Return the variables outside the catalogue that a profile may set."""
    return "\n".join(
        f"- **`{name}`**: {prose(row.summary)}. Values: {prose(row.legal.words)}."
        for name, row in allowed().items()
    )


def variables_without_effect() -> str:
    """Return the variables of published recipes that nothing reads."""
    return "\n".join(f"- **`{name}`**: {prose(why)}." for name, why in WITHOUT_EFFECT.items())


def trace_tables() -> str:
    """Return the tables and columns of a trace, with what the code says of the columns."""
    docs = attribute_docs("torchrepro.trace.format")
    classes = {"part": "Part", "step": "StepRow"}
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    tables = connection.execute("select name from sqlite_master where type = 'table'").fetchall()
    lines = [f"The format is number {FORMAT}."]
    for (name,) in tables:
        columns = connection.execute(f"pragma table_info({name})").fetchall()
        lines += [
            f"## {name}",
            "\n".join(
                f"- **`{column}`** ({kind})"
                + _described(docs.get((classes.get(name, ""), column), ""))
                for _, column, kind, *_ in columns
            ),
        ]
    connection.close()
    return "\n\n".join(lines)


def _described(text: str) -> str:
    return f": {prose(text)}" if text else ""
