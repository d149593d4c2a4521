"""What an environment variable is as a knob, and the row that describes one.

A variable is written to `os.environ`, which reaches C code that has not read it yet and every
child of the process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Effect, Knob, Phase, Scope
from torchrepro.knobs.legal import ANY_TEXT, Digits, Legal, Text

if TYPE_CHECKING:
    from collections.abc import Callable

BIT = Text("[01]", '"0", "1"')
COUNT = Digits(1, 9999)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable; None is a variable that is not set."""

    name: str

    def read(self) -> Any:
        return os.environ.get(self.name)

    def write(self, value: str) -> None:
        os.environ[self.name] = value

    save = read

    def restore(self, saved: Any) -> None:
        put_back(self.name, saved)


def put_back(name: str, text: str | None) -> None:
    """Give the variable `name` the value `text`, or take it away if that is None."""
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


def variable(name: str) -> Knob:
    """Return a row for a variable that the catalogue does not know, as `env_extra` names it."""
    return Knob(
        name=f"env_extra.{name}",
        target="env",
        legal=ANY_TEXT,
        access=Variable(name),
        variable=name,
        summary="A variable of the profile's own, which the catalogue does not know.",
        cost="unknown",
        source="",
        scope=Scope.PROCESS_AND_CHILDREN,
    )


PHASES = {
    "": Phase.ANY_TIME,
    "interpreter": Phase.INTERPRETER_START,
    "openmp": Phase.LIBRARY_LOAD,
    "torch": Phase.LIBRARY_LOAD,
    "torch_npu": Phase.LIBRARY_LOAD,
    "cuda": Phase.DEVICE_INIT,
    "npu": Phase.DEVICE_INIT,
    "communicator": Phase.COMMUNICATOR,
    "transformer_engine": Phase.MODULE_CONSTRUCTION,
}


def row(  # noqa: PLR0913 - the columns of the table below
    name: str,
    door: str,
    legal: Legal,
    summary: str,
    source: str,
    *,
    cost: str = "none",
    aliases: tuple[str, ...] = (),
    enough: Callable[[str], bool] | None = None,
    effect: Effect | None = None,
    access: Variable | None = None,
) -> Knob:
    return Knob(
        name=f"env.{name}",
        target="env",
        legal=legal,
        access=access or Variable(name),
        variable=name,
        summary=summary,
        cost=cost,
        source=source,
        phase=PHASES[door],
        door=door,
        scope=Scope.PROCESS_AND_CHILDREN,
        aliases=aliases,
        enough=enough,
        effect=effect,
    )


def digits(value: str) -> bool:
    """Whether `value` is a number, whichever."""
    return value.isdigit()
