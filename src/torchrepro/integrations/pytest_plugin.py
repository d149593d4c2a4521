"""The pytest plugin: `--repro=PROFILE`, the ini key, the marker, `repro` and `repro_numbers`.

The session's profile is applied before conftest files are imported. Each test has a scope of its
own, which sets every knob of the profile anew and restores what the test did to one of them.
pytest loads this into every run where torchrepro is installed, so nothing is imported until a
profile is named. See https://docs.pytest.org/en/stable/how-to/writing_plugins.html.
"""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchrepro.application.applier import Applied
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report

_MARKER = (
    "repro(profile, overrides=[...], **values): put a torchrepro profile in force for this test, "
    'as in @pytest.mark.repro("seed-only", seed=3); without `profile`, the one of --repro.'
)
_EXAMPLE = '@pytest.mark.repro("seed-only", seed=3, overrides=["dropout=zero"])'
_OBSTACLE = "pytest has started"
LIBRARIES = ("torch", "torch_npu", "transformer_engine")
"""Libraries that read environment variables, or fix other state, while they are imported."""


@dataclass(frozen=True, slots=True)
class _Session:
    applied: Applied
    command: str  # the pytest command that names it again
    header: tuple[str, ...]  # its lines of pytest's header


_SESSION = pytest.StashKey[_Session]()
_NAMED = pytest.StashKey[bool]()  # there once a profile is named, for the run or for a test
_SCOPE = pytest.StashKey[ExitStack]()
_IN_FORCE = pytest.StashKey["Applied"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and the ini keys."""
    group = parser.getgroup("torchrepro", "reproducible runs (torchrepro)")
    group.addoption(
        "--repro",
        metavar="PROFILE",
        help="put this torchrepro profile in force for the whole session, before conftest files "
        "are imported; every test starts from the same state (--repro= switches the ini's off)",
    )
    group.addoption(
        "--repro-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a value of that profile, as in seed=7; may be repeated",
    )
    group.addoption(
        "--repro-update",
        metavar="REASON",
        help="write the numbers of every test that uses `repro_numbers`, and why they are others",
    )
    parser.addini("repro", "torchrepro profile of the whole session; --repro wins over it")
    parser.addini("repro_set", "overrides of that profile, one a line", type="linelist")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put the session's profile in force before a conftest file can import torch."""
    options = early_config.known_args_namespace
    profile, overrides = options.repro, list(options.repro_set)
    if profile is None:  # the ini's overrides belong to its own profile
        profile = (early_config.getini("repro") or "").strip()
        overrides = [*early_config.getini("repro_set"), *overrides]
        if early_config.inipath is not None and profile.endswith((".yaml", ".yml")):
            beside = early_config.inipath.parent / profile
            profile = str(beside) if beside.is_file() else profile
    if options.repro_set and not profile:
        raise pytest.UsageError(
            "--repro-set needs a profile: --repro=PROFILE, or the ini's `repro`"
        )
    if not profile:
        return
    from torchrepro.application.applier import apply_resolved
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.ground.redaction import shareable
    from torchrepro.manifest.contents import secrets_here
    from torchrepro.profile.load import resolve
    from torchrepro.start.bootstrap import agreeing_run

    early = list(_imported_early(early_config))
    try:
        resolved = resolve(profile, overrides)
        applied = agreeing_run(resolved, "--repro")
        if applied is None:
            applied = apply_resolved(resolved, _OBSTACLE)
            early_config.add_cleanup(applied.restore)
    except TorchreproError as error:
        raise pytest.UsageError(f"torchrepro: {error}") from None
    secrets = secrets_here(resolved)
    words = ["pytest", f"--repro={profile}", *(f"--repro-set={text}" for text in overrides)]
    command = shlex.join(shareable(words, secrets))
    run = shlex.join(shareable(["torchrepro", "run", profile, *overrides], secrets))
    lines = tuple(header_lines(applied.report, early, run))
    early_config.stash[_SESSION] = _Session(applied, command, lines)
    early_config.stash[_NAMED] = True


def _imported_early(config: pytest.Config) -> Iterator[str]:
    """Yield who imported each of the libraries that is loaded already, as far as can be known.

    Python moves a module to the end of `sys.modules` when its import is complete. An importer is
    complete after what it imports, so the first plugin behind the library has imported it.
    CPython's importlib works so but does not promise it. The line therefore says how it is known.
    """
    order, plugins = list(sys.modules), {*map(id, config.pluginmanager.get_plugins())}
    for library in (library for library in LIBRARIES if library in sys.modules):
        behind = order[order.index(library) :]
        of_others = (
            name for name in behind if id(sys.modules[name]) in plugins and name != __name__
        )
        by = "by a pytest plugin after its own import"
        if "pytest" in behind:
            by = "before pytest itself"
        elif importer := next(of_others, ""):
            file = getattr(sys.modules[importer], "__file__", None) or "built in"
            by = f"by the pytest plugin {importer} ({file}), as the order of imports tells"
        yield f"imported too early: {library}, {by}"


def header_lines(report: Report, early: Sequence[str], run: str) -> Iterator[str]:
    """Yield what a run starts with, what was imported early, and the command that is in time."""
    from torchrepro.ground.console import as_text
    from torchrepro.reporting.outcomes import Outcome
    from torchrepro.reporting.report import announcement

    said = announcement(report)
    if not said:
        return
    yield from f"torchrepro: {as_text(*said)}".splitlines()
    yield from (f"  {line}" for line in early)
    if report.having(Outcome.TOO_LATE):
        yield f"  to set everything in time: {run} -- pytest ..."


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; refuses an update of numbers without a reason."""
    config.addinivalue_line("markers", _MARKER)
    reason = config.getoption("--repro-update")
    if reason is not None and not reason.strip():
        raise pytest.UsageError('--repro-update takes a reason, as in "addmm of torch 2.14"')


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is in force, and what came too late."""
    session = config.stash.get(_SESSION, None)
    return list(session.header) if session else []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Warn of modules that have seeded at their import: a test starts from the profile's seed."""
    ours = session.config.stash.get(_SESSION, None)
    if ours is None or ours.applied.resolved.values.get("seed") is None:
        return
    from torchrepro.ground.callers import is_library
    from torchrepro.ground.console import Verbosity, verbosity

    if verbosity() is Verbosity.QUIET:
        return
    started = getattr(sys.modules["__main__"], "__file__", None)  # from there plugins are called
    for call in ours.applied.seeding_calls:
        file, _, number = call.where.rpartition(":")
        if is_library(file) or file == started:
            continue
        text = (
            f"{call.function}({call.value}) has no effect on what tests draw: each starts from the "
            f"seed of {ours.applied.resolved.name}. Seed in the test or in a fixture of it"
        )
        # Not `warnings.warn`, which is an error under -W error.
        warning = warnings.WarningMessage(
            pytest.PytestWarning(text), pytest.PytestWarning, file, int(number)
        )
        session.config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": warning, "when": "collect", "nodeid": "", "location": None}
        )


@pytest.hookimpl(tryfirst=True)  # before fixtures, but within what other plugins wrap around
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put the profile of the session and that of the marker in force for one test.

    A wrong marker is an error of the test.
    """
    marker = item.get_closest_marker("repro")
    if marker is None and _NAMED not in item.config.stash:
        return
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.seeding import streams

    item.config.stash[_NAMED] = True
    session = item.config.stash.get(_SESSION, None)
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


@contextmanager
def _scope(resolved: ResolvedProfile) -> Iterator[Applied]:
    from torchrepro.application.applier import apply_resolved
    from torchrepro.ground.patching import variables_put_back

    with (
        variables_put_back(resolved.environment()),
        apply_resolved(resolved, _OBSTACLE) as applied,
    ):
        yield applied


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Take back what was in force for the test, and what the test has left behind.

    A knob that has drifted is an error of the test.
    """
    try:
        return (yield)
    finally:
        scope, drifted = item.stash.get(_SCOPE, None), ""
        if scope is not None:
            from torchrepro.ground.errors import TorchreproError

            del item.stash[_SCOPE]
            try:
                scope.close()
            except TorchreproError as error:
                drifted = f"torchrepro: {error}"
        if drifted:
            pytest.fail(drifted, pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Set up a fixture that several tests share under the session's profile, with its own seed.

    Otherwise the first test that uses it would start from other numbers than the others.
    """
    stash = request.config.stash
    if fixturedef.scope == "function" or _NAMED not in stash:
        return (yield)
    from torchrepro.seeding import streams
    from torchrepro.seeding.generators import seeded

    with ExitStack() as scope:
        if _SESSION in stash:
            scope.enter_context(_scope(stash[_SESSION].applied.resolved))
        if streams.current_plan().seed is not None:
            name = getattr(fixturedef.func, "__qualname__", fixturedef.argname)
            module = getattr(fixturedef.func, "__module__", "")
            scope.enter_context(seeded(f"pytest fixture {module}.{name}"))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show in the report of a failure under which profile it can be repeated."""
    result = yield
    applied = item.stash.get(_IN_FORCE, None)
    if result.failed and applied is not None:
        from torchrepro.reporting.process_state import inherited

        session, outer = item.config.stash.get(_SESSION, None), inherited()
        run = f"torchrepro run {outer.name} -- " if outer else ""
        command = f"{run}{session.command if session else 'pytest'} {shlex.quote(item.nodeid)}"
        report = applied.report
        text = f"{report.profile} ({report.guarantee}) {report.digest}\nto repeat: {command}"
        result.sections.append(("torchrepro", text))
    return result


def _marked(marker: pytest.Mark, outer: ResolvedProfile | None) -> ResolvedProfile:
    from torchrepro.ground.errors import ProfileError
    from torchrepro.ground.messages import shown
    from torchrepro.profile.load import in_hydras_grammar, resolve

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
    more = [f"{key}={in_hydras_grammar(value)}" for key, value in values.items()]
    return resolve(named[0] if named else outer, [*overrides, *more])


@pytest.fixture
def repro() -> Applied:
    """The profile in force for this test, with its `report` and `digest`."""
    from torchrepro.application.applier import in_force
    from torchrepro.start.bootstrap import in_force_now

    in_force_now()  # under `torchrepro run` it waits for the imports of what it sets
    if not in_force():
        pytest.fail(
            "no torchrepro profile is in force for this test: name one with --repro=PROFILE, the "
            'ini key `repro`, or @pytest.mark.repro("seed-only")',
            pytrace=False,
        )
    return in_force()[-1]


@pytest.fixture
def repro_numbers(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Hold the numbers of a training in this test to those in `repro_numbers/` beside it.

    Call it with the losses, and the model if its state is to be held as well: as in
    ``repro_numbers(losses, model)``. Each kind of machine has numbers of its own.
    ``--repro-update REASON`` writes those of today.
    """
    from torchrepro.application.applier import in_force
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.lock.locked_results import FOLDER, hold_test, numbers_of_training

    file, calls = request.path, count(1)
    whole = request.node.nodeid.partition("::")[2] or request.node.name

    def hold(losses: Any, model: Any = None) -> None:
        name = whole if (number := next(calls)) == 1 else f"{whole} {number}"
        profile = in_force()[-1].resolved.name if in_force() else None
        path = file.parent / FOLDER / f"{file.stem}.lock"
        reason = " ".join((request.config.getoption("--repro-update") or "").split())
        try:
            differs = hold_test(path, name, profile, numbers_of_training(losses, model), reason)
        except TorchreproError as error:
            differs = str(error)
        if differs:
            pytest.fail(f"torchrepro: {differs}", pytrace=False)

    return hold
