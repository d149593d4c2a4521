"""Profiles that Hydra composed and nothing applied: refused before a job, or reported at exit.

The last step of the way of a job, which `hydra` describes. Hydra calls callbacks for the jobs of
an app, unless the app removes ours. It calls none for `hydra.compose`
(https://hydra.cc/docs/advanced/compose_api), whose caller has to apply the profile. Also here:
what the command line requests, because its author has to hear of a profile without effect.
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

_REQUEST = re.compile(rf"\+{GROUP}(/\w+)?(@[^=]*)?=.")
_SEPARATORS = re.compile(r"[\s,()\[\]'\"]+")
_TODO = {
    "compose": f"call torchrepro.apply(config.{GROUP}) before the program's first random number",
    "main": f"let Hydra call torchrepro's callback: this app, or a ~hydra.callbacks.{CALLBACK} on "
    "the command line, takes it away",
}


@dataclass
class _UnappliedProfile:
    """What was composed in this process and not applied yet."""

    names: list[str] = field(default_factory=list)
    composer: str = ""
    sweeping: bool = False
    """Whether our callback has seen the start of the sweep whose jobs are composed now."""

    sweep_words: list[str] | None = None
    """In a launcher's process, which has its own command line: the requests of the sweep's."""

    reporter: int = 0
    """The process that reports at its end what is left."""


_pending = _UnappliedProfile()


def note_composed(name: str) -> None:
    """Note that Hydra has composed the profile `name`, for a job or for a caller of `compose`.

    Ends the process before a job of a sweep that our callback cannot protect.
    """
    composer = _composer()
    if composer == "sweep":
        if not _pending.sweeping and inherited() is None:
            say(_message([name], "main"))
            raise SystemExit(ApplyError.exit_status)
        return  # its job may run in another process, where the callback takes it
    if composer == "main":  # another program begins; a job of a sweep may compose for itself
        _pending.sweeping = False
    _pending.composer = composer
    if name not in _pending.names:
        _pending.names.append(name)
    if _pending.reporter != os.getpid():
        _pending.reporter = os.getpid()
        atexit.register(_at_exit, os.getpid(), ExitStatus())


def note_callback(*, sweeping: bool = False) -> None:
    """Note that our callback is there and applies what was composed."""
    _pending.names.clear()
    _pending.sweeping = sweeping


def requesting_words() -> list[str]:
    """Return the words of the command line that request a profile."""
    if _pending.sweep_words is not None:
        return _pending.sweep_words
    return [word for word in sys.argv[1:] if _REQUEST.match(word)]


def note_launched(words: list[str]) -> None:
    """Note that a launcher runs jobs here, of a sweep that was started with these requests."""
    _pending.sweep_words = words


def requested_names() -> frozenset[str]:
    """Return the names after ``+repro=`` and ``+repro/with=``, those of a sweep included."""
    values = (word.partition("=")[2] for word in requesting_words())
    return frozenset(name for value in values for name in _SEPARATORS.split(value) if name)


def _composer() -> str:
    """Return for whom Hydra composes: `compose`, a `sweep` for one of its jobs, or `main`.

    A source gets only the name of a config, so this looks at the stack for two public functions:
    hydra.compose, and ConfigLoader.load_sweep_config, which launchers call.
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
    if os.getpid() != process or not _pending.names or was_applied() or inherited() is not None:
        return
    if _pending.composer == "main" and not _a_job_has_run():
        return  # --cfg and --help only show a config; an error was reported already
    say(_message(_pending.names, _pending.composer))
    if requesting_words():
        status.value = ApplyError.exit_status


def _a_job_has_run() -> bool:
    """Whether a job of Hydra has run in this process and is over.

    Hydra sets its HydraConfig for a job and unsets it afterwards. A command that only shows a
    config leaves it set, and one that ends earlier never makes it.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton

    made = HydraConfig in Singleton.get_state()["instances"]
    return made and not HydraConfig.initialized()


def _message(names: list[str], composer: str) -> str:
    which = ", ".join(names)
    return (
        f"{GROUP}={which} was composed by Hydra, and nothing put it in force: the program is not "
        f"protected\n    to do: {_TODO[composer]}, or start with `torchrepro run {names[0]} -- "
        "COMMAND`"
    )
