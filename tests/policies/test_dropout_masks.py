"""Layers that draw a custom mask drop nothing while `dropout.zero_masks` is active."""

import json
import os
import py_compile
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrepro.ground.imports import AfterImport

from . import known_layers

HERE = Path(__file__).parent


DROPS = {"drops": True, "result": False, "gradient": False}
NEVER_DROPS = {"drops": False, "result": True, "gradient": True}
BEFORE = {"before": DROPS, "under": NEVER_DROPS, "made under": NEVER_DROPS, "after": DROPS}
AFTER = {**BEFORE, "before": NEVER_DROPS}  # made, and its class imported, with `zero` in force
ORDERS = {"before": BEFORE, "after": AFTER}
ROWS = [
    pytest.param(library, name, marks=pytest.mark.slow if library == "transformers" else ())
    for library in ("torchvision", "timm", "transformers")
    for name in known_layers.LIBRARIES[library]()
]


Run = Callable[..., subprocess.CompletedProcess[str]]
Printed = Callable[[str], Any]


def _last_line(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def run(fork_python: Run, tmp_path: Path) -> Run:
    """Run a script in a fork that can import the modules of this folder."""
    paths = [str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return lambda script: fork_python("-c", script, env=env)


@pytest.fixture
def printed(run: Run) -> Printed:
    """Return the last line of the output of a script, parsed as JSON."""
    return lambda script: _last_line(run(script))


def _needs(package: str) -> Path:
    folder: Path | None = known_layers.package_folder(package)
    if folder is None:
        pytest.skip(f"{package} is not installed")
    return folder


_seen: dict[tuple[str, str], dict[str, Any]] = {}  # by what was asked: all tests read one run


@pytest.fixture
def observed(fork_python: Run) -> Callable[[str, str], dict[str, Any]]:
    """Return the observations of the layers of a library."""

    def observed(library: str, order: str) -> dict[str, Any]:
        if (library, order) not in _seen:
            done = fork_python(str(HERE / "known_layers.py"), library, order)
            _seen[library, order] = _last_line(done)
        return _seen[library, order]

    return observed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("library", "name"), ROWS)
def test_a_known_layer_drops_except_under_the_policy(
    library: str, name: str, order: str, observed: Callable[[str, str], dict[str, Any]]
) -> None:
    """Under the policy a layer has the result and gradient without drops; otherwise it drops."""
    _needs(library)

    assert observed(library, order)[name] == ORDERS[order]


def _copy_of_timm_drop(folder: Path) -> Path:
    """Copy timm's file of dropping layers into a package that imports nothing else."""
    source = _needs("timm") / "layers" / "drop.py"
    copy = folder / "timm" / "layers" / "drop.py"
    copy.parent.mkdir(parents=True)
    for package in (copy.parent, copy.parent.parent):
        (package / "__init__.py").touch()
    shutil.copyfile(source, copy)
    return copy


START = """
import copy, importlib, json, pickle, sys, torch
from torchrepro.policies import dropout
x = torch.arange(1.0, 65.0)

def drops(call):
    return len({tuple(torch.manual_seed(s) and call(x).tolist()) for s in range(8)}) > 1
"""
EARLY = (
    f"{START}from timm.layers.drop import DropPath, drop_path\nimport timm.layers.drop as drop\n"
)


def test_other_code_that_calls_a_known_function_does_not_drop(
    tmp_path: Path, printed: Printed
) -> None:
    """A name imported before, a subclass and a custom layer are zeroed like the layer itself.

    So are compiled code, without a graph break, and modules that are reloaded under the policy.
    """
    _copy_of_timm_drop(tmp_path)

    assert printed(
        EARLY
        + """
class Sub(DropPath):
    @property
    def drop_prob(self): return 0.5
    @drop_prob.setter
    def drop_prob(self, value): pass
    def forward(self, x): return super().forward(x) + 1

class Own(torch.nn.Module):
    def forward(self, x): return drop_path(x, 0.5, self.training)

compiled = torch.compile(DropPath(0.5), backend="eager", fullgraph=True)
layers = [Sub(), Own(), lambda x: drop_path(x, drop_prob=0.5, training=True), compiled]

def dropping():
    torch._dynamo.reset()
    return [drops(layer) for layer in layers]

seen = [dropping()]
dropout.zero_masks()
seen.append(dropping())
importlib.reload(drop)
assert drop.drop_path is not drop_path
layers.append(lambda x: drop.drop_path(x, 0.5, True))
seen.append(dropping())
dropout.restore_masks()
seen.append(dropping())
print(json.dumps(seen))
""",
    ) == [[True] * 4, [False] * 4, [False] * 5, [True] * 5]


def test_a_layer_keeps_its_attributes(tmp_path: Path, printed: Printed) -> None:
    """Attributes, repr, state, pickle and copy keep its probability; the copy drops later."""
    _copy_of_timm_drop(tmp_path)

    same, zeroed, dropping = printed(
        EARLY
        + """
def look(layer):
    return repr(layer), str(vars(layer)), layer.state_dict(), pickle.dumps(layer), layer.drop_prob

layer = DropPath(0.5)
before = look(layer)
dropout.zero_masks()
copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), DropPath(layer.drop_prob)]
same = look(layer) == before
zeroed = [drops(copied) for copied in copies]
dropout.restore_masks()
print(json.dumps([same, zeroed, [drops(copied) for copied in copies]]))
""",
    )

    assert same
    assert zeroed == [False] * 3
    assert dropping == [True] * 3


def test_only_known_functions_change_and_they_are_restored(
    tmp_path: Path, printed: Printed
) -> None:
    """All other functions in the process keep their code; a second `zero_masks` changes nothing."""
    _copy_of_timm_drop(tmp_path)

    changed, back, meta_path = printed(
        EARLY
        + """
import gc, types
def codes():
    functions = [f for f in gc.get_objects() if type(f) is types.FunctionType]
    return {id(f): (f, f.__code__) for f in functions}

gc.unfreeze()  # the process that this is a fork of froze its own, which leaves them out of lists
before, finders = codes(), list(sys.meta_path)
assert len(before) > 10_000
dropout.restore_masks()
dropout.zero_masks()
dropout.zero_masks()
changed = [f.__qualname__ for key, (f, code) in before.items() if f.__code__ is not code]
dropout.restore_masks()
dropout.restore_masks()
back = all(f.__code__ is code for f, code in before.values())
print(json.dumps([sorted(changed), back, sys.meta_path == finders]))
""",
    )

    assert changed == ["DropBlock2d.forward", "drop_block_2d", "drop_path"]
    assert back
    assert meta_path


@pytest.mark.parametrize(
    "change",
    [
        "file.write_text('# edited\\n' + file.read_text())",
        "file.write_text(file.read_text().replace('1 - drop_prob', '1 + drop_prob'))",
        "file.write_text('def (')",
        "file.unlink()",
    ],
    ids=["moved", "edited", "broken", "deleted"],
)
def test_a_source_that_differs_from_the_running_code_is_refused(
    tmp_path: Path, change: str, printed: Printed
) -> None:
    """A file changed since its import is named in an error, and no function changes."""
    copy = _copy_of_timm_drop(tmp_path)

    error, code_kept, finders_kept = printed(
        EARLY
        + f"""
from pathlib import Path
finders, code = list(sys.meta_path), drop_path.__code__
file = Path({str(copy)!r})
{change}
try:
    dropout.zero_masks()
except dropout.SourceMissingError as raised:
    print(json.dumps([str(raised), drop_path.__code__ is code, sys.meta_path == finders]))
""",
    )

    assert "timm.layers.drop" in error
    assert code_kept
    assert finders_kept


def test_an_import_without_source_succeeds_with_a_warning(tmp_path: Path, run: Run) -> None:
    """A library without source can be imported under the policy, and a line reports what drops."""
    copy = _copy_of_timm_drop(tmp_path)
    py_compile.compile(str(copy), str(copy.with_suffix(".pyc")))
    copy.unlink()
    done = run(START + "dropout.zero_masks()\nimport timm.layers.drop\n")

    assert done.returncode == 0
    assert "torchrepro: dropout is not zeroed: timm.layers.drop" in done.stderr


def test_a_name_with_a_star_matches_all_modules_below_it() -> None:
    """`a.b.*` matches the modules below `a.b`, and no other module."""
    finder = AfterImport(["a.b.*", "c"], print)

    assert [finder.waits_for(name) for name in ("a.b.c", "a.b.c.d", "c")] == [True] * 3
    assert [finder.waits_for(name) for name in ("a.b", "a.bc", "c.d", "xa.b.c")] == [False] * 4
    assert not AfterImport([], print).waits_for("c")
