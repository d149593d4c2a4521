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
from torchrepro.messages import Problem, shown
from torchrepro.outcomes import Outcome
from torchrepro.patching import variables_put_back
from torchrepro.process_state import inherited
from torchrepro.profile.load import resolve
from torchrepro.redaction import shareable
from torchrepro.report import announcement
from torchrepro.seeding import streams
from torchrepro.seeding.generators import seeded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report


LIBRARIES = ("torch", "torch_npu", "transformer_engine")
"""Libraries that read environment variables, or fix other state, while they are imported."""


def imported_early(config: pytest.Config) -> tuple[str, ...]:
    """Return a line for each of the libraries that is loaded already."""
    return tuple(_line(library, config) for library in LIBRARIES if library in sys.modules)


def _line(library: str, config: pytest.Config) -> str:
    """Say who imported `library`, as far as the order of imports tells.

    Python moves a module to the end of `sys.modules` when its import is complete. An importer is
    complete after what it imports, so the first plugin behind the library has imported it.
    CPython's importlib works so but does not promise it. The line therefore says how it is known.
    """
    order = list(sys.modules)
    behind = set(order[order.index(library) :])
    if "pytest" in behind:
        return f"imported too early: {library}, before pytest itself"
    plugins = sorted(_plugins(config), key=lambda module: order.index(module.__name__))
    for module in plugins:
        if module.__name__ in behind:
            file = getattr(module, "__file__", None) or "built in"
            return (
                f"imported too early: {library}, by the pytest plugin {module.__name__} ({file}), "
                "as the order of imports tells"
            )
    return f"imported too early: {library}, by a pytest plugin after its own import"


def _plugins(config: pytest.Config) -> Iterator[Any]:
    """Yield the plugins of others that are modules."""
    for _, plugin in config.pluginmanager.list_name_plugin():
        name = str(getattr(plugin, "__name__", ""))
        ours = name.startswith(f"{__package__}.")
        if not ours and name in sys.modules and sys.modules[name] is plugin:
            yield plugin


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


_SESSION = pytest.StashKey[_Session]()
_SCOPE = pytest.StashKey[ExitStack]()
_IN_FORCE = pytest.StashKey[Applied]()


def begin(config: pytest.Config, profile: str, overrides: Sequence[str]) -> None:
    """Apply `profile` until `config` goes out of use.

    Raises `pytest.UsageError`, which ends pytest with status 4, for whatever torchrepro refuses.
    """
    early = imported_early(config)
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
    config.stash[_SESSION] = _Session(applied, command, lines)


def header(config: pytest.Config) -> list[str]:
    """Return the lines of pytest's header about the session's profile."""
    session = config.stash.get(_SESSION, None)
    return list(session.header) if session else []


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
    refused = ""
    with ExitStack() as scope:
        try:
            for resolved in _profiles(item):
                item.stash[_IN_FORCE] = scope.enter_context(_scope(resolved))
        except TorchreproError as error:
            refused = f"torchrepro: {error}"
        scope.enter_context(_only_seeds_of_the_profile(item.config))
        item.stash[_SCOPE] = scope.pop_all()
    if refused:
        pytest.fail(refused, pytrace=False)


def _profiles(item: pytest.Item) -> Iterator[ResolvedProfile]:
    """Yield the session's profile and the test's own, where there is one."""
    session, marker = item.config.stash.get(_SESSION, None), item.get_closest_marker("repro")
    outer = session.applied.resolved if session else None
    if outer is not None:
        yield outer
    if marker is not None:
        yield _marked(marker, outer)


def leave(item: pytest.Item) -> None:
    """Restore what `enter` applied; a knob that has drifted is an error of the test."""
    scope = item.stash.get(_SCOPE, None)
    if scope is None:
        return
    del item.stash[_SCOPE]
    try:
        scope.close()
    except TorchreproError as error:
        drifted = f"torchrepro: {error}"
    else:
        return
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
def _only_seeds_of_the_profile(config: pytest.Config) -> Iterator[None]:
    """Keep pytest-randomly from seeding over a profile's seed, as `--randomly-dont-reset-seed`.

    See https://github.com/pytest-dev/pytest-randomly#usage.
    """
    resets = getattr(config.option, "randomly_reset_seed", False)
    if not resets or streams.current_plan().seed is None:
        yield
        return
    config.option.randomly_reset_seed = False
    try:
        yield
    finally:
        config.option.randomly_reset_seed = resets


@contextmanager
def shared_fixture(config: pytest.Config, fixture: pytest.FixtureDef[Any]) -> Iterator[None]:
    """Set up a shared fixture under the session's profile and with a seed of its own.

    Otherwise the first test that uses it would start from other numbers than the others.
    """
    session = config.stash.get(_SESSION, None)
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
    session, outer = item.config.stash.get(_SESSION, None), inherited()
    run = f"torchrepro run {outer.name} -- " if outer else ""
    words = [session.command if session else "pytest", shlex.quote(item.nodeid)]
    report = applied.report
    lines = (
        f"{report.profile} ({report.guarantee}) {report.digest}",
        f"to repeat: {run}{' '.join(words)}",
    )
    return [("torchrepro", "\n".join(lines))]


def _marked(marker: pytest.Mark, outer: ResolvedProfile | None) -> ResolvedProfile:
    """Return the profile of a marker: its own or the session's, with what the marker sets."""
    values = dict(marker.kwargs)
    overrides = values.pop("overrides", [])
    named = [*marker.args, *([values.pop("profile")] if "profile" in values else [])]
    if len(named) > 1:
        raise _not_a_marker("it takes one profile", ", ".join(map(shown, named)))
    if not isinstance(overrides, list | tuple):
        raise _not_a_marker("`overrides` is a list of texts", shown(overrides))
    if not named and outer is None:
        raise _not_a_marker("it names no profile, and neither does --repro", "")
    source = named[0] if named else outer
    return resolve(source, [*overrides, *_as_overrides(values)])


def _not_a_marker(what: str, found: str) -> ProfileError:
    return ProfileError(Problem(what, "@pytest.mark.repro", found=found, legal=_EXAMPLE))


def _as_overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_written(value)}" for key, value in values.items()]


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
