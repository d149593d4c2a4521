"""The pytest plugin: `--repro=PROFILE`, the ini key, the marker and the fixture `repro`.

pytest loads it into every run where torchrepro is installed, so it imports nothing until a
profile is named. See https://docs.pytest.org/en/stable/how-to/writing_plugins.html.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from torchrepro.applier import Applied

_MARKER = (
    "repro(profile, overrides=[...], **values): put a torchrepro profile in force for this test, "
    'as in @pytest.mark.repro("seed-only", seed=3); without `profile`, the one of --repro.'
)


def _session() -> Any:
    """Return `pytest_session` if anything here has named a profile; None imports nothing."""
    return sys.modules.get("torchrepro.integrations.pytest_session")


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
    if profile:
        from torchrepro.integrations.pytest_session import begin

        begin(early_config, profile, overrides)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is in force, and what came too late."""
    session = _session()
    begun = config.stash.get(session.SESSION, None) if session else None
    return list(begun.header) if begun else []


@pytest.hookimpl(tryfirst=True)  # before fixtures, but within what other plugins wrap around
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Put the profile of the session and that of the marker in force for one test."""
    if _session() or item.get_closest_marker("repro") is not None:
        from torchrepro.integrations.pytest_session import enter

        enter(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Take back what was in force for the test, and what the test has left behind."""
    try:
        return (yield)
    finally:
        if session := _session():
            session.leave(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """Keep a fixture that several tests share from deciding what the first of them draws."""
    session = _session()
    if fixturedef.scope == "function" or not session:
        return (yield)
    with session.shared_fixture(request.config, fixturedef):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show in the report of a failure under which profile it can be repeated."""
    report = yield
    session = _session()
    if report.failed and session:
        report.sections += session.how_to_repeat(item)
    return report


@pytest.fixture
def repro() -> Applied:
    """The profile in force for this test, with its `report` and `digest`."""
    from torchrepro.applier import in_force
    from torchrepro.bootstrap import in_force_now

    in_force_now()  # under `torchrepro run` it waits for the imports of what it sets
    if not in_force():
        pytest.fail(
            "no torchrepro profile is in force for this test: name one with --repro=PROFILE, the "
            'ini key `repro`, or @pytest.mark.repro("seed-only")',
            pytrace=False,
        )
    return in_force()[-1]
