"""Whether the packages that a profile requires are installed in the versions it asks for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from torchrepro.errors import ProfileError
from torchrepro.imports import installed_version
from torchrepro.messages import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.profile.composition import Composition


def check_requirements(requires: Mapping[str, str], composition: Composition) -> None:
    """Raise `ProfileError` for every package that is absent or of another version."""
    problems = []
    for package, wanted in requires.items():
        key = f"requires.{package}"
        place = composition.place(key)
        try:
            specifier = _specifier(wanted)
        except InvalidSpecifier:
            problems.append(
                Problem("not a version range", place, key, shown(wanted), legal='">=2.6"')
            )
            continue
        installed = installed_version(package)
        if installed is None:
            problems.append(Problem("the package is not installed", place, key, wanted))
            continue
        if not _contains(specifier, installed):
            problems.append(
                Problem(
                    f"{package} {shown(installed)} is installed",
                    place,
                    key,
                    wanted,
                    todo=f"install {package}{wanted}, or take a profile made for {installed}",
                )
            )
    if problems:
        raise ProfileError(problems)


LONGEST = 200
_ORDINARY = re.compile(r"[\w.,<>=!~*+\- ]*", re.ASCII)


def _specifier(wanted: str) -> SpecifierSet:
    """Return the version range `wanted`; raises `InvalidSpecifier`.

    The operator === takes any text, and a number of thousands of digits is none to Python.
    """
    if len(wanted) > LONGEST or not _ORDINARY.fullmatch(wanted):
        raise InvalidSpecifier(wanted)
    return SpecifierSet(wanted)


def _contains(specifier: SpecifierSet, installed: str) -> bool:
    """Whether a version lies in the range; one that is none, as metadata may hold, does not."""
    try:
        return specifier.contains(installed, prereleases=True)
    except InvalidVersion:
        return False
