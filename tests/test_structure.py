"""The shape of the package: imports run one way, start-up is light, names say what is there."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrepro
from torchrepro.imports import named
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import Knob
from torchrepro.knobs.lazy_access import LazyAccess

PACKAGE = Path(torchrepro.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
LAYERS = (  # from the bottom upward; a module imports only from its own layer or one below
    ("hidden", "forks", "locks"),
    ("messages",),
    ("console",),
    ("errors",),
    ("imports", "callers"),
    ("knobs",),
    ("policies", "seeding"),
    ("profile",),
    ("report",),
    ("process", "threads"),
    ("relaunch",),
    ("planner",),
    ("manifest",),
    ("agreement",),
    ("guard",),
    ("applier", "launch", "untouched", "new_pack", "doctor"),
    ("trace",),
    ("started",),
    ("lock",),
    ("verdict",),
    ("verify",),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
BANNED = {"utils", "util", "core", "common", "helpers", "misc", "base", "manager"}


def _layer(part: str) -> int:
    return next(level for level, parts in enumerate(LAYERS) if part in parts)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield the package's own modules that `tree` imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrepro."):
            yield str(node.module).split(".")[1]
        yield from _imports(node)


def test_imports_run_one_way() -> None:
    """A module imports only from its own layer or one below it."""
    upward = {}
    for path in MODULES:
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in ("__init__", "boot"):
            continue
        used = set(_imports(ast.parse(path.read_text(encoding="utf-8"))))
        if above := {name for name in used if _layer(name) > _layer(part)}:
            upward[path.relative_to(PACKAGE).as_posix()] = above

    assert upward == {}


def test_modules_are_named_for_what_they_hold() -> None:
    """No module is a drawer for odds and ends."""
    assert [path for path in MODULES if path.stem in BANNED] == []


def _loaded(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


ACCESSED = ("torchrepro.seeding", "torchrepro.policies")
LIGHT = 30
HEAVY = {"torch", "hydra", "omegaconf", "pydantic", "numpy", "rich", "typer", "yaml"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    """`import torchrepro` loads neither torch nor hydra nor any other dependency."""
    assert _loaded("import torchrepro") & HEAVY == set()


def test_the_import_test_can_fail() -> None:
    """The test above sees a heavy import if there is one."""
    assert {"hydra", "omegaconf"} <= _loaded("import torchrepro, hydra")


def test_the_catalogue_loads_no_access_of_another_package() -> None:
    """Rows are data: what seeds and policies do is imported when a row is first used."""
    own = {name for name in _loaded("import torchrepro.knobs.catalogue") if "torchrepro." in name}
    first_use = "from torchrepro.knobs.catalogue import knobs_by_name as rows; "
    used = _loaded(first_use + "rows()['streams'].access.read(); rows()['dropout'].access.read()")

    assert "torchrepro.knobs.catalogue" in own
    assert {name for name in own if name.startswith(ACCESSED)} == set()
    assert len(own) < LIGHT
    assert "torchrepro.seeding.seed_access" in used
    assert not any(name.startswith("torchrepro.policies.dropout") for name in used)


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "knobs").glob("*.py")), ids=lambda path: path.stem
)
def test_no_row_imports_what_it_names(path: Path) -> None:
    """The catalogue imports neither seeding nor policies, nor in functions or for types."""
    imported = re.findall(r"^\s*(?:from|import) +(\S+)", path.read_text(encoding="utf-8"), re.M)

    assert [name for name in imported if name.startswith(ACCESSED)] == []


@pytest.mark.parametrize("knob", CATALOGUE, ids=lambda knob: knob.name)
def test_every_access_that_a_row_names_is_there(knob: Knob) -> None:
    """A row names an access that can be imported."""
    if isinstance(knob.access, LazyAccess):
        access = named(knob.access.path)
        assert all(hasattr(access, each) for each in ("read", "write", "save", "restore"))


def test_loading_a_profile_imports_no_torch() -> None:
    """A profile is read and validated before torch is there."""
    assert "torch" not in _loaded("import torchrepro; torchrepro.load('debug-strict')")


def test_applying_a_shipped_profile_imports_neither_hydra_nor_pydantic() -> None:
    """What a program pays for at start-up is only what putting a profile in force needs."""
    loaded = _loaded("import torchrepro; torchrepro.apply('seed-only')")

    assert loaded & {"hydra", "omegaconf", "pydantic", "rich", "typer"} == set()


def test_the_public_names_are_those_documented() -> None:
    """Every public name can be had from the package, and an unknown one is an AttributeError."""
    for name in torchrepro.__all__:
        assert getattr(torchrepro, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torchrepro.nonsense
