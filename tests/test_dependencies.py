"""Whatever the package imports, it asks for when it is installed."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_DECLARED = {  # what src imports all the same, and why that is safe
    "pydantic_core": "pydantic requires one exact version of it",
    "pytest": "only the pytest plugin imports it, which pytest loads",
    "safetensors": "only to read a file of that format; the error of `digest` says what to install",
    "sitecustomize": "the module of that name further on the path, if there is any",
    "torchrepro": "the package itself",
    "triton": "only where torch brings it; elsewhere torch's own ops compute the sums",
    "transformers": "only for a callback of its Trainer, which the program has imported or named",
}


def imported(tree):
    """Yield the top-level name of every module that `tree` imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant):
                yield str(name.value).partition(".")[0]


def distribution(requirement):
    """Return the name in a requirement as the index spells it."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_declared():
    """A package that src imports is a dependency, or stands above with the reason why not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {distribution(line) for line in project["dependencies"]}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    names = {name for text in sources for name in imported(ast.parse(text))}
    installed = packages_distributions()
    foreign = names - sys.stdlib_module_names - NOT_DECLARED.keys()

    assert {n for n in foreign if not declared & set(map(distribution, installed[n]))} == set()
    assert {"hydra", "packaging", "torch", "yaml"} <= foreign
    assert NOT_DECLARED.keys() <= names
