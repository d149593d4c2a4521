"""The catalogue has every setting of the installed torch, or a list gives the reason if not."""

import ast
import importlib.util
import re
from pathlib import Path

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.variables import ROWS, other_variables

TORCH = Path(importlib.util.find_spec("torch").submodule_search_locations[0])

NO_KNOBS = {
    "backends.backend": "a field of the objects through which precisions are set",
    "backends.op": "the same",
    "backends.fp32_precision": "backends.torch.float32_matmul_precision and those of each device",
    "backends.cuda.allow_tf32": "backends.cuda.matmul_fp32_precision, which older torches read too",
    "backends.cudnn.allow_tf32": "backends.cudnn.conv_fp32_precision and rnn_fp32_precision",
    "backends.cudnn.fp32_precision": "the same two, which are finer",
    "backends.mkldnn.allow_tf32": "backends.cpu.matmul_fp32_precision",
    "backends.cuda.size": "how many plans of cuFFT there are, which is read only",
    "backends.cuda.max_size": "how many plans of cuFFT are kept; it changes no numbers",
    "backends.miopen.immediate": "for GPUs of AMD, which nobody here has tried",
}
"""Flag of `torch.backends` -> what sets it, or why no profile does."""

NO_VARIABLES = {
    "DUMP_AOTI_MINIFIER": "writes files for reports of faults",
    "LOG_AUTOTUNE_RESULTS": "writes a log",
    "MAST_HPC_JOB_NAME": "the name of a job",
    "ROLE_RANK": "the place of a process among others",
}
"""Variable that inductor reads -> why neither a row nor a lock has it."""


def _flags():
    """Return the properties of modules of `torch.backends`, with the attributes that can be set."""
    for path in sorted((TORCH / "backends").rglob("*.py")):
        module = ".".join(path.relative_to(TORCH).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and "ContextProp(" in ast.unparse(node.value):
                yield from (f"{module}.{ast.unparse(target)}" for target in node.targets)
            elif isinstance(node, ast.FunctionDef) and node.name == "__setattr__":
                tests = (each for each in ast.walk(node) if isinstance(each, ast.Compare))
                for test in tests:
                    names = (each.value for each in test.comparators if hasattr(each, "value"))
                    yield from (f"{module}.{name}" for name in names if isinstance(name, str))


def test_each_flag_of_torch_is_a_knob_or_on_the_list():
    """The catalogue knows every attribute of `torch.backends` that can be set."""
    known = {name for knob in CATALOGUE for name in (knob.name, *knob.aliases)}
    ends = {name.replace(".matmul.", ".").removeprefix("torch.") for name in known}
    unknown = {flag for flag in _flags() if flag not in ends and flag not in NO_KNOBS}

    assert unknown == set()
    assert {*_flags()} & ends


def test_each_variable_of_the_compiler_is_a_row_or_in_every_lock():
    """A variable that inductor reads is a row, or has a digest in locks, or is on a list."""
    text = (TORCH / "_inductor" / "config.py").read_text(encoding="utf-8")
    read = {name for pair in re.findall(_READ, text) for name in pair if name}
    known = {row["name"] for row in ROWS}
    in_locks = other_variables(dict.fromkeys(read, "1")).keys()
    unknown = read - known - in_locks - NO_VARIABLES.keys()

    assert len(read) > 50
    assert unknown == set()


_READ = r'environ(?:\.get)?[\[(]\s*"([A-Z0-9_]+)"|getenv\(\s*"([A-Z0-9_]+)"'
