"""Options of inductor that start from an environment variable, as one state with it.

Inductor reads its variables once, when it is imported, which takes 0.7 s that a program without
torch.compile never needs. Until then the variable is the state, and from then on the option is.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.knob import Effect, Missing
from torchrepro.knobs.variable import Variable, put_back

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIGS = ("torch.compiler.config", "torch._inductor.config")
"""Where options live; a newer torch keeps some in the first, for all compilers."""


@dataclass(frozen=True, slots=True)
class InductorVariable(Variable):
    """A variable with the values 0 and 1 and the option that starts from it."""

    option: str

    def read(self) -> Any:
        text, option = os.environ.get(self.name), self.present()
        if option is None and _CONFIGS[-1] in sys.modules:
            raise Missing(f"this torch's inductor has no {self.option}")
        return text if option in (None, text == "1") else _text(option)

    def holds(self, value: Any) -> bool:
        return os.environ.get(self.name) == value and self.present() in (None, value == "1")

    def write(self, value: str) -> None:
        os.environ[self.name] = value
        self._set(value == "1", {"default": value == "1"})

    def save(self) -> Any:
        option = self.present()
        start = None if option is None else _start(self._config(), self.option)
        return os.environ.get(self.name), option, start

    def restore(self, saved: Any) -> None:
        text, option, start = saved
        put_back(self.name, text)
        if option is None:  # loaded since, if at all: it started from what is undone now
            option, start = text == "1", {"default": text == "1"}
        self._set(option, start)

    def present(self) -> bool | None:
        """Return the option, or None while the variable can still become it."""
        config = self._config()
        return None if config is None else bool(getattr(config, self.option))

    def _config(self) -> Any:
        loaded = (sys.modules.get(name) for name in _CONFIGS)
        return next((config for config in loaded if hasattr(config, self.option)), None)

    def _set(self, value: bool, start: Mapping[str, Any]) -> None:  # noqa: FBT001
        config = self._config()
        if config is None:
            return
        moves = bool(getattr(config, self.option)) != value
        _start_from(config, self.option, start)
        if moves:
            setattr(config, self.option, value)


@dataclass(frozen=True, slots=True)
class InductorSwitch(InductorVariable):
    """The same state by the option's own values."""

    def read(self) -> Any:
        if not _inductor_reads(self.name):
            raise Missing(f"this torch's inductor has no {self.option} mode")
        return InductorVariable.read(self) == "1"

    def holds(self, value: Any) -> bool:
        return bool(self.read() == value)

    def write(self, value: bool) -> None:  # type: ignore[override]  # noqa: FBT001
        InductorVariable.write(self, _text(value))


def effect_of(access: InductorVariable) -> Effect:
    """Return what inductor made of the variable behind `access`."""

    def read() -> bool:
        option = access.present()
        if option is None:
            raise Missing("inductor is not loaded")
        return option

    return Effect(read, lambda text: text == "1", f"inductor's {access.option} is {{}}")


def _text(option: bool) -> str:  # noqa: FBT001 - the value of a boolean option
    return "1" if option else "0"


_START = ("default", "env_value_default", "env_value_force")


def _start(config: Any, option: str) -> dict[str, Any]:
    """Return what every thread starts from with `option`, as torch took it from the variable.

    Private, because what is assigned to an option reaches the present thread only, and an option
    that its variable forces ignores assignments. Where torch keeps this elsewhere, other threads
    go on with what was there at the import, and a forced option is seen to be ineffective.
    """
    entry = getattr(config, "_config", {}).get(option)
    return {name: vars(entry)[name] for name in _START if name in getattr(entry, "__dict__", ())}


def _start_from(config: Any, option: str, start: Mapping[str, Any]) -> None:
    """Have every thread start from `start`, as `_start` returns it."""
    entry = getattr(config, "_config", {}).get(option)
    if hasattr(entry, "__dict__"):
        for name in _START:
            vars(entry).pop(name, None)
        vars(entry).update(start)


@cache
def _inductor_reads(variable: str) -> bool:
    """Whether inductor knows `variable`, looked up in its source: importing it takes 0.7 s."""
    source = Path(str(import_module("torch").__file__)).parent / "_inductor" / "config.py"
    return source.is_file() and variable in source.read_text(encoding="utf-8")
