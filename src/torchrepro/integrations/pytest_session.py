"""A profile for a pytest session, and within it for each test.

The session's profile is applied before conftest files are imported. Each test has a scope of its
own, which sets every knob of the profile anew and restores what the test did to one of them.
"""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from torchrepro.applier import Applied, apply_resolved
from torchrepro.bootstrap import agreeing_run
from torchrepro.console import as_text
from torchrepro.errors import ProfileError, TorchreproError
from torchrepro.manifest.contents import secrets_here
from torchrepro.messages import shown
from torchrepro.outcomes import Outcome
from torchrepro.patching import variables_put_back
from torchrepro.process_state import inherited
from torchrepro.profile.load import resolve
from torchrepro.redaction import shareable
from torchrepro.report import announcement
from torchrepro.seeding import streams
from torchrepro.seeding.generators import seeded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report


LIBRARIES = ("torch", "torch_npu", "transformer_engine")
"""Libraries that read environment variables, or fix other state, while they are imported."""


def imported_early(config: pytest.Config) -> Iterator[str]:
    """Yield who imported each of the libraries that is loaded already, as far as can be known.

    Python moves a module to the end of `sys.modules` when its import is complete. An importer is
    complete after what it imports, so the first plugin behind the library has imported it.
    CPython's importlib works so but does not promise it. The line therefore says how it is known.
    """
    order = list(sys.modules)
    plugins = [plugin for _, plugin in config.pluginmanager.list_name_plugin()]
    names = [str(getattr(plugin, "__name__", "")) for plugin in plugins]
    of_others = {
        name: plugin
        for name, plugin in zip(names, plugins, strict=True)
        if sys.modules.get(name) is plugin and not name.startswith(f"{__package__}.")
    }
    for library in (library for library in LIBRARIES if library in sys.modules):
        behind = order[order.index(library) :]
        importer = next((name for name in behind if name in of_others), "")
        by = "by a pytest plugin after its own import"
        if "pytest" in behind:
            by = "before pytest itself"
        elif importer:
            file = getattr(of_others[importer], "__file__", None) or "built in"
            by = f"by the pytest plugin {importer} ({file}), as the order of imports tells"
        yield f"imported too early: {library}, {by}"


_OBSTACLE = "pytest has started"
_EXAMPLE = '@pytest.mark.repro("seed-only", seed=3, overrides=["dropout=zero"])'
_PLAIN_WORD = re.compile(r"[A-Za-z_][\w.:/-]*")
_OTHER_WORDS = ("true", "false", "null", "nan", "inf")  # what Hydra's grammar takes for no text


@dataclass(frozen=True, slots=True)
class _Session:
    """The profile named on the command line or in the ini file."""

    applied: Applied
    command: str
    """The pytest command that names it again."""

    header: tuple[str, ...]
    """Its lines of pytest's header."""


SESSION = pytest.StashKey[_Session]()
_SCOPE = pytest.StashKey[ExitStack]()
_IN_FORCE = pytest.StashKey[Applied]()


def begin(config: pytest.Config, profile: str, overrides: Sequence[str]) -> None:
    """Apply `profile` until `config` goes out of use.

    Raises `pytest.UsageError`, which ends pytest with status 4, for whatever torchrepro refuses.
    """
    early = list(imported_early(config))
    try:
        resolved = resolve(profile, overrides)
        applied = agreeing_run(resolved, "--repro")
        if applied is None:
            applied = apply_resolved(resolved, _OBSTACLE)
            config.add_cleanup(applied.restore)
    except TorchreproError as error:
        raise pytest.UsageError(f"torchrepro: {error}") from None
    secrets = secrets_here(resolved)
    words = ["pytest", f"--repro={profile}", *(f"--repro-set={text}" for text in overrides)]
    command = shlex.join(shareable(words, secrets))
    run = shlex.join(shareable(["torchrepro", "run", profile, *overrides], secrets))
    lines = tuple(header_lines(applied.report, early, run))
    config.stash[SESSION] = _Session(applied, command, lines)


def header_lines(report: Report, early: Sequence[str], run: str) -> Iterator[str]:
    """Yield what a run starts with, what was imported early, and the command that is in time."""
    said = announcement(report)
    if not said:
        return
    yield from f"torchrepro: {as_text(*said)}".splitlines()
    yield from (f"  {line}" for line in early)
    if report.having(Outcome.TOO_LATE):
        yield f"  to set everything in time: {run} -- pytest ..."


def enter(item: pytest.Item) -> None:
    """Apply the profiles of one test; a wrong marker is an error of that test."""
    session, marker = item.config.stash.get(SESSION, None), item.get_closest_marker("repro")
    outer = session.applied.resolved if session else None
    refused = ""
    with ExitStack() as scope:
        try:
            if outer is not None:
                item.stash[_IN_FORCE] = scope.enter_context(_scope(outer))
            if marker is not None:
                item.stash[_IN_FORCE] = scope.enter_context(_scope(_marked(marker, outer)))
        except TorchreproError as error:
            refused = f"torchrepro: {error}"
        option = item.config.option
        if (
            getattr(option, "randomly_reset_seed", False)
            and streams.current_plan().seed is not None
        ):
            # Otherwise pytest-randomly seeds over a profile's seed: this is its own
            # `--randomly-dont-reset-seed`, see https://github.com/pytest-dev/pytest-randomly#usage.
            scope.callback(setattr, option, "randomly_reset_seed", option.randomly_reset_seed)
            option.randomly_reset_seed = False
        item.stash[_SCOPE] = scope.pop_all()
    if refused:
        pytest.fail(refused, pytrace=False)


def leave(item: pytest.Item) -> None:
    """Restore what `enter` applied; a knob that has drifted is an error of the test."""
    scope = item.stash.get(_SCOPE, None)
    if scope is None:
        return
    del item.stash[_SCOPE]
    drifted = ""
    try:
        scope.close()
    except TorchreproError as error:
        drifted = f"torchrepro: {error}"
    if drifted:
        pytest.fail(drifted, pytrace=False)


@contextmanager
def _scope(resolved: ResolvedProfile) -> Iterator[Applied]:
    """Apply `resolved`, and restore its variables afterwards, whoever has changed them."""
    with (
        variables_put_back(resolved.environment()),
        apply_resolved(resolved, _OBSTACLE) as applied,
    ):
        yield applied


@contextmanager
def shared_fixture(config: pytest.Config, fixture: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Set up a shared fixture under the session's profile and with a seed of its own.

    Otherwise the first test that uses it would start from other numbers than the others.
    """
    session = config.stash.get(SESSION, None)
    with ExitStack() as scope:
        if session is not None:
            scope.enter_context(_scope(session.applied.resolved))
        if streams.current_plan().seed is not None:
            name = getattr(fixture.func, "__qualname__", fixture.argname)
            module = getattr(fixture.func, "__module__", "")
            scope.enter_context(seeded(f"pytest fixture {module}.{name}"))
        yield


def how_to_repeat(item: pytest.Item) -> list[tuple[str, str]]:
    """Return the section of a failed test's report: profile, digest, and the command."""
    applied = item.stash.get(_IN_FORCE, None)
    if applied is None:
        return []
    session, outer = item.config.stash.get(SESSION, None), inherited()
    run = f"torchrepro run {outer.name} -- " if outer else ""
    command = f"{run}{session.command if session else 'pytest'} {shlex.quote(item.nodeid)}"
    report = applied.report
    text = f"{report.profile} ({report.guarantee}) {report.digest}\nto repeat: {command}"
    return [("torchrepro", text)]


def _marked(marker: pytest.Mark, outer: ResolvedProfile | None) -> ResolvedProfile:
    """Return the profile of a marker: its own or the session's, with what the marker sets."""
    values = dict(marker.kwargs)
    overrides = values.pop("overrides", [])
    named = [*marker.args, *([values.pop("profile")] if "profile" in values else [])]
    what, found = "", ""
    if len(named) > 1:
        what, found = "it takes one profile", ", ".join(map(shown, named))
    elif not isinstance(overrides, list | tuple):
        what, found = "`overrides` is a list of texts", shown(overrides)
    elif not named and outer is None:
        what = "it names no profile, and neither does --repro"
    if what:
        raise ProfileError.about(what, "@pytest.mark.repro", found=found, legal=_EXAMPLE)
    more = [f"{key}={_written(value)}" for key, value in values.items()]
    return resolve(named[0] if named else outer, [*overrides, *more])


def _written(value: Any) -> str:
    """Return a plain Python value in Hydra's grammar for overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_written(k)}:{_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    if not isinstance(value, str):
        return text
    if _PLAIN_WORD.fullmatch(text) and text.lower() not in _OTHER_WORDS:
        return text
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)  # a backslash counts only before a quote
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"
