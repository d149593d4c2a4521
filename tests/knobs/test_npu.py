"""The Ascend rows on the real torch_npu; skipped, with a reason, where it is not installed."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(
        importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed"
    ),
]

PROGRAM = """
import warnings; warnings.simplefilter("ignore")
import torch, torch_npu, torchrepro
from torchrepro.knobs.catalogue import CATALOGUE
if {initialise} and torch.npu.is_available():
    torch.npu.init()
rows = [k for k in CATALOGUE if "npu" in k.name.split(".")]
read = lambda: {{k.name: k.access.read() for k in rows}}
before = read(), torch.get_deterministic_debug_mode()
with torchrepro.apply("npu-align") as applied:
    for row in applied.report:
        if ".npu" in row.knob:
            print(row.knob, row.outcome, row.after)
assert before == (read(), torch.get_deterministic_debug_mode()), (before, read())
if torch.npu.is_available():
    print("DEVICES")
    for factor in (2.0, 3.0):
        x = torch.tensor([1.0, 2.0]).to("npu") * factor
        assert x.cpu().tolist() == [factor, 2 * factor], "ops no longer compute after the undo"
print("UNDONE")
"""

EXPECTED = {
    "backends.npu.jit_compile": "False",
    "backends.npu.conv_allow_hf32": "False",
    "backends.npu.matmul_allow_hf32": "False",
    "backends.npu.cube_math_type": "KEEP_DTYPE",
    "backends.npu.allow_internal_format": "False",
}


@pytest.mark.parametrize("initialise", [False, True])
def test_the_ascend_rows_are_set_and_undone(initialise: bool) -> None:
    """On torch_npu the aligned profile can be applied before and after device init, and undone."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(initialise=initialise)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("backends.npu.")]

    assert "UNDONE" in done.stdout, done.stderr
    assert {name: value for name, _, value in rows} == EXPECTED
    here = "DEVICES" in done.stdout
    assert {outcome for _, outcome, _ in rows} <= (
        {"applied", "unchanged"} if here else {"unsupported"}
    )
