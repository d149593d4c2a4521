"""pytest plugin that runs tests under a profile: options, marker and fixtures.

The session's profile is applied before conftest files are imported. It is applied again for each
test, and every knob that the test changed is restored afterwards. pytest loads this module in every
run where torchrepro is installed, so it imports torchrepro only if a profile is named. See
https://docs.pytest.org/en/stable/how-to/writing_plugins.html.
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
    "repro(profile, overrides=[...], **values): run this test under a torchrepro profile, "
    'as in @pytest.mark.repro("seed-only", seed=3); the default of `profile` is that of --repro.'
)
_EXAMPLE = '@pytest.mark.repro("seed-only", seed=3, overrides=["dropout=zero"])'
_OBSTACLE = "pytest has started"
LIBRARIES = ("torch", "torch_npu", "transformer_engine")
"""Libraries that read environment variables, or fix other state, during their import."""


@dataclass(frozen=True, slots=True)
class _Session:
    applied: Applied
    command: str  # the pytest command with the same profile
    header: tuple[str, ...]  # lines for pytest's header


_SESSION = pytest.StashKey[_Session]()
_NAMED = pytest.StashKey[bool]()  # set when a profile is named, for the session or for a test
_SCOPE = pytest.StashKey[ExitStack]()
_ACTIVE = pytest.StashKey["Applied"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the command line options and the ini keys."""
    group = parser.getgroup("torchrepro", "reproducible runs (torchrepro)")
    group.addoption(
        "--repro",
        metavar="PROFILE",
        help="apply this torchrepro profile to the whole session, before conftest files are "
        "imported; every test starts from the same state (--repro= disables the ini's profile)",
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
        help="accept the new results of every test that uses `repro_numbers`, and note the reason",
    )
    parser.addini("repro", "torchrepro profile of the whole session; --repro overrides it")
    parser.addini("repro_set", "overrides of that profile, one per line", type="linelist")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Apply the session's profile before a conftest file can import torch."""
    options = early_config.known_args_namespace
    profile, overrides = options.repro, list(options.repro_set)
    if profile is None:  # the ini's overrides belong to the ini's profile
        profile = (early_config.getini("repro") or "").strip()
        overrides = [*early_config.getini("repro_set"), *overrides]
        if early_config.inipath is not None and profile.endswith((".yaml", ".yml")):
            path = early_config.inipath.parent / profile
            profile = str(path) if path.is_file() else profile
    if options.repro_set and not profile:
        raise pytest.UsageError(
            "--repro-set needs a profile: --repro=PROFILE, or the ini's `repro`"
        )
    if not profile:
        return
    from torchrepro.application.applier import apply_resolved
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.ground.redaction import shareable
    from torchrepro.manifest.contents import known_secrets
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
    secrets = known_secrets(resolved)
    words = ["pytest", f"--repro={profile}", *(f"--repro-set={text}" for text in overrides)]
    command = shlex.join(shareable(words, secrets))
    run = shlex.join(shareable(["torchrepro", "run", profile, *overrides], secrets))
    lines = tuple(header_lines(applied.report, early, run))
    early_config.stash[_SESSION] = _Session(applied, command, lines)
    early_config.stash[_NAMED] = True


def _imported_early(config: pytest.Config) -> Iterator[str]:
    """Yield a line for each library that was imported too early, with the likely importer.

    Python moves a module to the end of `sys.modules` when its import is complete, so an importer
    comes after the modules that it imports. The first plugin after the library is the importer.
    CPython does not guarantee this order, so the line mentions that it relies on the order.
    """
    order, plugins = list(sys.modules), {*map(id, config.pluginmanager.get_plugins())}
    for library in LIBRARIES:
        if library not in sys.modules:
            continue
        later = order[order.index(library) :]
        later_plugins = (
            name for name in later if id(sys.modules[name]) in plugins and name != __name__
        )
        by = "by a pytest plugin after its own import"
        if "pytest" in later:
            by = "before pytest itself"
        elif importer := next(later_plugins, ""):
            file = getattr(sys.modules[importer], "__file__", None) or "built in"
            by = f"by the pytest plugin {importer} ({file}), judging by the order of imports"
        yield f"imported too early: {library}, {by}"


def header_lines(report: Report, early: Sequence[str], run: str) -> Iterator[str]:
    """Yield the header lines: the announcement of `report`, `early`, and the command `run`."""
    from torchrepro.ground.console import as_text
    from torchrepro.reporting.outcomes import Outcome
    from torchrepro.reporting.report import announcement

    announced = announcement(report)
    if not announced:
        return
    yield from f"torchrepro: {as_text(*announced)}".splitlines()
    yield from (f"  {line}" for line in early)
    if report.having(Outcome.TOO_LATE):
        yield f"  to set everything in time: {run} -- pytest ..."


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and raise `UsageError` if `--repro-update` has no reason."""
    config.addinivalue_line("markers", _MARKER)
    reason = config.getoption("--repro-update")
    if reason is not None and not reason.strip():
        raise pytest.UsageError('--repro-update needs a reason, as in "addmm of torch 2.14"')


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return lines for pytest's header: the profile, and settings that came too late."""
    session = config.stash.get(_SESSION, None)
    return list(session.header) if session else []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Warn if a test module seeds at import: each test starts from the profile's seed instead."""
    repro_session = session.config.stash.get(_SESSION, None)
    if repro_session is None:
        return
    applied = repro_session.applied
    if applied.resolved.values.get("seed") is None:
        return
    from torchrepro.ground.callers import is_library
    from torchrepro.ground.console import Verbosity, verbosity

    if verbosity() is Verbosity.QUIET:
        return
    started = getattr(sys.modules["__main__"], "__file__", None)  # the script that started pytest
    for call in applied.seeding_calls:
        file, _, number = call.where.rpartition(":")
        if is_library(file) or file == started:
            continue
        text = (
            f"{call.function}({call.value}) does not affect the random numbers of tests: each test "
            f"starts from the seed of {applied.resolved.name}. Seed in the test or in a fixture"
        )
        # Not `warnings.warn`, which is an error under -W error.
        warning = warnings.WarningMessage(
            pytest.PytestWarning(text), pytest.PytestWarning, file, int(number)
        )
        session.config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": warning, "when": "collect", "nodeid": "", "location": None}
        )


@pytest.hookimpl(tryfirst=True)  # before fixtures, but inside the wrappers of other plugins
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Apply the session's profile, and the profile in the test's marker, for one test.

    If the marker is wrong, pytest reports an error of the test.
    """
    marker = item.get_closest_marker("repro")
    if marker is None and _NAMED not in item.config.stash:
        return
    from torchrepro.seeding import streams

    item.config.stash[_NAMED] = True
    session = item.config.stash.get(_SESSION, None)
    outer = session.applied.resolved if session else None
    with _failing(), ExitStack() as scope:
        if outer is not None:
            item.stash[_ACTIVE] = scope.enter_context(_scope(outer))
        if marker is not None:
            item.stash[_ACTIVE] = scope.enter_context(_scope(_marked(marker, outer)))
        option = item.config.option
        if (
            getattr(option, "randomly_reset_seed", False)
            and streams.current_plan().seed is not None
        ):
            # Otherwise pytest-randomly would replace the profile's seed. This is the same as its
            # `--randomly-dont-reset-seed`: https://github.com/pytest-dev/pytest-randomly#usage.
            scope.callback(setattr, option, "randomly_reset_seed", option.randomly_reset_seed)
            option.randomly_reset_seed = False
        item.stash[_SCOPE] = scope.pop_all()


@contextmanager
def _failing() -> Iterator[None]:
    """Let the test fail without a traceback if the block raises an error of torchrepro."""
    from torchrepro.ground.errors import TorchreproError

    try:
        yield
    except TorchreproError as error:
        raise pytest.fail.Exception(f"torchrepro: {error}", pytrace=False) from None


@contextmanager
def _scope(resolved: ResolvedProfile) -> Iterator[Applied]:
    from torchrepro.application.applier import apply_resolved
    from torchrepro.ground.patching import variables_restored

    with (
        variables_restored(resolved.environment()),
        apply_resolved(resolved, _OBSTACLE) as applied,
    ):
        yield applied


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Restore the state from before the test.

    If a knob has drifted, pytest reports an error of the test.
    """
    try:
        return (yield)
    finally:
        scope = item.stash.get(_SCOPE, None)
        if scope is not None:
            del item.stash[_SCOPE]
            with _failing():
                scope.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Set up a fixture that several tests share, under the session's profile and a separate seed.

    Otherwise the fixture's draws would change the random numbers of the first test that uses it.
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
    """Add the profile, and the command that repeats the test, to the report of a failed test."""
    test_report = yield
    applied = item.stash.get(_ACTIVE, None)
    if test_report.failed and applied is not None:
        from torchrepro.reporting.process_state import inherited

        session, outer = item.config.stash.get(_SESSION, None), inherited()
        run = f"torchrepro run {outer.name} -- " if outer else ""
        command = f"{run}{session.command if session else 'pytest'} {shlex.quote(item.nodeid)}"
        report = applied.report
        text = f"{report.profile} ({report.guarantee}) {report.digest}\nto repeat: {command}"
        test_report.sections.append(("torchrepro", text))
    return test_report


def _marked(marker: pytest.Mark, outer: ResolvedProfile | None) -> ResolvedProfile:
    """Return the profile that `marker` names, by default `outer`; raises `ProfileError`."""
    from torchrepro.ground.errors import ProfileError, shown
    from torchrepro.profile.load import in_hydras_grammar, resolve

    values = dict(marker.kwargs)
    overrides = values.pop("overrides", [])
    profiles = list(marker.args)
    if "profile" in values:
        profiles.append(values.pop("profile"))
    problem, wrong = "", ""
    if len(profiles) > 1:
        problem, wrong = "the marker takes one profile", ", ".join(map(shown, profiles))
    elif not isinstance(overrides, list | tuple):
        problem, wrong = "`overrides` must be a list of texts", shown(overrides)
    elif not profiles and outer is None:
        problem = "the marker names no profile, and --repro names none either"
    if problem:
        raise ProfileError.about(problem, "@pytest.mark.repro", found=wrong, legal=_EXAMPLE)
    from_values = [f"{key}={in_hydras_grammar(value)}" for key, value in values.items()]
    return resolve(profiles[0] if profiles else outer, [*overrides, *from_values])


@pytest.fixture
def repro() -> Applied:
    """The active profile of this test, with its `report` and `digest`."""
    from torchrepro.application.applier import active_profiles
    from torchrepro.start.bootstrap import finish_applying

    finish_applying()  # under `torchrepro run` a profile may wait for torch
    if not active_profiles():
        pytest.fail(
            "no torchrepro profile is active in this test: name one with --repro=PROFILE, the "
            'ini key `repro`, or @pytest.mark.repro("seed-only")',
            pytrace=False,
        )
    return active_profiles()[-1]


@pytest.fixture
def repro_numbers(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Check results of a training against saved results in `repro_numbers/` beside the test file.

    Call the fixture with the losses, and with the model to check the parameters as well:
    ``repro_numbers(losses, model)``. Each platform has its own saved results.
    ``--repro-update REASON`` accepts the present results.
    """
    from torchrepro.application.applier import active_profiles
    from torchrepro.lock.locked_results import FOLDER, check_test_results, numbers_of_training

    file, calls = request.path, count(1)
    test_name = request.node.nodeid.partition("::")[2] or request.node.name

    def check(losses: Any, model: Any = None) -> None:
        name = test_name if (number := next(calls)) == 1 else f"{test_name} {number}"
        profile = active_profiles()[-1].resolved.name if active_profiles() else None
        path = file.parent / FOLDER / f"{file.stem}.lock"
        reason = " ".join((request.config.getoption("--repro-update") or "").split())
        with _failing():
            numbers = numbers_of_training(losses, model)
            differs = check_test_results(path, name, profile, numbers, reason)
        if differs:
            pytest.fail(f"torchrepro: {differs}", pytrace=False)

    return check
