"""Whether the packages that a profile requires are installed in the versions it asks for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from torchrepro.errors import Problem, ProfileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.profile.compose import Composition


def check_requirements(requires: Mapping[str, str], composition: Composition) -> None:
    """Raise `ProfileError` for every package that is absent or of another version."""
    problems = []
    for package, wanted in requires.items():
        key = f"requires.{package}"
        place = composition.place(key)
        try:
            specifier = SpecifierSet(wanted)
        except InvalidSpecifier:
            problems.append(Problem("not a version range", place, key, wanted, legal='">=2.6"'))
            continue
        try:
            installed = version(package)
        except (PackageNotFoundError, ValueError):  # ValueError: not the name of a package
            problems.append(Problem("the package is not installed", place, key, wanted))
            continue
        if not specifier.contains(installed, prereleases=True):
            problems.append(
                Problem(
                    f"{package} {installed} is installed",
                    place,
                    key,
                    wanted,
                    todo=f"install {package}{wanted}, or take a profile made for {installed}",
                )
            )
    if problems:
        raise ProfileError(problems)
