"""What a profile sets on Ascend reaches CANN, and its undo does, as the calls to CANN show.

These tests need the real torch_npu on stand-ins for CANN, which they build once (about a minute
and 1.5 GB) in the folder that the variable names, and use again from there:

    TORCHREPRO_ASCEND_RIG=~/ascend-rig python -m pytest tests/ascend

Without the variable they are skipped. What real kernels do with a setting they cannot show.
"""

from typing import Any

import pytest

pytestmark = [pytest.mark.npu, pytest.mark.slow]

BOTH = ("0", "1")
DETERMINISTIC = {  # CANN -> the calls, for one device, that say `deterministic` with a value
    "9.2.0": ("aclrtSetSysParamOpt 0 {}", "aclrtCtxSetSysParamOpt 0 {}", "HcclSetConfig 0 {}"),
    "9.0.0": ("aclrtCtxSetSysParamOpt 0 {}", "aclrtSetSysParamOpt 0 {}", "HcclSetConfig 0 {}"),
    "8.5.0": ("aclrtCtxSetSysParamOpt 0 {}", "aclrtSetSysParamOpt 0 {}", "HcclSetConfig 0 {}"),
}
HEARS_PER_DEVICE = ("9.0.0", "8.5.0")  # newer ones are told once for the process

PRODUCTS = """
import torch.nn.functional as F

def compute():
    for device in ("npu:0", "npu:1"):
        x = torch.ones(2, 2, device=device)
        x @ x
        F.conv2d(x.view(1, 1, 2, 2), x.view(1, 1, 2, 2))
        torch.npu.synchronize(device)
"""
ALIGNED = (
    PRODUCTS
    + """
torch.npu.matmul.allow_hf32 = True
torch.npu.matmul.cube_math_type = torch.npu.CubeMathType.USE_HF32
mark("before"); compute()
with torchrepro.apply("npu-align") as applied:
    say([[row.knob, str(row.outcome)] for row in applied.report])
    mark("in force"); compute()
    mark("undone, nothing computed")
mark("undone"); compute()
"""
)


def said(ran: Any) -> Any:
    """Return what the program said first; it has ended well."""
    assert ran.status == 0, ran.stderr
    return ran.said[0]


def of(calls: list[str], function: str) -> list[str]:
    """Return the calls of `function`, each as device and arguments."""
    return [call.replace(f" {function}", "") for call in calls if f" {function} " in f"{call} "]


@pytest.mark.parametrize("cann", DETERMINISTIC)
def test_determinism_and_precision_reach_device_and_collectives(rig: Any, cann: str) -> None:
    """With the first op under npu-align CANN and HCCL hear 1, and with the first after it 0.

    Under it every product and convolution gets KEEP_DTYPE; after it, the user's own.
    """
    ran = rig.run(ALIGNED, cann=cann)
    outcomes = dict(said(ran))

    assert outcomes["backends.torch.deterministic_algorithms"] == "applied"
    for call in DETERMINISTIC[cann]:
        assert f"0 {call.format(1)}" in ran.calls["in force"]
        assert f"0 {call.format(0)}" in ran.calls["undone"]
        assert f"0 {call.format(0)}" not in ran.calls["in force"]
        if cann in HEARS_PER_DEVICE:
            assert f"1 {call.format(1)}" in ran.calls["in force"]

    cube = {
        (mark, kernel): of(ran.calls[mark], f"aclnn{kernel}.cube_math_type")
        for mark in ("before", "in force", "undone")
        for kernel in ("Matmul", "Convolution")
    }
    hf32, kept = [f"{device} 3" for device in BOTH], [f"{device} 0" for device in BOTH]

    for kernel in ("Matmul", "Convolution"):
        assert cube["before", kernel] == cube["undone", kernel] == hf32
        assert cube["in force", kernel] == kept


ONE_SWITCH = (
    PRODUCTS
    + """
profile = {"backends": {"npu": {"conv_allow_hf32": False, "matmul_allow_hf32": True}}}
mark("before"); compute()
with torchrepro.apply(profile):
    mark("in force"); compute()
mark("undone"); compute()
"""
)


def test_each_hf32_switch_reaches_its_own_kernels(rig: Any) -> None:
    """Where cube_math_type is left alone, each HF32 switch decides about its own kernels."""
    ran = rig.run(ONE_SWITCH)
    assert ran.status == 0, ran.stderr
    seen = {
        mark: [
            of(ran.calls[mark], f"aclnn{kernel}.cube_math_type")[0]
            for kernel in ("Matmul", "Convolution")
        ]
        for mark in ("before", "in force", "undone")
    }

    assert seen["before"] == seen["undone"] == ["0 0", "0 3"]
    assert seen["in force"] == ["0 3", "0 0"]


COMPILED = """
torch.npu.set_compile_mode(jit_compile=True)
if {initialise}:
    torch.npu.init()

def compute():
    x = torch.ones(2, device="npu")
    torch.npu.synchronize()
    x * x
    torch.npu.synchronize()

with torchrepro.apply("debug-strict") as applied:
    mark("in force"); compute()
mark("undone"); compute()
"""


@pytest.mark.parametrize("initialise", [False, True])
def test_compile_mode_reaches_the_kernels(rig: Any, initialise: bool) -> None:
    """Under debug-strict no op is compiled when it is called, and after it they are again."""
    ran = rig.run(COMPILED.format(initialise=initialise))
    assert ran.status == 0, ran.stderr

    assert of(ran.calls["in force"], "aclopCompileAndExecute") == []
    assert "0 aclnnMul" in ran.calls["in force"]
    assert "0 Mul" in of(ran.calls["undone"], "aclopCompileAndExecute")


SEEDED = """
def draw():
    for device in ("npu:0", "npu:1"):
        torch.randn(2, device=device)
        torch.npu.synchronize(device)

def states():
    return [state.tolist() for state in torch.npu.get_rng_state_all()]

torch.manual_seed(7)
if {initialise}:
    draw()
    before = states()
with torchrepro.apply("debug-strict", ["seed=42"]) as applied:
    mark("in force"); draw()
    say([str(applied.report["seed.npu"].outcome), torch.npu.initial_seed()])
if {initialise}:
    assert states() == before
mark("undone"); draw()
"""


@pytest.mark.parametrize("initialise", [False, True])
def test_the_seed_reaches_every_device_and_undo_gives_its_own_back(
    rig: Any, initialise: bool
) -> None:
    """Each NPU draws from the profile's seed, given before or after device init.

    After the profile it draws what it would have drawn without it.
    """
    ran = rig.run(SEEDED.format(initialise=initialise))

    assert said(ran) == ["applied", 42]
    assert of(ran.calls["in force"], "aclnnInplaceNormal.seed") == ["0 42 0", "1 42 0"]
    if initialise:
        assert of(ran.calls["undone"], "aclnnInplaceNormal.seed") == ["0 7 12", "1 7 12"]


FILLED = """
def make():
    torch.empty(2, device="npu")

torch.npu.init()
torch.use_deterministic_algorithms(True)
mark("before"); make()
with torchrepro.apply("debug-strict") as applied:
    say(str(applied.report["backends.torch.fill_uninitialized_memory"].outcome))
    mark("in force"); make()
torch.use_deterministic_algorithms(True)
mark("undone"); make(); mark("end")
"""


def test_uninitialised_memory_is_filled_on_the_device(rig: Any) -> None:
    """Under debug-strict the NPU fills torch.empty, which torch's own default does not reach."""
    ran = rig.run(FILLED)

    assert said(ran) == "applied"
    assert "aclnnInplaceFillScalar" in " ".join(ran.calls["in force"])
    for mark in ("before", "undone"):
        assert "aclnnInplaceFillScalar" not in " ".join(ran.calls.get(mark, []))


TRAINED = """
import torch.nn as nn

def train():
    torch.manual_seed(3)
    layers = (nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    model = nn.Sequential(*layers).to("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x, y = torch.randn(8, 4).to("npu"), torch.randn(8, 1).to("npu")
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model[0].weight.detach().cpu().tolist()

with torchrepro.apply("debug-strict"):
    first, second = train(), train()
say([first == second, any(any(row) for row in first)])
"""


def test_a_small_network_trains_the_same_twice(rig: Any) -> None:
    """Two trainings with dropout on the NPU end with bitwise the same weights."""
    assert said(rig.run(TRAINED)) == [True, True]
