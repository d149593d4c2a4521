"""The shape of the package: imports run one way, start-up is light, names say what is there."""

import ast
import re
import runpy
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import torchrepro
from torchrepro.ground.imports import named
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import LazyAccess

PACKAGE = Path(torchrepro.__file__).parent
MODULES = {
    ".".join(("torchrepro", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "template" not in path.parts
}
PAGE = Path(__file__).parent.parent / "ARCHITECTURE.md"
BANNED = {"utils", "util", "core", "common", "helpers", "misc", "base", "manager"}
ENTRANCES = ("torchrepro.__main__", "torchrepro.start.boot")
"""Modules that hand over to others, and that nothing in the package imports."""


def _layer_of(module, layers):
    """Return the layer of the longest name in the table that the module's name begins with."""
    name = module.removeprefix("torchrepro.")
    while name not in layers:
        name = name.rpartition(".")[0]
    return layers[name]


def _module(name):
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def _names(node, own):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start = own.split(".")[: -node.level] if node.level else []
        module = ".".join([*start, node.module or ""]).strip(".")
        return [f"{module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.partition(":")[0]
        full = name if name.startswith("torchrepro.") else f"torchrepro.{name}"
        return [full] if "." in name and full in MODULES else []
    return []


STATEMENTS = (ast.Import, ast.ImportFrom)


def _imported(path, own, kinds):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, kinds):
            yield from filter(None, map(_module, _names(node, own)))


def _graph(*kinds):
    return {
        module: set(_imported(path, module, kinds)) - {module, "torchrepro"}
        for module, path in MODULES.items()
        if module != "torchrepro" and not module.startswith(ENTRANCES)
    }


def _layers():
    lines = (
        PAGE.read_text(encoding="utf-8").partition("## Layers")[2].partition("\n## ")[0].split("\n")
    )
    rows = [
        re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in lines if line.startswith("| `")
    ]
    return {part: level for level, parts in enumerate(reversed(rows)) for part in parts}


def test_imports_run_one_way():
    """A module imports only from its own layer or one below it, as ARCHITECTURE.md draws them."""
    layers = _layers()

    upward = [
        f"{module} -> {used}"
        for module, imports in _graph(*STATEMENTS).items()
        for used in imports
        if _layer_of(used, layers) > _layer_of(module, layers)
    ]

    assert upward == []


def test_architecture_names_what_exists():
    """Every file and every identifier that ARCHITECTURE.md shows is found in the repository."""
    root = PAGE.parent
    shown = re.findall(r"`([\w./*]+)`", PAGE.read_text(encoding="utf-8"))
    files = [name for name in shown if name.endswith((".py", ".yaml", ".json", ".html", ".md"))]
    sources = [*MODULES.values(), PACKAGE / "knobs" / "variables.json"]
    words = {path.stem for path in sources}
    words.update(*(re.findall(r"\w+", path.read_text(encoding="utf-8")) for path in sources))
    identifiers = [name for name in shown if re.fullmatch(r"[A-Za-z]\w*_\w+", name)]

    assert [f for f in files if not [*root.glob(f), *PACKAGE.glob(f)]] == []
    assert [name for name in identifiers if name not in words] == []


def test_no_imports_form_a_circle():
    """No module imports itself through others, in strings that name a module included."""
    TopologicalSorter(_graph(*STATEMENTS, ast.Constant)).prepare()


def test_a_module_has_a_name_of_its_own():
    """No two modules share a name, none is a drawer for odds and ends or hides a public name."""
    names = Counter(module.rpartition(".")[2] for module in MODULES)

    assert [name for name, number in names.items() if number > 1] == []
    assert BANNED & set(names) == set()
    assert [name for name in torchrepro.__all__ if f"torchrepro.{name}" in MODULES] == []


def _loaded(statement):
    code = f"{statement}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


ACCESSED = ("torchrepro.seeding", "torchrepro.policies")
LIGHT = 30
HEAVY = {"torch", "hydra", "omegaconf", "pydantic", "numpy", "rich", "typer", "yaml"}


def test_importing_the_package_imports_nothing_heavy():
    """`import torchrepro` loads neither torch nor hydra nor any other dependency."""
    assert _loaded("import torchrepro") & HEAVY == set()


def test_what_few_runs_need_is_loaded_for_them_alone():
    """A profile that requires no package loads no `packaging`, an end without effects no `rich`."""
    plan = "import torchrepro; planned = torchrepro.plan({})"
    end = "from torchrepro.reporting.report import announce_effects as end; end(planned.report)"
    nothing = _loaded(f"{plan.format({})}; {end}")

    assert {"packaging", "rich"} & nothing == set()
    assert "packaging" in _loaded(plan.format({"requires": {"torch": ">=2"}}))


def test_the_catalogue_loads_no_access_of_another_package():
    """Rows are data: what seeds and policies do is imported when a row is first used."""
    own = {name for name in _loaded("import torchrepro.knobs.catalogue") if "torchrepro." in name}
    first_use = "from torchrepro.knobs.catalogue import knobs_by_name as rows; "
    used = _loaded(first_use + "rows()['streams'].access.read(); rows()['dropout'].access.read()")

    assert "torchrepro.knobs.catalogue" in own
    assert {name for name in own if name.startswith(ACCESSED)} == set()
    assert len(own) < LIGHT
    assert "torchrepro.seeding.global_seeds" in used
    assert not any(name.startswith("torchrepro.policies.dropout") for name in used)


@pytest.mark.parametrize("knob", CATALOGUE, ids=lambda knob: knob.name)
def test_every_access_that_a_row_names_is_there(knob):
    """A row names an access that can be imported."""
    if isinstance(knob.access, LazyAccess):
        access = named(knob.access.path)
        assert all(hasattr(access, each) for each in ("read", "write", "save", "restore"))


def test_applying_a_shipped_profile_imports_neither_hydra_nor_pydantic():
    """What a program pays for at start-up is only what putting a profile in force needs."""
    loaded = _loaded("import torchrepro; torchrepro.apply('debug-strict')")
    heavy = {"hydra", "omegaconf", "pydantic", "rich", "typer", "torch._dynamo", "torch._inductor"}

    assert "torchrepro.policies.fallback" in loaded
    assert loaded & heavy == set()


def test_the_public_names_are_those_documented():
    """Every public name is what its module has, and an unknown one is an AttributeError.

    No module can take its place in whatever order they are imported: none has a public name, and
    none imports itself through others.
    """
    for name, home in torchrepro._MODULE.items():
        assert getattr(torchrepro, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = torchrepro.nonsense


CEILING = yaml.safe_load(Path(__file__).with_name("ceiling.yaml").read_text(encoding="utf-8"))
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "template" not in path.parts)
code_lines = runpy.run_path(str(PAGE.parent / ".ci" / "code-lines"))["code_lines"]


def test_the_source_has_a_ceiling():
    """The lines of code and the files of the source stay below a ceiling that rarely moves."""
    lines = sum(len(code_lines(path.read_text(encoding="utf-8"))) for path in SOURCES)

    print(f"{lines} lines of code of at most {CEILING['lines of code']} in {len(SOURCES)} files")

    assert lines <= CEILING["lines of code"]
    assert len(SOURCES) <= CEILING["files"]


def _longer_than(lengths, most, exceptions):
    """Return the names that are too long, and the exceptions that are wider than needed."""
    longer = {name: length for name, length in lengths.items() if length > most}
    too_long = {n: length for n, length in longer.items() if length > exceptions.get(n, most)}
    needless = {n: limit for n, limit in exceptions.items() if limit > longer.get(n, 0) + SLACK}
    return too_long | needless


SLACK = 20
"""Lines by which a module or a function may shrink before its exception has to shrink too."""


def test_no_module_is_longer_than_a_thought():
    """A module has at most 600 lines, 800 where it is rows; named exceptions can only shrink."""
    lengths = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8").count("\n")
        for path in SOURCES
    }

    assert _longer_than(lengths, CEILING["module"], CEILING["longer modules"]) == {}


def test_no_function_is_longer_than_a_page_or_two():
    """A function has at most 100 lines; named exceptions can only shrink."""
    lengths = {
        f"{path.relative_to(PACKAGE).as_posix()}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert _longer_than(lengths, CEILING["function"], CEILING["longer functions"]) == {}


LEAVE = yaml.safe_load((PAGE.parent / ".ci" / "leave.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("capability", LEAVE)
def test_what_can_leave_is_named_by_its_rows_alone(capability):
    """No module outside of a capability names one of its modules, except for its rows."""
    row, root = LEAVE[capability], PAGE.parent
    files = [root / file for file in row["files"] if file.startswith("src/")]
    own = {path for file in files for path in ([file] if file.is_file() else file.rglob("*.py"))}
    modules = {name for name, path in MODULES.items() if root / "src" / _in_source(path) in own}
    allowed = {root / entry["file"] for entry in row["rows"]}
    allowed |= {root / file for file in row.get("named_in", ())}

    naming = {
        _in_source(path).as_posix()
        for name, path in MODULES.items()
        if name not in modules
        and modules & set(_imported(path, name, (*STATEMENTS, ast.Constant)))
        and root / "src" / _in_source(path) not in allowed
    }

    assert modules
    assert naming == set()


def test_architecture_lists_what_can_leave():
    """The table of ARCHITECTURE.md has a row for each capability that a job takes out."""
    table = PAGE.read_text(encoding="utf-8").partition("## What can leave")[2].partition("\n## ")[0]

    assert set(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE)) == set(LEAVE)


def _in_source(path):
    """Return the path of a module of the package below `src`."""
    return Path("torchrepro") / path.relative_to(PACKAGE)
