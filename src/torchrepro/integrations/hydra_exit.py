"""A profile that Hydra composed and nothing put in force: refused before a job, or said at exit.

Hydra calls callbacks for the jobs of an app, unless the app takes ours away, and none for
`hydra.compose` (https://hydra.cc/docs/advanced/compose_api), whose caller has to apply the profile.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from dataclasses import dataclass, field

from torchrepro.applier import was_applied
from torchrepro.console import say
from torchrepro.errors import ApplyError
from torchrepro.exit_status import ExitStatus
from torchrepro.integrations.hydra_config import CALLBACK, GROUP
from torchrepro.process_state import inherited

_ASKED = re.compile(rf"\+{GROUP}(/\w+)?(@[^=]*)?=.")
_SEPARATORS = re.compile(r"[\s,()\[\]'\"]+")
_TODO = {
    "compose": f"call torchrepro.apply(config.{GROUP}) before the program's first random number",
    "main": f"let Hydra call torchrepro's callback: this app, or a ~hydra.callbacks.{CALLBACK} on "
    "the command line, takes it away",
}


@dataclass
class _UnappliedProfile:
    """What was composed in this process and has to be put in force by somebody."""

    names: list[str] = field(default_factory=list)
    composer: str = ""
    sweeping: bool = False
    """Our callback has seen the start of the sweep whose jobs are composed now."""

    words_of_the_launcher: list[str] | None = None
    """In a process of a launcher, whose command line is its own: the words of the sweep's."""

    watched_by: int = 0
    """The process that says at its end what is left."""


_waiting = _UnappliedProfile()


def note_composed(name: str) -> None:
    """Note that Hydra has composed the profile `name`, for a job or for whoever called `compose`.

    Ends the process for a job of a sweep that our callback is not there to protect.
    """
    composer = _composer()
    if composer == "sweep":
        if not _waiting.sweeping and inherited() is None:
            say(_said([name], "main"))
            raise SystemExit(ApplyError.exit_status)
        return  # its job may run in another process, where the callback takes it
    if composer == "main":  # another program begins; a job of a sweep may compose for itself
        _waiting.sweeping = False
    _waiting.composer = composer
    if name not in _waiting.names:
        _waiting.names.append(name)
    if _waiting.watched_by != os.getpid():
        _waiting.watched_by = os.getpid()
        atexit.register(_at_exit, os.getpid(), ExitStatus())


def note_callback(*, sweeping: bool = False) -> None:
    """Note that our callback is there and sees to what was composed."""
    _waiting.names.clear()
    _waiting.sweeping = sweeping


def words_that_ask() -> list[str]:
    """Return the words of the command line with which whoever started this asked for a profile."""
    if _waiting.words_of_the_launcher is not None:
        return _waiting.words_of_the_launcher
    return [word for word in sys.argv[1:] if _ASKED.match(word)]


def note_launched(words: list[str]) -> None:
    """Note that a launcher runs jobs of a sweep here, which was started with `words` that ask."""
    _waiting.words_of_the_launcher = words


def asked_on_the_command_line() -> bool:
    """Whether whoever started this program asked for a profile."""
    return bool(words_that_ask())


def asked_by_name() -> frozenset[str]:
    """Return the names after ``+repro=`` and ``+repro/with=``, those of a sweep included."""
    values = (word.partition("=")[2] for word in words_that_ask())
    return frozenset(name for value in values for name in _SEPARATORS.split(value) if name)


def _composer() -> str:
    """Return who has Hydra compose: `compose`, a `sweep` for one of its jobs, or `main`.

    Hydra tells a source nothing but the name of a config. Both functions looked for here are
    public: hydra.compose, and ConfigLoader.load_sweep_config, which launchers call.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - documented, if only for CPython
    while frame is not None:
        if frame.f_globals.get("__name__") == "hydra.compose":
            return "compose"
        if frame.f_code.co_name == "load_sweep_config":
            return "sweep"
        frame = frame.f_back  # type: ignore[assignment]
    return "main"


def _at_exit(process: int, status: ExitStatus) -> None:
    if os.getpid() != process or not _waiting.names or was_applied() or inherited() is not None:
        return
    if _waiting.composer == "main" and not _a_job_has_run():
        return  # --cfg and --help only show what would be composed, and an error is said already
    say(_said(_waiting.names, _waiting.composer))
    if asked_on_the_command_line():
        status.value = ApplyError.exit_status


def _a_job_has_run() -> bool:
    """Whether Hydra has begun a job in this process, and it is over.

    Hydra sets its HydraConfig for a job and unsets it behind; what only shows a config leaves it
    set, and what ends before never makes it.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton

    made = HydraConfig in Singleton.get_state()["instances"]
    return made and not HydraConfig.initialized()


def _said(names: list[str], composer: str) -> str:
    which = ", ".join(names)
    return (
        f"{GROUP}={which} was composed by Hydra, and nothing put it in force: the program is not "
        f"protected\n    to do: {_TODO[composer]}, or start with `torchrepro run {names[0]} -- "
        "COMMAND`"
    )
