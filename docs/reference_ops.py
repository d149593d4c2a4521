"""Ops that can vary between two runs, by device, and what profiles do about them.

The ops are the rows of `torchrepro.policies.deterministic_ops`. On which devices torch refuses
them, or takes a slower kernel, is read from the documentation of the torch that is installed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from reference_markdown import code, prose, table
from reference_rows import shipped

from torchrepro.policies.deterministic_ops import IMPLEMENTATIONS, OPS, NondeterministicOp
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten

PIECE = "cpu-fallback"
EVERY = "every device"
DEVICES = ("CPU", "CUDA", "XPU", "MPS")
_ENTRY = re.compile(r"^ +\* :(?:class|func):`([\w.]+)`(.*(?:\n {10,}.*|\n)*)", re.MULTILINE)
_SLOWER, _REFUSED = "act", "throw"
"""The verbs with which torch's documentation begins its two lists."""

_ACTIONS = {
    (
        "error",
        "error",
    ): "raises where torch has no deterministic kernel, and says what to use instead",
    ("error", "cpu"): "runs that op on the CPU where torch has no deterministic kernel",
    ("error", None): "raises torch's own error where torch has no deterministic kernel",
    ("warn", None): "warns where torch has no deterministic kernel, and lets it vary",
    ("none", None): "lets it vary",
    (None, None): "lets it vary",
}
"""What becomes of an op, by the values of `deterministic_algorithms` and `device.fallback`."""


class Documented(NamedTuple):
    """An entry of torch's list: what a program calls, on which devices, in which pass."""

    name: str
    devices: tuple[str, ...]
    differentiated: bool

    @property
    def where(self) -> str:
        """The devices and the pass in words."""
        devices = " and ".join(self.devices) or EVERY
        return f"{devices}, backward" if self.differentiated else devices


def documented(verb: str) -> list[Documented]:
    """Return the list of `torch.use_deterministic_algorithms` about ops that `verb`.

    A torch that words its documentation in another way fails the build, rather than leave a table
    empty.
    """
    text = torch.use_deterministic_algorithms.__doc__ or ""
    _, *sections = re.split(r"The following normally-nondeterministic operations will (\w+)", text)
    lists = dict(zip(sections[::2], sections[1::2], strict=True))
    entries = _ENTRY.findall(lists.get(verb, "").partition("\n    In addition")[0])
    if not entries:
        raise LookupError(f"torch {torch.__version__} documents no ops that {verb}")
    return [
        Documented(
            name,
            tuple(device for device in DEVICES if re.search(rf"\b{device}\b", said)),
            "differentiate" in said or "requires grad" in said,
        )
        for name, said in entries
    ]


def torch_version() -> str:
    """Return whose lists the page shows."""
    version = torch.__version__.partition("+")[0]
    return f"The devices are those that the documentation of torch {version} names."


def profiles() -> str:
    """Return what each shipped profile does about an op without a deterministic kernel."""
    with_piece = flatten(resolve("debug-strict", [f"with=[{PIECE}]"]).values)
    every = {**shipped(), f"debug-strict 'with=[{PIECE}]'": with_piece}
    rows = []
    for name, values in every.items():
        asked = values.get("backends.torch.deterministic_algorithms")
        fallback = values.get("device.fallback") if asked == "error" else None
        rows.append([code(name), _ACTIONS[asked, fallback]])
    return table(["profile", "such an op"], rows)


def refused_ops() -> str:
    """Return every op without a deterministic kernel, with the devices and what to use instead."""
    refused, slower = _places(_REFUSED), _places(_SLOWER)
    lines = []
    for row in OPS:
        calls = f" ({', '.join(map(code, row.documented))})" if row.documented else ""
        where = _devices([place for name in row.documented for place in refused.get(name, ())])
        older = _devices([place for name in row.documented for place in slower.get(name, ())])
        shown = where or (
            f"an older torch refuses it ({older}); this one has a kernel"
            if older
            else "where its kernel says so; torch's list leaves it out"
        )
        lines.append(
            f"- **`{row.name}`**{calls}: {shown}. Instead: {prose(row.instead)}.{_on_cpu(row)}"
        )
    return "\n".join(lines)


def _places(verb: str) -> dict[str, list[str]]:
    """Return where ops `verb`, by what a program calls."""
    places: dict[str, list[str]] = {}
    for each in documented(verb):
        places.setdefault(each.name, []).append(each.where)
    return places


def _on_cpu(row: NondeterministicOp) -> str:
    if not row.on_cpu:
        return " `device.fallback: cpu` does not help: the CPU's kernel raises as well."
    return ""


def replaced_ops() -> str:
    """Return the ops for which torchrepro has a deterministic implementation of its own."""
    return ", ".join(code(name) for name in IMPLEMENTATIONS)


def slower_ops() -> str:
    """Return what torch computes by another, slower kernel under deterministic algorithms."""
    return "\n".join(
        f"- {code(name)}: {_devices(where)}" for name, where in _places(_SLOWER).items()
    )


def _devices(where: list[str]) -> str:
    return EVERY if EVERY in where else "; ".join(dict.fromkeys(where))
